"""Selected attention, backward, the queries' side: dQ and delta."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import LOG2E, add_rows, padded, partial_sums
from nsa.kernels.launch import launch
from nsa.kernels.selected import (
    block_scores,
    last_seen,
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
    dgates: Tensor | None = None,
    dq: Tensor | None = None,
    tile: Mapping[str, Tile] | None = None,
    force: str | None = None,
    cost: float | None = None,
    descriptors: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq [tokens, HQ, D], delta [tokens, HQ] fp32) for do [tokens, HQ, DV] of the gated sum.

    lse2 [tokens, HQ] is the forward's; gates None weighs 1. delta = <do, o> of the branch without
    its gate, which is the gate's gradient and goes to dgates[..., branch] too. A given dq of any
    float dtype is added to; otherwise it is new, in q's dtype. The rest is as in the forward.
    """
    add = dq is not None
    dq = q.new_empty(q.shape) if dq is None else dq
    delta = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    strides = tuple(
        (0, 0, 0) if x is None else x.stride() for x in (q, k, v, do, gates, dq, dgates)
    )
    for one in launches("dq", q, k, v, plan, sequences, force, cost, tile, descriptors):
        launch(
            _selected_dq, one.grid,
            q, one.keys, one.values, v, do, lse2, gates, dq, delta, dgates, strides,
            one.union, one.rivals, one.axis, one.sizes, scale, scale * LOG2E,
            BRANCH=branch, ADD=add, ALIKE=k.stride() == v.stride(), WALK=one.walk,
            **one.options,
        )  # fmt: skip
    return dq, delta


@triton.jit
def _selected_dq(
    q, k, v, v_rows, do, lse, gates, dq, delta, dgates, strides,
    union, rivals, axis, sizes, scale, scale2,
    BRANCH: tl.constexpr, ADD: tl.constexpr, ALIKE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """One program: dq and delta of one tile's rows over the union of their blocks.

    delta is only known at the end, so with A = sum of (P dP) K and R = sum of P K,
    dq = scale * gate * (A - delta R). P and P dP are rounded for the products, so the delta taken
    here is the quotient of their rounded sums: a key with all the weight then cancels as it must.
    What all values of a row share cancels too, so dP of 16 bits is taken less that of the token's
    own value; in fp32 nothing is rounded, and a long sum loses less without it.
    v_rows is v where v is a descriptor.
    """
    ROWS: tl.constexpr = WALK.rows
    D: tl.constexpr = WALK.d
    DV: tl.constexpr = WALK.dv
    sequence, start, rows, first, kv_head, head, tile, mine = place(axis, rivals, sizes, WALK)
    if not mine:
        return
    k = of_head(k, start, kv_head, strides[1])
    v = of_head(v, start, kv_head, strides[2])
    v_strides = strides[1 if ALIKE else 2]  # one set of offsets for both
    for _ in range(WALK.pieces if WALK.merged else 1):
        token, position, row, heads, valid = tile_rows(
            start, rows, first, kv_head, head, sizes[2], WALK
        )
        queries = load_rows(q, row, heads, valid, strides[0], D)
        dos = load_rows(do, row, heads, valid, strides[3], DV)
        flat = row * (sizes[1] * sizes[2]) + heads
        lse2 = tl.load(lse + flat, mask=valid, other=float("-inf"))
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)  # no key: no probability
        shift = tl.zeros([ROWS], tl.float32)
        if queries.dtype != tl.float32:
            sees = valid & (lse2 < float("inf"))
            own = load_rows(v_rows, row, heads * 0 + kv_head, sees, strides[2], DV)
            shift = tl.sum(dos.to(tl.float32) * own.to(tl.float32), 1)
        blocks, members, count = union_of(union, tile, kv_head, sizes[1], WALK)
        if WALK.turned:
            grad, delta_rows = _walk_turned(
                queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
                sequence, kv_head, rows, sizes[3], strides[1], v_strides, scale2, WALK,
            )  # fmt: skip
        else:
            grad, delta_rows = _walk(
                queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
                sequence, kv_head, rows, sizes[3], strides[1], v_strides, scale2, WALK,
            )  # fmt: skip

        tl.store(delta + flat, delta_rows, mask=valid)
        factor = tl.zeros([ROWS], tl.float32) + scale
        if gates is not None:
            at = row * strides[4][0] + heads.to(tl.int64) * strides[4][1] + BRANCH * strides[4][2]
            factor *= tl.load(gates + at, mask=valid, other=0.0).to(tl.float32)
        if dgates is not None:
            at = row * strides[6][0] + heads.to(tl.int64) * strides[6][1] + BRANCH * strides[6][2]
            tl.store(dgates + at, delta_rows.to(dgates.dtype.element_ty), mask=valid)
        grad *= factor[:, None]
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
    """(A - delta R [ROWS, padded D], delta [ROWS]) of `count` blocks, before scale and gate."""
    ROWS: tl.constexpr = WALK.rows
    KEYS: tl.constexpr = WALK.keys
    BLOCK_D: tl.constexpr = padded(WALK.d)
    PRECISION: tl.constexpr = WALK.precision
    total = tl.zeros([ROWS, 8], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, tl.float32).to(queries.dtype)
    p_sum = tl.zeros([ROWS, 16 if ROWS >= 64 else 8], tl.float32)
    dp_sum = tl.zeros([ROWS, 16 if ROWS >= 64 else 8], tl.float32)
    weighted = tl.zeros([ROWS, BLOCK_D], tl.float32)
    plain = tl.zeros([ROWS, BLOCK_D], tl.float32)
    ahead = of_union(blocks, members, 0, count, WALK)
    for i in range(count * WALK.parts):
        first_key, width, member, keys, values, ahead = _next_keys(
            k, v, ahead, blocks, members, i, count, sequence, kv_head, rows, select_block,
            k_strides, v_strides, WALK,
        )  # fmt: skip
        s = block_scores(queries, keys, token, position, member, first_key, width, PRECISION)
        p = tl.exp2(s * scale2 - lse2[:, None])
        dp = tl.dot(dos, tl.trans(values), input_precision=PRECISION)  # [ROWS, KEYS]
        dp = p * (dp - shift[:, None])
        total += partial_sums(dp)
        p, dp = p.to(queries.dtype), dp.to(queries.dtype)
        plain = tl.dot(p, keys, plain, input_precision=PRECISION)
        weighted = tl.dot(dp, keys, weighted, input_precision=PRECISION)
        p_sum = add_rows(p, ones, p_sum, PRECISION)
        dp_sum = add_rows(dp, ones, dp_sum, PRECISION)

    delta = tl.sum(total, 1) + shift  # probabilities add up to 1
    p_rounded, dp_rounded = tl.sum(p_sum, 1), tl.sum(dp_sum, 1)  # as often as columns
    rounded = dp_rounded / tl.where(p_rounded == 0.0, 1.0, p_rounded)
    return weighted - rounded[:, None] * plain, delta


@triton.jit
def _walk_turned(
    queries, dos, lse2, shift, token, position, k, v, blocks, members, count,
    sequence, kv_head, rows, select_block, k_strides, v_strides, scale2,
    WALK: tl.constexpr,
):  # fmt: skip
    """`_walk` with everything turned: keys are the rows of all products, queries the columns.

    wgmma takes 64 rows, which a tile of few queries does not have and a block of keys does. A and
    R are one product [padded D, 2 ROWS], their columns in turns, so that K is read once for both.
    """
    ROWS: tl.constexpr = WALK.rows
    KEYS: tl.constexpr = WALK.keys
    BLOCK_D: tl.constexpr = padded(WALK.d)
    PRECISION: tl.constexpr = WALK.precision
    n = tl.arange(0, KEYS)[:, None]
    total = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    p_sum = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    dp_sum = tl.zeros([KEYS // 16, 8, ROWS], tl.float32)
    both = tl.zeros([BLOCK_D, 2 * ROWS], tl.float32)
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
        dp = p * (dp - shift[None, :])
        total += _add_pairs(dp)
        p, dp = p.to(queries.dtype), dp.to(queries.dtype)
        p_sum += _add_pairs(p.to(tl.float32))
        dp_sum += _add_pairs(dp.to(tl.float32))
        pair = tl.reshape(tl.join(p, dp), [KEYS, 2 * ROWS])
        both = tl.dot(tl.trans(keys), pair, both, input_precision=PRECISION)

    delta = _add_rest(total) + shift
    plain, weighted = tl.split(tl.reshape(both, [BLOCK_D, ROWS, 2]))
    p_rounded, dp_rounded = _add_rest(p_sum), _add_rest(dp_sum)
    rounded = dp_rounded / tl.where(p_rounded == 0.0, 1.0, p_rounded)
    return tl.trans(weighted - rounded[None, :] * plain), delta


@triton.jit
def _next_keys(
    k, v, ahead, blocks, members, i, count, sequence, kv_head, rows, select_block, k_strides,
    v_strides, WALK: tl.constexpr,
):  # fmt: skip
    """Of part number i of a union: (first key, keys in it, members, k [KEYS, *], v [KEYS, *], and
    what to call this with for the next)."""
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
    """The sums over all keys, [ROWS], of what `_add_pairs` left."""
    return tl.sum(tl.sum(x, 1), 0)
