"""Kernels of the span branches' backward; `span_bwd` launches them.

With P = softmax(scale * q k), gp = g * P and dP = <do, v>: delta = sum_s P dP, which is also the
gate's gradient, dS = gp (dP - delta), dq = scale * dS k, dk = scale * dS^T q and dv = gp^T do.
"""

import triton
import triton.language as tl

from nsa.kernels.common import add_rows, extent, locate, padded, partial_sums, position_of
from nsa.kernels.span_common import (
    at,
    key_part,
    load_gate,
    load_line,
    load_tile,
    query_tile,
    seen_by,
    seen_end,
    sees,
    store_rows,
)


@triton.jit
def dq_kernel(
    q, k, v, v_rows, do, lse2, delta, kept, gates, dgates, dq, strides,
    tokens, keys, tiles, total, scale, scale2,
    SIZES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, BRANCH: tl.constexpr,
    MAKE_DELTA: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dq of TILE.rows neighbouring tokens of one query head.

    MAKE_DELTA: delta is known only after the last key, so dq = sum gp dP k - delta sum gp k. Here
    delta uses the rounded factors of the two products, so that a key with nearly all the weight
    cancels correctly. An offset common to all values cancels too, so for 16-bit inputs dP of the
    newest value that a row sees is subtracted from dP. v_rows is v if v is a descriptor. kept: sum
    of a row's probabilities; None: 1.
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    D: tl.constexpr = SIZES.D
    DV: tl.constexpr = SIZES.DV
    q_strides, k_strides, v_strides, do_strides, gate_strides, dgate_strides, dq_strides = strides
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
    statistics = head.to(tl.int64) * total + start + t
    q_tile = load_tile(q, q_strides, token_place, first, head, D, BLOCK_M)
    do_tile = load_tile(do, do_strides, token_place, first, head, DV, BLOCK_M)
    lse2_rows = tl.load(lse2 + statistics, mask=t < rows, other=float("-inf"))
    lse2_rows = tl.where(lse2_rows == float("-inf"), float("inf"), lse2_rows)
    if gates is not None:
        gate = load_gate(gates, gate_strides, start + first, head, left, BRANCH, BLOCK_M)
    acc = tl.zeros([BLOCK_M, padded(D)], tl.float32)
    if MAKE_DELTA:
        shift = tl.zeros([BLOCK_M], tl.float32)
        if q_tile.dtype != tl.float32:
            newest = seen_end(position, SPAN) - 1
            at_newest = at(v_rows, v_strides, key_place[1], kv_head)
            row = newest.to(tl.int64)[:, None] * v_strides[0]
            d = tl.arange(0, padded(DV))
            at_newest += row + d[None, :]
            sees_any = (lse2_rows < float("inf"))[:, None] & (d < DV)[None, :]
            v_newest = tl.load(at_newest, mask=sees_any, other=0.0)
            shift = tl.sum(do_tile.to(tl.float32) * v_newest.to(tl.float32), 1)
        delta_sums = tl.zeros([BLOCK_M, 8], tl.float32)
        # Without descriptors, addresses take the registers of the sixteen columns.
        described: tl.constexpr = isinstance(k, tl.tensor_descriptor)
        columns: tl.constexpr = 16 if described and BLOCK_M >= 64 else 8
        ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(q_tile.dtype)
        delta_rounded = tl.zeros([BLOCK_M, columns], tl.float32)
        sum_rounded = tl.zeros([BLOCK_M, columns], tl.float32)
        acc_plain = tl.zeros([BLOCK_M, padded(D)], tl.float32)  # sum P k
    else:
        delta_rows = tl.load(delta + statistics, mask=t < rows, other=0.0)

    for n in range(seen[0], seen[1], BLOCK_N):
        k_tile = load_tile(k, k_strides, key_place, n, kv_head, D, BLOCK_N)
        v_tile = load_tile(v, v_strides, key_place, n, kv_head, DV, BLOCK_N)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        # A branch between the products would keep the compiler from mixing them with the rest.
        if (n < whole[0]) | (n + BLOCK_N > whole[1]):
            visible = sees(position[:, None], n + tl.arange(0, BLOCK_N)[None, :], SPAN)
            s = tl.where(visible, s, float("-inf"))
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        p = tl.exp2(s * scale2 - lse2_rows[:, None])
        if MAKE_DELTA:
            ds = p * (dp - shift[:, None])
            delta_sums += partial_sums(ds)
            p = p.to(k_tile.dtype)
            sum_rounded = add_rows(p, ones, sum_rounded, PRECISION)
            acc_plain = tl.dot(p, k_tile, acc_plain, input_precision=PRECISION)
        else:
            ds = p * (dp - delta_rows[:, None])
        ds = ds.to(k_tile.dtype)
        if MAKE_DELTA:
            delta_rounded = add_rows(ds, ones, delta_rounded, PRECISION)
        acc = tl.dot(ds, k_tile, acc, input_precision=PRECISION)

    if MAKE_DELTA:
        p_rounded = tl.sum(sum_rounded, 1)  # as often as columns
        rounded = tl.sum(delta_rounded, 1) / tl.where(p_rounded == 0, 1.0, p_rounded)
        if kept is not None:
            share = tl.load(kept + statistics, mask=t < rows, other=0.0)
            rounded = rounded * share - shift * (1.0 - share)
            shift *= share
        acc -= rounded[:, None] * acc_plain
        delta_rows = tl.sum(delta_sums, 1) + shift  # probabilities add up to 1, or to their share
        tl.store(delta + statistics, delta_rows, mask=t < rows)
        if dgates is not None:
            dgates_at = at(dgates, dgate_strides, start + first, head) + BRANCH * dgate_strides[2]
            dgates_at += tl.arange(0, BLOCK_M) * dgate_strides[0]
            tl.store(dgates_at, delta_rows.to(dgates.dtype.element_ty), mask=t < rows)
    acc *= scale
    if gates is not None:
        acc *= gate[:, None]
    store_rows(at(dq, dq_strides, start + first, head), dq_strides[0], left, acc, D, ADD)


@triton.jit
def dkdv_kernel(
    q, k, v, do, lse2, delta, gate, dk, dv, strides, tokens, keys, total, scale, scale2,
    SIZES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr,
    SPLITS: tl.constexpr, TOGETHER: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of TILE.keys keys, from one of SPLITS shares of the tokens that see
    them and EACH query heads of the group that shares them.

    tokens: (bounds, length, starts); keys: (table, bounds, length). Scores are transposed,
    [keys, tokens], so that P^T and dS^T go from the registers of one product into the next. dk and
    dv have an axis of parts, G / EACH * SPLITS of them, last in their strides. TOGETHER programs of
    a tile are
    followed by as many of the next tile, and so on, so that tokens are reread from the cache;
    early tiles, which the most tokens see, start first. lse2, delta and gate are
    [HQ, tokens].
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    D: tl.constexpr = SIZES.D
    DV: tl.constexpr = SIZES.DV
    G: tl.constexpr = SIZES.G
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides = strides
    tile, part = key_part(SIZES.HQ, EACH, SPLITS, TOGETHER)
    first_head = part // SPLITS * EACH
    kv_head = first_head // G
    sequence, start, rows, first = locate(tile, keys[0], keys[1], keys[2], BLOCK_N, PACKED)
    if first >= rows:
        return
    token_start, token_rows = extent(sequence, tokens[0], tokens[1], PACKED)
    token_place, key_place = (sequence, token_start, token_rows), (sequence, start, rows)
    left = rows - first
    position = position_of(sequence, tokens[2])
    begin, end, whole_begin, whole_end = seen_by(first, BLOCK_N, rows, position + token_rows, SPAN)
    if tokens[2] is not None:  # from positions to rows
        begin = tl.maximum(begin - position, 0)
        end -= position
        whole_begin -= position
        whole_end -= position
    if isinstance(lse2, tl.tensor_descriptor):
        begin = begin // 4 * 4  # by TMA, a line starts at a multiple of 16 bytes
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)

    s_keys = first + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_M)
    k_tile = load_tile(k, k_strides, key_place, first, kv_head, D, BLOCK_N)
    v_tile = load_tile(v, v_strides, key_place, first, kv_head, DV, BLOCK_N)
    dk_acc = tl.zeros([BLOCK_N, padded(D)], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, padded(DV)], tl.float32)
    share = tl.cdiv(tiles * EACH, SPLITS)
    step_begin = part % SPLITS * share
    for step in range(step_begin, tl.minimum(step_begin + share, tiles * EACH)):
        head = first_head
        row = begin + step * BLOCK_M
        if EACH > 1:
            head += step // tiles
            row = begin + step % tiles * BLOCK_M
        behind = token_rows - row
        q_tile = load_tile(q, q_strides, token_place, row, head, D, BLOCK_M)
        do_tile = load_tile(do, do_strides, token_place, row, head, DV, BLOCK_M)
        lse2_rows = load_line(lse2, total, token_place, row, head, BLOCK_M)
        delta_rows = load_line(delta, total, token_place, row, head, BLOCK_M)
        if gate is not None:
            gate_rows = load_line(gate, total, token_place, row, head, BLOCK_M)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [N, M]
        # A branch between the products would keep the compiler from mixing them with the rest.
        if (row < whole_begin) | (row + BLOCK_M > whole_end):
            seen = sees((position + row + i)[None, :], s_keys[:, None], SPAN)
            s = tl.where(seen & (i < behind)[None, :], s, float("-inf"))
            # Rows that see no key have lse2 = -inf, and -inf - -inf is NaN.
            lse2_rows = tl.where(lse2_rows == float("-inf"), 0.0, lse2_rows)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)  # [N, M]
        p = tl.exp2(s * scale2 - lse2_rows[None, :])
        if gate is not None:
            p *= gate_rows[None, :]
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
        ds = p * (dp - delta_rows[None, :])
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)

    part = (part % (G // EACH * SPLITS)).to(tl.int64)  # of this KV head
    dk_at = at(dk, dk_strides, start + first, kv_head) + part * dk_strides[2]
    dv_at = at(dv, dv_strides, start + first, kv_head) + part * dv_strides[2]
    store_rows(dk_at, dk_strides[0], left, dk_acc * scale, D)
    store_rows(dv_at, dv_strides[0], left, dv_acc, DV)


@triton.jit
def sum_parts(
    dk_parts, dv_parts, dk, dv, bounds, sequences, dk_row, dv_row, dk_size, dv_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK elements of dk (axis 1: 0) or of dv (1) summed over the parts in order."""
    if tl.program_id(1) == 0:
        _sum_block(dk_parts, dk, bounds, sequences, dk_row, dk_size, PARTS, BLOCK)
    else:
        _sum_block(dv_parts, dv, bounds, sequences, dv_row, dv_size, PARTS, BLOCK)


@triton.jit
def _sum_block(parts, out, bounds, sequences, row, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at_element < size
    written = mask
    if bounds is not None:  # rows past the last sequence's end are unused and 0
        written = at_element < tl.load(bounds + sequences).to(tl.int64) * row
    acc = tl.zeros([BLOCK], tl.float32)
    source = at_element
    for _ in range(PARTS):
        acc += tl.load(parts + source, mask=written, other=0.0)
        source += size
    tl.store(out + at_element, acc.to(out.dtype.element_ty), mask=mask)
