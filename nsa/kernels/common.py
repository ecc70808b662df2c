"""Code shared by the kernels: tile locations, online softmax, gates, and tile sizes.

Every kernel works on flat axes: q [tokens, HQ, D], k [keys, HKV, D], v [keys, HKV, DV], with
concatenated sequences (see `sequences`). The last dimension is contiguous, the others are not
assumed to be. Scores are in base 2: `scale2` is scale * log2(e), and lse2 is a log2.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.sequences import Axis

LOG2E = math.log2(math.e)
# fp32 numbers above it are 1 apart: a number added to it is rounded, in its bits.
WHOLE = tl.constexpr(1.5 * 2**23)
WHOLE_BITS = tl.constexpr(0x4B400000)
MOST_BITS = 13  # of a block's index next to its importance in 32 bits, leaving 10 of mantissa


class Sizes(NamedTuple):
    """Sizes of one call that are compile-time constants of a kernel."""

    HQ: int  # query heads
    G: int  # query heads of a KV head
    D: int
    DV: int


@triton.constexpr_function
def padded(n):
    """Same as `power_of_two`, inside a kernel."""
    return triton.next_power_of_2(max(n, 16))


@triton.jit
def locate(tile, table, bounds, length, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, first row, rows, first row of the tile in its sequence) of tile number `tile`.

    A tile that starts at or past its sequence's end has nothing to do.
    """
    if PACKED:
        sequence = tl.load(table + 2 * tile)
        number = tl.load(table + 2 * tile + 1)
        start = tl.load(bounds + sequence).to(tl.int64)
        rows = (tl.load(bounds + sequence + 1) - start).to(tl.int32)
    else:
        per_sequence = tl.cdiv(length, SIZE)
        sequence = tile // per_sequence
        number = tile % per_sequence
        start = sequence.to(tl.int64) * length
        rows = length
    return sequence, start, rows, number * SIZE


@triton.jit
def extent(sequence, bounds, length, PACKED: tl.constexpr):
    """(first row, rows) of a sequence on an axis."""
    if PACKED:
        start = tl.load(bounds + sequence).to(tl.int64)
        rows = (tl.load(bounds + sequence + 1) - start).to(tl.int32)
    else:
        start = sequence.to(tl.int64) * length
        rows = length
    return start, rows


@triton.jit
def position_of(sequence, starts):
    """Position of a sequence's first row on the axis of queries; starts None: 0."""
    position = 0
    if starts is not None:
        position = tl.load(starts + sequence)
    return position


@triton.jit
def partial_sums(x):
    """Sums of x [M, N] over every eighth column, [M, 8]; they add up to the row's sum.

    In the layout of a product one thread holds all terms of such a sum, so that threads and warps
    exchange nothing until the last tile.
    """
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@triton.jit
def add_rows(x, ones, sums, PRECISION: tl.constexpr):
    """Add the row sums of the rounded x to sums, as `partial_sums` or repeated in every column.

    ones: [N, 16] ones in x's dtype.
    """
    if sums.shape[1] == 16:  # wgmma overlaps it; unpacking rounded values is slow
        sums = tl.dot(x, ones, sums, input_precision=PRECISION)
    else:
        sums += partial_sums(x.to(tl.float32))
    return sums


@triton.jit
def absorb(s, scale2, m, total):
    """Online softmax over one more tile s [M, N] of q k: (p, m, total, rescale).

    m is the running maximum of s scale2, total [M, 8] the running `partial_sums`; sums over
    earlier p must be multiplied by rescale [M]. scale2 is positive. A row that saw only -inf so far
    stays at m = -inf and total = 0.
    """
    p, m, rescale = weighed(s, scale2, m)
    return p, m, total * rescale[:, None] + partial_sums(p), rescale


@triton.jit
def weighed(s, scale2, m):
    """(p, m, rescale) of `absorb`."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale2)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # exp2(-inf - -inf) is NaN
    return tl.exp2(s * scale2 - shift[:, None]), m_new, tl.exp2(m - shift)


@triton.jit
def finish(m, total):
    """(divisor, lse2) of an online softmax; 1 and -inf in rows that saw no key."""
    total = tl.where(m == float("-inf"), 1.0, tl.sum(total, 1))
    return total, m + tl.log2(total)


@triton.jit
def truncated(p, dtype: tl.constexpr):
    """Truncate fp32 p to the bits that bf16 or fp16 keep, so that rounding it to dtype is exact.

    Values are summed with 16-bit p. Divided by the sum of the same p, an offset common to all
    values is exact, and the error of p only affects their differences. Truncated, not rounded,
    since a conversion back to fp32 takes as long as an exponential.
    """
    KEPT: tl.constexpr = -(1 << 16) if dtype == tl.bfloat16 else -(1 << 13)
    return tl.cast(tl.cast(p, tl.int32, bitcast=True) & KEPT, tl.float32, bitcast=True)


@triton.jit
def fixed_point(x):
    """(fp32 numbers x [M, N] as int16, the fp32 unit of each row [M]).

    The error is at most 2^-17 of a row's largest number, versus 2^-9 of each number in bf16. delta
    = <do, o> needs that: if all values share an offset, it is a small difference of large numbers.
    A row with a NaN or an infinity becomes NaN.
    """
    unit = tl.max(tl.abs(x), 1) * (1 / 32760) + tl.sum(x * 0.0, 1)
    whole = x * (1.0 / tl.where(unit == 0.0, 1.0, unit))[:, None] + WHOLE
    return tl.cast(whole, tl.int32, bitcast=True).to(tl.int16), unit


@triton.jit
def in_units(x):
    """Convert the int16 of `fixed_point` to fp32, in its units; faster than a plain cast."""
    bits = x.to(tl.int32) + WHOLE_BITS
    return tl.cast(bits, tl.float32, bitcast=True) - WHOLE


@triton.jit
def rest_of(x, rounded):
    """The 8 bits of fp32 x that follow the bits kept by `rounded`, x in bf16 or fp16; int8."""
    BITS: tl.constexpr = 8 if rounded.dtype == tl.bfloat16 else 5
    rest = (tl.cast(x, tl.int32, bitcast=True) - _bits(rounded) + (1 << (BITS - 1))) >> BITS
    return tl.minimum(tl.maximum(rest, -128), 127).to(tl.int8)


@triton.jit
def with_rest(rounded, rest):
    """Restore fp32 numbers from their rounded values and `rest_of`."""
    BITS: tl.constexpr = 8 if rounded.dtype == tl.bfloat16 else 5
    return tl.cast(_bits(rounded) + (rest.to(tl.int32) << BITS), tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    """Bits of x, in bf16 or fp16, as fp32, in int32."""
    if x.dtype == tl.bfloat16:
        bits = tl.cast(x, tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = tl.cast(x.to(tl.float32), tl.int32, bitcast=True)
    return bits


@triton.jit
def sunk(divisor, lse2, sink2):
    """Divisor of a softmax that has one more logit, sink2, in addition to the keys of lse2.

    Both may be -inf; without keys it is an arbitrary nonzero number, since it divides 0.
    """
    return divisor * (1.0 + tl.exp2(sink2 - tl.where(lse2 > float("-inf"), lse2, 0.0)))


def contiguous_like(x: Tensor) -> Tensor:
    """Empty tensor for a gradient of x: its shape and dtype, always contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def ceil_div(n: int, size: int) -> int:
    """Ceiling of n / size. Triton's function is made for kernels and takes 10 us on the host."""
    return -(-n // size)


@lru_cache(maxsize=256)
def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least n, 1 for n = 0."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache(maxsize=256)
def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n and valid for tl.dot, i.e. at least 16."""
    return max(16, next_power_of_two(n))


def precision(x: Tensor) -> str:
    """tl.dot's input_precision: tf32, Triton's default, would round fp32 inputs to 11 bits."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def axis_arguments(axis: Axis, size: int) -> tuple[tuple, int]:
    """((table, bounds, length, starts), count): arguments of `locate` and `position_of` for tiles
    of `size`, their number."""
    table, count = axis.tiles(size)
    return (table, axis.bounds, axis.length, axis.starts), count
