"""The physical limit of a call: operations and bytes that no implementation can do without.

Divided by what the device does for a plain matrix product and a plain copy, measured in the same
process, they give the time that a perfect kernel would take.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from nsa.blocks import compressed_span, window_span
from nsa.config import NSAConfig
from nsa.lab.measure.shapes import Shape


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: multiply-adds count as two operations, bytes both ways."""

    matmul_tflops: float
    copy_tb_s: float


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the matrix products, and fewest bytes to and from memory."""

    flops: int
    bytes: int

    def limit_ms(self, ceilings: Ceilings) -> float:
        """Whichever takes longer."""
        compute_s = self.flops / (ceilings.matmul_tflops * 1e12)
        return 1e3 * max(compute_s, self.bytes / (ceilings.copy_tb_s * 1e12))


def pairs(tokens: int, config: NSAConfig) -> dict[str, int]:
    """Pairs of a query and a key it sees, of one head and sequence: cmp, slc, win and dense."""
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
    """Forward operations a branch; "score" is the second product of queries and compressed keys.

    The probabilities that rank blocks need every key's score first, so whoever keeps no T x C
    tensor makes them twice.
    """
    seen = pairs(shape.tokens, shape.config)
    heads = shape.batch * shape.heads
    both = 2 * (shape.dim + shape.value_dim)
    found = {name: heads * count * both for name, count in seen.items()}
    return found | {"score": heads * seen["cmp"] * 2 * shape.dim}


def work(shape: Shape, operation: str = "nsa_attention") -> dict[str, Work]:
    """{"forward", "backward", "step": Work} of "nsa_attention" or "dense_attention".

    Forward: two products a pair, one for scoring. Backward: five a pair (scores again, dP, dV, dQ,
    dK), none for scoring, which has no gradient. Bytes: every input read once, every output written
    once.
    """
    flops, dense = branch_flops(shape), operation == "dense_attention"
    branches = ("dense",) if dense else ("cmp", "slc", "win")
    forward = sum(flops[b] for b in branches) + (0 if dense else flops["score"])
    both, five = shape.dim + shape.value_dim, 3 * shape.dim + 2 * shape.value_dim
    backward = sum(flops[b] for b in branches) * five // both
    rows = shape.batch * shape.tokens
    copies = 1 if dense or shape.shared_kv else 3
    inputs = rows * (shape.heads * shape.dim + copies * shape.kv_heads * both)
    inputs += 0 if dense else rows * shape.heads * 3
    output = rows * shape.heads * shape.value_dim
    size = shape.torch_dtype.itemsize
    found = {
        "forward": Work(forward, (inputs + output) * size),
        "backward": Work(backward, (2 * inputs + output) * size),
    }
    total = [sum(getattr(w, name) for w in found.values()) for name in ("flops", "bytes")]
    return found | {"step": Work(*total)}


def measure_ceilings(device: str | torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Median of an 8192^3 product in `dtype` and of a copy of 1 GiB; far smaller ones on a CPU."""
    device = torch.device(device)
    gpu = device.type == "cuda"
    edge, size = (8192, 1 << 30) if gpu else (512, 1 << 24)
    a, b = torch.randn(2, edge, edge, device=device).to(dtype)
    matmul_s = _median_s(lambda: a @ b, device)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device)
    return Ceilings(2 * edge**3 / matmul_s / 1e12, 2 * size / copy_s / 1e12)


def _median_s(call, device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=300, return_mode="median") / 1e3
    times = []
    for _ in range(6):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
