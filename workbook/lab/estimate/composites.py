"""Functions of torch for which C++ calls other operators on a GPU than on a meta tensor.

They reimplement torch's C++ (the source is named for each), and call the operators that a GPU
would run. Autocast is included: its kernels do not cast meta tensors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nsa.attention.dense import DTYPES

aten = torch.ops.aten


def _both(*names: str) -> set[Any]:
    """Return torch's functions and Tensor's methods of these names."""
    return {getattr(x, name) for x in (torch, Tensor) for name in names if hasattr(x, name)}


# Functions of models that autocast runs in its dtype, and in fp32 (aten/autocast_mode.h).
LOWER = _both("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "__matmul__")
LOWER |= {F.linear, F.scaled_dot_product_attention}
WIDER = _both("softmax", "log_softmax", "logsumexp", "exp", "log", "pow", "rsqrt", "reciprocal")
WIDER |= _both("sum", "prod", "cumsum", "cumprod", "norm", "rms_norm")
WIDER |= {F.layer_norm, F.nll_loss, F.cross_entropy, F.mse_loss, F.softplus}

# Operators that autograd calls directly if they have their own kernel, as on a GPU, and decomposed
# elsewhere. For a torch without CUDA a kernel is registered; it is never run.
_KERNELS = torch.library.Library("aten", "IMPL", "CUDA")
for _name in ("_fused_rms_norm", "silu_backward", "mish_backward"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "CUDA"):
        _KERNELS.impl(_name, lambda *_, **__: NotImplemented)


class Composites(TorchFunctionMode):
    """Mode that calls these functions in place of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self._cast: dict[Tensor, Tensor] = {}  # leaves, until the outermost autocast ends

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cuda"):
            if func in LOWER:
                dtype = torch.get_autocast_dtype("cuda")
                args, kwargs = tree_map_only(Tensor, lambda x: self._to(x, dtype), (args, kwargs))
            elif func in WIDER and kwargs.get("dtype") is None:
                wide = torch.float32
                args, kwargs = tree_map_only(Tensor, lambda x: self._to(x, wide), (args, kwargs))
        return INSTEAD.get(func, func)(*args, **kwargs)

    def _to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast like `cached_cast` of aten/autocast_mode.cpp."""
        floating = x.is_floating_point() and x.dtype not in (dtype, torch.float64)
        if x.device.type != "cuda" or not floating:
            return x
        kept = dtype != torch.float32 and torch.is_autocast_cache_enabled()
        if not (kept and x.requires_grad and x.is_leaf and not x._is_view()):
            return x.to(dtype)
        if x not in self._cast:
            self._cast[x] = x.to(dtype)
        return self._cast[x]

    def backward(self, *args, **kwargs) -> Any:
        """Replace torch.autograd's engine: keeps this mode on for recomputation inside it."""
        with self:
            return _engine_run_backward(*args, **kwargs)

    def forget(self) -> None:
        """Replace torch.clear_autocast_cache."""
        self._cast.clear()


def _rms_norm(*args, **kwargs) -> Tensor:
    """layer_norm.cpp: the fused kernel, unless x and its weight differ in dtype."""
    return aten._fused_rms_norm(*args, **kwargs)[0]


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """transformers/attention.cpp: scaled_dot_product_attention."""
    served = sdpa_choice(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    plain, mask = {"scale": scale}, attn_mask
    if mask is not None and mask.dtype == torch.bool:  # convert_boolean_attn_mask
        hidden = torch.full((), float("-inf"), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, 0.0, hidden)
    if served == SDPBackend.CUDNN_ATTENTION.value:
        given = mask, learns, dropout_p, is_causal, False
        return aten._scaled_dot_product_cudnn_attention(q, k, v, *given, **plain)[0]
    if served == SDPBackend.FLASH_ATTENTION.value:
        dim, missing = q.shape[-1], -q.shape[-1] % 8
        plain["scale"] = dim**-0.5 if scale is None else scale
        if missing:
            q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        o = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, **plain)
        return o[0][..., :dim] if missing else o[0]
    if served == SDPBackend.EFFICIENT_ATTENTION.value:
        if mask is not None:  # preprocess_mask
            if any(s % 8 for s in mask.stride()[:-1]) or mask.stride(-1) != 1:
                keys = mask.shape[-1]
                mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]
            mask = mask.expand(*q.shape[:3], k.shape[2])
        given = mask, learns, dropout_p, is_causal
        return aten._scaled_dot_product_efficient_attention(q, k, v, *given, **plain)[0]
    return _math(q, k, v, mask, is_causal, scale, enable_gqa)


def _math(q, k, v, mask, is_causal, scale, enable_gqa) -> Tensor:
    """_scaled_dot_product_attention_math."""
    dtype, factor = q.dtype, (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    if dtype in DTYPES:
        q, k, v = q.float(), k.float(), v.float()
    q = q * factor
    if is_causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = torch.where(seen, 0.0, torch.full((), float("-inf"), dtype=q.dtype, device=q.device))
    if enable_gqa and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(aten._safe_softmax(scores, -1), v).to(dtype)


def sdpa_choice(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> int:
    """transformers/cuda/sdp_utils.cpp, in torch 2.11 with CUDA 13: the number of the first enabled
    kernel that accepts these inputs on the pretended GPU. RuntimeError if none does.
    """
    capability, half = torch.cuda.get_device_capability(), q.dtype in DTYPES
    dim, value_dim = q.shape[-1], v.shape[-1]
    heads = options.get("enable_gqa") or q.shape[1] == k.shape[1] == v.shape[1]
    dense = heads and q.ndim == 4 and all(x.stride(-1) == 1 for x in (q, k, v))
    dense = dense and capability >= (8, 0)
    grain = 8 if half else 4
    takes = {
        SDPBackend.CUDNN_ATTENTION: torch._C._get_cudnn_sdp_enabled()
        and (dense and half and max(dim, value_dim) <= 128 and dim % 8 == value_dim % 8 == 0)
        and (k.shape[2] > 1 and not torch.are_deterministic_algorithms_enabled()),
        SDPBackend.FLASH_ATTENTION: torch._C._get_flash_sdp_enabled()
        and (dense and half and attn_mask is None and dim == k.shape[-1] == value_dim <= 256)
        and not (is_causal and q.shape[2] != k.shape[2]),
        SDPBackend.EFFICIENT_ATTENTION: torch._C._get_mem_efficient_sdp_enabled()
        and (dense and q.dtype != torch.float64 and dim % grain == value_dim % grain == 0)
        and (q.shape[1] == k.shape[1]),
        SDPBackend.MATH: torch._C._get_math_sdp_enabled(),
    }
    order = list(takes)
    if capability[0] not in (9, 10):  # check_prefer_cudnn_attention
        order = [*order[1:], order[0]]
    for kernel in order:
        if takes[kernel]:
            return kernel.value
    raise RuntimeError("no kernel that is allowed takes these inputs")


INSTEAD = {
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: sdpa,
    torch._fused_sdp_choice: sdpa_choice,
}
