"""The physical limit of a call, and the model FLOPs of a training step.

The limit is the operations and bytes that every implementation needs. Divided by the rates of a
plain matrix product and a plain copy, measured in the same process, they give the time of a perfect
kernel.

Model FLOPs are those required by the mathematics: no recomputation, neither of a checkpoint nor of
scores inside a kernel. So an implementation gains nothing by doing more work than necessary.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from nsa.blocks import compressed_span, count_compressed, window_span
from nsa.config import NSAConfig
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import latency
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel


@dataclass(frozen=True)
class Ceilings:
    """Highest measured rates of the device: a multiply-add is two operations, bytes both ways."""

    matmul_tflops: float
    copy_tb_s: float


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the matrix products, and the minimum memory traffic in bytes."""

    flops: int
    bytes: int

    def limit_ms(self, ceilings: Ceilings) -> float:
        """Time limit in ms: the longer of compute and memory traffic."""
        compute_s = self.flops / (ceilings.matmul_tflops * 1e12)
        return 1e3 * max(compute_s, self.bytes / (ceilings.copy_tb_s * 1e12))


def pairs(tokens: int, config: NSAConfig) -> dict[str, int]:
    """Pairs of a query and a visible key, per head and sequence: cmp, slc, win and dense."""
    t = np.arange(tokens, dtype=np.int64)
    compressed, window = compressed_span(config), window_span(config)
    cmp = np.maximum(0, compressed.ended(t))
    own = t // config.select_block
    others = np.minimum(config.select_count, own + 1) - 1
    slc = others * config.select_block + t % config.select_block + 1
    return {
        "cmp": int(cmp.sum()),
        "slc": int(slc.sum()),
        "win": int(np.minimum(t + 1, window.lookback).sum()),
        "dense": int((t + 1).sum()),
    }


def branch_flops(shape: Shape) -> dict[str, int]:
    """Forward operations per branch; "score" is the second product of queries and compressed keys.

    The probabilities that rank blocks need every key's score first, so an implementation that
    stores no T x C tensor computes them twice.
    """
    seen = pairs(shape.tokens, shape.config)
    heads = shape.batch * shape.heads
    both = 2 * (shape.dim + shape.value_dim)
    found = {name: heads * count * both for name, count in seen.items()}
    return found | {"score": heads * seen["cmp"] * 2 * shape.dim}


def work(shape: Shape, operation: str = "nsa_attention") -> dict[str, Work]:
    """Return {"forward", "backward", "step": Work} of "nsa_attention" or "dense_attention".

    Forward: two products per pair, one for scoring. Backward: five per pair (scores again, dP, dV,
    dQ, dK), none for scoring, which has no gradient. Bytes: every input read once, every output
    written once.
    """
    flops, dense = branch_flops(shape), operation == "dense_attention"
    products = sum(flops[b] for b in (("dense",) if dense else ("cmp", "slc", "win")))
    forward = products + (0 if dense else flops["score"])
    both, five = shape.dim + shape.value_dim, 3 * shape.dim + 2 * shape.value_dim
    copies, gates = (1, 0) if dense else (1 if shape.shared_kv else 3, 3)
    rows, size = shape.batch * shape.tokens, shape.torch_dtype.itemsize
    inputs = rows * (shape.heads * (shape.dim + gates) + copies * shape.kv_heads * both) * size
    output = rows * shape.heads * shape.value_dim * size
    ahead = Work(forward, inputs + output)
    back = Work(products * five // both, 2 * inputs + output)
    step = Work(ahead.flops + back.flops, ahead.bytes + back.bytes)
    return {"forward": ahead, "backward": back, "step": step}


def measure_ceilings(device: str | torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Time an 8192^3 product in `dtype` and a 1 GiB copy (medians); far smaller ones on a CPU."""
    device = torch.device(device)
    gpu = device.type == "cuda"
    edge, size = (8192, 1 << 30) if gpu else (512, 1 << 24)
    a, b = torch.randn(2, edge, edge, device=device).to(dtype)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for call in (lambda: a @ b, lambda: target.copy_(source)):
        call()
        seconds.append(latency(call, device).median / 1e3)
    return Ceilings(2 * edge**3 / seconds[0] / 1e12, 2 * size / seconds[1] / 1e12)


# Dense bf16 TFLOP/s from the vendor's data sheets, SXM boards, by a part of the device's name.
NOMINAL_TFLOPS = {"B200": 2250.0, "H200": 989.4, "H100": 989.4, "A100": 312.0}


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
    `nsa.lab.measure.limits.pairs`; scoring has no product of its own, since it reuses the
    compressed branch's. All branches count, regardless of `force_branch`.
    """
    a_token, a_block = _multiplied(config)
    multiplied = tokens * a_token + count_compressed(tokens, config.nsa) * a_block
    sizes = config.heads, config.kv_heads, config.head_dim, config.value_size, batch
    flops = branch_flops(Shape(tokens, *sizes, config=config.nsa))
    branches = ("dense",) if config.attention == "dense" else ("cmp", "slc", "win")
    attention = config.layers * sum(flops[branch] for branch in branches)
    return StepFlops(weights=6 * batch * multiplied, attention=3 * attention)


def nominal_tflops(device_name: str) -> float:
    """Vendor's peak TFLOP/s for dense bf16 products, NaN for a device not in the table."""
    return next((t for part, t in NOMINAL_TFLOPS.items() if part in device_name), float("nan"))


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
