"""Code shared by the span kernels: keys that a query sees, tiles of rows, gates, tile sizes."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.blocks import Span
from nsa.kernels.common import extent, locate, padded, position_of, power_of_two
from nsa.kernels.sequences import Axis
from nsa.kernels.tiles import Tile, architecture, processors


@triton.jit
def seen_end(t, SPAN: tl.constexpr):
    """Number of keys that have ended by position t, the exclusive end of those seen at t."""
    # triton's // rounds to zero, so its numerator must not be negative
    return tl.maximum(t + 1 - SPAN.length + SPAN.stride, 0) // SPAN.stride


@triton.jit
def seen_start(t, SPAN: tl.constexpr):
    """First key that the query at position t sees, if it sees any."""
    start = t * 0
    if SPAN.lookback is not None:
        start = tl.maximum(seen_end(t, SPAN) - SPAN.lookback, 0)
    return start


@triton.jit
def sees(t, s, SPAN: tl.constexpr):
    """True where position t sees key s; the two broadcast against each other."""
    end = seen_end(t, SPAN)
    seen = s < end
    if SPAN.lookback is not None:
        seen = seen & (s >= end - SPAN.lookback)
    return seen


@triton.jit
def query_tile(
    number, tokens, keys, tiles, HQ: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """(head, place of tokens, place of keys, first token, seen, whole) of query tile `number`.

    tokens: (table, bounds, length, starts) of the queries' axis; keys: (bounds, length) of the
    keys'. A place is (sequence, its first row, its rows), and that of tokens has the position of
    its first row as well. Some row sees the keys in [seen[0], seen[1]), every row those in
    [whole[0], whole[1]). Late tiles, which see the most keys when there is no lookback, start
    first. A tile whose first token is past the place's rows is empty.
    """
    tile = tiles - 1 - number // HQ
    head = number % HQ
    sequence, start, rows, first = locate(tile, tokens[0], tokens[1], tokens[2], ROWS, PACKED)
    key_start, key_rows = extent(sequence, keys[0], keys[1], PACKED)
    position = position_of(sequence, tokens[3])
    begin = position + first
    last = position + tl.minimum(first + ROWS, rows) - 1
    seen = seen_start(begin, SPAN), tl.minimum(seen_end(last, SPAN), key_rows)
    whole = seen_start(last, SPAN), tl.minimum(seen_end(begin, SPAN), key_rows)
    place = sequence, start, rows, position
    return head, place, (sequence, key_start, key_rows), first, seen, whole


@triton.jit
def key_part(HQ: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr):
    """(tile of keys, part of the query heads and tokens that see it) of this program.

    TOGETHER programs of a tile are followed by as many of the next tile, and so on.
    """
    number = tl.program_id(0)
    turn = tl.num_programs(0) // (HQ // EACH * SPLITS) * TOGETHER
    return number % turn // TOGETHER, number // turn * TOGETHER + number % TOGETHER


@triton.jit
def seen_by(first, KEYS: tl.constexpr, rows, tokens, SPAN: tl.constexpr):
    """(begin, end, whole begin, whole end): positions that see some, and all, of the KEYS keys
    starting at `first`, of `rows` keys and `tokens` tokens."""
    last = tl.minimum(first + KEYS, rows) - 1
    # Key s is seen from position s stride + length - 1 on, for lookback * stride tokens.
    begin = first * SPAN.stride + SPAN.length - 1
    whole_begin = last * SPAN.stride + SPAN.length - 1
    end = tokens
    whole_end = tokens
    if SPAN.lookback is not None:
        end = tl.minimum(end, whole_begin + SPAN.lookback * SPAN.stride)
        whole_end = tl.minimum(whole_end, begin + SPAN.lookback * SPAN.stride)
    return begin, end, whole_begin, whole_end


@triton.jit
def at(x, strides, row, head):
    """x[row, head], with offsets in int64."""
    return x + row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_rows(x, stride, rows, BLOCK: tl.constexpr, D: tl.constexpr):
    """[BLOCK, padded D] starting at x; 0 past the first `rows` rows and D columns."""
    i = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, padded(D))[None, :]
    mask = i < rows
    if padded(D) != D:
        mask = mask & (d < D)
    return tl.load(x + i * stride + d, mask=mask, other=0.0)


@triton.jit
def load_tile(x, strides, place, row, head, D: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, padded D]: rows row.. of a sequence of x, which is from `operand`; 0 past its end.

    place: (sequence, its first row, its rows) on x's axis.
    """
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([place[0], head, row, 0]).reshape(BLOCK, padded(D))
    else:
        first = at(x, strides, place[1] + row, head)
        tile = load_rows(first, strides[0], place[2] - row, BLOCK, D)
    return tile


@triton.jit
def store_rows(x, stride, rows, values, D: tl.constexpr, ADD: tl.constexpr = False):
    """Write values [BLOCK, padded D] to the first `rows` rows, or add them in place."""
    i = tl.arange(0, values.shape[0])[:, None]
    d = tl.arange(0, values.shape[1])[None, :]
    mask = i < rows
    if values.shape[1] != D:
        mask = mask & (d < D)
    if ADD:
        values += tl.load(x + i * stride + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + i * stride + d, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_line(x, total, place, row, head, BLOCK: tl.constexpr):
    """[BLOCK] of x [heads, total] from `line_operand`: rows row.. of a sequence; 0 past its end."""
    if isinstance(x, tl.tensor_descriptor):
        line = x.load([head, place[0], row]).reshape(BLOCK)
    else:
        i = tl.arange(0, BLOCK)
        first = x + head.to(tl.int64) * total + place[1] + row
        line = tl.load(first + i, mask=i < place[2] - row, other=0.0)
    return line


@triton.jit
def load_gate(gates, strides, row, head, rows, BRANCH: tl.constexpr, BLOCK: tl.constexpr):
    """gates[row : row + BLOCK, head, BRANCH] in fp32 [BLOCK], 0 past the first `rows`."""
    i = tl.arange(0, BLOCK)
    x = at(gates, strides, row, head) + BRANCH * strides[2]
    return tl.load(x + i * strides[0], mask=i < rows, other=0.0).to(tl.float32)


def descriptors_fit(tokens: Axis, keys: Axis, *tensors: Tensor) -> bool:
    """True if TMA can fetch tiles of these: Hopper, 16-bit, 16-byte strides, and not packed.

    It writes 0 past a tensor's end, which only the last of packed sequences reaches.
    """
    if tokens.packed or keys.packed or not keys.rows or architecture(tensors[0].device) < 90:
        return False
    return all(
        x.element_size() == 2
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:2])
        for x in tensors
    )


def lines_fit(axis: Axis, *tensors: Tensor | None) -> bool:
    """True if TMA can fetch lines of these [heads, tokens] fp32; None is ignored.

    A line must start at a multiple of 16 bytes, which packed sequences need not.
    """
    given = [x for x in tensors if x is not None]
    if axis.packed or not axis.rows or architecture(given[0].device) < 90:
        return False
    return axis.length % 4 == 0 and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in given)


def operand(x: Tensor, axis: Axis, rows: int, descriptors: bool) -> Tensor | TensorDescriptor:
    """Argument x of `load_tile` for tiles of `rows` rows of x [axis, heads, D]."""
    if not descriptors:
        return x
    by_row, by_head, _ = x.stride()
    _, heads, dim = x.shape
    return described(
        x,
        [axis.count, heads, axis.length, dim],
        [axis.length * by_row, by_head, by_row, 1],
        [1, 1, rows, power_of_two(dim)],
    )


def described(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Tensor:
    """Create a TensorDescriptor without its checks, which are slow on the host and were done by
    `descriptors_fit` or `lines_fit`."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, shape, strides, block
    return made


def line_operand(
    x: Tensor | None, axis: Axis, rows: int, descriptor: bool
) -> Tensor | TensorDescriptor | None:
    """Argument x of `load_line` for lines of `rows` numbers of x [heads, axis]."""
    if x is None or not descriptor:
        return x
    heads, total = x.shape
    return described(x, [heads, axis.count, axis.length], [total, axis.length, 1], [1, 1, rows])


def default_tile(
    kernel: str, value_dim: int, span: Span, q: Tensor, descriptors: bool = True
) -> Tile:
    """Default tile of "forward", "dq" or "dkdv" for q [tokens, HQ, D].

    Without descriptors, addresses occupy registers, which the largest tiles cannot spare.
    """
    total, heads, dim = q.shape
    wide = max(power_of_two(dim), power_of_two(value_dim))
    if q.dtype == torch.float32:
        return _wide_tile(kernel, wide)
    few = total * heads < 2 * 128 * processors(q.device)
    chip, looks_back = architecture(q.device), span.lookback is not None
    return _narrow_tile(kernel, wide, chip, few, looks_back, descriptors)


@lru_cache(maxsize=256)
def _narrow_tile(
    kernel: str, wide: int, chip: int, few: bool, looks_back: bool, descriptors: bool
) -> Tile:
    """Default tile for 16-bit dtypes. few: True if there are few large tiles per SM."""
    if chip >= 90:
        tiles = {
            "forward": (
                Tile(128, 64, 4, 2) if descriptors else Tile(128, 64, 8, 3),
                Tile(128, 64, 8, 2),
            ),
            "dq": (Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
            "dkdv": (
                Tile(64, 128, 8, 3) if descriptors else Tile(32, 64, 4, 3),
                Tile(32, 64, 8, 2),
            ),
        }
        # Several small tiles to a processor spread more evenly where there are few large ones, and
        # waste less where a window's edges, of which half is masked, are much of what is seen.
        spread = wide <= 128 and (few or looks_back)
        narrow = wide <= 64
        if spread or narrow:
            tiles["forward"] = (Tile(64, 64, 4, 2 if narrow else 3),)
            if spread:
                tiles["dq"] = (Tile(64, 64, 4, 3 if narrow else 2),)
            tiles["dkdv"] = (
                Tile(64, 64, 4, 3 if narrow else 2) if descriptors else Tile(32, 64, 4, 3),
            )
    else:
        # Without a delta to start from (the window), dq's second accumulator takes the registers.
        keys = 32 if looks_back else 64
        tiles = {
            "forward": (Tile(128, 64, 8 if wide > 64 else 4, 3), Tile(64, 32, 4, 2)),
            "dq": (Tile(64, keys, 4, 2), Tile(64, 32, 8, 2)),
            "dkdv": (Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
        }
    tile = tiles[kernel][wide > 128]
    # Consumer chips have 99 KB of shared memory a block, 64 KB less than an A100.
    return tile._replace(stages=max(1, tile.stages - 1)) if 80 < chip < 90 else tile


def _wide_tile(kernel: str, wide: int) -> Tile:
    """Default tile for fp32, whose exact products use no tensor cores."""
    if kernel == "forward" and wide <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(32, 32, 8, 2 if wide <= 64 else 1) if wide <= 128 else Tile(16, 16, 4, 1)


def felt(span: Span, keys: Axis) -> Span:
    """Return the span, without a lookback that has no effect on these sequences."""
    far = span.lookback is not None and span.lookback >= keys.length
    return span._replace(lookback=None) if far else span
