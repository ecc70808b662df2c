"""Block arithmetic shared by two or more layers. Plain integers, no tensors.

Positions are 0-based within one sequence. A compressed block i covers the tokens
[i d, i d + l) and a selectable block j covers [j l', (j + 1) l').
"""

from typing import NamedTuple

from nsa.config import NSAConfig


class Span(NamedTuple):
    """Contiguous range of keys that a query sees, in the compressed and the window branch.

    Key s represents the tokens [s stride, s stride + length); the query at position t sees the keys
    that have ended by t, the newest `lookback` of them; None means all. A token is a block of
    length and stride 1.
    """

    length: int = 1
    stride: int = 1
    lookback: int | None = None

    def ended(self, position):
        """Number of keys that have ended by a position, or each of an array; 0 or less if none."""
        return (position + 1 - self.length) // self.stride + 1

    def seen(self, position: int) -> tuple[int, int]:
        """Range [low, high) of the keys that the query at `position` sees."""
        high = max(0, self.ended(position))
        return (0 if self.lookback is None else max(0, high - self.lookback)), high


def compressed_span(config: NSAConfig) -> Span:
    """Span of every compressed block that has ended."""
    return Span(length=config.compress_block, stride=config.compress_stride)


def window_span(config: NSAConfig) -> Span:
    """Span of the newest w tokens, the query's own included."""
    return Span(lookback=config.window)


def count_compressed(tokens: int, config: NSAConfig) -> int:
    """Number of compressed keys of a sequence, C; 0 if it is shorter than one compressed block."""
    if tokens < config.compress_block:
        return 0
    return (tokens - config.compress_block) // config.compress_stride + 1


def count_selectable(tokens: int, config: NSAConfig) -> int:
    """Number of selectable blocks of a sequence, NB; the last one may be partial."""
    return -(-tokens // config.select_block)


def overlap(compressed: int, selectable: int, config: NSAConfig) -> int:
    """Number of strides of d tokens that a compressed and a selectable block share (Eq. 9)."""
    per_compressed = config.compress_block // config.compress_stride
    per_selectable = config.select_block // config.compress_stride
    first = max(compressed, selectable * per_selectable)
    last = min(compressed + per_compressed, (selectable + 1) * per_selectable)
    return max(0, last - first)


def overlap_band(config: NSAConfig) -> tuple[int, list[int]]:
    """Eq. 9 as a band: p_slc[j] = sum_m weights[m] p_cmp[j l'/d + offset + m].

    Returns (offset, weights), the same for every j; l=32, d=16, l'=64 give (-1, [1, 2, 2, 2, 1]).
    """
    per_compressed = config.compress_block // config.compress_stride
    per_selectable = config.select_block // config.compress_stride
    # j is far enough from 0 for the band not to be cut off at the start of the sequence.
    j = per_compressed
    start = j * per_selectable - per_compressed + 1
    weights = [overlap(i, j, config) for i in range(start, (j + 1) * per_selectable)]
    return 1 - per_compressed, weights
