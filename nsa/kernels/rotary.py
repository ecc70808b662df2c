"""Rotary position embedding in one pass over its input, as a torch operator with its gradient.

In plain torch it is ten passes forward and as many backward, most of them in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import ceil_div, power_of_two
from nsa.kernels.registration import contiguous, on_its_device

ROWS = 64  # heads of tokens a program turns


@triton.jit
def _rotate(
    x, out, cos, sin, positions, strides, tokens, heads, rows,
    BACK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads, those of a token side by side."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, t, b = i % heads, i // heads % tokens, i // heads // tokens
    d = tl.arange(0, BLOCK)[None, :]
    valid = i < rows
    mask = valid[:, None] & (d < HALF)
    at = t
    if positions is not None:
        at = tl.load(positions + t, mask=valid, other=0)
    c = tl.load(cos + at[:, None] * HALF + d, mask=mask, other=0.0)
    s = tl.load(sin + at[:, None] * HALF + d, mask=mask, other=0.0)
    if BACK:
        s = -s
    source = x + (b * strides[0] + t * strides[1] + head * strides[2])[:, None] + d
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + i[:, None] * (2 * HALF) + d
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=mask)


@torch.library.custom_op("nsa::rotate", mutates_args=())
@on_its_device
def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, back: bool) -> Tensor:
    """x [B, T, H, D] turned by its position, `back` the other way; dtype in, dtype out.

    As `nsa.reference.rotary.rotate` does for fp32 tables cos, sin [P, D/2] and positions [T] int64:
    in fp32, rounded once.
    """
    x = contiguous(x)
    batch, tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = batch * tokens * heads
    if rows:
        _rotate[(ceil_div(rows, ROWS),)](
            x, out, cos.contiguous(), sin.contiguous(), positions, x.stride()[:3],
            tokens, heads, rows, BACK=back, HALF=dim // 2, BLOCK=power_of_two(dim // 2), ROWS=ROWS,
            num_warps=4,
        )  # fmt: skip
    return out


@rotate.register_fake
def _(x, cos, sin, positions, back):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    _, cos, sin, positions, ctx.back = inputs
    ctx.save_for_backward(cos, sin, positions)


def _turn_back(ctx, dout):
    cos, sin, positions = ctx.saved_tensors
    return rotate(dout, cos, sin, positions, not ctx.back), None, None, None, None


rotate.register_autograd(_turn_back, setup_context=_save)
