"""Model FLOPs of a training step: what the mathematics requires, without recomputation.

An implementation gains nothing by doing more work than necessary.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from nsa.blocks import count_compressed
from nsa.config import BRANCHES, NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.model.reads import keys_read


def pairs(tokens: int, config: NSAConfig) -> dict[str, int]:
    """Pairs of a query and a visible key, per head and sequence: cmp, slc, win and dense."""
    read = keys_read(torch.tensor([tokens], device="cpu"), config)[0].tolist()
    return dict(zip(BRANCHES, read, strict=True)) | {"dense": tokens * (tokens + 1) // 2}


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of forward and backward of one optimizer step, by source.

    weights: products with parameters. attention: products of queries, keys and values.
    """

    weights: int
    attention: int

    @property
    def total(self) -> int:
        return self.weights + self.attention

    def utilisation(self, step_s: float, tflops: float, devices: int = 1) -> float:
        """Fraction of `devices` x `tflops` TFLOP/s reached by a step of `step_s` seconds."""
        return self.total / (step_s * tflops * 1e12 * devices)


def step_flops(config: ModelConfig, tokens: int, batch: int) -> StepFlops:
    """Six operations per parameter and token, and six per attention pair and dimension.

    Two forward, four backward: each product has a gradient for both of its factors. Parameters are
    those of matrix products: not the embedding, which is a lookup, nor norms and biases; phi's
    count once per compressed block. Pairs are a query and a visible key, as counted by
    `pairs`; scoring has no product of its own, since it reuses the compressed branch's, so that
    `share_selection` saves none. All branches count, regardless of `force_branch`.
    """
    a_token, a_block = _multiplied(config)
    multiplied = tokens * a_token + count_compressed(tokens, config.nsa) * a_block
    seen = pairs(tokens, config.nsa)
    branches = ("dense",) if config.attention == "dense" else BRANCHES
    forward = batch * config.heads * 2 * (config.head_dim + config.value_size)
    attention = 3 * config.layers * forward * sum(seen[branch] for branch in branches)
    return StepFlops(weights=6 * batch * multiplied, attention=attention)


@cache
def _multiplied(config: ModelConfig) -> tuple[int, int]:
    """Multiply-adds with parameters: per token, and per compressed block."""
    with torch.device("meta"):
        model = LanguageModel(config)
    # A softmax gate reads the mean query of each group, so its matrices multiply once a KV head.
    groups = config.kv_heads if config.gate == "softmax" else 1
    linear = sum(
        m.weight.numel() * (groups if ".attention.gate" in name else 1)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    )
    weights = [(n, p) for n, p in model.named_parameters() if "weight" in n.rpartition(".")[2]]
    return linear, sum(p.numel() for name, p in weights if ".phi_" in name)
