"""Conversion from a run of `nsa train` to transformers and back, and from a Llama to NSA."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from nsa.config import NSAConfig as Sizes
from nsa.hf.model import NSAForCausalLM
from nsa.model import saving
from nsa.model.config import ModelConfig
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from nsa.reference.nsa import BRANCHES

# Names of the same matrix in a Llama's layer and ours; keys and values go to each branch.
LAYER = {
    "input_layernorm": "norm1",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.{branch}k_proj",
    "self_attn.v_proj": "attention.{branch}v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "norm2",
}
# Fields of ModelConfig that are specific to NSA and not determined by a Llama.
OWN = (
    *("name", "phi", "gate", "gate_temperature", "gate_init", "compress_rope", "shared_kv"),
    *("share_selection", "sinks", "force_branch", "stopgrad_gates", "backend", "strict"),
    *("checkpoint", "max_tokens"),
)


def from_checkpoint(
    path: str | os.PathLike, device: str | torch.device = "cpu", **changes: Any
) -> NSAForCausalLM:
    """Load a model saved by `nsa train`; path, device, changes and errors as in `load_model`."""
    return NSAForCausalLM.of(saving.load_model(path, device, **changes))


def to_checkpoint(
    model: NSAForCausalLM, path: str | os.PathLike, training: TrainConfig | None = None
) -> Path:
    """Write a checkpoint of this package at step 0, in fp32, without an optimizer's state.

    `nsa.load_model` and `nsa generate --checkpoint` read it, and a Trainer with that `training`
    config can resume from it. `path` is a .pt file or a folder; returns the file. A head tied to
    the embedding is stored as a separate one.
    """
    inside = copy.deepcopy(model.language_model()).float().cpu()
    if inside.head.weight is inside.embed_tokens.weight:
        inside.head.weight = nn.Parameter(inside.embed_tokens.weight.detach().clone())
    training = replace(training or TrainConfig(batch=1, tokens=1), seed=None)  # nothing is drawn
    trainer = Trainer(inside, synthetic(), training)
    trainer.save(path)
    return saving.file_of(path, trainer.steps_done)


@torch.no_grad()
def from_llama(
    llama: LlamaForCausalLM | str | os.PathLike, nsa: Sizes | None = None, **options: Any
) -> tuple[NSAForCausalLM, list[str]]:
    """(model with NSA initialized with a Llama's weights, names of its other parameters).

    Each branch gets a copy of the keys' and values' projections, the rest has one counterpart. New
    are the gates, whose last matrix is zero, so that each is 1/2 ("softmax": 1/3), and a learned
    phi. So the model is not equivalent to the Llama: a query reads n blocks and w tokens, and o is
    half the sum of three branches. `options` are NSA's fields of ModelConfig, such as phi="mlp".

    Raises ValueError for another option, and for a Llama with unsupported features: biases,
    dropout, another activation, rotary that is neither plain nor linearly scaled.
    """
    if not isinstance(llama, nn.Module):
        _config(AutoConfig.from_pretrained(llama), Sizes())  # raises before it loads
        llama = LlamaForCausalLM.from_pretrained(llama)
    unknown = [name for name in options if name not in OWN]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not NSA's own; options are {', '.join(OWN)}")
    options = {"gate_init": "zero"} | options
    if options.get("gate") == "uniform":
        del options["gate_init"]
    theirs = llama.config
    config = _config(theirs, nsa or Sizes()).with_(**options)
    made = LanguageModel(config).to(llama.device, llama.dtype)
    ids = {name: getattr(theirs, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    other = {f"{name}_token_id": value for name, value in ids.items()}
    tied = getattr(theirs, "tie_word_embeddings", False)
    model = NSAForCausalLM.of(made.train(llama.training), tie_word_embeddings=tied, **other)
    wanted, new = dict(model.named_parameters()), set(model.state_dict())
    for name, weight in llama.state_dict().items():
        for target in _targets(name, config):
            wanted[target].copy_(weight)
            new.remove(target)
    model.tie_weights()
    model.generation_config = copy.deepcopy(llama.generation_config)
    return model, sorted(new)


def _config(theirs: Any, nsa: Sizes) -> ModelConfig:
    """Config with the same sizes. ValueError for unsupported features."""
    if theirs.model_type != "llama":
        raise ValueError(
            f"a model of type {theirs.model_type!r} is no Llama; model_type 'llama' can be taken"
        )
    rope = dict(getattr(theirs, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    plain = {
        "hidden_act": (theirs.hidden_act, "silu"),
        "attention_bias": (theirs.attention_bias, False),
        "mlp_bias": (theirs.mlp_bias, False),
        "attention_dropout": (theirs.attention_dropout, 0.0),
        "rope_type": (kind if kind != "linear" else "default", "default"),
    }
    other = [f"{name}={got!r}" for name, (got, wanted) in plain.items() if got != wanted]
    if other:
        raise ValueError(
            f"the model has no {', '.join(other)}; a Llama without, and with rope_type 'default' "
            "or 'linear', can be taken"
        )
    return ModelConfig(
        name="nsa-llama",
        layers=theirs.num_hidden_layers,
        dim=theirs.hidden_size,
        heads=theirs.num_attention_heads,
        kv_heads=theirs.num_key_value_heads,
        head_dim=theirs.head_dim,
        vocab=theirs.vocab_size,
        mlp_hidden=theirs.intermediate_size,
        nsa=nsa,
        rope_base=float(rope.get("rope_theta", 10000.0)),
        rope_scale=float(rope["factor"]) if kind == "linear" else 1.0,
        norm_eps=theirs.rms_norm_eps,
    )


def _targets(name: str, config: ModelConfig) -> list[str]:
    """Names of the parameters here that correspond to a Llama's parameter."""
    module, _, leaf = name.rpartition(".")
    if not module.startswith("model.layers."):
        return [name]
    _, _, index, inner = module.split(".", 3)
    sources = ("",) if config.shared_kv else [f"{branch}." for branch in BRANCHES]
    found = {LAYER.get(inner, inner).format(branch=source) for source in sources}
    return [f"model.blocks.{index}.{target}.{leaf}" for target in sorted(found)]
