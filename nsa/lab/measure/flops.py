"""Model FLOPs of a training step, and the share of a device's matrix throughput that they make.

Counted is what the mathematics needs: no recomputation, neither a checkpoint's nor the scores that
a kernel makes again. So an implementation gains nothing here by doing more than it must.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from nsa.blocks import count_compressed
from nsa.lab.measure import limits
from nsa.lab.measure.shapes import Shape
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel

# Dense bf16 TFLOP/s by the maker's data sheets, SXM boards, by a part of the device's name.
NOMINAL_TFLOPS = {"B200": 2250.0, "H200": 989.4, "H100": 989.4, "A100": 312.0}


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of forward and backward of one optimizer step, by their source.

    weights: products with parameters. attention: products of queries, keys and values.
    """

    weights: int
    attention: int

    @property
    def total(self) -> int:
        return self.weights + self.attention

    def utilisation(self, step_s: float, tflops: float, devices: int = 1) -> float:
        """The share of `devices` ceilings of `tflops` TFLOP/s that a step of `step_s` reaches."""
        return self.total / (step_s * tflops * 1e12 * devices)


def step_flops(config: ModelConfig, tokens: int, batch: int) -> StepFlops:
    """Six operations a parameter and token, and six a pair and dimension of attention.

    Two forward, four backward: each product has a gradient for both of its factors. Parameters are
    those of matrices that multiply: not the embedding, which is looked up, nor norms and biases;
    phi's multiply once a compressed block. Pairs are a query and a key that it sees, exactly as
    `nsa.lab.measure.limits.pairs` counts them; scoring has no product of its own, for it reads the
    compressed branch's. All branches take part, whatever `force_branch` says.
    """
    a_token, a_block = _multiplied(config)
    multiplied = tokens * a_token + count_compressed(tokens, config.nsa) * a_block
    return StepFlops(
        weights=6 * batch * multiplied,
        attention=3 * config.layers * _attention_forward(config, tokens, batch),
    )


def nominal_tflops(device_name: str) -> float:
    """What the maker states for dense bf16 products, NaN for a device that is not in the table."""
    return next((t for part, t in NOMINAL_TFLOPS.items() if part in device_name), float("nan"))


@cache
def _multiplied(config: ModelConfig) -> tuple[int, int]:
    """Multiply-adds with parameters: of each token, and of each compressed block."""
    with torch.device("meta"):
        model = LanguageModel(config)
    # A softmax gate reads the mean query of each group, so its matrices multiply once a KV head.
    groups = config.kv_heads if config.gate == "softmax" else 1
    linear = sum(
        m.weight.numel() * (groups if ".attention.gate" in name else 1)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    )
    phi = sum(
        p.numel()
        for name, p in model.named_parameters()
        if ".phi_" in name and "weight" in name.rpartition(".")[2]
    )
    return linear, phi


def _attention_forward(config: ModelConfig, tokens: int, batch: int) -> int:
    """One layer's."""
    shape = Shape(
        tokens,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.value_size,
        batch,
        config=config.nsa,
    )
    found = limits.branch_flops(shape)
    if config.attention == "dense":
        return found["dense"]
    return found["cmp"] + found["slc"] + found["win"]
