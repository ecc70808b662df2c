"""Mean compression as a torch operator, with its gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.kernels import compress
from nsa.kernels.registration import contiguous, on_its_device, sequences_of


@torch.library.custom_op("nsa::compress_mean", mutates_args=())
@on_its_device
def compress_mean(
    k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, batch: int, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Mean-compressed keys and values [C rows, HKV, *] of k, v [tokens, HKV, *] (Eq. 7).

    Without v the second result is empty.
    """
    sequences = sequences_of(k.shape[0], cu_seqlens, batch, sizes)
    k_cmp, v_cmp = compress.compress_mean(k, v, sequences)
    return k_cmp, k.new_empty(0) if v_cmp is None else v_cmp


@compress_mean.register_fake
def _(k, v, cu_seqlens, batch, sizes):
    rows = sequences_of(k.shape[0], cu_seqlens, batch, sizes).compressed.rows
    k_cmp = k.new_empty(rows, *k.shape[1:])
    return k_cmp, k.new_empty(0) if v is None else v.new_empty(rows, *v.shape[1:])


@torch.library.custom_op("nsa::compress_mean_backward", mutates_args=())
@on_its_device
def compress_mean_backward(
    dk_cmp: Tensor,
    dv_cmp: Tensor | None,
    cu_seqlens: Tensor | None,
    tokens: int,
    batch: int,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v of `compress_mean`."""
    sequences = sequences_of(tokens, cu_seqlens, batch, sizes)
    dk, dv = compress.compress_mean_backward(dk_cmp, dv_cmp, sequences)
    return dk, dk.new_empty(0) if dv is None else dv


@compress_mean_backward.register_fake
def _(dk_cmp, dv_cmp, cu_seqlens, tokens, batch, sizes):
    dk = dk_cmp.new_empty(tokens, *dk_cmp.shape[1:])
    return dk, dk.new_empty(0) if dv_cmp is None else dv_cmp.new_empty(tokens, *dv_cmp.shape[1:])


def _save_compress(ctx, inputs, output):
    k, v, cu_seqlens, ctx.batch, ctx.sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.tokens, ctx.has_v = k.shape[0], v is not None
    ctx.save_for_backward(cu_seqlens, *output)


def _backward_compress(ctx, dk_cmp, dv_cmp):
    cu_seqlens, k_cmp, v_cmp = ctx.saved_tensors
    dk_cmp = torch.zeros_like(k_cmp) if dk_cmp is None else dk_cmp
    if not ctx.has_v:
        dv_cmp = None
    elif dv_cmp is None:
        dv_cmp = torch.zeros_like(v_cmp)
    dk_cmp, dv_cmp = (None if x is None else contiguous(x) for x in (dk_cmp, dv_cmp))
    dk, dv = torch.ops.nsa.compress_mean_backward(
        dk_cmp, dv_cmp, cu_seqlens, ctx.tokens, ctx.batch, ctx.sizes
    )
    return dk, dv if ctx.has_v else None, None, None, None


compress_mean.register_autograd(_backward_compress, setup_context=_save_compress)
