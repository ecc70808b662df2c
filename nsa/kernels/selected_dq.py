"""Selected attention, backward of queries: dQ and delta."""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import LOG2E, padded, partial_sums, with_rest
from nsa.kernels.hopper import launches as hopper
from nsa.kernels.launch import launch
from nsa.kernels.selected import (
    block_scores,
    delta_left,
    last_seen,
    load_block,
    load_rows,
    of_head,
    of_union,
    place,
    rounds,
    store_rows,
    tile_rows,
    union_of,
)
from nsa.kernels.selected_plan import Plan, launches
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile


def selected_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse2: Tensor,
    gates: Tensor | None,
    branch: int,
    plan: Plan,
    sequences: Sequences,
    scale: float,
    *,
    o: Tensor,
    rest: Tensor | None = None,
    others: Sequence[tuple[Tensor, int]] = (),
    kept: Tensor | None = None,
    dgates: Tensor | None = None,
    dq: Tensor | None = None,
    tile: Mapping[str, Tile] | None = None,
    force: str | None = None,
    cost: float | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq [tokens, HQ, D], delta [tokens, HQ] fp32) for do [tokens, HQ, DV] of the gated sum.

    lse2 [tokens, HQ] is from the forward; gates None: 1. delta = <do, o> of the branch without its
    gate, which is the gate's gradient and is also written to dgates[..., branch]. o [tokens, HQ,
    DV] is the gated sum, rest the forward's, and others are (delta [HQ, tokens], branch) of each
    other branch in it. kept: see `span_bwd.span_dq`, [tokens, HQ]. A given dq of any float dtype is
    added to; otherwise it is new, in q's dtype. The others are as in the forward.
    """
    add = dq is not None
    dq = q.new_empty(q.shape) if dq is None else dq
    delta = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    strides = tuple(
        (0, 0, 0) if x is None else x.stride() for x in (q, k, v, do, gates, dq, dgates, o)
    )
    deltas, branches = tuple(x for x, _ in others), tuple(n for _, n in others)
    if specialized is None and (tile or force or cost or descriptors is not None):
        specialized = False
    if by_warps := hopper.selected_tile("selected_dq", specialized, plan, sequences, (q, k, v, do)):
        hopper.launch_selected_dq(
            (q, k, v, do, o, rest), (lse2, kept, deltas, branches), (gates, dgates, branch),
            (dq, delta), plan, sequences, scale, add=add,
            tile=(tile or {}).get("large") or by_warps,
        )  # fmt: skip
        return dq, delta
    for one in launches("dq", q, k, v, plan, sequences, force, cost, tile, descriptors):
        launch(
            _selected_dq, one.grid,
            q, one.keys, one.values, do, o, rest, deltas, lse2, kept, gates, dq, delta, dgates,
            strides, one.union, one.rivals, one.axis, one.sizes, q.shape[0], scale, scale * LOG2E,
            BRANCH=branch, OTHERS=branches, ADD=add, ALIKE=k.stride() == v.stride(), WALK=one.walk,
            **one.options,
        )  # fmt: skip
    return dq, delta


@triton.jit
def _selected_dq(
    q, k, v, do, o, rest, deltas, lse, kept, gates, dq, delta, dgates, strides,
    union, rivals, axis, sizes, total, scale, scale2,
    BRANCH: tl.constexpr, OTHERS: tl.constexpr, ADD: tl.constexpr, ALIKE: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """One program: dq and delta of one tile's rows over the union of their blocks.

    dS = P (dP - delta) uses this branch's remainder of <do, o> of the gated sum as delta, with the
    rounding error of o and its rest. The sum of all dS is that error, so the resulting delta is
    corrected by it. If few keys are seen, a second pass uses the corrected delta.
    """
    ROWS: tl.constexpr = WALK.rows
    D: tl.constexpr = WALK.d
    DV: tl.constexpr = WALK.dv
    BLOCK_D: tl.constexpr = padded(D)
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
        dos = load_rows(do, row, heads, valid, strides[3], DV)
        flat = row * (sizes[1] * sizes[2]) + heads
        lse2 = tl.load(lse + flat, mask=valid, other=float("-inf"))
        sees_any = lse2 > float("-inf")
        lse2 = tl.where(sees_any, lse2, float("inf"))  # no key: no probability
        outputs = load_rows(o, row, heads, valid, strides[7], DV)
        if rest is not None:
            outputs = with_rest(outputs, load_rows(rest, row, heads, valid, strides[7], DV))
        product = tl.sum(dos.to(tl.float32) * outputs.to(tl.float32), 1)
        shift, gate = delta_left(
            product, gates, deltas, row, heads, valid, sees_any, strides[4], total, BRANCH, OTHERS
        )
        blocks, members, count = union_of(union, tile, kv_head, sizes[1], WALK)
        grad = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if kept is not None:
            share = tl.load(kept + flat, mask=valid, other=0.0)
        for _ in range(rounds(along[2] + first, sizes[3], WALK.slots, WALK.tokens)):
            if WALK.turned:
                grad, beyond = _walk_turned(
                    queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
                    sequence, kv_head, along[1], sizes[3], strides[1], v_strides, scale2, WALK,
                )  # fmt: skip
            else:
                grad, beyond = _walk(
                    queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
                    sequence, kv_head, along[1], sizes[3], strides[1], v_strides, scale2, WALK,
                )  # fmt: skip
            if kept is not None:
                shift *= share
            shift = beyond + shift  # probabilities add up to 1, or to their share

        tl.store(delta + flat, shift, mask=valid)
        if dgates is not None:
            at = row * strides[6][0] + heads.to(tl.int64) * strides[6][1] + BRANCH * strides[6][2]
            tl.store(dgates + at, shift.to(dgates.dtype.element_ty), mask=valid)
        grad *= (scale * gate)[:, None]
        if ADD:
            grad += load_rows(dq, row, heads, valid, strides[5], D).to(tl.float32)
        store_rows(dq, grad, row, heads, valid, strides[5], D)
        tile += 1
        first += WALK.tokens


@triton.jit
def _walk(
    queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
    sequence, kv_head, rows, select_block, k_strides, v_strides, scale2,
    WALK: tl.constexpr,
):  # fmt: skip
    """(dq [ROWS, padded D] before scale and gate, sum of all dS [ROWS]) of `count` blocks.

    shift [ROWS]: delta up to a rounding error, which equals that sum.
    """
    ROWS: tl.constexpr = WALK.rows
    BLOCK_D: tl.constexpr = padded(WALK.d)
    PRECISION: tl.constexpr = WALK.precision
    total = tl.zeros([ROWS, 8], tl.float32)
    grad = tl.zeros([ROWS, BLOCK_D], tl.float32)
    ahead = of_union(blocks, members, 0, count, WALK)
    for i in range(count * WALK.parts):
        first_key, width, member, keys, values, ahead = _next_keys(
            k, v, ahead, blocks, members, i, count, sequence, kv_head, rows, select_block,
            k_strides, v_strides, WALK,
        )  # fmt: skip
        s = block_scores(queries, keys, token, position, member, first_key, width, PRECISION)
        p = tl.exp2(s * scale2 - lse2[:, None])
        dp = tl.dot(dos, tl.trans(values), input_precision=PRECISION)  # [ROWS, KEYS]
        ds = p * (dp - shift[:, None])
        total += partial_sums(ds)
        grad = tl.dot(ds.to(queries.dtype), keys, grad, input_precision=PRECISION)

    return grad, tl.sum(total, 1)


@triton.jit
def _walk_turned(
    queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
    sequence, kv_head, rows, select_block, k_strides, v_strides, scale2,
    WALK: tl.constexpr,
):  # fmt: skip
    """`_walk` transposed: keys are the rows of all products, queries the columns.

    wgmma needs 64 rows, which a tile of few queries does not have and a block of keys has.
    """
    ROWS: tl.constexpr = WALK.rows
    KEYS: tl.constexpr = WALK.keys
    BLOCK_D: tl.constexpr = padded(WALK.d)
    PRECISION: tl.constexpr = WALK.precision
    n = tl.arange(0, KEYS)[:, None]
    total = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    grad = tl.zeros([BLOCK_D, ROWS], tl.float32)
    ahead = of_union(blocks, members, 0, count, WALK)
    for i in range(count * WALK.parts):
        first_key, width, member, keys, values, ahead = _next_keys(
            k, v, ahead, blocks, members, i, count, sequence, kv_head, rows, select_block,
            k_strides, v_strides, WALK,
        )  # fmt: skip
        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)  # [KEYS, ROWS]
        dp = tl.dot(values, tl.trans(dos), input_precision=PRECISION)
        last = last_seen(token, position, member, first_key, width)
        s = tl.where(n <= last[None, :], s, float("-inf"))
        p = tl.exp2(s * scale2 - lse2[None, :])
        ds = p * (dp - shift[None, :])
        total += _add_pairs(ds)
        ds = ds.to(queries.dtype)
        grad = tl.dot(tl.trans(keys), ds, grad, input_precision=PRECISION)

    return tl.trans(grad), _add_rest(total)


@triton.jit
def _next_keys(
    k, v, ahead, blocks, members, i, count, sequence, kv_head, rows, select_block, k_strides,
    v_strides, WALK: tl.constexpr,
):  # fmt: skip
    """Load part number i of a union: (first key, keys in it, members, k [KEYS, *], v [KEYS, *],
    argument `ahead` of the next call)."""
    KEYS: tl.constexpr = WALK.keys
    PARTS: tl.constexpr = WALK.parts
    if WALK.early:
        block, member = ahead
        ahead = of_union(blocks, members, (i + 1) // PARTS, count, WALK)
    else:
        block, member = of_union(blocks, members, i // PARTS, count, WALK)
    part = i % PARTS * KEYS
    width = tl.minimum(select_block - part, KEYS)
    first_key = block * select_block + part
    left = tl.minimum(rows - first_key, width)
    keys = load_block(k, sequence, kv_head, first_key, left, k_strides, KEYS, WALK.d)
    values = load_block(v, sequence, kv_head, first_key, left, v_strides, KEYS, WALK.dv)
    return first_key, width, member, keys, values, ahead


@triton.jit
def _add_pairs(x):
    """x [KEYS, ROWS] with key i + 8 of each 16 added to key i: a thread of a wgmma holds both."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1]]), 1)


@triton.jit
def _add_rest(x):
    """Sum the results of `_add_pairs` over all keys, [ROWS]."""
    return tl.sum(tl.sum(x, 1), 0)
