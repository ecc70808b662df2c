"""Forward of the compressed and the window branch: a query sees a contiguous range of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.blocks import Span
from nsa.kernels.common import (
    LOG2E,
    Sizes,
    absorb,
    axis_arguments,
    finish,
    fixed_point,
    in_units,
    padded,
    partial_sums,
    precision,
    sunk,
    truncated,
)
from nsa.kernels.hopper import launches as hopper
from nsa.kernels.launch import launch
from nsa.kernels.sequences import Axis
from nsa.kernels.span_common import (
    at,
    default_tile,
    descriptors_fit,
    felt,
    load_gate,
    load_rows,
    load_tile,
    operand,
    query_tile,
    sees,
    store_rows,
)
from nsa.kernels.tiles import Tile


@triton.jit
def _span_forward(
    q, k, v, o, o_unit, lse2, gates, base, base_unit, sink2, strides, tokens, keys, tiles, total,
    scale2,
    SIZES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, BRANCH: tl.constexpr,
    BASE_BRANCH: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: TILE.rows neighbouring tokens of one query head, over every key that they see.

    tokens, keys: as in `query_tile`. v None: lse2 alone.
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    q_strides, k_strides, v_strides, o_strides, gate_strides, base_strides = strides
    head, token_place, key_place, first, seen, whole = query_tile(
        tl.program_id(0), tokens, keys, tiles, SIZES.HQ, SPAN, BLOCK_M, PACKED
    )
    start, rows = token_place[1], token_place[2]
    if first >= rows:
        return
    kv_head = head // SIZES.G
    left = rows - first

    t = first + tl.arange(0, BLOCK_M)
    position = token_place[3] + t
    q_tile = load_tile(q, q_strides, token_place, first, head, SIZES.D, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, 8], tl.float32)
    if v is not None:
        acc = tl.zeros([BLOCK_M, padded(SIZES.DV)], tl.float32)
        kept = tl.zeros([BLOCK_M, 8], tl.float32)  # sums of p as values are weighed by it
    for n in range(seen[0], seen[1], BLOCK_N):
        k_tile = load_tile(k, k_strides, key_place, n, kv_head, SIZES.D, BLOCK_N)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        if (n < whole[0]) | (n + BLOCK_N > whole[1]):
            visible = sees(position[:, None], n + tl.arange(0, BLOCK_N)[None, :], SPAN)
            s = tl.where(visible, s, float("-inf"))
        p, m, sums, rescale = absorb(s, scale2, m, sums)
        if v is not None:
            acc = acc * rescale[:, None]
            v_tile = load_tile(v, v_strides, key_place, n, kv_head, SIZES.DV, BLOCK_N)
            if v_tile.dtype != tl.float32:
                p = truncated(p, v_tile.dtype)
                kept = kept * rescale[:, None] + partial_sums(p)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    divisor, lse2_rows = finish(m, sums)
    statistics = head.to(tl.int64) * total + start + t
    tl.store(lse2 + statistics, lse2_rows, mask=t < rows)
    if v is not None:
        if q_tile.dtype != tl.float32:
            divisor, _ = finish(m, kept)
        if sink2 is not None:
            divisor = sunk(divisor, lse2_rows, tl.load(sink2 + head))
        acc = acc / divisor[:, None]
        if gates is not None:
            gate = load_gate(gates, gate_strides, start + first, head, left, BRANCH, BLOCK_M)
            acc *= gate[:, None]
            if base is not None:
                other = at(base, base_strides, start + first, head)
                other = load_rows(other, base_strides[0], left, BLOCK_M, SIZES.DV)
                if base_unit is None:
                    other = other.to(tl.float32)
                else:
                    unit = tl.load(base_unit + statistics, mask=t < rows, other=0.0)
                    other = in_units(other) * unit[:, None]
                if BASE_BRANCH is not None:
                    gate = load_gate(
                        gates, gate_strides, start + first, head, left, BASE_BRANCH, BLOCK_M
                    )
                    other *= gate[:, None]
                acc += other
        if o_unit is not None:
            acc, unit = fixed_point(acc)
            tl.store(o_unit + statistics, unit, mask=t < rows)
        store_rows(at(o, o_strides, start + first, head), o_strides[0], left, acc, SIZES.DV)


def span_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    *,
    gates: Tensor | None = None,
    branch: int = 2,
    base: Tensor | None = None,
    base_branch: int | None = None,
    base_unit: Tensor | None = None,
    out: Tensor | None = None,
    out_unit: Tensor | None = None,
    lse2: Tensor | None = None,
    sink2: Tensor | None = None,
    tile: Tile | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(o [tokens, HQ, DV] in q's dtype, lse2 [HQ, tokens] fp32) over each query's range of keys.

    q [tokens, HQ, D]; k [keys, HKV, D], v [keys, HKV, DV], on an axis of tokens or on that of
    compressed keys. scale must be positive. A query that sees no key has o = 0 and lse2 = -inf.
    v None: no values are summed, and o is None.

    With gates [tokens, HQ, 3], o = gates[..., branch] * attention + base, or with base_branch
    + gates[..., base_branch] * base; base [tokens, HQ, DV], mixed in fp32. `out` receives o if
    given, `lse2` receives lse2; `out` may be `base`. An `out` or a base of int16 is in the units of
    out_unit or base_unit [HQ, tokens] fp32, see `common.fixed_point`. sink2 [HQ] fp32: a logit in
    base 2 added to each softmax; lse2 excludes it. tile: default_tile's if None.
    descriptors: fetch the tiles by TMA; None: if possible. specialized: see
    `hopper.launches.tile_for`.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale}: the softmax takes a positive scale; negate q instead")
    total, heads, dim = q.shape
    value_dim = dim if v is None else v.shape[2]
    o = out
    if v is not None and out is None:
        o = torch.empty(total, heads, value_dim, dtype=q.dtype, device=q.device)
    if lse2 is None:
        lse2 = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    along = span, tokens, keys
    by_warps = None if v is None else hopper.tile_for("forward", specialized, *along, (q, k, v))
    if by_warps:
        mix = gates, branch, None if gates is None else base, base_branch, base_unit, sink2
        hopper.launch_forward((q, k, v), (o, out_unit, lse2), mix, *along, scale, tile or by_warps)
        return o, lse2
    if descriptors is None:
        descriptors = descriptors_fit(tokens, keys, *(x for x in (q, k, v) if x is not None))
    tile = tile or default_tile("forward", value_dim, span, q, descriptors)
    place, count = axis_arguments(tokens, tile.rows)
    if count:
        launch(
            _span_forward, (count * heads,),
            operand(q, tokens, tile.rows, descriptors), operand(k, keys, tile.keys, descriptors),
            None if v is None else operand(v, keys, tile.keys, descriptors), o, out_unit, lse2,
            gates, base if gates is not None else None, base_unit, sink2,
            tuple(None if x is None else x.stride() for x in (q, k, v, o, gates, base)),
            place, (keys.bounds, keys.length), count, total, scale * LOG2E,
            Sizes(heads, heads // k.shape[1], dim, value_dim), felt(span, keys), tile,
            BRANCH=branch, BASE_BRANCH=base_branch, PACKED=tokens.packed, PRECISION=precision(q),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return o, lse2
