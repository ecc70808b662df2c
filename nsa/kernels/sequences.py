"""Locations of sequences on the flat token axis of every kernel, without a sync of the GPU."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nsa.blocks import count_compressed, count_selectable
from nsa.config import NSAConfig


@dataclass(frozen=True)
class Axis:
    """Concatenated sequences on one axis: of tokens, or of their compressed keys.

    Dense: `count` sequences of `length` rows each and no `bounds`. Packed: row `bounds[i]` is the
    first of sequence i, and `length` is an upper bound on their lengths. The first row of sequence
    i is at position starts[i] of it, 0 without `starts`.
    """

    count: int
    length: int
    bounds: Tensor | None = None  # [count + 1] int32
    starts: Tensor | None = None  # [count] int32

    @property
    def packed(self) -> bool:
        return self.bounds is not None

    @property
    def rows(self) -> int:
        """Number of rows of the flat axis; an upper bound if packed."""
        return self.length if self.packed else self.count * self.length

    def tile_count(self, size: int) -> int:
        """Number of tiles of `size` rows; an upper bound over all possible lengths if packed."""
        if self.packed:
            return self.rows // size + self.count
        return self.count * -(-self.length // size)

    def tiles(self, size: int) -> tuple[Tensor | None, int]:
        """(table, count) of the tiles of `size` rows, none of which spans two sequences.

        Packed, `table` [count, 2] int32 holds each tile's sequence and its number there; unneeded
        tiles start past their sequence's end.
        """
        if not self.packed:
            return None, self.tile_count(size)
        needed = (self.bounds.diff() + size - 1) // size
        ends = needed.cumsum(0)
        tile = torch.arange(self.tile_count(size), device=ends.device)
        sequence = torch.searchsorted(ends, tile, right=True).clamp(max=self.count - 1)
        number = tile - (ends - needed)[sequence]
        return torch.stack([sequence, number], dim=1).int(), tile.shape[0]


@dataclass(frozen=True)
class Sequences:
    """Sequences of one call and the axes derived from them."""

    tokens: Axis  # that have keys
    config: NSAConfig
    offset: Axis | None = None  # queries, if they have another axis

    @property
    def queries(self) -> Axis:
        """Axis of queries: that of the tokens unless they begin at an offset."""
        return self.offset or self.tokens

    @cached_property
    def compressed(self) -> Axis:
        """Axis of compressed keys."""
        tokens, config = self.tokens, self.config
        if not tokens.packed:
            return Axis(tokens.count, count_compressed(tokens.length, config))
        overhang = config.compress_block - config.compress_stride
        counts = (tokens.bounds.diff() - overhang).clamp(min=0) // config.compress_stride
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        # A sequence of n tokens has at most n / stride keys, so together they have no more.
        return Axis(tokens.count, tokens.length // config.compress_stride, bounds)

    @cached_property
    def selectable(self) -> Axis:
        """Axis of selectable blocks."""
        tokens, config = self.tokens, self.config
        if not tokens.packed:
            return Axis(tokens.count, count_selectable(tokens.length, config))
        counts = (tokens.bounds.diff() + config.select_block - 1) // config.select_block
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return Axis(tokens.count, tokens.length // config.select_block + tokens.count, bounds)

    @property
    def index_bits(self) -> int:
        """Number of bits of the largest index of a selectable block."""
        return max(1, (count_selectable(self.tokens.length, self.config) - 1).bit_length())


def dense(batch: int, tokens: int, config: NSAConfig) -> Sequences:
    """Create `batch` sequences of `tokens` tokens each."""
    return Sequences(Axis(batch, tokens), config)


def packed(cu_seqlens: Tensor, tokens: int, config: NSAConfig) -> Sequences:
    """Create sequences with bounds cu_seqlens [N + 1] on an axis of `tokens` tokens."""
    return Sequences(Axis(cu_seqlens.shape[0] - 1, tokens, cu_seqlens.int()), config)
