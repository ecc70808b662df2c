"""Distinct blocks that a tile of neighbouring tokens selects, and the tokens that select each.

Neighbours select mostly the same blocks, so a tile that walks their union loads each block once.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import (
    axis_arguments,
    ceil_div,
    locate,
    next_power_of_two,
    position_of,
)
from nsa.kernels.launch import launch
from nsa.kernels.sequences import Axis, Sequences

CHUNK = 32  # slots that every entry is compared with at a time


@dataclass(frozen=True)
class Unions:
    """For tile i and KV head h: blocks[i, h, : counts[i, h]] and the tokens that select them.

    Bit b of members[i, h, e] is set if the tile's token number b selects blocks[i, h, e].
    Entries past the count are not written.
    """

    tokens_per_tile: int
    blocks: Tensor  # [tiles, HKV, slots] int32
    members: Tensor  # [tiles, HKV, slots] int32
    counts: Tensor  # [tiles, HKV] int32

    def tensors(self) -> list[Tensor]:
        return [self.blocks, self.members, self.counts]


def unions(blocks: Tensor, sequences: Sequences, tokens_per_tile: int) -> Unions:
    """Unions of blocks [tokens, HKV, N] int32 over tiles of neighbouring tokens of one sequence.

    A slot counts if its block starts at or before its token and is not negative; repeats in a
    token count once. Blocks are in the order of their first selection by the tile's tokens, one
    after the other: later tokens never move an earlier token's blocks.
    """
    return nested_unions(blocks, sequences, tokens_per_tile, 1)[1]


@dataclass(frozen=True)
class Layout:
    """Layout of the unions over small tiles, and large ones of `pieces` of them, in one buffer.

    `slots`: slots of a token. Small tile number i * pieces + p is piece p of large tile i.
    """

    tokens: Axis
    kv_heads: int
    slots: int
    tokens_per_tile: int
    pieces: int

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of blocks, members and counts of the small tiles and, if any, the large ones."""
        count = self.tokens.tile_count(self.tokens_per_tile * self.pieces)
        sizes = [(count * self.pieces, self.tokens_per_tile)]
        if self.pieces > 1:
            sizes.append((count, self.tokens_per_tile * self.pieces))
        found = []
        for tiles, tokens in sizes:
            each = tiles, self.kv_heads
            found += [(*each, tokens * self.slots), (*each, tokens * self.slots), each]
        return found

    def elements(self) -> int:
        """Number of int32 elements of the buffer."""
        return sum(_padded(shape) for shape in self.shapes)

    @cached_property
    def places(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(shape, strides, first element) of each tensor in `shapes`."""
        firsts = accumulate((_padded(shape) for shape in self.shapes), initial=0)
        strides = (tuple(prod(shape[i + 1 :]) for i in range(len(shape))) for shape in self.shapes)
        return list(zip(self.shapes, strides, firsts, strict=False))

    def of(self, workspace: Tensor) -> tuple[Unions, Unions | None]:
        """Unions, small and large, in workspace [elements] int32."""
        start = workspace.storage_offset()
        parts = [workspace.as_strided(a, b, start + first) for a, b, first in self.places]
        small = Unions(self.tokens_per_tile, *parts[:3])
        whole = self.tokens_per_tile * self.pieces
        return small, Unions(whole, *parts[3:]) if self.pieces > 1 else None


def laid_out(tokens: Axis, *sizes: int) -> Layout:
    """Return the Layout, cached for dense shapes."""
    known = not tokens.packed and isinstance(tokens.length, int)  # and not while torch traces
    return (_known if known else Layout)(tokens, *sizes)


_known = lru_cache(maxsize=256)(Layout)


def _padded(shape: tuple[int, ...]) -> int:
    """Number of elements padded to a multiple of 16 bytes, Triton's preferred alignment."""
    return ceil_div(prod(shape), 4) * 4


def nested_unions(
    blocks: Tensor, sequences: Sequences, tokens_per_tile: int, pieces: int
) -> tuple[Tensor, Unions, Unions | None]:
    """Unions over small tiles and over large ones of `pieces` of them, in one launch.

    Returns (workspace, see Layout; small; large, or None if large tiles are the same).
    """
    whole = tokens_per_tile * pieces
    if not 1 <= whole <= 32:
        raise ValueError(f"a tile of a union holds 1 to 32 tokens, got {whole}")
    _, kv_heads, slots = blocks.shape
    axis, count = axis_arguments(sequences.queries, whole)
    layout = laid_out(sequences.queries, kv_heads, slots, tokens_per_tile, pieces)
    workspace = blocks.new_empty(layout.elements(), dtype=torch.int32)
    small, large = layout.of(workspace)
    padded = next_power_of_two(whole * slots)
    if count * kv_heads:
        launch(
            _unions, (count * kv_heads,),
            blocks, tuple(small.tensors()), tuple((large or small).tensors()), axis,
            blocks.stride(), count, kv_heads, slots, sequences.config.select_block,
            TOKENS=tokens_per_tile, PIECES=pieces, ENTRIES=padded,
            CHUNK=min(CHUNK, next_power_of_two(slots)), PACKED=sequences.queries.packed,
            num_warps=1 if padded <= 64 else 4,
        )  # fmt: skip
    return workspace, small, large


@triton.jit
def _unions(
    blocks, small, large, axis, strides, tiles, kv_heads, slots, select_block,
    TOKENS: tl.constexpr, PIECES: tl.constexpr, ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One program: the unions of one large tile and of its pieces for one KV head."""
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(0) // tiles
    sequence, start, rows, first = locate(tile, axis[0], axis[1], axis[2], TOKENS * PIECES, PACKED)
    begin = position_of(sequence, axis[3])
    source = blocks + kv_head.to(tl.int64) * strides[1]
    entry = tl.arange(0, ENTRIES)
    token, slot = entry // slots, entry % slots
    inside = token < TOKENS * PIECES
    mine = _slots(source, start, rows, begin, first + token, slot, inside, strides, select_block)
    counts = mine >= 0
    bits = tl.zeros([ENTRIES], tl.int32)  # bit t: token t of the tile names this block
    for other in range(TOKENS * PIECES):
        found = tl.full([ENTRIES], 0x7FFFFFFF, tl.int32)
        for low in range(0, slots, CHUNK):
            at = low + tl.arange(0, CHUNK)
            row = first + other + tl.zeros_like(at)
            valid = at < slots
            theirs = _slots(source, start, rows, begin, row, at, valid, strides, select_block)
            # [CHUNK, ENTRIES], so that a thread has all of CHUNK and shares nothing for the least
            same = tl.where(theirs[:, None] == mine[None, :], at[:, None], 0x7FFFFFFF)
            found = tl.minimum(found, tl.min(same, 0))
        bits |= (found < slots).to(tl.int32) << other
        counts &= (token != other) | (found == slot)  # not a second time by the same token
    earlier = bits & ((1 << token) - 1)
    size = TOKENS * PIECES * slots
    new = counts & (earlier == 0)
    _store(large, tile, kv_head, kv_heads, size, mine, bits, new)
    if PIECES > 1:
        piece = token // TOKENS
        new = counts & ((earlier >> (piece * TOKENS)) == 0)
        bits = (bits >> (piece * TOKENS)) & ((1 << TOKENS) - 1)
        for p in range(PIECES):
            small_tile = tile * PIECES + p
            size = TOKENS * slots
            own = new & (piece == p)
            _store(small, small_tile, kv_head, kv_heads, size, mine, bits, own)


@triton.jit
def _slots(source, start, rows, begin, token, slot, valid, strides, select_block):
    """Blocks in the given slots of the given tokens, -1 for slots that do not count.

    begin: position of token 0.
    """
    valid &= token < rows
    row = start + token
    block = tl.load(source + row * strides[0] + slot * strides[2], mask=valid, other=-1)
    return tl.where(valid & (block >= 0) & (block <= (begin + token) // select_block), block, -1)


@triton.jit
def _store(out, tile, kv_head, kv_heads, size, block, bits, new):
    """Write a tile's union: the blocks that are new to it, in order."""
    at = tile.to(tl.int64) * kv_heads + kv_head
    place = at * size + tl.cumsum(new.to(tl.int32), 0) - 1
    tl.store(out[0] + place, block, mask=new)
    tl.store(out[1] + place, bits, mask=new)
    tl.store(out[2] + at, tl.sum(new.to(tl.int32), 0))
