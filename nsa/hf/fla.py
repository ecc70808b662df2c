"""Conversion from and to flash-linear-attention's NSA layout (`fla.models.nsa`).

Their layer is ours with one K/V projection, phi="mean" over blocks that do not overlap, gates of
one matrix, and l = d = l'. fla itself is not required for either direction.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nsa.config import NSAConfig as Sizes
from nsa.hf.model import NSAForCausalLM
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.reference.nsa import BRANCHES

# Names of the same matrix in fla's model and a LanguageModel; layers are numbered under LAYERS.
LAYERS = "model.layers", "blocks"
LAYER = {
    "attn_norm": "norm1",
    "attn.q_proj": "attention.q_proj",
    "attn.k_proj": "attention.{source}k_proj",
    "attn.v_proj": "attention.{source}v_proj",
    "attn.g_proj": "attention.gate2",
    "attn.o_proj": "attention.o_proj",
    "mlp_norm": "norm2",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
ENDS = {"model.embeddings": "embed_tokens", "model.norm": "norm", "lm_head": "head"}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields of ModelConfig that are not determined by their layout.
OPEN = ("name", "nsa", "shared_kv", "backend", "strict", "checkpoint", "max_tokens")
# Fields of ModelConfig that are fixed there.
FIXED = {"attention": "nsa", "gate": "linear", "phi": "mean", "compress_rope": "before"}
FORCED = {"select_initial": 1, "select_local": 2}  # by their code since August 2025


def from_fla(source: nn.Module | str | os.PathLike, **options: Any) -> NSAForCausalLM:
    """Convert a model of flash-linear-attention's NSA to an equivalent one.

    `source` is such a model, or a folder with its config.json and safetensors. Widths are inferred
    from the weights. `options` are those in OPEN: shared_kv=False gives each branch a copy of the
    K/V projections, to be trained separately; nsa={"select_initial": 0, "select_local": 1} is for
    weights from before August 2025, when only a query's own block was forced.

    `block_counts` is rounded up to a power of two, as in fla's kernels.

    Raises ValueError for another option, a folder without such files, and unsupported features:
    biases, another activation, attention residuals, no window.
    """
    if unknown := [name for name in options if name not in OPEN]:
        raise ValueError(f"{', '.join(unknown)} follows from the model; options are {OPEN}")
    theirs, weights = _read(source)
    config = _config(theirs, weights).with_(**options)
    found, sources = {}, ("",) if config.shared_kv else [f"{branch}." for branch in BRANCHES]
    for name, target in _names(config, sources):
        if name not in weights and name.startswith("lm_head"):
            found[target] = found["embed_tokens.weight"]  # tied
        elif name not in weights:
            raise ValueError(f"the model has no {name}, which NSA in fla's layout has")
        else:
            found[target] = weights[name].detach().clone()
    if strangers := sorted(set(weights) - {name for name, _ in _names(config, sources)}):
        raise ValueError(f"the model has weights that NSA here has not: {', '.join(strangers[:5])}")
    with torch.device("meta"):
        made = LanguageModel(config)
    made.load_state_dict(found, assign=True)
    made.train(isinstance(source, nn.Module) and source.training)
    tied = bool(theirs.get("tie_word_embeddings", False)) or "lm_head.weight" not in weights
    other = {name: theirs.get(name) for name in IDS}
    model = NSAForCausalLM.of(made, tie_word_embeddings=tied, **other)
    model.tie_weights()
    return model


def to_fla(model: NSAForCausalLM, folder: str | os.PathLike) -> Path:
    """Write config.json and model.safetensors for fla's `NSAForCausalLM.from_pretrained`.

    Returns the folder. fla's kernels need groups G of 16 or more heads, a power of two, and blocks
    of at least 2 select_count tokens; a model of other sizes is written nevertheless.

    Raises ValueError for a model that is not of that layout.
    """
    inside, folder = model.language_model(), Path(folder)
    config, sizes = inside.config, inside.config.nsa
    block, count = sizes.select_block, sizes.select_count
    wanted = FIXED | {"shared_kv": True, "force_branch": None, "gate_temperature": 1.0}
    wanted |= {"rope_scale": 1.0, "value_size": config.head_dim, "share_selection": 1}
    other = [f"{n}={getattr(config, n)!r}" for n, x in wanted.items() if getattr(config, n) != x]
    same = {"compress_block": block, "compress_stride": block, "select_count": _power(count)}
    other += [
        f"nsa.{n}={getattr(sizes, n)}" for n, x in (same | FORCED).items() if getattr(sizes, n) != x
    ]
    if other:
        raise ValueError(
            f"fla's NSA has no {', '.join(other)}; it has {wanted} and {same | FORCED}"
        )
    tied = inside.head.weight is inside.embed_tokens.weight
    theirs = {
        "architectures": ["NSAForCausalLM"],
        "model_type": "nsa",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "block_size": block,
        "block_counts": count,
        "window_size": sizes.window,
        "rope_theta": config.rope_base,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": tied,
        **{name: getattr(model.config, name) for name in IDS},
    }
    state = inside.state_dict()
    names = [pair for pair in _names(config, ("",)) if not (tied and pair[0][:7] == "lm_head")]
    weights = {name: state[target].detach().cpu().contiguous() for name, target in names}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(theirs, indent=2) + "\n", "utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _read(source: nn.Module | str | os.PathLike) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Read (fla's config, fla's weights)."""
    if isinstance(source, nn.Module):
        return source.config.to_dict(), source.state_dict()
    folder = Path(source)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} is no folder with config.json and *.safetensors; download the model, or "
            "give the model itself"
        )
    theirs = json.loads((folder / "config.json").read_text("utf-8"))
    return theirs, {name: x for file in files for name, x in load_file(file).items()}


def _config(theirs: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ModelConfig:
    """Config with the same sizes. ValueError for unsupported features."""
    if "block_counts" not in theirs or "model.layers.0.attn.g_proj.weight" not in weights:
        raise ValueError(
            f"a model of type {theirs.get('model_type')!r} without block_counts in its config or "
            "attn.g_proj among its weights is no NSA of flash-linear-attention"
        )
    has_not = {
        "qkv_bias": (False, None),
        "hidden_act": ("swish", "silu", None),
        "attnres_block_size": (None,),
    }
    other = [f"{n}={theirs[n]!r}" for n, allowed in has_not.items() if theirs.get(n) not in allowed]
    window, count = theirs.get("window_size"), theirs["block_counts"]
    other += [] if window else [f"window_size={window!r}"]
    other += [] if isinstance(count, int) and count > 0 else [f"block_counts={count!r}"]
    if other:
        raise ValueError(f"the model has no {', '.join(other)}")
    layer = {name: weights[f"model.layers.0.{name}.weight"] for name in LAYER}
    # Not config.head_dim, which fla's layer did not read until December 2025.
    heads = layer["attn.g_proj"].shape[0] // 3
    head_dim = layer["attn.q_proj"].shape[0] // heads
    block, (vocab, dim) = theirs["block_size"], weights["model.embeddings.weight"].shape
    rope = theirs.get("rope_theta") or (theirs.get("rope_parameters") or {}).get("rope_theta")
    return ModelConfig(
        name="nsa-fla",
        layers=theirs["num_hidden_layers"],
        dim=dim,
        heads=heads,
        kv_heads=layer["attn.k_proj"].shape[0] // head_dim,
        head_dim=head_dim,
        vocab=vocab,
        mlp_hidden=layer["mlp.gate_proj"].shape[0],
        nsa=Sizes(block, block, block, _power(count), window=window, **FORCED),
        shared_kv=True,
        rope_base=float(rope or 10000.0),
        norm_eps=theirs.get("norm_eps", 1e-6),
        **FIXED,
    )


def _names(config: ModelConfig, sources: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs (name of an fla parameter, name of the LanguageModel parameter with its values)."""
    pairs = list(ENDS.items())
    for index in range(config.layers):
        for theirs, ours in LAYER.items():
            for target in dict.fromkeys(ours.format(source=source) for source in sources):
                names = zip(LAYERS, (theirs, target), strict=True)
                pairs.append(tuple(f"{root}.{index}.{name}" for root, name in names))
    return [(f"{theirs}.weight", f"{ours}.weight") for theirs, ours in pairs]


def _power(count: int) -> int:
    """Smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
