"""Selected attention, forward: every query attends to the blocks it selected (Eq. 11-12)."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import (
    LOG2E,
    absorb,
    finish,
    in_units,
    padded,
    partial_sums,
    rest_of,
    sunk,
    truncated,
)
from nsa.kernels.hopper import launches as hopper
from nsa.kernels.launch import launch
from nsa.kernels.selected import (
    block_scores,
    load_block,
    load_rows,
    of_head,
    of_union,
    place,
    store_rows,
    tile_rows,
    union_of,
)
from nsa.kernels.selected_plan import Plan, launches
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile


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
    base_unit: Tensor | None = None,
    out: Tensor | None = None,
    rest: Tensor | None = None,
    sink2: Tensor | None = None,
    tile: Mapping[str, Tile] | None = None,
    force: str | None = None,
    cost: float | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [tokens, HQ, DV] in q's dtype, lse2 [tokens, HQ] fp32) of the planned blocks.

    q is [tokens, HQ, D], k [tokens, HKV, D], v [tokens, HKV, DV]. Without gates, o is the attention
    itself. With gates [tokens, HQ, 3], o = gates[..., branch] * attention + base, `base` weighted
    by gates[..., base_branch] where that is given, rounded once; base None is 0. A base of int16 is
    in the units of base_unit [HQ, tokens] fp32. `out` may be `base`. rest, int8 with
    the strides of o, receives `common.rest_of` o for a backward. sink2: as in `span_forward`.

    `tile` holds choices for "small" and "large" tiles, `force` allows only one of them, and `cost`
    is the cost of a block in a large tile relative to a small one; these and `descriptors` are for
    Triton's kernels. specialized: see `hopper.launches.selected_tile`.
    """
    o = q.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if specialized is None and (tile or force or cost or descriptors is not None):
        specialized = False
    if by_warps := hopper.selected_tile("selected", specialized, plan, sequences, (q, k, v)):
        mix = gates, branch, base, base_branch, base_unit, sink2
        chosen = (tile or {}).get("large") or by_warps
        hopper.launch_selected((q, k, v), (o, rest, lse), mix, plan, sequences, scale, chosen)
        return o, lse
    strides = tuple((0, 0, 0) if x is None else x.stride() for x in (q, k, v, o, gates, base))
    for one in launches("forward", q, k, v, plan, sequences, force, cost, tile, descriptors):
        launch(
            _selected_forward, one.grid,
            q, one.keys, one.values, o, rest, lse, gates, base, base_unit, sink2, strides,
            one.union, one.rivals, one.axis, one.sizes, q.shape[0], scale * LOG2E,
            BRANCH=branch, BASE_BRANCH=-1 if base_branch is None else base_branch,
            ALIKE=k.stride() == v.stride(), WALK=one.walk, **one.options,
        )  # fmt: skip
    return o, lse


@triton.jit
def _selected_forward(
    q, k, v, o, rest, lse, gates, base, base_unit, sink2, strides, union, rivals, axis, sizes,
    rows_of_all, scale2,
    BRANCH: tl.constexpr, BASE_BRANCH: tl.constexpr, ALIKE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """One program: the rows of one tile over the union of their blocks, then o and lse2."""
    ROWS: tl.constexpr = WALK.rows
    KEYS: tl.constexpr = WALK.keys
    PARTS: tl.constexpr = WALK.parts
    PRECISION: tl.constexpr = WALK.precision
    D: tl.constexpr = WALK.d
    DV: tl.constexpr = WALK.dv
    sequence, start, rows, first, kv_head, head, tile, mine, along = place(
        axis, rivals, sizes, WALK
    )
    if not mine:
        return
    k = of_head(k, along[0], kv_head, strides[1])
    v = of_head(v, along[0], kv_head, strides[2])
    v_strides = strides[1 if ALIKE else 2]  # one set of offsets for both
    for _ in range(WALK.pieces if WALK.merged else 1):
        token, position, row, heads, valid = tile_rows(
            start, rows, first, along[2], kv_head, head, sizes[2], WALK
        )
        queries = load_rows(q, row, heads, valid, strides[0], D)
        blocks, members, count = union_of(union, tile, kv_head, sizes[1], WALK)

        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, 8], tl.float32)
        kept = tl.zeros([ROWS, 8], tl.float32)  # sums of p as values are weighed by it
        acc = tl.zeros([ROWS, padded(DV)], tl.float32)
        ahead = of_union(blocks, members, 0, count, WALK)
        for i in range(count * PARTS):
            part = i % PARTS * KEYS
            width = tl.minimum(sizes[3] - part, KEYS)
            block, member = ahead
            ahead = of_union(blocks, members, (i + 1) // PARTS, count, WALK)
            first_key = block * sizes[3] + part
            left = tl.minimum(along[1] - first_key, width)
            keys = load_block(k, sequence, kv_head, first_key, left, strides[1], KEYS, D)
            s = block_scores(queries, keys, token, position, member, first_key, width, PRECISION)
            p, m, total, rescale = absorb(s, scale2, m, total)
            acc *= rescale[:, None]
            values = load_block(v, sequence, kv_head, first_key, left, v_strides, KEYS, DV)
            if queries.dtype != tl.float32:
                p = truncated(p, queries.dtype)
                kept = kept * rescale[:, None] + partial_sums(p)
            acc = tl.dot(p.to(queries.dtype), values, acc, input_precision=PRECISION)

        divisor, lse2 = finish(m, total)
        if queries.dtype != tl.float32:
            divisor, _ = finish(m, kept)
        if sink2 is not None:
            divisor = sunk(divisor, lse2, tl.load(sink2 + heads, mask=valid, other=0.0))
        acc /= divisor[:, None]
        tl.store(lse + row * (sizes[1] * sizes[2]) + heads, lse2, mask=valid)
        at = row * strides[4][0] + heads.to(tl.int64) * strides[4][1]
        if gates is not None:
            gate = tl.load(gates + at + BRANCH * strides[4][2], mask=valid, other=0.0)
            acc *= gate.to(tl.float32)[:, None]
        if base is not None:
            more = load_rows(base, row, heads, valid, strides[5], DV)
            if base_unit is None:
                more = more.to(tl.float32)
            else:
                unit = base_unit + heads.to(tl.int64) * rows_of_all + row
                more = in_units(more) * tl.load(unit, mask=valid, other=0.0)[:, None]
            if BASE_BRANCH >= 0:
                gate = tl.load(gates + at + BASE_BRANCH * strides[4][2], mask=valid, other=0.0)
                more *= gate.to(tl.float32)[:, None]
            acc += more
        store_rows(o, acc, row, heads, valid, strides[3], DV)
        if rest is not None:
            low = rest_of(acc, acc.to(o.dtype.element_ty))
            store_rows(rest, low, row, heads, valid, strides[3], DV)
        tile += 1
        first += WALK.tokens
