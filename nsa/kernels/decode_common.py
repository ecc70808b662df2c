"""Code shared by the decode kernels: a step's tokens, rows of a cache, dependent launches.

A step gives each sequence b of a batch `new` tokens at the positions held .. held + new - 1. Rows
of scratch are in the order [B, HKV, N, G]. A cache's tensors are contiguous.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from nsa.kernels.common import padded


class Tuning(NamedTuple):
    """Tiles and splits of one step. Splits are over keys, so a small batch fills the GPU too."""

    score_rows: int  # rows of queries, [N, G] flattened, that one program scores
    score_keys: int  # compressed keys a tile
    score_splits: int
    score_warps: int
    score_stages: int
    choose_blocks: int  # importances ranked at a time
    choose_warps: int
    attend_keys: int  # keys a tile
    selected_splits: int
    window_splits: int
    attend_warps: int
    attend_stages: int
    dependent: bool  # launches overlap: programmatic dependent launch, Hopper and newer


# Numbers that go into tuples inside a kernel: a 1 there must not become a constant.
PLAIN = ["columns", "pool", "page"]


@triton.constexpr_function
def rounded_up(n):
    """Smallest power of two that is at least n."""
    return triton.next_power_of_2(max(n, 1))


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait for the previous launch. Data that no launch of a step writes may be read earlier."""
    if DEPENDENT:
        cuda.gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Allow the next launch to start once there is room. Not before `append` has waited."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def step_of(b, lengths, counts, n, capacity):
    """(held, new) of sequence b, or of each of a vector of sequences; never past the capacity."""
    held = tl.maximum(tl.load(lengths + b), 0)
    new = n + held * 0
    if counts is not None:
        new = tl.minimum(tl.load(counts + b), n)
    return held, tl.maximum(tl.minimum(new, capacity - held), 0)


@triton.jit
def home_of(pages, b, PER_PAGE: tl.constexpr):
    """Argument `home` of `page_of` for sequence b: its only page, or its row's offset in table."""
    table, columns, _ = pages
    return tl.load(table + b).to(tl.int64) if PER_PAGE is None else b.to(tl.int64) * columns


@triton.jit
def page_of(pages, home, s, valid, PER_PAGE: tl.constexpr):
    """Pages of positions s [N], or the page of one; -1 where not valid."""
    page = home
    if PER_PAGE is not None:
        page = tl.load(pages[0] + home + s // PER_PAGE, mask=valid, other=-1)
    return page


@triton.jit
def rows_on(pages, page, s, valid, size, PER_PAGE: tl.constexpr):
    """(rows int64, mask of valid ones) of a paged tensor [P * size, ...] for positions s on their
    pages, from `page_of`.

    pages: (table, columns, P). size: rows of a sequence's page, if it has only one. A page
    outside the pool has no rows.
    """
    if PER_PAGE is None:
        row, there = page * size + s, valid & (page >= 0) & (page < pages[2])
    else:
        row = page.to(tl.int64) * PER_PAGE + s % PER_PAGE
        there = valid & (page.to(tl.uint32, bitcast=True) < pages[2].to(tl.uint32))
    return row, there


@triton.jit
def page_rows(pages, home, s, valid, size, PER_PAGE: tl.constexpr):
    """Same as `rows_on`, with the pages looked up."""
    page = page_of(pages, home, s, valid, PER_PAGE)
    return rows_on(pages, page, s, valid, size, PER_PAGE)


@triton.jit
def load_rows(x, row, valid, head, HKV: tl.constexpr, D: tl.constexpr):
    """x [rows, HKV, D] at rows [N] int64 and one head: [N, padded D]; 0 where not valid."""
    d = tl.arange(0, padded(D))[None, :]
    mask = valid[:, None]
    if padded(D) != D:
        mask = mask & (d < D)
    return tl.load(x + (row * (HKV * D) + head * D)[:, None] + d, mask=mask, other=0.0)


@triton.jit
def store_rows(x, row, valid, head, values, HKV: tl.constexpr, D: tl.constexpr):
    """Write values [N, padded D] to x [rows, HKV, D] at valid rows [N] int64 and one head."""
    d = tl.arange(0, padded(D))[None, :]
    mask = valid[:, None]
    if padded(D) != D:
        mask = mask & (d < D)
    at = x + (row * HKV + head)[:, None] * D + d
    tl.store(at, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_queries(q, strides, b, token, head, valid, D: tl.constexpr):
    """q[b, token, head] for vectors of tokens and heads: [M, padded D]; 0 where not valid."""
    d = tl.arange(0, padded(D))[None, :]
    at = q + b.to(tl.int64) * strides[0]
    at += (token.to(tl.int64) * strides[1] + head * strides[2])[:, None] + d
    return tl.load(at, mask=valid[:, None] & (d < D), other=0.0)


@triton.jit
def tiles_of(seen, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """(tiles, tiles per split, nonempty splits) of `seen` keys in tiles of KEYS."""
    tiles = tl.cdiv(seen, KEYS)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    return tiles, each, tl.cdiv(tiles, each)
