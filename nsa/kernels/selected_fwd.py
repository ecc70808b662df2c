"""Selected attention, forward: every query attends to the blocks it selected (Eq. 11-12)."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import LOG2E, absorb, finish
from nsa.kernels.selected import (
    block_scores,
    load_keys,
    load_rows,
    place,
    store_rows,
    tile_rows,
)
from nsa.kernels.selected_plan import Plan, launches, plan
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile

__all__ = ["Plan", "plan", "selected_forward"]


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    sequences: Sequences,
    scale: float,
    *,
    gates: Tensor | None = None,
    branch: int = 1,
    base: Tensor | None = None,
    base_branch: int | None = None,
    out: Tensor | None = None,
    tile: Mapping[str, Tile] | None = None,
    force: str | None = None,
    cost: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [tokens, HQ, DV] in q's dtype, lse2 [tokens, HQ] fp32) of the planned blocks.

    q is [tokens, HQ, D], k [tokens, HKV, D], v [tokens, HKV, DV]. Without gates, o is the attention
    itself. With gates [tokens, HQ, 3], o = gates[..., branch] * attention + base, `base` weighted
    by gates[..., base_branch] where that is given, rounded once; base None is 0. `out` may be
    `base`. `tile` holds choices for "small" and "large" tiles, `force` allows one of them only, and
    `cost` is what a block costs in a large tile, in terms of a small one.
    """
    o = q.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    strides = tuple((0, 0, 0) if x is None else x.stride() for x in (q, k, v, o, gates, base))
    for launch in launches("forward", q, v, plan, sequences, force, cost, tile):
        _selected_forward[launch.grid](
            q, k, v, o, lse, gates, base, strides,
            launch.union, launch.rivals, launch.axis, launch.sizes, scale * LOG2E,
            BRANCH=branch, BASE_BRANCH=-1 if base_branch is None else base_branch,
            ALIKE=k.stride() == v.stride(), **launch.constants,
        )  # fmt: skip
    return o, lse


@triton.jit
def _selected_forward(
    q, k, v, o, lse, gates, base, strides, union, rivals, axis, sizes, scale2,
    BRANCH: tl.constexpr, BASE_BRANCH: tl.constexpr,
    ALIKE: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr, RATIO: tl.constexpr,
    DECIDE: tl.constexpr, LARGE: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the rows of one tile over the union of their blocks, then o and lse2."""
    start, rows, first, kv_head, head, blocks, members, count = place(
        axis, union, rivals, sizes, TOKENS, PIECES, RATIO, DECIDE, LARGE, HEADS, SLOTS, PACKED
    )
    if (count < 0) | (first >= rows):
        return
    token, position, row, heads, valid = tile_rows(
        start, rows, first, kv_head, head, sizes[2], TOKENS, HEADS, ROWS
    )
    queries = load_rows(q, row, heads, valid, strides[0], D, BLOCK_D)
    k += start * strides[1][0] + kv_head.to(tl.int64) * strides[1][1]
    v_strides = strides[1 if ALIKE else 2]  # one set of offsets for both
    v += start * strides[2][0] + kv_head.to(tl.int64) * strides[2][1]

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i in range(count * PARTS):
        part = i % PARTS * KEYS
        width = tl.minimum(sizes[3] - part, KEYS)
        first_key = tl.load(blocks + i // PARTS) * sizes[3] + part
        member = tl.load(members + i // PARTS)
        left = tl.minimum(rows - first_key, width)
        keys = load_keys(k, first_key.to(tl.int64), left, strides[1], KEYS, D, BLOCK_D)
        s = block_scores(
            queries, keys, token, position, member, first_key, width, scale2, KEYS, PRECISION
        )
        p, m, total, acc = absorb(s, m, total, acc)
        values = load_keys(v, first_key.to(tl.int64), left, v_strides, KEYS, DV, BLOCK_DV)
        acc = tl.dot(p.to(v.dtype.element_ty), values, acc, input_precision=PRECISION)

    acc, lse2 = finish(m, total, acc)
    tl.store(lse + row * (sizes[1] * sizes[2]) + heads, lse2, mask=valid)
    at = row * strides[4][0] + heads.to(tl.int64) * strides[4][1]
    if gates is not None:
        gate = tl.load(gates + at + BRANCH * strides[4][2], mask=valid, other=0.0).to(tl.float32)
        acc *= gate[:, None]
    if base is not None:
        more = load_rows(base, row, heads, valid, strides[5], DV, BLOCK_DV).to(tl.float32)
        if BASE_BRANCH >= 0:
            gate = tl.load(gates + at + BASE_BRANCH * strides[4][2], mask=valid, other=0.0)
            more *= gate.to(tl.float32)[:, None]
        acc += more
    store_rows(o, acc, row, heads, valid, strides[3], DV, BLOCK_DV)
