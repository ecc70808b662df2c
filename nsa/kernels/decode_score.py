"""The second launch of a decode step: compressed attention and importance, one pass over keys.

Keys are divided into tiles, tiles into splits. A tile's probabilities are not yet divided by the
sum over all keys: their sums over blocks are stored with the maximum that they are relative to.
"""

import triton
import triton.language as tl

from nsa.kernels.common import absorb, finish, padded
from nsa.kernels.decode_common import (
    PLAIN,
    home_of,
    load_queries,
    load_rows,
    page_of,
    release,
    rows_on,
    step_of,
    tiles_of,
    wait,
)
from nsa.kernels.span_common import seen_end
from nsa.kernels.topk import band, pool


@triton.jit
def pool_tile(p, BLOCKS: tl.constexpr, PER_COMPRESSED: tl.constexpr, PER_SELECTABLE: tl.constexpr):
    """Eq. 9 within a tile of BLOCKS blocks: (sums [M, >= BLOCKS], part reaching past it [M])."""
    if p.shape[1] == BLOCKS * PER_SELECTABLE:
        nothing = tl.zeros([p.shape[0]], tl.float32)
        sums, past = pool(p, nothing, PER_COMPRESSED, PER_SELECTABLE)
    else:
        key = tl.arange(0, p.shape[1])
        shared = band(key, tl.arange(0, padded(BLOCKS)), PER_COMPRESSED, PER_SELECTABLE)
        sums = tl.dot(p, shared, input_precision="ieee")
        reach = tl.maximum(key + PER_COMPRESSED - BLOCKS * PER_SELECTABLE, 0).to(tl.float32)
        past = tl.sum(p * reach[None, :], 1)
    return sums, past


@triton.jit(do_not_specialize=PLAIN)
def score(
    q, q_strides, k_cmp, v_cmp, table, columns, pool, size, lengths, counts, n, capacity, scale2,
    ranking, parts, o_cmp, tiles_most,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, SPAN: tl.constexpr, PER_PAGE: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: M rows, of [N, G], of a KV head of a sequence, over one split of their keys.

    A tile has KEYS keys at most, those of BLOCKS selectable blocks. ranking: None, or inputs of
    `choose`: (sums [rows, tiles_most * BLOCKS], past [rows, tiles_most], maxima [rows,
    tiles_most]). parts: (maxima [rows, SPLITS], sums [rows, SPLITS], o [rows, SPLITS, DV], used
    if there are splits). o_cmp [rows, DV] fp32, if there are none. v_cmp None: no attention.
    """
    HKV: tl.constexpr = SIZES.HQ // SIZES.G
    PER_SELECTABLE: tl.constexpr = CONFIG.select_block // CONFIG.compress_stride
    PER_COMPRESSED: tl.constexpr = CONFIG.compress_block // CONFIG.compress_stride
    TILE: tl.constexpr = BLOCKS * PER_SELECTABLE
    row_tiles = tl.cdiv(n * SIZES.G, M)
    unit = tl.program_id(0) // row_tiles
    b = unit // HKV
    head = unit % HKV
    split = tl.program_id(1)
    r = (tl.program_id(0) % row_tiles) * M + tl.arange(0, M)
    token = r // SIZES.G
    valid = r < n * SIZES.G
    row = unit.to(tl.int64) * n * SIZES.G + r
    pages = table, columns, pool
    held, new = step_of(b, lengths, counts, n, capacity)
    end = tl.where(token < new, seen_end(held + token, SPAN), 0)
    seen = seen_end(held + new - 1, SPAN)
    tiles, each, _ = tiles_of(seen, TILE, SPLITS)
    ranks = valid & ((held + new - 1) // CONFIG.select_block >= CONFIG.select_count)
    home = home_of(pages, b, PER_PAGE)
    q_tile = load_queries(
        q, q_strides, b, token, head * SIZES.G + r % SIZES.G, valid & (token < new), SIZES.D
    )
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M, 8], tl.float32)
    acc = tl.zeros([M, padded(SIZES.DV)], tl.float32)
    place = tl.arange(0, KEYS)
    key = split * each * TILE + place
    # A tile's pages are looked up one tile ahead: a load that waits for another is not pipelined.
    page = page_of(pages, home, key, (place < TILE) & (key < seen), PER_PAGE)
    wait(DEPENDENT)
    release(DEPENDENT)
    for i in range(split * each, tl.minimum((split + 1) * each, tiles)):
        key = i * TILE + place
        at, there = rows_on(pages, page, key, (place < TILE) & (key < seen), size, PER_PAGE)
        inside = (place < TILE) & (key + TILE < seen)
        page = page_of(pages, home, key + TILE, inside, PER_PAGE)
        k_tile = load_rows(k_cmp, at, there, head, HKV, SIZES.D)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, KEYS]
        mine = (place < TILE)[None, :] & (key[None, :] < end[:, None])
        s = tl.where(mine, s, float("-inf"))
        p, m, total, rescale = absorb(s, scale2, m, total)
        if ranking is not None:
            sums, past = pool_tile(p, BLOCKS, PER_COMPRESSED, PER_SELECTABLE)
            j = tl.arange(0, sums.shape[1])[None, :]
            to = ranking[0] + row[:, None] * (tiles_most * BLOCKS) + i * BLOCKS + j
            tl.store(to, sums, mask=ranks[:, None] & (j < BLOCKS))
            tl.store(ranking[1] + row * tiles_most + i, past, mask=ranks)
            tl.store(ranking[2] + row * tiles_most + i, m, mask=ranks)
        if v_cmp is not None:
            acc *= rescale[:, None]
            v_tile = load_rows(v_cmp, at, there, head, HKV, SIZES.DV)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    tl.store(parts[0] + row * SPLITS + split, m, mask=valid)
    tl.store(parts[1] + row * SPLITS + split, tl.sum(total, 1), mask=valid)
    if v_cmp is not None:
        d = tl.arange(0, padded(SIZES.DV))[None, :]
        mask = valid[:, None] & (d < SIZES.DV)
        if SPLITS == 1:
            divisor, _ = finish(m, total)
            tl.store(o_cmp + row[:, None] * SIZES.DV + d, acc / divisor[:, None], mask=mask)
        elif split * each < tiles:
            to = parts[2] + (row * SPLITS + split)[:, None] * SIZES.DV + d
            tl.store(to, acc, mask=mask)
