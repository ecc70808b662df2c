"""Importance of blocks as sortable integers, and the best of them: the steps of the selection.

A candidate is one integer, (importance, index): a lower index wins a tie, and one word moves.
"""

import triton
import triton.language as tl

ILLEGAL = tl.constexpr(-(2**31) + 1)  # below every candidate
FORCED = tl.constexpr(2**31 - 1)  # above the bits of every float
NONE = tl.constexpr(2**31 - 1)  # sorts behind every index


@triton.jit
def pool(
    p, left_over, PER_COMPRESSED: tl.constexpr, PER_SELECTABLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Eq. 9 where a tile of keys is a whole number of blocks: (importance [M, BLOCKS], left_over).

    A key counts in the block where it begins, and what reaches into the next one there;
    left_over [M] is what reaches into the next tile.
    """
    place = (tl.arange(0, BLOCK_N) % PER_SELECTABLE)[None, :]
    own = p * tl.minimum(PER_COMPRESSED, PER_SELECTABLE - place).to(tl.float32)
    own = tl.sum(tl.reshape(own, [BLOCK_M, BLOCKS, PER_SELECTABLE]), 2)
    if PER_COMPRESSED > 1:
        reach = (place + PER_COMPRESSED - PER_SELECTABLE).to(tl.float32)
        reach = tl.where(reach > 0, p * reach, 0.0)
        reach = tl.sum(tl.reshape(reach, [BLOCK_M, BLOCKS, PER_SELECTABLE]), 2)
        column = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, BLOCKS)[None, :]
        before = tl.gather(reach, tl.maximum(column - 1, 0), 1)
        own += tl.where(column == 0, left_over[:, None], before)
        left_over = tl.sum(tl.where(column == BLOCKS - 1, reach, 0.0), 1)
    return own, left_over


@triton.jit
def band(
    first_key, first_block, PER_COMPRESSED: tl.constexpr, PER_SELECTABLE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Strides that keys and blocks share, [N, BLOCKS] fp32 (`nsa.blocks.overlap`)."""
    key = (first_key + tl.arange(0, BLOCK_N))[:, None]
    start = ((first_block + tl.arange(0, BLOCKS)) * PER_SELECTABLE)[None, :]
    low = tl.maximum(key, start)
    high = tl.minimum(key + PER_COMPRESSED, start + PER_SELECTABLE)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def candidates(
    importance, first_block, own, index_mask, WIDE: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """(importance, index) of the blocks from first_block on, as one integer each [M, BLOCKS].

    From the top: forced, by importance, NaN, illegal; a lower index first.
    """
    j = (first_block + tl.arange(0, BLOCKS))[None, :]
    own = own[:, None]
    forced = (j < INITIAL) | (j > own - LOCAL)
    bits = tl.where(forced, FORCED, importance.to(tl.int32, bitcast=True))
    high = bits.to(tl.int64) << 32 if WIDE else bits & ~index_mask
    key = high | (index_mask - j)
    key = tl.where((importance == importance) | forced, key, ~j)
    return tl.where(j <= own, key, ILLEGAL)


@triton.jit
def merge(best, found, SLOTS: tl.constexpr):
    """The largest SLOTS, ascending, of best [M, SLOTS], ascending, and found [M, BLOCKS].

    Later tiles beat few of the best: taking those out one by one costs less than sorting all.
    """
    beats = found > tl.min(best, 1)[:, None]
    rounds = tl.minimum(tl.max(tl.sum(beats.to(tl.int32), 1), 0), SLOTS)
    slot = tl.arange(0, SLOTS)[None, :]
    new = tl.full(best.shape, ILLEGAL, best.dtype)
    for i in range(rounds):
        top = tl.max(found, 1)[:, None]
        new = tl.where(slot == i, top, new)
        found = tl.where(found == top, ILLEGAL, found)
    # One ascends and the other descends: the larger of each pair are the largest of all.
    return tl.bitonic_merge(tl.maximum(best, new))


@triton.jit
def indices(keys, index_mask):
    """The blocks' indices in keys; NONE for what is not legal."""
    index = tl.where(keys < 0, ~keys, index_mask - (keys & index_mask)).to(tl.int32)
    return tl.where(keys == ILLEGAL, NONE, index)
