"""What a comparison calls: one form for our backends, dense attention and anybody else's code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.attention.inputs import Inputs, checked
from nsa.lab.measure.attention_inputs import Drawn
from nsa.lab.measure.shapes import Shape
from nsa.reference.nsa import BRANCHES

NSA, DENSE = "nsa_attention", "dense_attention"


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention from drawn inputs.

    operation: NSA or DENSE, what it is compared with. `call(drawn, blocks)` returns
    o [B, T, HQ, DV]; blocks [B, T, HKV, n] is None unless `takes_blocks`. `why_not(drawn)` lists
    reasons, empty when it runs. `reaches(drawn)` names the leaves that o depends on. `other` says
    in which way it computes another function, so that its accuracy is not compared.
    `held_bytes(shape)`: T x T tensors it holds, 0 for linear memory. `graph`: a CUDA graph can
    capture it; a capture that fails may leave the allocator unfit for what comes after.
    """

    name: str
    operation: str
    call: Callable[[Drawn, Tensor | None], Tensor]
    why_not: Callable[[Drawn], list[str]]
    reaches: Callable[[Drawn], list[str]] = lambda drawn: list(drawn.leaves())
    takes_blocks: bool = False
    other: str = ""
    held_bytes: Callable[[Shape], int] = lambda shape: 0
    graph: bool = False


def backends(names: Sequence[str] | None = None) -> list[Implementation]:
    """Our backends, those with memory linear in T first; ValueError for an unknown name."""
    if names is not None and not names:
        raise ValueError(f"no backends; name some of {', '.join(registry.names())}")
    for name in names or ():
        registry.get(name)
    known = [b for b in registry.backends() if names is None or b.name in names]
    return [_backend(b) for b in sorted(known, key=lambda b: (b.quadratic, b.name != "triton"))]


def inputs_of(drawn: Drawn) -> Inputs:
    """What a backend's `why_not` looks at."""
    return checked(
        drawn.q, drawn.k, drawn.v, drawn.gates, drawn.shape.config, phi=None, cu_seqlens=None,
        blocks=None, branches=BRANCHES, scale=None,
    )  # fmt: skip


def _backend(backend: registry.Backend) -> Implementation:
    def call(drawn: Drawn, blocks: Tensor | None) -> Tensor:
        return nsa_attention(
            drawn.q, drawn.k, drawn.v, drawn.gates, drawn.shape.config,
            backend=backend.name, blocks=blocks,
        )  # fmt: skip

    return Implementation(
        backend.name,
        NSA,
        call,
        why_not=lambda drawn: backend.why_not(inputs_of(drawn)),
        takes_blocks=True,
        held_bytes=lambda shape: _held_bytes(backend.name, shape),
        graph=backend.name == "triton",
    )


def _held_bytes(name: str, shape: Shape) -> int:
    """T x T tensors that stay for the backward, bytes, as `activation_model` counts them."""
    square, size = shape.batch * shape.tokens**2, shape.torch_dtype.itemsize
    stride = shape.config.compress_stride
    if name == "masked":  # fp32 probabilities of three branches and a copy in the dtype of v
        return int(square * shape.heads * (2 + 1 / stride) * (4 + size))
    if name == "sdpa":  # its masks as an additive bias
        return int(square * shape.group * (shape.kv_heads + 1 + 1 / stride) * size)
    return 0


def free_bytes(device: torch.device) -> int:
    """Bytes that a call may still ask for: the GPU's, or those the host says are available."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo") as file:
        told = dict(line.split(":", 1) for line in file)
    return int(told["MemAvailable"].split()[0]) * 1024
