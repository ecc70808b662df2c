"""The physical limit of a call.

The limit is the operations and bytes that every implementation needs. Divided by the rates of a
plain matrix product and a plain copy, measured in the same process, they give the time of a perfect
kernel. Operations are those required by the mathematics, as in `nsa.model.flops`.
"""

from dataclasses import dataclass

import torch

from nsa.model.flops import pairs
from workbook.lab.measure.shapes import Shape
from workbook.lab.measure.timing import latency


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


def nominal_tflops(device_name: str) -> float:
    """Vendor's peak TFLOP/s for dense bf16 products, NaN for a device not in the table."""
    return next((t for part, t in NOMINAL_TFLOPS.items() if part in device_name), float("nan"))
