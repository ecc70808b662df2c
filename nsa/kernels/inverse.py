"""Inverse of the selection: the tokens that selected each block, in tasks of bounded length."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import (
    axis_arguments,
    ceil_div,
    extent,
    locate,
    next_power_of_two,
    position_of,
)
from nsa.kernels.launch import launch
from nsa.kernels.sequences import Sequences

CHUNK = 1024  # lists or slots that a program takes at a time
SCAN = 4096  # slots that a program of the scan takes at a time
# Tokens of one task; a block chosen by more is summed from parts.
LEAST_TASK, MOST_TASK, TASKS = 512, 1024, 1024
SCANNED = 2048  # largest number of tasks that the scan, which has no tighter bound, allocates


@dataclass(frozen=True)
class Inverse:
    """Token lists; list number i = h NB + j is that of KV head h and block j of all sequences:

    tokens[starts[i] : stops[i]] are the rows of the token axis that selected it, ascending and
    unique. Tasks are numbered list by list, at least one per list; ends[i] is the first task after
    those of list i, and task_list[t] the list of task t. The nonempty tasks are the last ones of a
    list. Lists with tokens for more than one task have partial sums; partial_ends[i] is the first
    one after those of list i.
    """

    tokens: Tensor  # [any] int32
    starts: Tensor  # [lists] int32
    stops: Tensor  # [lists] int32
    ends: Tensor  # [lists] int32
    partial_ends: Tensor  # [lists] int32
    task_list: Tensor  # [bound on tasks] int32; not written past the last task
    partials: int  # a bound on partial sums, whatever the selection
    task: int  # the most tokens of one task


def inverse(
    blocks: Tensor,
    sequences: Sequences,
    task: int | None = None,
    *,
    scanned: bool | None = None,
) -> Inverse:
    """Invert blocks [tokens, HKV, N] int32 in tasks of up to `task` tokens, None: by size.

    A slot counts if its block starts at or before its token and is not negative; repeats in a token
    count once. Deterministic. `scanned` chooses between a scan of all tokens for each list, in one
    launch, and a sort; None: by size.
    """
    if task is None:  # short ones where there is little to do, so that all processors have a share
        wanted = next_power_of_two(max(1, blocks.numel() // TASKS))
        task = min(max(wanted, LEAST_TASK), MOST_TASK)
    most = sequences.selectable.rows * blocks.shape[1] * ceil_div(sequences.queries.length, task)
    if most <= SCANNED if scanned is None else scanned:
        return _by_scans(blocks, sequences, task)
    return _by_sorting(blocks, sequences, task)


def _by_scans(blocks: Tensor, sequences: Sequences, task: int) -> Inverse:
    """Inverse by scans: every list has room for all tokens of a sequence, and tasks for them."""
    _, kv_heads, slots = blocks.shape
    queries = sequences.queries
    room = queries.length
    lists, tasks = kv_heads * sequences.selectable.rows, max(1, ceil_div(room, task))
    tokens, starts, stops, ends, partial_ends, task_list = (
        torch.empty(size, dtype=torch.int32, device=blocks.device)
        for size in (lists * room, lists, lists, lists, lists, lists * tasks)
    )
    axis, _ = axis_arguments(sequences.selectable, 1)
    padded = next_power_of_two(slots)
    if lists:
        launch(
            _scan, (lists,),
            blocks, (tokens, starts, stops, ends, partial_ends, task_list), axis,
            (queries.bounds, room, queries.starts), blocks.stride(),
            (sequences.selectable.rows, slots, sequences.config.select_block), task, tasks,
            TOKENS=max(1, SCAN // padded), SLOTS=padded, TASKS=next_power_of_two(tasks),
            PACKED=queries.packed,
        )  # fmt: skip
    partials = lists * tasks if tasks > 1 else 0
    return Inverse(tokens, starts, stops, ends, partial_ends, task_list, partials, task)


@triton.jit
def _scan(
    blocks, out, axis, tokens, strides, sizes, task, tasks,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, TASKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: one list, scanned TOKENS tokens at a time, and its tasks."""
    number = tl.program_id(0)
    sequence, _, known, block = locate(number % sizes[0], axis[0], axis[1], axis[2], 1, PACKED)
    start, rows = extent(sequence, tokens[0], tokens[1], PACKED)
    source = blocks + (number // sizes[0]).to(tl.int64) * strides[1]
    slot = tl.arange(0, SLOTS)
    begin = number * tokens[1]
    end = begin
    begin_row = block * sizes[2]
    if tokens[2] is not None:
        begin_row = tl.maximum(begin_row - position_of(sequence, tokens[2]), 0)
    for low in range(begin_row, tl.where(block < known, rows, 0), TOKENS):
        position = low + tl.arange(0, TOKENS)
        row = start + position
        valid = (position < rows)[:, None] & (slot < sizes[1])[None, :]
        theirs = source + (row * strides[0])[:, None] + (slot * strides[2])[None, :]
        theirs = tl.load(theirs, mask=valid, other=-1)
        hit = tl.max((theirs == block).to(tl.int32), 1)
        place = end + tl.cumsum(hit, 0) - 1
        tl.store(out[0] + place, row.to(tl.int32), mask=hit > 0)
        end += tl.sum(hit, 0)
    tl.store(out[1] + number, begin)
    tl.store(out[2] + number, end)
    tl.store(out[3] + number, (number + 1) * tasks)
    tl.store(out[4] + number, number * tasks + tl.cdiv(end - begin, task))
    t = tl.arange(0, TASKS)
    tl.store(out[5] + number * tasks + t, number + t * 0, mask=t < tasks)


def _by_sorting(blocks: Tensor, sequences: Sequences, task: int) -> Inverse:
    """Inverse by a sort of all slots: concatenated lists."""
    _, kv_heads, slots = blocks.shape
    lists = kv_heads * sequences.selectable.rows
    keys = _keys(blocks, sequences, lists)
    # Stable, and slots lie token after token: a list's tokens stay ascending.
    keys, order = torch.sort(keys.view(-1), stable=True)
    bounds = torch.arange(lists + 1, device=keys.device, dtype=keys.dtype)
    starts = torch.searchsorted(keys, bounds, out_int32=True)
    full_tasks = keys.numel() // task
    shapes = keys.numel(), lists, lists, lists + full_tasks
    tokens, ends, partial_ends, task_list = (starts.new_empty(shape) for shape in shapes)
    if lists:
        launch(
            _tasks, (1 + ceil_div(keys.numel(), CHUNK),),
            order, starts, tokens, ends, partial_ends, task_list, keys.numel(), lists, task,
            kv_heads * slots, CHUNK=CHUNK,
        )  # fmt: skip
    # A list of several tasks has more than `task` tokens, and at most one of its tasks is not full.
    partials = min(lists + full_tasks, 2 * full_tasks)
    return Inverse(tokens, starts[:-1], starts[1:], ends, partial_ends, task_list, partials, task)


@triton.jit
def _tasks(
    order, starts, tokens, ends, partial_ends, task_list, entries, lists, task, slots,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The first program: the tasks of all lists. Each other: the tokens of CHUNK sorted slots."""
    program = tl.program_id(0)
    if program > 0:
        entry = (program - 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        inside = entry < entries
        token = tl.load(order + entry, mask=inside, other=0) // slots
        tl.store(tokens + entry, token.to(tl.int32), mask=inside)
    else:
        done = tl.zeros([], tl.int32)
        partials = tl.zeros([], tl.int32)
        for low in range(0, lists, CHUNK):
            number = low + tl.arange(0, CHUNK)
            inside = number < lists
            start = tl.load(starts + number, mask=inside, other=0)
            count = tl.cdiv(tl.load(starts + number + 1, mask=inside, other=0) - start, task)
            several = tl.where(count > 1, count, 0)
            tl.store(partial_ends + number, partials + tl.cumsum(several, 0), mask=inside)
            partials += tl.sum(several, 0)
            count = tl.where(inside, tl.maximum(count, 1), 0)
            end = done + tl.cumsum(count, 0)
            tl.store(ends + number, end, mask=inside)
            done += tl.sum(count, 0)
            for i in range(tl.max(count, 0)):
                tl.store(task_list + end - 1 - i, number, mask=i < count)


def _keys(blocks: Tensor, sequences: Sequences, lists: int) -> Tensor:
    """List number of each slot [tokens, HKV, N], `lists` where the slot does not count."""
    # The narrower the integers, the fewer passes a radix sort makes.
    dtype = torch.int16 if lists < torch.iinfo(torch.int16).max else torch.int32
    keys = torch.full(blocks.shape, lists, dtype=dtype, device=blocks.device)
    _, kv_heads, slots = blocks.shape
    padded = next_power_of_two(kv_heads * slots)
    size = max(1, 1024 // padded)
    axis, count = axis_arguments(sequences.queries, size)
    selectable = sequences.selectable
    if count:
        launch(
            _list_numbers, (count,),
            blocks, keys, axis, (selectable.bounds, selectable.length), selectable.rows,
            blocks.stride(), kv_heads, slots, sequences.config.select_block,
            TOKENS=size, ENTRIES=padded, PACKED=sequences.queries.packed,
        )  # fmt: skip
    return keys


@triton.jit
def _list_numbers(
    blocks, keys, axis, selectable, all_blocks, strides, kv_heads, slots, select_block,
    TOKENS: tl.constexpr, ENTRIES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: the list numbers of all slots of a few tokens."""
    sequence, start, rows, first = locate(
        tl.program_id(0), axis[0], axis[1], axis[2], TOKENS, PACKED
    )
    position = first + tl.arange(0, TOKENS)
    entry = tl.arange(0, ENTRIES)
    kv_head = entry // slots
    valid = (position < rows)[:, None] & (entry < kv_heads * slots)[None, :]
    row = start + position
    at = (row * strides[0])[:, None] + (kv_head * strides[1] + entry % slots * strides[2])[None, :]
    block = tl.load(blocks + at, mask=valid, other=-1)
    own = (position_of(sequence, axis[3]) + position) // select_block
    valid &= (block >= 0) & (block <= own[:, None])
    for slot in range(slots - 1):
        later = valid & (slot < entry % slots)[None, :]
        other = (row * strides[0])[:, None] + (kv_head * strides[1] + slot * strides[2])[None, :]
        valid &= tl.load(blocks + other, mask=later, other=-1) != block
    before = tl.load(selectable[0] + sequence) if PACKED else sequence * selectable[1]
    number = kv_head[None, :] * all_blocks + before + block
    out = (row * kv_heads * slots)[:, None] + entry[None, :]
    tl.store(keys + out, number.to(keys.dtype.element_ty), mask=valid)
