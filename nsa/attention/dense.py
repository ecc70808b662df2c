"""Dense causal attention by the generation of flash-attn that supports the GPU.

FlashAttention-4 (flash-attn-4 on PyPI) needs compute capability 9.0 (Hopper) or newer,
FlashAttention-2 (flash-attn) 8.0. Both return [B, T, H, D]; query head h reads KV head h // G.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.operator import plain_backward

DTYPES = (torch.bfloat16, torch.float16)
GRAIN = 8  # head dims are padded to a multiple: 16 bytes


@dataclass(frozen=True)
class Library:
    """A generation of flash-attn: its `flash_attn_func` and the limits of that function."""

    name: str  # "fa4" or "fa2", as the path witness shows it
    attend: Callable
    open_left: int | None  # its value for an unbounded window
    smallest: int = GRAIN  # head dim; smaller ones are padded with zeros
    largest: int = 256
    deterministic: bool = True  # has a bit-repeatable backward


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> tuple[Tensor, str]:
    """(o [B, T, HQ, DV], the library's name) for q [B, T, HQ, D], k and v [B, T, HKV, *].

    Token t sees the tokens up to t, the newest `window` of them; None means all. fp16 or bf16 on a
    GPU; check `why_not` first. Bit-repeatable under torch.use_deterministic_algorithms.
    """
    library = library_for(torch.cuda.get_device_capability(q.device))
    if isinstance(library, str):
        raise RuntimeError(library)
    value_dim = v.shape[3]
    # Grouped heads have a backward only where D = DV (FlashAttention-4), or never else (2).
    width = max(library.smallest, -(-max(q.shape[3], value_dim) // GRAIN) * GRAIN)
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    whole = window is None or window >= q.shape[1]
    reach = library.open_left if whole else window - 1, 0
    repeatable = torch.are_deterministic_algorithms_enabled()
    o = library.attend(
        q, k, v, softmax_scale=scale, causal=True, window_size=reach, deterministic=repeatable
    )
    o = o[0] if isinstance(o, tuple) else o
    return _FirstDerivative.apply(o[..., :value_dim]), library.name


def why_not(q: Tensor, value_dim: int, scale: float) -> list[str]:
    """Reasons why `dense_attention` does not support q [B, T, HQ, D] and values of that dim."""
    if torch.compiler.is_compiling():
        return ["torch.compile cannot trace flash-attn"]
    reasons = []
    if q.dtype not in DTYPES:
        reasons.append(f"needs bf16 or fp16, got {q.dtype}")
    if scale <= 0:  # it computes the maximum before it scales
        reasons.append(f"needs a positive scale, got {scale}")
    if not q.is_cuda:
        return [*reasons, f"needs a GPU, got {q.device}"]
    library = library_for(torch.cuda.get_device_capability(q.device))
    if isinstance(library, str):
        return [*reasons, library]
    if max(q.shape[3], value_dim) > library.largest:
        reasons.append(
            f"{library.name} needs D and DV of at most {library.largest} on "
            f"{torch.cuda.get_device_name(q.device)}, got {q.shape[3]} and {value_dim}"
        )
    if torch.are_deterministic_algorithms_enabled() and not library.deterministic:
        reasons.append(f"{library.name} has no deterministic backward on this GPU")
    return reasons


@cache
def library_for(capability: tuple[int, int]) -> Library | str:
    """Library for a GPU of that compute capability; else a message why there is none."""
    found = []
    for distribution, oldest, load in (("flash-attn-4", 9, _fa4), ("flash-attn", 8, _fa2)):
        if capability[0] < oldest or not _installed(distribution):
            continue
        try:
            return load(capability)
        except Exception as error:  # built for another torch or CUDA: it can be any
            found.append(f"{distribution} is installed and does not import: {error}")
    if capability[0] < 8:
        return f"needs compute capability 8.0 (Ampere) or newer, got {capability}"
    wanted = "FlashAttention-2: pip install flash-attn --no-build-isolation"
    if capability[0] >= 9:
        wanted = "FlashAttention-4: pip install 'nsa[flash-attn]'"
    return "; ".join(found) or f"flash-attn is not installed; {wanted}"


def _fa4(capability: tuple[int, int]) -> Library:
    from flash_attn.cute import flash_attn_func

    # Its limits by architecture, as its _validate_head_dims and _flash_attn_bwd have them. Below a
    # head dim of 64, dQ of many heads to a group was wrong (4.0.0b36, H200).
    dims = {"smallest": 64, "largest": 256 if capability[0] == 9 else 128}
    repeatable = capability[0] != 12
    return Library("fa4", flash_attn_func, open_left=None, deterministic=repeatable, **dims)


def _fa2(capability: tuple[int, int]) -> Library:
    from flash_attn import flash_attn_func

    return Library("fa2", flash_attn_func, open_left=-1)


def _installed(distribution: str) -> bool:
    # By its metadata: flash-attn has a flash_attn.cute as well, without what it needs.
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


class _FirstDerivative(torch.autograd.Function):
    """Identity that refuses create_graph: flash-attn's gradients have no graph of their own."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @plain_backward
    def backward(ctx, do):
        return do
