"""Selected attention, backward of keys and values: dK and dV over tokens that chose a block."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import (
    LOG2E,
    axis_arguments,
    ceil_div,
    contiguous_like,
    extent,
    locate,
    next_power_of_two,
    padded,
    position_of,
    precision,
)
from nsa.kernels.inverse import Inverse
from nsa.kernels.launch import launch
from nsa.kernels.selected import load_keys, load_rows
from nsa.kernels.selected_plan import MOST_ROWS
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile, default_tile, processors

SUMMED = 16  # keys whose parts one program sums
FEW = 4  # tasks to a processor


class Cut(NamedTuple):
    """Compile-time sizes of a program's part of a block."""

    task: int  # tokens, at most
    keys: int
    parts: int  # of this many keys per block
    d: int
    dv: int
    packed: bool


class Rows(NamedTuple):
    """Rows of queries that a program processes at a time."""

    rows: int
    tokens: int
    heads: int
    group: int  # query heads of a KV head
    chunks: int  # of this many heads per group
    early: bool  # prefetch tokens a round early: faster only for 2^n heads
    offset: bool  # queries begin later than keys; Triton 3.6 cannot test a tuple for None


def selected_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse2: Tensor,
    delta: Tensor,
    gates: Tensor | None,
    branch: int,
    lookup: Inverse,
    sequences: Sequences,
    scale: float,
    *,
    out: Sequence[Tensor] = (),
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk like k, dv like v), contiguous, or the two of `out`; every sum is in a fixed order.

    lookup is the selection's `inverse`; lse2 and delta [tokens, HQ] fp32 are from the forward and
    dQ; gates None: 1. `tile.rows` is the number of query rows processed at a time. Memory: fp32
    sums of the blocks that more than lookup.task tokens chose, at most 2 * tokens * HKV * N / task
    of them or, in short calls, 2048.
    """
    dk, dv = out or (contiguous_like(k), contiguous_like(v))
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    select_block = sequences.config.select_block
    few = lookup.task_list.shape[0] <= FEW * processors(q.device)
    given, tile = tile, tile or default_tile("dkdv", MOST_ROWS, q, v, select_block, few=few)
    heads = min(group, tile.rows)
    early = not heads & (heads - 1)
    if not early and given is None:
        tile = tile._replace(stages=min(2, tile.stages))  # a third was faster with it alone
    parts = ceil_div(select_block, tile.keys)
    width = k.shape[2] + v.shape[2]
    partial = torch.empty(
        lookup.partials, parts * tile.keys, width, dtype=torch.float32, device=q.device
    )
    axis, _ = axis_arguments(sequences.selectable, 1)
    strides = tuple(x.stride() for x in (q, k, v, do))
    # Contiguous and fp32 for the copies to be asynchronous.
    weights = None if gates is None else gates[..., branch].float().contiguous()
    # A token names a block once, so that no more of them lie inside the keys of a part.
    inside = next_power_of_two(select_block)
    tables = (
        lookup.tokens, lookup.starts, lookup.ends, lookup.task_list, lookup.partial_ends,
        lookup.stops,
    )  # fmt: skip
    tokens = sequences.tokens.bounds, sequences.tokens.length
    rows, queries = None, sequences.offset
    if queries is not None:
        rows = queries.bounds, queries.length, queries.starts
    lists = lookup.ends.shape[0]
    sizes = lists // kv_heads, kv_heads, select_block
    tokens_at_once, chunks = tile.rows // heads, ceil_div(group, heads)
    taken = Rows(tile.rows, tokens_at_once, heads, group, chunks, early, rows is not None)
    cut = Cut(lookup.task, tile.keys, parts, k.shape[2], v.shape[2], packed=sequences.tokens.packed)
    if lists:
        launch(
            _selected_dkdv, (lookup.task_list.shape[0] * parts,),
            q, k, v, do, lse2, delta, weights, dk, dv, partial, strides, tables, axis, tokens, rows,
            sizes, scale, scale * LOG2E, MOST_INSIDE=inside, WIDE=max(reach(q), reach(do)) >= 2**31,
            ALIKE=q.stride() == do.stride(), PRECISION=precision(q), CUT=cut,
            QUERIES=taken, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if lookup.partials:
        launch(
            _sum_partials, (lists * parts * (tile.keys // SUMMED),),
            dk, dv, partial, tables, axis, tokens, sizes, SUMMED=SUMMED, CUT=cut,
        )  # fmt: skip
    return dk, dv


def reach(x: Tensor) -> int:
    """Number of elements spanned by x, from its first to its last."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1


@triton.jit
def _selected_dkdv(
    q, k, v, do, lse, delta, gates, dk, dv, partial, strides, tables, axis, tokens, queries,
    sizes, scale, scale2,
    MOST_INSIDE: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr, PRECISION: tl.constexpr,
    CUT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One program: contribution of one task of a block's tokens to one part of its keys.

    Stores dk and dv if the block has no other tokens, else partial sums.
    """
    TASK: tl.constexpr = CUT.task
    KEYS: tl.constexpr = CUT.keys
    PARTS: tl.constexpr = CUT.parts
    D: tl.constexpr = CUT.d
    DV: tl.constexpr = CUT.dv
    task = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if task >= tl.load(tables[2] + sizes[0] * sizes[1] - 1):
        return
    number = tl.load(tables[3] + task)
    sequence, start, first_key, left, kv_head = _block(
        number, part, axis, tokens, sizes, KEYS, CUT.packed
    )
    if left <= 0:
        return
    begin = tl.load(tables[1] + number)
    end = tl.load(tables[5] + number)
    count = tl.cdiv(end - begin, TASK)
    which = task - (tl.load(tables[2] + number) - tl.maximum(count, 1))
    if which < 0:
        return
    low = begin + which * TASK
    high = tl.minimum(low + TASK, end)

    row = start + first_key
    query_row = row  # of the query that stands at the first key, possibly not there
    if QUERIES.offset:
        query_row, _ = extent(sequence, queries[0], queries[1], CUT.packed)
        query_row += first_key - position_of(sequence, queries[2])
    keys = load_keys(k + kv_head.to(tl.int64) * strides[1][1], row, left, strides[1], KEYS, D)
    values = load_keys(v + kv_head.to(tl.int64) * strides[2][1], row, left, strides[2], KEYS, DV)
    dk_sum = tl.zeros([KEYS, padded(D)], tl.float32)
    dv_sum = tl.zeros([KEYS, padded(DV)], tl.float32)
    # Tokens ascend: those inside the block come first, and only they must not see all of it.
    ahead = low + tl.arange(0, MOST_INSIDE)
    token = tl.load(tables[0] + ahead, mask=ahead < high, other=0x7FFFFFFF)
    inside = low + tl.sum((token < query_row + KEYS).to(tl.int32), 0)
    dk_sum, dv_sum = _absorb(
        dk_sum, dv_sum, keys, values, q, do, lse, delta, gates, tables[0], low, inside, query_row,
        kv_head, sizes[1], strides, scale2, True, ALIKE, WIDE, PRECISION, CUT, QUERIES,
    )  # fmt: skip
    dk_sum, dv_sum = _absorb(
        dk_sum, dv_sum, keys, values, q, do, lse, delta, gates, tables[0], inside, high, query_row,
        kv_head, sizes[1], strides, scale2, False, ALIKE, WIDE, PRECISION, CUT, QUERIES,
    )  # fmt: skip
    dk_sum *= scale
    if count > 1:
        last_partial = tl.load(tables[4] + number)
        at = ((last_partial - count + which).to(tl.int64) * PARTS + part) * (KEYS * (D + DV))
        _store(partial + at, dk_sum, D + DV, KEYS, D)
        _store(partial + at + D, dv_sum, D + DV, KEYS, DV)
    else:
        out = row * sizes[1] + kv_head
        _store(dk + out * D, dk_sum, sizes[1] * D, left, D)
        _store(dv + out * DV, dv_sum, sizes[1] * DV, left, DV)


@triton.jit
def _absorb(
    dk_sum, dv_sum, keys, values, q, do, lse, delta, gates, tokens, low, high, first_row,
    kv_head, kv_heads, strides, scale2,
    CAUSAL: tl.constexpr, ALIKE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    CUT: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Add the contribution of tokens[low:high] to dk_sum / scale and dv_sum.

    first_row is the row of a query at keys[0]; ALIKE: q and do have the same strides. Invalid
    keys, past the end of block or sequence, get undefined sums, which are not stored.
    """
    TOKENS: tl.constexpr = QUERIES.tokens
    HEADS: tl.constexpr = QUERIES.heads
    GROUP: tl.constexpr = QUERIES.group
    CHUNKS: tl.constexpr = QUERIES.chunks
    r = tl.arange(0, QUERIES.rows)
    ahead = 0
    if QUERIES.early:  # all else that is fetched waits for it
        place = low + r // HEADS
        ahead = tl.load(tokens + place, mask=place < high, other=0)
    for i in range(tl.cdiv(high - low, TOKENS) * CHUNKS):
        place = low + i // CHUNKS * TOKENS + r // HEADS
        in_group = i % CHUNKS * HEADS + r % HEADS
        valid = (place < high) & (r < TOKENS * HEADS) & (in_group < GROUP)
        if QUERIES.early:
            token = tl.where(valid, ahead, 0)
            place = low + (i + 1) // CHUNKS * TOKENS + r // HEADS
            ahead = tl.load(tokens + place, mask=place < high, other=0)
        else:
            token = tl.load(tokens + place, mask=valid, other=0)
        head = kv_head * GROUP + in_group
        queries = load_rows(q, token, head, valid, strides[0], CUT.d, WIDE)
        dos = load_rows(do, token, head, valid, strides[0 if ALIKE else 3], CUT.dv, WIDE)
        flat = token * (kv_heads * GROUP) + head
        # 0 in all data of invalid rows: their terms are 0.
        lse2 = tl.load(lse + flat, mask=valid, other=0.0)
        deltas = tl.load(delta + flat, mask=valid, other=0.0)

        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale2  # [KEYS, ROWS]
        if CAUSAL:
            last = (token - first_row).to(tl.int32)
            s = tl.where(tl.arange(0, CUT.keys)[:, None] <= last[None, :], s, float("-inf"))
        p = tl.exp2(s - lse2[None, :])  # finite: the token sees at least the block's first key
        if gates is not None:
            p *= tl.load(gates + flat, mask=valid, other=0.0)[None, :]
        dv_sum = tl.dot(p.to(do.dtype.element_ty), dos, dv_sum, input_precision=PRECISION)
        dp = tl.dot(values, tl.trans(dos), input_precision=PRECISION)
        ds = p * (dp - deltas[None, :])
        dk_sum = tl.dot(ds.to(q.dtype.element_ty), queries, dk_sum, input_precision=PRECISION)
    return dk_sum, dv_sum


@triton.jit
def _sum_partials(
    dk, dv, partial, tables, axis, tokens, sizes,
    SUMMED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of SUMMED keys of a block from its tasks' partial sums, in order."""
    ROWS: tl.constexpr = CUT.parts * CUT.keys
    D: tl.constexpr = CUT.d
    DV: tl.constexpr = CUT.dv
    first = tl.program_id(0) * SUMMED
    number = first // ROWS
    count = tl.cdiv(tl.load(tables[5] + number) - tl.load(tables[1] + number), CUT.task)
    if count <= 1:
        return
    part = first % ROWS // SUMMED
    _, start, first_key, left, kv_head = _block(
        number, part, axis, tokens, sizes, SUMMED, CUT.packed
    )
    if left <= 0:
        return
    n = first % ROWS + tl.arange(0, SUMMED)
    d = tl.arange(0, padded(D))
    e = tl.arange(0, padded(DV))
    dk_sum = tl.zeros([SUMMED, padded(D)], tl.float32)
    dv_sum = tl.zeros([SUMMED, padded(DV)], tl.float32)
    at = tl.load(tables[4] + number) - count
    source = partial + at.to(tl.int64) * (ROWS * (D + DV)) + (n * (D + DV))[:, None]
    for _ in tl.range(count, num_stages=4):
        dk_sum += tl.load(source + d[None, :], mask=(d < D)[None, :], other=0.0)
        dv_sum += tl.load(source + D + e[None, :], mask=(e < DV)[None, :], other=0.0)
        source += ROWS * (D + DV)
    out = (start + first_key) * sizes[1] + kv_head
    _store(dk + out * D, dk_sum, sizes[1] * D, left, D)
    _store(dv + out * DV, dv_sum, sizes[1] * DV, left, DV)


@triton.jit
def _block(number, part, axis, tokens, sizes, KEYS: tl.constexpr, PACKED: tl.constexpr):
    """Keys of part `part` of the block of list `number`.

    Returns (sequence, its first row, first key in it, keys up to its or the block's end, KV
    head); a block beyond the last one of a packed batch has no keys.
    """
    sequence, _, blocks, block = locate(number % sizes[0], axis[0], axis[1], axis[2], 1, PACKED)
    start, rows = extent(sequence, tokens[0], tokens[1], PACKED)
    first_key = block * sizes[2] + part * KEYS
    left = tl.minimum(tl.minimum(rows, (block + 1) * sizes[2]) - first_key, KEYS)
    return sequence, start, first_key, tl.where(block < blocks, left, 0), number // sizes[0]


@triton.jit
def _store(x, values, stride, left, D: tl.constexpr):
    """Write the first `left` rows of values [KEYS, padded D] to x, `stride` apart."""
    n = tl.arange(0, values.shape[0])
    d = tl.arange(0, padded(D))
    mask = (n < left)[:, None]
    if padded(D) > D:
        mask = mask & (d < D)[None, :]
    x += n.to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(x, values.to(x.dtype.element_ty), mask=mask)
