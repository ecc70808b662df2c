"""Temporary allocations of operators, and substitutes for those that fake tensors cannot run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from workbook.lab.estimate import libraries
from workbook.lab.estimate.libraries import round_up

aten = torch.ops.aten


def substitute(tracker: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the results of a substitute for `func`; NotImplemented if there is none."""
    if func is aten._pin_memory.default:
        return args[0]
    instead = libraries.launcher(func) if tracker.device == "cuda" else None
    if instead is None:
        return NotImplemented
    with tracker:
        return instead(*args, **kwargs)


def besides(tracker: Any, func: Any, args: tuple, kwargs: dict, out: Any) -> tuple[int, ...]:
    """Bytes of the operator's temporary allocations. An unknown operator is noted in the trace,
    with the bytes of its largest results: it may allocate as much again."""
    found = BESIDES[tracker.device].get(func)
    if found is not None:
        return found(args, kwargs, out)
    # CPU operators need only their results even where GPU ones do not, by the allocator's events.
    if not _plain(func) and (tracker.device == "cuda" or func not in BESIDES["cuda"]):
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        size = sum(_bytes(x) for x in made if x.device.type == tracker.device)
        if size:
            unknown = tracker.trace.unknown
            unknown[str(func)] = max(unknown[str(func)], size)
    return ()


def _bytes(x: Tensor, size: int | None = None) -> int:
    return x.numel() * (x.element_size() if size is None else size)


def _logsumexp(args, kwargs, out) -> tuple[int, ...]:
    """native/ReduceOps.cpp, logsumexp_out_impl: the maxima and exp(x - maximum)."""
    return _bytes(args[0]), _bytes(out)


def _safe_softmax(args, kwargs, out) -> tuple[int, ...]:
    """native/transformers/attention.cpp: masks of -inf scores, and of rows with only -inf."""
    return _bytes(out, 1), out.numel() // max(1, out.shape[args[1]])


def _softmax_backward(args, kwargs, out) -> tuple[int, ...]:
    """native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output."""
    return (_bytes(args[0]),)


def _product(args, kwargs, out) -> tuple[int, ...]:
    """native/cuda/Blas.cpp, prepare_matrix_for_cublas: a copy of each matrix with no
    contiguous dimension."""
    return tuple(_bytes(x) for x in args if isinstance(x, Tensor) and x.ndim > 1 and _strided(x))


def _strided(x: Tensor) -> bool:
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    by_rows = by_column == 1 and by_row >= max(1, columns)
    return not (by_rows or (by_row == 1 and by_column >= max(1, rows)))


def _sort(args, kwargs, out) -> tuple[int, ...]:
    """native/cuda/Sort.cpp: up to 4096 in place; more by cub, with a second buffer of keys and
    indices, and the initial indices."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if x.ndim == 0 or x.shape[dim] <= 4096:
        return ()
    return _bytes(x), _bytes(x, 8), _bytes(x, 8)


def _embedding_backward(args, kwargs, out) -> tuple[int, ...]:
    """native/cuda/Embedding.cu: 3073 or more indices are sorted, with their positions, by cub,
    and rows are summed in parts of 10 and one more for each word."""
    ids, words = args[1].numel(), out.shape[0]
    if ids <= 3072:
        return ()
    return *(ids * 8,) * 4, (ids // 10 + min(ids, words)) * out.shape[1] * 4


def _cudnn_backward(args, kwargs, out) -> tuple[int, ...]:
    """native/cudnn/MHA.cpp: do if its last dimension is not contiguous. cuDNN's workspace is not
    published; measured on an H200: dq in fp32, one number per row, and with groups dk and dv of
    each query head."""
    do, q, k = args[:3]
    copied = 0 if do.stride(-1) == 1 else _bytes(do)
    return copied, _bytes(q, 4), _bytes(q[..., 0], 4), *(_grouped(q, k),) * 2


def _grouped(q: Tensor, k: Tensor) -> int:
    """Bytes of a gradient of k [B, HKV, S, D] for each query head; 0 without groups."""
    return 0 if k.shape[1] == q.shape[1] else _bytes(k) // k.shape[1] * q.shape[1]


def _flash_backward(args, kwargs, out) -> tuple[int, ...]:
    """native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd, and its contiguous copies."""
    do, q, k = args[:3]
    batch, heads, rows, dim = q.shape[0], q.shape[1], round_up(q.shape[2], 128), q.shape[3]
    width = round_up(dim, 32 if dim <= 128 else 64)
    copied = [_bytes(x) for x in (do, args[4]) if not x.transpose(1, 2).is_contiguous()]
    sums = batch * heads * rows * 4
    return *copied, sums, sums * width, *(_grouped(q, k),) * 2


def _efficient(args, kwargs, out) -> tuple[int, ...]:
    """mem_eff_attention/kernel_forward.h: o in fp32 if it does not fit the registers."""
    q, v = args[0], args[2]
    wide = v.shape[-1] > 128 and q.element_size() == 2
    return (_bytes(out[0], 4),) if wide else ()


def _efficient_backward(args, kwargs, out) -> tuple[int, ...]:
    """attention_backward.cu, kernel_backward.h: do, the row sums; for 16-bit inputs dq in fp32, for
    fp32 do * o, from which the row sums are computed."""
    do, q = args[:2]
    copied = 0 if do.transpose(1, 2).is_contiguous() else _bytes(do)
    return copied, _bytes(q[..., 0], 4), _bytes(q, 4) if q.element_size() == 2 else _bytes(do)


# Bytes of temporaries that an operator allocates in addition to its results, from (args, kwargs,
# out). Those left out are below a thousandth of any step's peak: reductions' partial sums,
# _foreach_norm's, topk's counts, and the fused norm's at 65,536 rows or more. So are flash
# attention's tiles per CPU thread, except in steps of a few MiB (2 % were observed).
_BOTH = {aten.logsumexp.default: _logsumexp, aten._safe_softmax.default: _safe_softmax}
BESIDES: dict[str, dict[Any, Callable[..., tuple[int, ...]]]] = {
    "cpu": _BOTH,
    "cuda": _BOTH
    | {
        aten._softmax_backward_data.default: _softmax_backward,
        aten.sort.default: _sort,
        aten.sort.stable: _sort,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten._scaled_dot_product_efficient_attention.default: _efficient,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    }
    | dict.fromkeys((aten.mm.default, aten.bmm.default, aten.bmm.dtype), _product)
    | dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _product),
}

# Operators known to allocate only their results, besides those that torch tags as pointwise
# and those that return a view or write in place.
RESULTS_ONLY = frozenset(
    """
    empty empty_like _unsafe_view floor_divide empty_strided new_empty new_empty_strided zeros
    zeros_like new_zeros new_ones ones ones_like full full_like new_full arange eye scalar_tensor
    randint clone _to_copy copy lift_fresh sum mean amax amin any all prod var argmax max min
    linalg_vector_norm norm cumsum cumprod cat stack repeat constant_pad_nd tril triu roll flip
    where masked_fill gather index index_select take_along_dim scatter scatter_add index_add
    index_put slice_backward select_backward unfold_backward embedding searchsorted bucketize topk
    _softmax _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward
    _fused_rms_norm _fused_rms_norm_backward native_layer_norm silu_backward gelu gelu_backward
    sigmoid_backward tanh_backward _foreach_norm isin _local_scalar_dense
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """.split()  # noqa: SIM905
)


def _plain(func: Any) -> bool:
    if func not in _known:
        schema = func._schema
        aliases = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
        name = schema.name.partition("::")[2]
        tagged = torch.Tag.pointwise in func.tags
        _known[func] = aliases or tagged or name in RESULTS_ONLY or func.namespace == "nsa"
    return _known[func]


_known: dict[Any, bool] = {}
