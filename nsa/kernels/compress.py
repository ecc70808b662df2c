"""Mean compression (Eq. 7 with phi = mean): keys and values in one launch, as a torch operator."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import ceil_div, padded
from nsa.kernels.launch import launch
from nsa.kernels.registration import contiguous, operator, sequences_of
from nsa.kernels.sequences import Axis, Sequences


@triton.jit
def _place(row, bounds, length, count, steps, PACKED: tl.constexpr):
    """(sequence, its first row) of each row of an axis; sequence = count past the axis's end."""
    if PACKED:
        low = row * 0
        high = low + count
        for _ in range(steps):
            middle = (low + high) // 2
            inside = low < high
            before = inside & (tl.load(bounds + middle + 1, mask=inside, other=0) <= row)
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        sequence = low
        first = tl.load(bounds + sequence)
    else:
        sequence = row // length
        first = sequence * length
    return sequence, first


@triton.jit
def _rows(x, strides, row, head, valid, D: tl.constexpr):
    """x[row, head] in fp32 [ROWS, padded D], 0 where not valid."""
    d = tl.arange(0, padded(D))[None, :]
    at = x + row.to(tl.int64)[:, None] * strides[0] + head.to(tl.int64) * strides[1] + d
    return tl.load(at, mask=valid[:, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, rows, head, values, HKV: tl.constexpr, D: tl.constexpr):
    """Write values [ROWS, padded D] to the contiguous x [rows, HKV, D]."""
    d = tl.arange(0, padded(D))[None, :]
    at = x + (row.to(tl.int64)[:, None] * HKV + head) * D + d
    tl.store(at, values.to(x.dtype.element_ty), mask=(row < rows)[:, None] & (d < D))


@triton.jit
def _mean(
    x, x_cmp, strides, row, rows, head, token, valid,
    HKV: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the means of LENGTH tokens starting at each of `token` to `row`; 0 where not valid."""
    total = tl.zeros([row.shape[0], padded(D)], tl.float32)
    for i in tl.range(0, LENGTH, loop_unroll_factor=min(LENGTH, 8)):
        total += _rows(x, strides, token + i, head, valid, D)
    _store(x_cmp, row, rows, head, total / LENGTH, HKV, D)


@triton.jit
def _compress(
    k, v, k_cmp, v_cmp, k_strides, v_strides, compressed, tokens, rows, count, steps,
    HKV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program: ROWS neighbouring compressed keys, or values, of one KV head.

    compressed, tokens: (bounds, length) of the two axes.
    """
    row = tl.program_id(0) // HKV * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) % HKV
    sequence, first = _place(row, compressed[0], compressed[1], count, steps, PACKED)
    valid = (row < rows) & (sequence < count)
    start = tl.load(tokens[0] + sequence) if PACKED else sequence * tokens[1]
    token = start + (row - first) * STRIDE
    if tl.program_id(1) == 0:
        _mean(k, k_cmp, k_strides, row, rows, head, token, valid, HKV, LENGTH, D)
    elif v is not None:
        _mean(v, v_cmp, v_strides, row, rows, head, token, valid, HKV, LENGTH, DV)


@triton.jit
def _spread(
    dx_cmp, dx, strides, at,
    HKV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write each token's gradient from the compressed blocks that cover it.

    at: (row, rows, head, the newest such block, the sequence's first block, its blocks).
    """
    row, rows, head, newest, first, count = at
    total = tl.zeros([row.shape[0], padded(D)], tl.float32)
    for m in tl.static_range(LENGTH // STRIDE):
        block = newest - m
        valid = (row < rows) & (block >= 0) & (block < count)
        total += _rows(dx_cmp, strides, first + block, head, valid, D)
    _store(dx, row, rows, head, total / LENGTH, HKV, D)


@triton.jit
def _compress_backward(
    dk_cmp, dv_cmp, dk, dv, k_strides, v_strides, compressed, tokens, rows, count, steps,
    HKV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of ROWS neighbouring tokens' keys, or values, of one KV head."""
    row = tl.program_id(0) // HKV * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) % HKV
    sequence, start = _place(row, tokens[0], tokens[1], count, steps, PACKED)
    inside = sequence < count
    if PACKED:
        first = tl.load(compressed[0] + sequence)
        blocks = tl.load(compressed[0] + sequence + 1, mask=inside, other=0) - first
    else:
        first = sequence * compressed[1]
        blocks = tl.where(inside, compressed[1], 0)
    at = row, rows, head, (row - start) // STRIDE, first, blocks
    if tl.program_id(1) == 0:
        _spread(dk_cmp, dk, k_strides, at, HKV, LENGTH, STRIDE, D)
    elif dv is not None:
        _spread(dv_cmp, dv, v_strides, at, HKV, LENGTH, STRIDE, DV)


def compress_forward(
    k: Tensor, v: Tensor | None, sequences: Sequences
) -> tuple[Tensor, Tensor | None]:
    """Means of compress_block tokens, compress_stride apart: (k_cmp [C rows, HKV, D], v_cmp).

    k [tokens, HKV, D], v [tokens, HKV, DV] or None; C rows = sequences.compressed.rows. Summed in
    fp32. Rows past the end of a packed batch are 0.
    """
    return _launch(_compress, k, v, sequences, sequences.compressed)


def compress_backward(
    dk_cmp: Tensor, dv_cmp: Tensor | None, sequences: Sequences
) -> tuple[Tensor, Tensor | None]:
    """(dk [tokens, HKV, D], dv); each token gathers from the blocks that cover it."""
    return _launch(_compress_backward, dk_cmp, dv_cmp, sequences, sequences.tokens)


def _launch(kernel, k: Tensor, v: Tensor | None, sequences: Sequences, axis: Axis):
    """Run one of the two kernels from k, v to new tensors of the same dtype along `axis`."""
    config, tokens, compressed = sequences.config, sequences.tokens, sequences.compressed
    rows, (_, kv_heads, dim) = axis.rows, k.shape
    value_dim = dim if v is None else v.shape[2]

    def out(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.empty(rows, kv_heads, x.shape[2], dtype=x.dtype, device=x.device)

    k_out, v_out = out(k), out(v)
    block = 8 if max(dim, value_dim) > 64 else 16
    if rows:
        launch(
            kernel, (ceil_div(rows, block) * kv_heads, 1 if v is None else 2),
            k, v, k_out, v_out, k.stride()[:2], None if v is None else v.stride()[:2],
            (compressed.bounds, compressed.length), (tokens.bounds, tokens.length),
            rows, tokens.count, tokens.count.bit_length(),
            HKV=kv_heads, LENGTH=config.compress_block, STRIDE=config.compress_stride,
            PACKED=tokens.packed, ROWS=block, D=dim, DV=value_dim, num_warps=4,
        )  # fmt: skip
    return k_out, v_out


@operator("compress_mean")
def compress_mean(
    k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, batch: int, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Mean-compressed keys and values [C rows, HKV, *] of k, v [tokens, HKV, *] (Eq. 7).

    Without v the second result is empty.
    """
    sequences = sequences_of(k.shape[0], cu_seqlens, batch, sizes)
    k_cmp, v_cmp = compress_forward(k, v, sequences)
    return k_cmp, k.new_empty(0) if v_cmp is None else v_cmp


@compress_mean.register_fake
def _(k, v, cu_seqlens, batch, sizes):
    rows = sequences_of(k.shape[0], cu_seqlens, batch, sizes).compressed.rows
    k_cmp = k.new_empty(rows, *k.shape[1:])
    return k_cmp, k.new_empty(0) if v is None else v.new_empty(rows, *v.shape[1:])


@operator("compress_mean_backward")
def compress_mean_backward(
    dk_cmp: Tensor,
    dv_cmp: Tensor | None,
    cu_seqlens: Tensor | None,
    tokens: int,
    batch: int,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v of `compress_mean`."""
    sequences = sequences_of(tokens, cu_seqlens, batch, sizes)
    dk, dv = compress_backward(dk_cmp, dv_cmp, sequences)
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
    dk, dv = compress_mean_backward(dk_cmp, dv_cmp, cu_seqlens, ctx.tokens, ctx.batch, ctx.sizes)
    return dk, dv if ctx.has_v else None, None, None, None


compress_mean.register_autograd(_backward_compress, setup_context=_save_compress)
