"""Rotary position embedding of queries and keys in one launch, as a torch operator with gradient.

In plain torch it is ten passes over each tensor forward and as many backward, most of them in fp32.
One operator for all tensors: an operator's cost on the host is more than that of its work.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import ceil_div, padded
from nsa.kernels.launch import launch
from nsa.kernels.registration import contiguous, operator

ROWS = 64  # heads of tokens that a program rotates


@triton.jit
def _rotate(
    xs, outs, strides, heads, ends, cos, sin, positions, tokens, batch,
    BACK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads of one x, those of a token adjacent.

    Programs up to ends[0] are the first x's, then up to ends[1] the second's.
    """
    program = tl.program_id(0)
    first = 0
    for j in tl.static_range(len(xs)):
        if (program >= first) & (program < ends[j]):
            at = strides[3 * j], strides[3 * j + 1], strides[3 * j + 2]
            x = xs[j], outs[j], at, heads[j]
            _turn(x, program - first, cos, sin, positions, tokens, batch, BACK, HALF, ROWS)
        first = ends[j]


@triton.jit
def _turn(
    x, number, cos, sin, positions, tokens, batch,
    BACK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the ROWS heads with this number of one x: (its tensor, out, strides, heads)."""
    source, out, strides, heads = x
    i = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, t, b = i % heads, i // heads % tokens, i // heads // tokens
    d = tl.arange(0, padded(HALF))[None, :]
    mask = (b < batch)[:, None] & (d < HALF)
    at = t
    if positions is not None:
        at = tl.load(positions + t, mask=b < batch, other=0)
    c = tl.load(cos + at[:, None] * HALF + d, mask=mask, other=0.0)
    s = tl.load(sin + at[:, None] * HALF + d, mask=mask, other=0.0)
    if BACK:
        s = -s
    source = source + (b * strides[0] + t * strides[1] + head * strides[2])[:, None] + d
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + i[:, None] * (2 * HALF) + d
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=mask)


@operator("rotate")
def rotate(
    cos: Tensor, sin: Tensor, positions: Tensor | None, back: bool, xs: Sequence[Tensor]
) -> list[Tensor]:
    """Rotate each of xs [B, T, H, D] by its position, inversely if `back`; the dtype is kept.

    B, T, D and the dtype are common to all, H may differ. Same as `nsa.reference.rotary.rotate`
    for fp32 tables cos, sin [P, D/2] and positions [T] int64: in fp32, rounded once.
    """
    xs = [contiguous(x) for x in xs]
    batch, tokens, _, dim = xs[0].shape
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    heads = [x.shape[2] for x in xs]
    ends = list(accumulate(ceil_div(batch * tokens * count, ROWS) for count in heads))
    if ends[-1]:
        launch(
            _rotate, (ends[-1],),
            tuple(xs), tuple(outs), tuple(s for x in xs for s in x.stride()[:3]), tuple(heads),
            tuple(ends), cos.contiguous(), sin.contiguous(), positions, tokens, batch,
            BACK=back, HALF=dim // 2, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return outs


@rotate.register_fake
def _(cos, sin, positions, back, xs):
    return [x.new_empty(x.shape) for x in xs]


def _save(ctx, inputs, output):
    cos, sin, positions, ctx.back, _ = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.set_materialize_grads(False)  # unreached outputs have no gradient instead of zero


def _turn_back(ctx, douts):
    cos, sin, positions = ctx.saved_tensors
    turned = iter(rotate(cos, sin, positions, not ctx.back, [x for x in douts if x is not None]))
    return None, None, None, None, [None if x is None else next(turned) for x in douts]


rotate.register_autograd(_turn_back, setup_context=_save)
