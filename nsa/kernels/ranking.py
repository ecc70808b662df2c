"""Candidates of a top n: importance and index in one integer, ranked in registers.

A lower index wins a tie, and one word moves. The kernels for scores and decoding and the
warp-specialized ones use these.
"""

import triton
import triton.language as tl

ILLEGAL = tl.constexpr(-(2**31) + 1)  # below every candidate
FORCED = tl.constexpr(2**31 - 1)  # above the bits of every float
NONE = tl.constexpr(2**31 - 1)  # sorts behind every index


@triton.jit
def candidates(importance, j, own, index_mask, WIDE: tl.constexpr, CONFIG: tl.constexpr):
    """(importance, index) of the blocks j [1, BLOCKS], as one integer each [M, BLOCKS].

    In descending order: forced, by importance, NaN, illegal; a lower index first.
    """
    own = own[:, None]
    forced = (j < CONFIG.select_initial) | (j > own - CONFIG.select_local)
    bits = tl.where(forced, FORCED, tl.cast(importance, tl.int32, bitcast=True))
    high = bits.to(tl.int64) << 32 if WIDE else bits & ~index_mask
    key = high | (index_mask - j)
    key = tl.where((importance == importance) | forced, key, ~j)
    return tl.where(j <= own, key, ILLEGAL)


@triton.jit
def merge(best, found, SLOTS: tl.constexpr):
    """Largest SLOTS, ascending, of best [M, SLOTS], ascending, and found [M, BLOCKS].

    Later tiles beat few of the best: inserting those one by one costs less than sorting all.
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
    """Block indices of keys; NONE for illegal ones."""
    index = tl.where(keys < 0, ~keys, index_mask - (keys & index_mask)).to(tl.int32)
    return tl.where(keys == ILLEGAL, NONE, index)
