"""The first launch of a decode step: new keys and values into the cache, and phi (Eq. 7)."""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa.kernels.common import padded
from nsa.kernels.decode_common import (
    PLAIN,
    home_of,
    load_rows,
    page_rows,
    release,
    step_of,
    store_rows,
    wait,
)
from nsa.kernels.span_common import seen_end


class Rows(NamedTuple):
    """Compile-time sizes of the rows of keys or of values."""

    heads: int
    dim: int
    page: int | None  # tokens a page; None: a sequence has one page


@triton.constexpr_function
def per_page(tokens, stride):
    """Number of compressed rows per page."""
    return None if tokens is None else tokens // stride


@triton.jit
def load_new(x, strides, b, i, valid, head, D: tl.constexpr):
    """x[b, i, head] of new rows i [N]: [N, padded D]; 0 where not valid."""
    d = tl.arange(0, padded(D))[None, :]
    at = x + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    at += i.to(tl.int64)[:, None] * strides[1] + d
    return tl.load(at, mask=valid[:, None] & (d < D), other=0.0)


@triton.jit
def _keep(
    new, strides, caches, pages, rings, place, held, count, WIDTHS: tl.constexpr, NEW: tl.constexpr
):
    """Write the new rows of one head for the branches: slc pages, win ring, raw ring."""
    HKV: tl.constexpr = WIDTHS.heads
    D: tl.constexpr = WIDTHS.dim
    PER_PAGE: tl.constexpr = WIDTHS.page
    b, head = place
    i = tl.arange(0, NEW)
    t = held + i
    valid = i < count
    if caches[0] is not None:
        home = home_of(pages[0], b, PER_PAGE)
        row, there = page_rows(pages[0], home, t, valid, pages[1], PER_PAGE)
        store_rows(caches[0], row, there, head, load_new(new[0], strides[0], b, i, valid, head, D),
                   HKV, D)  # fmt: skip
    for j in tl.static_range(1, 3):
        if caches[j] is not None:
            row = b.to(tl.int64) * rings[j - 1] + t % rings[j - 1]
            x = load_new(new[j], strides[j], b, i, valid, head, D)
            store_rows(caches[j], row, valid, head, x, HKV, D)


@triton.jit
def _token(raw, new, strides, ring, place, held, t, valid, HKV: tl.constexpr, D: tl.constexpr):
    """Uncompressed rows at positions t [N], fp32: the held ones from the ring, others new."""
    b, head = place
    row = b.to(tl.int64) * ring + t % ring
    old = load_rows(raw, row, valid & (t < held), head, HKV, D).to(tl.float32)
    return old + load_new(new, strides, b, t - held, valid & (t >= held), head, D).to(tl.float32)


@triton.jit
def _column_sums(
    source, start, weights, head, columns,
    WIDTHS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The product of one block, [l D], with `columns` [N] of weight1 [HKV, l D, WIDTH], fp32."""
    HKV: tl.constexpr = WIDTHS.heads
    D: tl.constexpr = WIDTHS.dim
    raw, new, strides, ring, place, held = source
    position, weight = weights
    d = tl.arange(0, padded(D))
    total = tl.zeros([padded(D), columns.shape[0]], tl.float32)
    head = head.to(tl.int64)
    one = tl.arange(0, 1)
    for i in range(LENGTH):
        t = start + i + one
        x = _token(raw, new, strides, ring, place, held, t, t >= 0, HKV, D)
        x = tl.reshape(x, [padded(D)])
        x += tl.load(position + (head * LENGTH + i) * D + d, mask=d < D, other=0.0).to(tl.float32)
        at = weight + ((head * LENGTH + i) * D + d)[:, None] * WIDTH + columns[None, :]
        mask = (d < D)[:, None] & (columns < WIDTH)[None, :]
        total += x[:, None] * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _halves(
    source, start, weights, head, part,
    WIDTHS: tl.constexpr, LENGTH: tl.constexpr, KIND: tl.constexpr, HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """COLUMNS numbers of the first half of a compressed row, and those HALF columns later."""
    D: tl.constexpr = WIDTHS.dim
    position, weight1, bias1, weight2, bias2 = weights
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    # Past the first half are the second one's own columns.
    first, second = tl.where(c < HALF, c, D), tl.where(c < HALF, c + HALF, D)
    if KIND == "linear":
        low = _column_sums(source, start, (position, weight1), head, first, WIDTHS, LENGTH, D)
        high = _column_sums(source, start, (position, weight1), head, second, WIDTHS, LENGTH, D)
    else:
        low_sums = tl.zeros([32, COLUMNS], tl.float32)
        high_sums = tl.zeros([32, COLUMNS], tl.float32)
        wide = head.to(tl.int64)
        for begin_hidden in range(0, HIDDEN, 32):
            h = begin_hidden + tl.arange(0, 32)
            x = _column_sums(source, start, (position, weight1), head, h, WIDTHS, LENGTH, HIDDEN)
            x += tl.load(bias1 + wide * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
            at = weight2 + (wide * HIDDEN + h)[:, None] * D
            inside = (h < HIDDEN)[:, None]
            w = tl.load(at + first[None, :], mask=inside & (first < D)[None, :], other=0.0)
            low_sums += _gelu(x)[:, None] * w.to(tl.float32)
            w = tl.load(at + second[None, :], mask=inside & (second < D)[None, :], other=0.0)
            high_sums += _gelu(x)[:, None] * w.to(tl.float32)
        low = tl.sum(low_sums, 0)
        low += tl.load(bias2 + wide * D + first, mask=first < D, other=0.0).to(tl.float32)
        high = tl.sum(high_sums, 0)
        high += tl.load(bias2 + wide * D + second, mask=second < D, other=0.0).to(tl.float32)
    return low, high, first, second


@triton.jit
def _mean_halves(
    source, start, WIDTHS: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Same as `_halves`, for the mean over a block's tokens."""
    HKV: tl.constexpr = WIDTHS.heads
    D: tl.constexpr = WIDTHS.dim
    raw, new, strides, ring, place, held = source
    b, head = place
    i = tl.arange(0, ROWS)
    t = start + i
    c = tl.arange(0, COLUMNS)
    first, second = tl.where(c < HALF, c, D), tl.where(c < HALF, c + HALF, D)
    old = raw + ((b.to(tl.int64) * ring + t % ring) * HKV + head)[:, None] * D
    fresh = new + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    fresh += (t - held).to(tl.int64)[:, None] * strides[1]
    before = ((i < LENGTH) & (t < held))[:, None]
    after = ((i < LENGTH) & (t >= held))[:, None]
    in_first, in_second = (first < D)[None, :], (second < D)[None, :]
    low = tl.load(old + first[None, :], mask=before & in_first, other=0.0).to(tl.float32)
    low += tl.load(fresh + first[None, :], mask=after & in_first, other=0.0).to(tl.float32)
    high = tl.load(old + second[None, :], mask=before & in_second, other=0.0).to(tl.float32)
    high += tl.load(fresh + second[None, :], mask=after & in_second, other=0.0).to(tl.float32)
    return tl.sum(low, 0) / LENGTH, tl.sum(high, 0) / LENGTH, first, second


@triton.jit
def _compress(
    source, out, pages, block, weights, rotary, part,
    WIDTHS: tl.constexpr, CONFIG: tl.constexpr, KIND: tl.constexpr, HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Write one compressed row, or the columns of one part, to the cache."""
    HKV: tl.constexpr = WIDTHS.heads
    D: tl.constexpr = WIDTHS.dim
    HALF: tl.constexpr = (D + 1) // 2
    PER_PAGE: tl.constexpr = per_page(WIDTHS.page, CONFIG.compress_stride)
    LENGTH: tl.constexpr = CONFIG.compress_block
    b, head = source[4]
    start = block * CONFIG.compress_stride
    if KIND == "mean":
        low, high, first, second = _mean_halves(
            source, start, WIDTHS, LENGTH, LENGTHS, COLUMNS, HALF
        )
    else:
        low, high, first, second = _halves(
            source, start, weights, head, part, WIDTHS, LENGTH, KIND, HIDDEN, COLUMNS, HALF
        )
    if rotary is not None:
        cos, sin, positions = rotary
        at = start.to(tl.int64) * HALF + first
        mask = (first < HALF) & (start < positions)
        c = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
        low, high = low * c - high * s, high * c + low * s
    home = home_of(pages[0], b, PER_PAGE)
    one = block + tl.arange(0, 1)
    size = pages[1] // CONFIG.compress_stride
    row, there = page_rows(pages[0], home, one, one >= 0, size, PER_PAGE)
    at = out + (row * HKV + head)[:, None] * D
    low, high = low[None, :].to(out.dtype.element_ty), high[None, :].to(out.dtype.element_ty)
    tl.store(at + first[None, :], low, mask=there[:, None] & (first < D)[None, :])
    tl.store(at + second[None, :], high, mask=there[:, None] & (second < D)[None, :])


@triton.jit
def _one_side(
    new, strides, caches, compressed, weights, rotary, pages, rings, place, held, count, keeps,
    block, ends, part,
    CONFIG: tl.constexpr, WIDTHS: tl.constexpr, KIND: tl.constexpr, HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr, NEW: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    if keeps:
        _keep(new, strides, caches, pages, rings, place, held, count, WIDTHS, NEW)
    if compressed is not None and ends:
        source = caches[2], new[2], strides[2], rings[1], place, held
        _compress(
            source, compressed, pages, block, weights, rotary, part,
            WIDTHS, CONFIG, KIND, HIDDEN, COLUMNS, LENGTHS,
        )  # fmt: skip


@triton.jit(do_not_specialize=PLAIN)
def append(
    new, strides, caches, compressed, weights, rotary, table, columns, pool, page, rings,
    lengths, counts, n, capacity, arrived,
    CONFIG: tl.constexpr, SPAN: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KIND: tl.constexpr,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, NEW: tl.constexpr,
    LENGTHS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one head's new keys, or values, and one of the blocks that they complete.

    Pairs are (keys, values): new, strides and caches in the order slc, win, cmp, each None where
    nothing is stored. columns, pool: columns of the table, and P. rings: rows of (win, raw).
    arrived [B, HKV, N] is set to 0.
    """
    b = tl.program_id(0) // KEYS.heads
    head = tl.program_id(0) % KEYS.heads
    number = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    wait(DEPENDENT)
    release(DEPENDENT)
    if tl.program_id(1) + tl.program_id(2) == 0:
        i = tl.arange(0, NEW)
        tl.store(arrived + tl.program_id(0) * n + i, 0, mask=i < n)
    held, count = step_of(b, lengths, counts, n, capacity)
    done = seen_end(held - 1, SPAN)
    block = done + number
    ends = block < seen_end(held + count - 1, SPAN)
    keeps = tl.program_id(1) == 0
    place = b, head
    pages = (table, columns, pool), page
    if tl.program_id(2) == 0:
        _one_side(
            new[0], strides[0], caches[0], compressed[0], weights[0], rotary, pages, rings, place,
            held, count, keeps, block, ends, part,
            CONFIG, KEYS, KIND, HIDDEN, COLUMNS, NEW, LENGTHS,
        )  # fmt: skip
    else:
        _one_side(
            new[1], strides[1], caches[1], compressed[1], weights[1], None, pages, rings, place,
            held, count, keeps, block, ends, part,
            CONFIG, VALUES, KIND, HIDDEN, COLUMNS, NEW, LENGTHS,
        )  # fmt: skip
