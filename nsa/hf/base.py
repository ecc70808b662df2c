"""NSA's decoder as a transformers base model: padding, packing, caches, hidden states."""

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import TransformersKwargs

from nsa.attention.transforms import autocast_dtype
from nsa.hf.cache import GenerationCache
from nsa.hf.columns import Columns, borders, check_mask, check_positions
from nsa.hf.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.llama import Decoder, LanguageModel
from nsa.model.names import SINCE

# transformers renamed it in the course of version 5.
KEY = next(
    x.name for x in fields(BaseModelOutputWithPast) if x.name in ("cache", "past_key_values")
)
# Arguments that transformers and tools around it pass to any model, and that change nothing here.
IGNORED = {*TransformersKwargs.__optional_keys__, "cache_position", "logits_indices", "seq_idx"}
IGNORED |= {"token_type_ids", "shift_labels", "tokenizer", "assistant_tokenizer", "streamer"}
# Names in files from before the head was next to the base model and projections in branches.
OLD_NAMES = {rf"\.{re.escape(old)}\.": f".{new}." for old, new in SINCE.items()}
OLD_NAMES |= {r"^model\.head\.": "lm_head."}
_HAS_NOT = {
    "output_attentions": "there is no T x T matrix; workbook.lab.observers tells of selections",
    "output_router_logits": "there are no experts",
    "head_mask": "no head can be left out",
}


class NSAPreTrainedModel(PreTrainedModel):
    """Weights, loading and flags common to all NSA models of transformers."""

    config_class = NSAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # NSA has its own attention; config.backend names its implementation
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> "NSAPreTrainedModel":
        """Load a model as transformers does, also from files with names of earlier versions."""
        options.setdefault("key_mapping", OLD_NAMES)
        made = super().from_pretrained(*args, **options)
        model = made[0] if isinstance(made, tuple) else made
        model._weight_conversions = None  # it is saved with the present names
        return made

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: a folder refers to the installed package, see `NSAConfig.save_pretrained`."""

    @property
    def decoder(self) -> "NSAModel":
        """The base model."""
        return getattr(self, self.base_model_prefix, self)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw weights missing from a checkpoint as LanguageModel does; keep loaded ones."""
        named = [] if self.decoder._drawn else self.named_parameters()
        lacking = [(name, p) for name, p in named if not hasattr(p, "_is_hf_initialized")]
        if lacking:
            drawn = dict(LanguageModel(self.config.model_config()).named_parameters())
            for name, parameter in lacking:
                inside = re.sub("^lm_head", "head", name.removeprefix("model."))
                if inside in drawn:
                    parameter.copy_(drawn[inside])
                else:  # the head of a classifier
                    nn.init.normal_(parameter, std=0.02)
        self.decoder._drawn = True

    def gradient_checkpointing_enable(self, *options: Any, **more: Any) -> None:
        """Recompute every block in the backward, as `Decoder.recompute` does."""
        self.decoder.recompute("all")

    def gradient_checkpointing_disable(self) -> None:
        self.decoder.recompute("")

    activation_checkpointing_enable = gradient_checkpointing_enable
    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return len(self.decoder.recomputed) > 0

    is_activation_checkpointing = is_gradient_checkpointing

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> nn.Embedding:
        """Resize as transformers does, and update the decoder's vocabulary size."""
        made = super().resize_token_embeddings(*sizes, **options)
        self.decoder._sizes = self.config.model_config()
        return made


class NSAModel(NSAPreTrainedModel, Decoder):
    """Hidden states of an NSA decoder; `layers` are its blocks."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.build(config.model_config())
        self._drawn = self.embed_tokens.weight.device.type != "meta"
        self.post_init()

    @property
    def sizes(self) -> ModelConfig:
        """The decoder's config; a smaller `config.num_hidden_layers` leaves the last blocks out,
        as early exits of assisted decoding require."""
        layers = self.config.layers
        return self._sizes if layers == self._sizes.layers else self._sizes.with_(layers=layers)

    @sizes.setter
    def sizes(self, value: ModelConfig) -> None:
        self._sizes = value

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, by the name that tools for Llama expect."""
        return self.blocks

    def forward(
        self,
        input_ids: Int64[Tensor, "B T"] | None = None,
        attention_mask: Int[Tensor, "B TOTAL"] | None = None,
        position_ids: Int64[Tensor, "_ T"] | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seq_lens_q: Int[Tensor, " N1"] | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states [B, T, E] after the last norm, for ids or embeddings.

        Columns with `attention_mask` 0 are padding: a sequence is the remaining tokens, wherever
        the padding is, and positions count only its tokens. The output for padding is undefined.
        With a cache the mask covers all its columns and the new ones, or only the new ones.

        Packed sequences are independent: `position_ids` that restart at 0 within a row, as from
        DataCollatorWithFlattening, or `cu_seq_lens_q` [N + 1] (B = 1), which the host need not
        read and torch.compile can trace.

        A cache is created and returned if `use_cache`, by default the config's value if no gradient
        is recorded. No gradient flows through a cache. `hidden_states` are the embeddings and every
        block's output, the last one after the norm.

        Raises:
            TypeError: an argument unknown to both this model and transformers.
            ValueError: inputs that do not fit, or that NSA does not support: attention matrices,
                masks of other shapes, positions that do not count up, non-causal attention.
        """
        cache = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("one of input_ids and inputs_embeds is needed, and not both")
        given = input_ids if inputs_embeds is None else inputs_embeds
        shape = given.shape[:2]
        self._check(given, cache, cu_seq_lens_q, options)
        mask = check_mask(given, attention_mask, cache)
        if position_ids is not None and cu_seq_lens_q is None:
            position_ids = position_ids.expand(len(given), -1)
            if cache is None:
                cu_seq_lens_q = borders(position_ids, mask)
            if cu_seq_lens_q is None:
                check_positions(position_ids, attention_mask, cache)
            elif len(given) > 1 or mask is not None:
                given, mask = given.flatten(0, 1)[None], None
        if cache is None:
            wanted = self.config.use_cache and not torch.is_grad_enabled()
            if (wanted if use_cache is None else use_cache) and cu_seq_lens_q is None:
                cache = GenerationCache(self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        seen = [] if output_hidden_states else None
        columns = Columns.of(given, mask)
        if cache is None:
            x = self.hidden(columns.tokens, cu_seq_lens_q, seen)
        else:
            if cache.nsa is None:
                check_one_device(self.parameters())
            weight = self.embed_tokens.weight
            dtype = autocast_dtype(weight.device) or weight.dtype
            inside = cache.room(*columns.tokens.shape[:2], dtype, columns.tokens.device)
            x = self.read(columns.tokens, inside, columns.counts, seen)
            cache.saw(columns.tokens.shape[1], mask)
        x = columns.back(self.norm(x)).reshape(*shape, -1)
        if seen is not None:
            seen = (*(columns.back(each).reshape(*shape, -1) for each in seen), x)
        output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=seen, **{KEY: cache})
        plain = self.config.return_dict if return_dict is None else return_dict
        return output if plain else output.to_tuple()

    def _check(
        self, given: Tensor, cache: Any, cu_seqlens: Tensor | None, options: dict[str, Any]
    ) -> None:
        name = type(self).__name__
        for key, value in options.items():
            if key in _HAS_NOT and value is not None and value is not False:
                raise ValueError(f"{name} takes no {key}: {_HAS_NOT[key]}")
            if key not in IGNORED and key not in _HAS_NOT:
                raise TypeError(f"{name} takes no {key}")
        if options.get("is_causal") is False:
            raise ValueError("is_causal=False: NSA is causal in each of its branches")
        where = self.embed_tokens.weight.device
        if where != given.device and where.type != "meta" and not hasattr(self, "_hf_hook"):
            raise ValueError(f"the model is on {where} and its input on {given.device}")
        if cache is None:
            return
        if not isinstance(cache, GenerationCache):
            raise ValueError(
                f"a {type(cache).__name__} cannot hold what NSA keeps; "
                "nsa.hf.GenerationCache(model.config) can"
            )
        if cu_seqlens is not None:
            raise ValueError("with a cache there are no cu_seq_lens_q")
        if cache.nsa is not None and cache.batch_size != len(given):
            raise ValueError(
                f"input_ids are of {len(given)} sequences, the cache of {cache.batch_size}; "
                "cache.batch_select_indices(rows) has others"
            )


def check_one_device(parameters: Iterable[Any]) -> None:
    """Raise ValueError for parameters on several devices; offloaded ones do not count."""
    devices = sorted({str(p.device) for p in parameters if p.device.type != "meta"})
    if len(devices) > 1:
        raise ValueError(
            f"a cache is on one device and the model on {', '.join(devices)}; use_cache=False "
            "reads all tokens again for each new one"
        )


def kept(x: Float[Tensor, "B T F"], keep: int | Tensor) -> Float[Tensor, "B K F"]:
    """Return the last `keep` columns, all for 0, or those with the indices in `keep`."""
    return x[:, keep] if isinstance(keep, Tensor) else x[:, -keep:] if keep else x


def scored(labels: Int64[Tensor, "B T"], mask: Tensor | None) -> Tensor:
    """Labels with -100 where the mask [B, T] is 0, and for the next token after such."""
    if mask is None:
        return labels
    real = mask.to(labels.device).bool()
    known = real & torch.cat([real[:, :1], real[:, :-1]], dim=1)
    return labels.masked_fill(~known, -100)
