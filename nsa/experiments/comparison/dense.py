"""Dense causal attention, as torch and flash-attn bring it: what NSA has to be faster than."""

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.experiments.comparison.implementations import DENSE, Implementation
from nsa.lab.measure.attention_inputs import Drawn


def providers() -> list[Implementation]:
    """dense-flash (torch's FlashAttention-2), dense-cudnn, and dense-fa4 (flash-attn-4)."""
    return [
        Implementation("dense-flash", DENSE, _flash, _why_not_flash, _reaches, graph=True),
        Implementation("dense-cudnn", DENSE, _cudnn, _why_not_cudnn, _reaches, graph=True),
        Implementation("dense-fa4", DENSE, _fa4, _why_not_fa4, _reaches, graph=True),
    ]


def operands(drawn: Drawn) -> dict[str, Tensor]:
    """q, k and v of dense attention, by the names of their leaves: shared ones or the window's."""
    leaves = drawn.leaves()
    return {name: leaves[name] for name in _reaches(drawn)}


def _reaches(drawn: Drawn) -> list[str]:
    return ["q", "k", "v"] if drawn.shape.shared_kv else ["q", "k_win", "v_win"]


def _sdpa(drawn: Drawn, backend) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in operands(drawn).values())
    with sdpa_kernel([backend]):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


def _flash(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from torch.nn.attention import SDPBackend

    return _sdpa(drawn, SDPBackend.FLASH_ATTENTION)


def _cudnn(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from torch.nn.attention import SDPBackend

    return _sdpa(drawn, SDPBackend.CUDNN_ATTENTION)


def _fa4(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from flash_attn.cute import flash_attn_func

    o = flash_attn_func(*operands(drawn).values(), causal=True)
    return o[0] if isinstance(o, tuple) else o  # some releases return the lse, too


def _why_not_flash(drawn: Drawn) -> list[str]:
    return (_half_on_a_gpu(drawn) if drawn.q.is_cuda else []) + _one_dim(drawn)


def _why_not_cudnn(drawn: Drawn) -> list[str]:
    if not drawn.q.is_cuda:
        return [f"needs a GPU, got {drawn.q.device}"]
    return _half_on_a_gpu(drawn)


def _why_not_fa4(drawn: Drawn) -> list[str]:
    if importlib.util.find_spec("flash_attn") is None or (
        importlib.util.find_spec("flash_attn.cute") is None
    ):
        return ["flash-attn-4 is not installed; pip install 'nsa[flash-attn]'"]
    if not drawn.q.is_cuda:
        return [f"needs a GPU, got {drawn.q.device}"]
    reasons = _half_on_a_gpu(drawn)
    capability = torch.cuda.get_device_capability(drawn.q.device)
    if capability < (9, 0):
        reasons.append(f"needs compute capability 9.0 (Hopper) or newer, got {capability}")
    return reasons + _one_dim(drawn)  # grouped heads have no backward otherwise


def _one_dim(drawn: Drawn) -> list[str]:
    dim, value_dim = drawn.shape.dim, drawn.shape.value_dim
    return [] if dim == value_dim else [f"needs D = DV, got {dim} and {value_dim}"]


def _half_on_a_gpu(drawn: Drawn) -> list[str]:
    dtype = drawn.q.dtype
    return [] if dtype in (torch.bfloat16, torch.float16) else [f"needs bf16 or fp16, got {dtype}"]
