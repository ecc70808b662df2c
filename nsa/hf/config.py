"""Config of a model in transformers' format: config.json holds each field of ModelConfig."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from nsa.config import NSAConfig as Sizes
from nsa.model.config import ModelConfig, check_names
from nsa.model.presets import preset

DEFAULTS = preset("production").with_(name="nsa").to_dict()
# Fields that transformers reads from a config and ModelConfig does not have.
OTHER = {
    "use_cache": None,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# The file of a saved model that leads `trust_remote_code=True` to this package.
CODE = "modeling_nsa"
AUTO = {
    "AutoConfig": "NSAConfig",
    "AutoModel": "NSAModel",
    "AutoModelForCausalLM": "NSAForCausalLM",
    "AutoModelForSequenceClassification": "NSAForSequenceClassification",
    "AutoModelForTokenClassification": "NSAForTokenClassification",
}
_STUB = f'''"""Classes of the package nsa, for transformers' trust_remote_code."""

from nsa.hf import (  # pip install 'nsa[hf]' brings it
    {", ".join(sorted(AUTO.values()))},
)
'''


class NSAConfig(PretrainedConfig):
    """Fields of `ModelConfig` under their own names, or under transformers' (`hidden_size`).

    NSAConfig(layers=4, dim=256, heads=8, kv_heads=2, head_dim=32, nsa={"window": 128}, vocab=32000)
    is an example; omitted fields are as in the preset "production". `nsa` may also be an
    `nsa.config.NSAConfig`. All fields are written to config.json, so that new defaults of a later
    version change no stored model. Dense attention has no cache, so `use_cache` is False for it.

    A saved folder has a code file that imports this package, for `trust_remote_code=True`; if the
    package is installed, transformers finds the model without it, see `nsa_autoload`.

    Raises ValueError and TypeError as ModelConfig does.
    """

    model_type = "nsa"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "max_position_embeddings": "max_tokens",
        "rms_norm_eps": "norm_eps",
    }

    def __init__(self, **values: Any) -> None:
        if "block_counts" in values:
            raise ValueError(
                "this is a config of flash-linear-attention's NSA, whose model_type is the same; "
                "nsa.hf.from_fla(folder) takes such a model"
            )
        values = _own_names(values)
        own = {name: values.pop(name, default) for name, default in DEFAULTS.items()}
        given = own["nsa"]
        if isinstance(given, Sizes):
            own["nsa"] = asdict(given)
        elif isinstance(given, dict):
            check_names(Sizes, given, prefix="nsa.")
            own["nsa"] = DEFAULTS["nsa"] | given
        own = ModelConfig.from_dict(own).to_dict()
        other = {name: values.pop(name, default) for name, default in OTHER.items()}
        if other["use_cache"] is None:
            other["use_cache"] = own["attention"] == "nsa"
        values["auto_map"] = {auto: f"{CODE}.{name}" for auto, name in AUTO.items()}
        super().__init__(**values)
        for name, value in (own | other).items():
            setattr(self, name, value)

    @classmethod
    def of(cls, config: ModelConfig, **other: Any) -> "NSAConfig":
        """Convert a ModelConfig; `other` are transformers' fields such as eos_token_id."""
        return cls(**config.to_dict(), **other)

    @property
    def intermediate_size(self) -> int:
        """Hidden width of the MLP, also if `mlp_hidden` has its default."""
        return self.model_config().mlp_size

    def to_dict(self) -> dict[str, Any]:
        """All fields, with sizes also under transformers' names, which tools expect."""
        found = super().to_dict()
        found |= {theirs: found[own] for theirs, own in self.attribute_map.items() if own in found}
        return found | {"intermediate_size": self.intermediate_size}

    def save_pretrained(self, save_directory: str | os.PathLike, **options: Any) -> None:
        """Write config.json, and the file that `trust_remote_code=True` executes."""
        super().save_pretrained(save_directory, **options)
        Path(save_directory, f"{CODE}.py").write_text(_STUB)

    def model_config(self) -> ModelConfig:
        """Return the ModelConfig. Raises ValueError for fields that do not fit."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in DEFAULTS})


def _own_names(values: dict[str, Any]) -> dict[str, Any]:
    """Values under this package's names. ValueError for two that differ for one field."""
    found = dict(values)
    hidden = found.pop("intermediate_size", None)
    if "mlp_hidden" not in found and hidden is not None:
        found["mlp_hidden"] = hidden
    for theirs, own in NSAConfig.attribute_map.items():
        if theirs not in found:
            continue
        value = found.pop(theirs)
        if found.setdefault(own, value) != value:
            raise ValueError(
                f"{theirs}={value!r} and {own}={found[own]!r} name one field; give one"
            )
    return found
