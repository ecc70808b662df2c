"""Which tokens selected a block: the selection turned around, cut into tasks of bounded length."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import axis_arguments, locate
from nsa.kernels.sequences import Sequences


@dataclass(frozen=True)
class Inverse:
    """For list number i = h NB + j, of KV head h and block j of all sequences' blocks:

    tokens[starts[i] : starts[i + 1]] are the rows of the token axis that selected it, ascending,
    each once. Tasks are numbered list by list, each list having at least one; ends[i] is the first
    task after those of list i. `task_list` holds each task's list, and the number of lists for the
    tasks beyond the last. Lists of more than one task own partial sums; partial_ends[i] is the
    first one after those of list i.
    """

    task: int  # tokens of a task
    tokens: Tensor  # [tokens * HKV * N] int32
    starts: Tensor  # [lists + 1] int32
    ends: Tensor  # [lists]
    task_list: Tensor  # [bound on tasks] int32
    partial_ends: Tensor  # [lists]
    partials: int  # a bound, whatever the selection


def inverse(blocks: Tensor, sequences: Sequences, task: int) -> Inverse:
    """The inverse of blocks [tokens, HKV, N] int32, in the same order on every call.

    A slot counts when its block starts at or before its token and is not negative, the first time
    that the token names it.
    """
    _, kv_heads, slots = blocks.shape
    lists = kv_heads * sequences.selectable.rows
    keys = _keys(blocks, sequences, lists)
    # Stable, and slots lie token after token: a list's tokens stay ascending.
    keys, order = torch.sort(keys.view(-1), stable=True)
    bounds = torch.arange(lists + 1, device=keys.device, dtype=keys.dtype)
    starts = torch.searchsorted(keys, bounds, out_int32=True)
    counts = (starts.diff() + (task - 1)) // task
    ends = counts.clamp(min=1).cumsum(0)
    partial_ends = (counts * (counts > 1)).cumsum(0)
    bound = lists + keys.numel() // task
    numbers = torch.arange(bound, device=keys.device)
    return Inverse(
        task,
        (order // (kv_heads * slots)).int(),
        starts,
        ends,
        torch.searchsorted(ends, numbers, right=True, out_int32=True),
        partial_ends,
        # A list of several tasks has more than `task` tokens, and at most one task is not full.
        min(bound, 2 * (keys.numel() // task)),
    )


def _keys(blocks: Tensor, sequences: Sequences, lists: int) -> Tensor:
    """Each slot's list [tokens, HKV, N], `lists` where it does not count."""
    # The narrower the integers, the fewer passes a radix sort makes.
    dtype = torch.int16 if lists < torch.iinfo(torch.int16).max else torch.int32
    keys = torch.full(blocks.shape, lists, dtype=dtype, device=blocks.device)
    _, kv_heads, slots = blocks.shape
    padded = triton.next_power_of_2(kv_heads * slots)
    size = max(1, 1024 // padded)
    axis, count = axis_arguments(sequences.tokens, size)
    selectable = sequences.selectable
    if count:
        _list_numbers[(count,)](
            blocks, keys, axis, (selectable.bounds, selectable.length), selectable.rows,
            blocks.stride(), kv_heads, slots, sequences.config.select_block,
            TOKENS=size, ENTRIES=padded, PACKED=sequences.tokens.packed,
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
    valid &= (block >= 0) & (block <= (position // select_block)[:, None])
    for slot in range(slots - 1):
        later = valid & (slot < entry % slots)[None, :]
        other = (row * strides[0])[:, None] + (kv_head * strides[1] + slot * strides[2])[None, :]
        valid &= tl.load(blocks + other, mask=later, other=-1) != block
    before = tl.load(selectable[0] + sequence) if PACKED else sequence * selectable[1]
    number = kv_head[None, :] * all_blocks + before + block
    out = (row * kv_heads * slots)[:, None] + entry[None, :]
    tl.store(keys + out, number.to(keys.dtype.element_ty), mask=valid)
