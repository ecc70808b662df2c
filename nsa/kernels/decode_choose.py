"""The third launch of a decode step: the top n of importance; the sum over the score's splits."""

import triton
import triton.language as tl

from nsa.kernels.common import padded
from nsa.kernels.decode_common import release, rounded_up, step_of, tiles_of, wait
from nsa.kernels.ranking import ILLEGAL, NONE, candidates, indices
from nsa.kernels.span_common import seen_end


@triton.jit
def _importance(
    ranking, row, first, tiles, tiles_most,
    G: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Importance of TILES * BLOCKS blocks, starting at tile `first`, summed over G rows: [1, *].

    Head by head: a sum over an axis of heads would spread the blocks over lanes that are not
    neighbours, and then Triton 3.6 computes the maximum over some of those lanes only.
    """
    tile = first + tl.arange(0, TILES)
    j = tl.arange(0, BLOCKS)[None, :]
    there, before = tile < tiles, (tile >= 1) & (tile <= tiles)
    own = tl.zeros([TILES, BLOCKS], tl.float32)
    past = tl.zeros([TILES], tl.float32)
    for g in tl.range(0, G, loop_unroll_factor=min(G, 16)):
        at = (row + g) * tiles_most + tile
        shift = tl.load(ranking[3] + row + g)
        factor = tl.exp2(tl.load(ranking[2] + at, mask=there, other=float("-inf")) - shift)
        sums = tl.load(ranking[0] + at[:, None] * BLOCKS + j, mask=there[:, None], other=0.0)
        own += sums * factor[:, None]
        factor = tl.exp2(tl.load(ranking[2] + at - 1, mask=before, other=float("-inf")) - shift)
        past += tl.load(ranking[1] + at - 1, mask=before, other=0.0) * factor
    own += tl.where(j == 0, past[:, None], 0.0)
    return tl.reshape(own, [1, TILES * BLOCKS])


@triton.jit
def _rank(
    unit, ranking, parts, blocks, lengths, counts, n, capacity, tiles_most,
    SIZES: tl.constexpr, CONFIG: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Selected blocks of one token of one KV head (Eq. 10-11), ascending, -1 last."""
    COUNT: tl.constexpr = CONFIG.select_count
    LOCAL: tl.constexpr = CONFIG.select_local
    FORCED_KEY: tl.constexpr = ((2**31 - 1) << 32) + 2**31 - 1
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
        row = unit.to(tl.int64) * SIZES.G
        seen = seen_end(held + new - 1, SPAN)
        tiles, _, used = tiles_of(seen, BLOCKS * (SELECT // CONFIG.compress_stride), SPLITS)
        split = tl.arange(0, rounded_up(SPLITS))[None, :]
        mask = real[:, None] & (split < used)
        at = (row + g)[:, None] * SPLITS + split
        m = tl.load(parts[0] + at, mask=mask, other=float("-inf"))
        sums = tl.load(parts[1] + at, mask=mask, other=0.0)
        top = tl.max(m, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(m - top[:, None]) * sums, 1)
        lse2 = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(ranking[3] + row + g, lse2, mask=real)
        tl.debug_barrier()  # every thread reads every head's
        # The last blocks are forced: they take the highest slots, and are not ranked.
        last = own[:, None] - slot + (SLOTS - LOCAL)
        best = tl.where(slot >= SLOTS - LOCAL, FORCED_KEY - last.to(tl.int64), ILLEGAL)
        ranked = (held + token) // SELECT + 1 - LOCAL
        for first in range(0, ranked, STEP):
            importance = _importance(
                ranking, row, first // BLOCKS, tiles, tiles_most, SIZES.G, BLOCKS, TILES
            )
            j = (first + tl.arange(0, STEP))[None, :]
            found = candidates(importance, j, own, 2**31 - 1, True, CONFIG)
            found = tl.where(j < ranked, found, ILLEGAL)
            # One ascends and the other descends: the larger of each pair are the largest of all.
            best = tl.bitonic_merge(tl.maximum(best, tl.topk(found, SLOTS)))
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
    """Compressed attention of ROWS rows, merged from their splits."""
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

    units: number of programs that select: B HKV N, or 0. ranking, parts and tiles_most: as `score`
    writes them, and BLOCKS and SPLITS as there; ranking has one more, [rows], for the rows'
    divisors. TILES * BLOCKS importances are ranked at a time, at least SLOTS.
    """
    wait(DEPENDENT)
    release(DEPENDENT)
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
