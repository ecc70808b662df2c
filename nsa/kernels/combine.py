"""Softmax delta of a branch whose output was kept, for the backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import ceil_div, in_units, padded
from nsa.kernels.launch import launch

TOKENS = 8  # by 8 heads: rows of delta and of dgates are then written whole sectors at a time
HEADS = 8


@triton.jit
def _delta(
    do, o, unit, delta, dgates, do_strides, o_strides, gate_strides, tokens, heads,
    BRANCH: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS neighbouring tokens of HEADS neighbouring heads."""
    tiles = tl.cdiv(heads, HEADS)
    i = tl.arange(0, TOKENS * HEADS)
    t = (tl.program_id(0) // tiles * TOKENS + i % TOKENS).to(tl.int64)
    head = (tl.program_id(0) % tiles * HEADS + i // TOKENS).to(tl.int64)
    d = tl.arange(0, padded(DV))[None, :]
    valid = (t < tokens) & (head < heads)
    mask = valid[:, None] & (d < DV)
    do_at = do + (t * do_strides[0] + head * do_strides[1])[:, None] + d
    o_at = o + (t * o_strides[0] + head * o_strides[1])[:, None] + d
    do_tile = tl.load(do_at, mask=mask, other=0.0).to(tl.float32)
    o_tile = tl.load(o_at, mask=mask, other=0)
    if unit is None:
        sums = tl.sum(do_tile * o_tile.to(tl.float32), 1)
    else:
        sums = tl.sum(do_tile * in_units(o_tile), 1)
        sums *= tl.load(unit + head * tokens + t, mask=valid, other=0.0)
    tl.store(delta + head * tokens + t, sums, mask=valid)
    if dgates is not None:
        at = dgates + t * gate_strides[0] + head * gate_strides[1] + BRANCH * gate_strides[2]
        tl.store(at, sums.to(dgates.dtype.element_ty), mask=valid)


def delta_of(
    do: Tensor, o: Tensor, dgates: Tensor | None, branch: int, unit: Tensor | None = None
) -> Tensor:
    """<do, o> in fp32, [HQ, tokens], for do and o [tokens, HQ, DV]; the softmax backward's delta.

    o of int16 is in the units of unit [HQ, tokens] fp32, see `common.fixed_point`. delta is also
    the gradient of the branch's gate and written to dgates[..., branch], if dgates [tokens, HQ, 3]
    is given.
    """
    tokens, heads, value_dim = o.shape
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=o.device)
    if tokens:
        launch(
            _delta, (ceil_div(tokens, TOKENS) * ceil_div(heads, HEADS),),
            do, o, unit, delta, dgates, do.stride()[:2], o.stride()[:2],
            None if dgates is None else dgates.stride(), tokens, heads,
            BRANCH=branch, TOKENS=TOKENS, HEADS=HEADS, DV=value_dim, num_warps=4,
        )  # fmt: skip
    return delta
