"""What a CPU's operators allocate besides their results: read off the allocator's events, and the
sizes from their sources (aten/src/ATen/native).

Not here, for it depends on the processor: the scratch of oneDNN's products in bf16, about 1 MiB
for one of 1000 x 768 x 2048.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
KEYS = 512  # that flash attention takes at a time
WIDE = 4  # bytes of fp32, in which it and means of bf16 count


def _mean(args, kwargs, out) -> tuple[int, ...]:
    """Of bf16 the input and the sums in fp32."""
    x = args[0]
    return (WIDE * x.numel(), WIDE * out.numel()) if x.dtype in HALF else ()


def _in_one_dtype(args, kwargs, out) -> tuple[int, ...]:
    """Of two tensors the narrower one in the dtype of the other."""
    both = [x for x in args[:2] if isinstance(x, Tensor)]
    if len(both) < 2 or both[0].dtype == both[1].dtype:
        return ()
    common = torch.result_type(*both)
    return tuple(x.numel() * common.itemsize for x in both if x.dtype != common)


def _sort(args, kwargs, out) -> tuple[int, ...]:
    """Of one dimension, numbers to sort along: by radix."""
    return (8 * args[0].numel(),) if args[0].dim() == 1 else ()


def _rows(queries: int) -> int:
    """Queries that flash attention takes at a time."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def _flash(args, kwargs, out) -> tuple[int, ...]:
    """For each thread of torch: scores, two statistics and the sum of values of so many queries,
    in fp32, and the scores in bf16; there, where tiles are multiplied, keys and values packed."""
    q, k = args[:2]
    heads, keys, dim = q.shape[0] * k.shape[1], k.shape[2], q.shape[3]
    threads, rows, some = torch.get_num_threads(), _rows(q.shape[2]), min(KEYS, keys)
    wide = WIDE * threads * rows * (some + 2 + dim)
    if q.dtype not in HALF:
        return (wide,)
    half = 2 * threads * rows * (some + some % 2)
    if not torch.cpu._is_amx_tile_supported():
        return wide, half
    packed = 2 * heads * dim * (2 * keys + keys % 2)
    return wide, half, packed, 2 * some * dim * threads


def _flash_backward(args, kwargs, out) -> tuple[int, ...]:
    """For each thread scores and their gradients, in fp32 and in bf16; the gradient in order."""
    do, q, k = args[:3]
    tile = 2 * torch.get_num_threads() * _rows(q.shape[2]) * min(KEYS, k.shape[2])
    ordered = do.transpose(1, 2).is_contiguous()
    return WIDE * tile, 2 * tile * (q.dtype in HALF), 0 if ordered else do.nbytes


def _positions(args, kwargs, out) -> tuple[int, ...]:
    """A number for each place along the dimension that was unfolded."""
    return (8 * args[1][args[2]],)


def _nothing(args, kwargs, out) -> tuple[int, ...]:
    """Of fp32 at least."""
    return ()


_PLAIN = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.sort.default, aten._softmax_backward_data.default),
    aten.embedding_dense_backward.default,
)
_BINARY = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
)
BESIDES: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.mean.dim: _mean,
    aten.sort.stable: _sort,
    aten.unfold_backward.default: _positions,
    **dict.fromkeys(_PLAIN, _nothing),
    **dict.fromkeys(_BINARY, _in_one_dtype),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
