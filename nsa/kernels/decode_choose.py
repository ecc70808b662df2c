"""The third launch of a decode step: the top n of importance; what the score's splits found, summed."""

import triton
import triton.language as tl

from nsa.kernels.common import padded
from nsa.kernels.decode_common import begin, rounded_up, step_of, tiles_of
from nsa.kernels.span_common import seen_end
from nsa.kernels.topk import ILLEGAL, NONE, candidates, indices, merge


@triton.jit
def _importance(
    ranking, row, real, lse2, first, tiles, tiles_most,
    BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Importance of TILES * BLOCKS blocks from tile `first` on, summed over rows [G]: [1, *]."""
    tile = first + tl.arange(0, TILES)
    there = real[:, None] & (tile < tiles)[None, :]
    at = row[:, None] * tiles_most + tile[None, :]
    shift = lse2[:, None]
    factor = tl.exp2(tl.load(ranking[2] + at, mask=there, other=float("-inf")) - shift)
    j = tl.arange(0, BLOCKS)[None, None, :]
    sums = tl.load(ranking[0] + at[:, :, None] * BLOCKS + j, mask=there[:, :, None], other=0.0)
    own = tl.sum(sums * factor[:, :, None], 0)  # [TILES, BLOCKS]
    before = real[:, None] & ((tile >= 1) & (tile <= tiles))[None, :]
    factor = tl.exp2(tl.load(ranking[2] + at - 1, mask=before, other=float("-inf")) - shift)
    past = tl.sum(tl.load(ranking[1] + at - 1, mask=before, other=0.0) * factor, 0)
    own += tl.where(tl.arange(0, BLOCKS)[None, :] == 0, past[:, None], 0.0)
    return tl.reshape(own, [1, TILES * BLOCKS])


@triton.jit
def _rank(
    unit, ranking, parts, blocks, lengths, counts, n, capacity, tiles_most,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The blocks of one token of one KV head (Eq. 10-11), ascending, -1 last."""
    COUNT: tl.constexpr = CONFIG.select_count
    SELECT: tl.constexpr = CONFIG.select_block
    STEP: tl.constexpr = TILES * BLOCKS
    HKV: tl.constexpr = SIZES.HQ // SIZES.G
    token = unit % n
    held, new = step_of(unit // n // HKV, lengths, counts, n, capacity)
    own = (held + token) // SELECT + tl.zeros([1], tl.int32)
    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.where(slot <= own[:, None], slot, NONE)
    if (token < new) & ((held + token) // SELECT >= COUNT):
        g = tl.arange(0, GROUP)
        real = g < SIZES.G
        row = unit.to(tl.int64) * SIZES.G + g
        seen = seen_end(held + new - 1, SPAN)
        tiles, _, used = tiles_of(seen, BLOCKS * (SELECT // CONFIG.compress_stride), SPLITS)
        split = tl.arange(0, rounded_up(SPLITS))[None, :]
        mask = real[:, None] & (split < used)
        at = row[:, None] * SPLITS + split
        m = tl.load(parts[0] + at, mask=mask, other=float("-inf"))
        sums = tl.load(parts[1] + at, mask=mask, other=0.0)
        top = tl.max(m, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(m - top[:, None]) * sums, 1)
        lse2 = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        best = tl.full([1, SLOTS], ILLEGAL, tl.int64)
        for first in range(0, (held + token) // SELECT + 1, STEP):
            importance = _importance(
                ranking, row, real, lse2, first // BLOCKS, tiles, tiles_most, BLOCKS, TILES
            )
            found = candidates(importance, first, own, 2**31 - 1, True, CONFIG)
            best = merge(best, found, SLOTS)
        chosen = tl.where(slot >= SLOTS - COUNT, indices(best, 2**31 - 1), NONE)
        chosen = tl.sort(chosen)
    chosen = tl.where(chosen == NONE, -1, chosen)
    tl.store(blocks + unit.to(tl.int64) * COUNT + slot, chosen, mask=slot < COUNT)


@triton.jit
def _sum_splits(
    group, parts, o_cmp, rows, lengths, counts, n, capacity,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compressed attention of ROWS rows from that of their splits."""
    TILE: tl.constexpr = BLOCKS * (CONFIG.select_block // CONFIG.compress_stride)
    row = group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    b = tl.where(valid, row, 0) // (n * SIZES.HQ)
    held, new = step_of(b, lengths, counts, n, capacity)
    _, _, used = tiles_of(seen_end(held + new - 1, SPAN), TILE, SPLITS)
    split = tl.arange(0, rounded_up(SPLITS))[None, :]
    mask = valid[:, None] & (split < used[:, None])
    at = row[:, None] * SPLITS + split
    m = tl.load(parts[0] + at, mask=mask, other=float("-inf"))
    sums = tl.load(parts[1] + at, mask=mask, other=0.0)
    top = tl.max(m, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(m - top[:, None])
    total = tl.sum(weight * sums, 1)
    total = tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, padded(SIZES.DV))
    inside = mask[:, :, None] & (d < SIZES.DV)[None, None, :]
    o = tl.load(parts[2] + at[:, :, None] * SIZES.DV + d[None, None, :], mask=inside, other=0.0)
    o = tl.sum(o * weight[:, :, None], 1) / total[:, None]
    to = o_cmp + row[:, None] * SIZES.DV + d[None, :]
    tl.store(to, o, mask=valid[:, None] & (d < SIZES.DV)[None, :])


@triton.jit
def choose(
    ranking, parts, blocks, o_cmp, units, rows, lengths, counts, n, capacity, tiles_most,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: the selection of one token of one KV head, or the sums of ROWS rows.

    units: how many programs select: B HKV N, or 0. ranking, parts and tiles_most: as `score`
    writes them, and BLOCKS and SPLITS as there.
    """
    begin(DEPENDENT)
    program = tl.program_id(0)
    if blocks is not None and program < units:
        _rank(
            program, ranking, parts, blocks, lengths, counts, n, capacity, tiles_most,
            SIZES, CONFIG, SPAN, BLOCKS, TILES, SPLITS, SLOTS, GROUP,
        )  # fmt: skip
    if o_cmp is not None and program >= units:
        _sum_splits(
            program - units, parts, o_cmp, rows, lengths, counts, n, capacity,
            SIZES, CONFIG, SPAN, BLOCKS, SPLITS, ROWS,
        )  # fmt: skip
