"""The last launch of a decode step: selected blocks and window, then the gated sum (Eq. 5).

The last program of a token to finish sums the results of all.
"""

import triton
import triton.language as tl

from nsa.kernels.common import absorb, finish, padded
from nsa.kernels.decode_common import (
    PLAIN,
    home_of,
    load_queries,
    load_rows,
    page_rows,
    rounded_up,
    step_of,
    tiles_of,
    wait,
)


@triton.jit
def _look_up(
    at, blocks, x, stop,
    SELECT: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(rows, positions) of KEYS keys, starting at number x, -1 for a position that has no row; only
    of a block's first key, if no tile has keys of two blocks."""
    b, _, pages, home, size = at
    if blocks is not None and SELECT % KEYS == 0:
        s = tl.load(blocks + x // SELECT, mask=x < stop, other=-1) * SELECT
        valid = s >= 0  # and a page has whole blocks
    else:
        number = x + tl.arange(0, KEYS)
        valid = number < stop
        s = number
        if blocks is not None:
            s = tl.load(blocks + number // SELECT, mask=valid, other=-1) * SELECT + number % SELECT
            valid = s >= 0
    if RING:
        # No two keys of a window are at one place: none is a whole ring behind the first.
        place = x % size + tl.arange(0, KEYS)
        row, there = b.to(tl.int64) * size + tl.where(place >= size, place - size, place), valid
    else:
        row, there = page_rows(pages, home, s, valid, size, PER_PAGE)
    return row, tl.where(there, s, -1)


@triton.jit
def _rows_of(row, s, x, SELECT: tl.constexpr, KEYS: tl.constexpr):
    """(rows [KEYS], their positions, -1 for none) from the result of `_look_up`."""
    if len(s.shape) == 0:
        i = x % SELECT + tl.arange(0, KEYS)
        row += i
        s = tl.where(s >= 0, s + i, -1)
    return row, s


@triton.jit
def _attend_to(
    q_tile, k, v, at, blocks, t, first, stop, scale2,
    SIZES: tl.constexpr, SELECT: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention [M, padded DV], not yet divided, with its maximum [M] and partial sums [M, 8].

    Over keys number first .. stop - 1: of the keys in `blocks`, SELECT in each, or, if that is
    None, of the positions themselves. at: (b, head, pages, home, rows of one page or of the ring).
    """
    HKV: tl.constexpr = SIZES.HQ // SIZES.G
    head = at[1]
    m = tl.full([q_tile.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_tile.shape[0], 8], tl.float32)
    acc = tl.zeros([q_tile.shape[0], padded(SIZES.DV)], tl.float32)
    # A tile's rows are looked up one tile ahead: a load that waits for another is not pipelined.
    row, s = _look_up(at, blocks, first, stop, SELECT, PER_PAGE, RING, KEYS)
    for x in range(first, stop, KEYS):
        rows, position = _rows_of(row, s, x, SELECT, KEYS)
        there = (position >= 0) & (position <= t)
        row, s = _look_up(at, blocks, x + KEYS, stop, SELECT, PER_PAGE, RING, KEYS)
        keys = load_rows(k, rows, there, head, HKV, SIZES.D)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(there[None, :], scores, float("-inf"))
        p, m, total, rescale = absorb(scores, scale2, m, total)
        acc *= rescale[:, None]
        values = load_rows(v, rows, there, head, HKV, SIZES.DV)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, m, total


@triton.jit
def _selected(
    q_tile, caches, at, blocks, t, split, scale2,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, PER_PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SELECT: tl.constexpr = CONFIG.select_block
    keys = tl.minimum(t // SELECT + 1, CONFIG.select_count) * SELECT
    _, each, _ = tiles_of(keys, KEYS, SPLITS)
    first = split * each * KEYS
    return _attend_to(
        q_tile, caches[0], caches[1], at, blocks, t, first, tl.minimum(first + each * KEYS, keys),
        scale2, SIZES, SELECT, PER_PAGE, False, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def _window(
    q_tile, caches, at, t, split, scale2,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    low = tl.maximum(t + 1 - CONFIG.window, 0)
    _, each, _ = tiles_of(t + 1 - low, KEYS, SPLITS)
    first = low + split * each * KEYS
    return _attend_to(
        q_tile, caches[0], caches[1], at, None, t, first, tl.minimum(first + each * KEYS, t + 1),
        scale2, SIZES, CONFIG.select_block, PER_PAGE, RING, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def _part(
    q_tile, selected, window, pooled, ringed, blocks, t, part, scale2,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr,
    KEYS: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Part number `part` of a token: splits of the selected keys, then splits of the window."""
    if WINDOW == 0:
        acc, m, total = _selected(
            q_tile, selected, pooled, blocks, t, part, scale2,
            SIZES, CONFIG, PER_PAGE, KEYS, SELECTED, PRECISION,
        )  # fmt: skip
    elif SELECTED == 0:
        acc, m, total = _window(
            q_tile, window, ringed, t, part, scale2,
            SIZES, CONFIG, PER_PAGE, RING, KEYS, WINDOW, PRECISION,
        )  # fmt: skip
    elif part < SELECTED:
        acc, m, total = _selected(
            q_tile, selected, pooled, blocks, t, part, scale2,
            SIZES, CONFIG, PER_PAGE, KEYS, SELECTED, PRECISION,
        )  # fmt: skip
    else:
        acc, m, total = _window(
            q_tile, window, ringed, t, part - SELECTED, scale2,
            SIZES, CONFIG, PER_PAGE, RING, KEYS, WINDOW, PRECISION,
        )  # fmt: skip
    return acc, m, total


@triton.jit
def _gate(gates, strides, b, token, head, real, BRANCH: tl.constexpr):
    at = gates + b.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
    at += head * strides[2] + BRANCH * strides[3]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _with_compressed(o, o_cmp, row, gate, real, DV: tl.constexpr):
    if o_cmp is not None:
        d = tl.arange(0, padded(DV))[None, :]
        mask = real[:, None] & (d < DV)
        found = tl.load(o_cmp + row[:, None] * DV + d, mask=mask, other=0.0)
        o += found * gate[:, None]
    return o


@triton.jit
def _with_sink(total, top, sink2, heads, real, BRANCH: tl.constexpr, HQ: tl.constexpr):
    """Add the branch's sink in sink2 [3, HQ], if any, to sums [G] of 2^(score - top)."""
    if sink2 is not None:
        sink = tl.load(sink2 + BRANCH * HQ + heads, mask=real, other=float("-inf"))
        total += tl.exp2(sink - tl.where(top > float("-inf"), top, 0.0))
    return total


@triton.jit
def _share(parts, at, real, split, BEGIN: tl.constexpr, END: tl.constexpr, COUNT: tl.constexpr):
    """(maximum, sum) [G] over a branch's parts BEGIN .. END - 1 of COUNT; 0 and 1 without keys."""
    mask = real[:, None] & ((split >= BEGIN) & (split < END))[None, :]
    offset = at[:, None] * COUNT + split[None, :]
    m = tl.load(parts[0] + offset, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(parts[1] + offset, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(m, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(m - top[:, None]) * sums, 1)
    return top, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _sum_parts(
    parts, row, real, gate_slc, gate_win, sink2, heads,
    DV: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr, HQ: tl.constexpr,
):  # fmt: skip
    """The gated sum [M, padded DV] of both branches from all parts of a token."""
    COUNT: tl.constexpr = SELECTED + WINDOW
    split = tl.arange(0, rounded_up(COUNT))
    top_slc, sum_slc = _share(parts, row, real, split, 0, SELECTED, COUNT)
    inverse_slc = 1.0 / _with_sink(sum_slc, top_slc, sink2, heads, real, 1, HQ)
    top_win, sum_win = _share(parts, row, real, split, SELECTED, COUNT, COUNT)
    inverse_win = 1.0 / _with_sink(sum_win, top_win, sink2, heads, real, 2, HQ)
    d = tl.arange(0, padded(DV))[None, :]
    o = tl.zeros([row.shape[0], padded(DV)], tl.float32)
    for i in tl.range(0, COUNT, loop_unroll_factor=4):
        top = tl.where(i < SELECTED, top_slc, top_win)
        factor = tl.where(i < SELECTED, inverse_slc * gate_slc, inverse_win * gate_win)
        at = row * COUNT + i
        m = tl.load(parts[0] + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        mask = (m > float("-inf"))[:, None] & (d < DV)
        found = tl.load(parts[2] + at[:, None] * DV + d, mask=mask, other=0.0, cache_modifier=".cg")
        o += found * (tl.exp2(m - top) * factor)[:, None]
    return o


@triton.jit(do_not_specialize=PLAIN)
def attend(
    q, q_strides, gates, gate_strides, selected, window, table, columns, pool, page, ring, blocks,
    o_cmp, scored, sink2, parts, arrived, o, lengths, counts, n, capacity, scale2,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr,
    SCORED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: a split of the keys of one token of one KV head, or all of them if WHOLE.

    selected, window: (k, v) of the branch; SELECTED, WINDOW: its splits, 0 if it is not computed.
    RING: the window has its own tensors, of `ring` rows per sequence. parts: (maxima [rows,
    splits], sums [rows, splits], o [rows, splits, DV]). arrived [units]: 0. o [B, N, HQ, DV].
    sink2 [3, HQ]: sink logits of each branch in base 2, or None; for the compressed branch, which
    is already divided, scored has the maxima and sums of its SCORED splits.
    """
    HKV: tl.constexpr = SIZES.HQ // SIZES.G
    DV: tl.constexpr = SIZES.DV
    unit = tl.program_id(0)
    part = tl.program_id(1)
    token = unit % n
    b = unit // n // HKV
    head = unit // n % HKV
    g = tl.arange(0, GROUP)
    real = g < SIZES.G
    heads = head * SIZES.G + g
    row = unit.to(tl.int64) * SIZES.G + g
    d = tl.arange(0, padded(DV))[None, :]
    to = o + ((b.to(tl.int64) * n + token) * SIZES.HQ + heads)[:, None] * DV + d
    mask = real[:, None] & (d < DV)

    held, new = step_of(b, lengths, counts, n, capacity)
    t = held + token
    gate_cmp = _gate(gates, gate_strides, b, token, heads, real, 0)
    gate_slc = _gate(gates, gate_strides, b, token, heads, real, 1)
    gate_win = _gate(gates, gate_strides, b, token, heads, real, 2)
    q_tile = load_queries(q, q_strides, b, g * 0 + token, heads, real, SIZES.D)
    pages = table, columns, pool
    home = home_of(pages, b, PER_PAGE)
    wait(DEPENDENT)
    if token >= new:
        if part == 0:
            tl.store(to, tl.zeros([GROUP, padded(DV)], o.dtype.element_ty), mask=mask)
        return
    pooled = b, head, pages, home, page
    ringed = b, head, pages, home, page
    if RING:
        ringed = b, head, pages, home, ring
    if blocks is not None:
        blocks += unit.to(tl.int64) * CONFIG.select_count
    if sink2 is not None and o_cmp is not None:
        top, total = _share(scored, row, real, tl.arange(0, rounded_up(SCORED)), 0, SCORED, SCORED)
        gate_cmp *= total / _with_sink(total, top, sink2, heads, real, 0, SIZES.HQ)
    if WHOLE:
        out = tl.zeros([GROUP, padded(DV)], tl.float32)
        if SELECTED > 0:
            acc, m, total = _selected(
                q_tile, selected, pooled, blocks, t, 0, scale2,
                SIZES, CONFIG, PER_PAGE, KEYS, 1, PRECISION,
            )  # fmt: skip
            divisor, _ = finish(m, total)
            divisor = _with_sink(divisor, m, sink2, heads, real, 1, SIZES.HQ)
            out += acc * (gate_slc / divisor)[:, None]
        if WINDOW > 0:
            acc, m, total = _window(
                q_tile, window, ringed, t, 0, scale2,
                SIZES, CONFIG, PER_PAGE, RING, KEYS, 1, PRECISION,
            )  # fmt: skip
            divisor, _ = finish(m, total)
            divisor = _with_sink(divisor, m, sink2, heads, real, 2, SIZES.HQ)
            out += acc * (gate_win / divisor)[:, None]
        out = _with_compressed(out, o_cmp, row, gate_cmp, real, DV)
        tl.store(to, out.to(o.dtype.element_ty), mask=mask)
    else:
        COUNT: tl.constexpr = SELECTED + WINDOW
        acc, m, total = _part(
            q_tile, selected, window, pooled, ringed, blocks, t, part, scale2,
            SIZES, CONFIG, PER_PAGE, RING, KEYS, SELECTED, WINDOW, PRECISION,
        )  # fmt: skip
        at = row * COUNT + part
        tl.store(parts[0] + at, m, mask=real)
        tl.store(parts[1] + at, tl.sum(total, 1), mask=real)
        found = mask & (m > float("-inf"))[:, None]
        tl.store(parts[2] + at[:, None] * DV + d, acc, mask=found)
        tl.debug_barrier()  # all of a program's stores come before its arrival
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == COUNT - 1:
            out = _sum_parts(
                parts, row, real, gate_slc, gate_win, sink2, heads, DV, SELECTED, WINDOW, SIZES.HQ
            )
            out = _with_compressed(out, o_cmp, row, gate_cmp, real, DV)
            tl.store(to, out.to(o.dtype.element_ty), mask=mask)
