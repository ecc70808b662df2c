"""Division of a sequence among ranks: a chunk of its head and a chunk of its tail for each.

A sequence is cut into 2P chunks of equal length, and rank r of P has chunks r and 2P - 1 - r, in
this order: under a causal mask every rank then has the same number of (query, key) pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int, Int64
from torch import Tensor

IGNORED = -100  # target of a padded token, which cross_entropy does not score


@dataclass(frozen=True)
class Layout:
    """Chunks of one sequence of `tokens` tokens, padded at its end to 2 `ranks` `chunk`."""

    tokens: int
    ranks: int
    chunk: int  # tokens of one chunk

    @property
    def padded(self) -> int:
        """Number of tokens on all ranks together."""
        return 2 * self.ranks * self.chunk

    def chunks(self, rank: int) -> tuple[slice, slice]:
        """Token ranges of a rank's head and tail chunk."""
        starts = (rank * self.chunk, (2 * self.ranks - 1 - rank) * self.chunk)
        return tuple(slice(start, start + self.chunk) for start in starts)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Int64[Tensor, " TL"]:
        """Token indices of a rank's TL = 2 chunk rows, in their order."""
        rows = (torch.arange(s.start, s.stop, device=device) for s in self.chunks(rank))
        return torch.cat(list(rows))

    def shard(self, x: Tensor, rank: int, dim: int = 1, fill: float = 0) -> Tensor:
        """A rank's rows of x, which has all `tokens` along `dim`; padded rows have `fill`."""
        if missing := self.padded - x.shape[dim]:
            shape = list(x.shape)
            shape[dim] = missing
            x = torch.cat([x, x.new_full(shape, fill)], dim)
        return torch.cat([x.narrow(dim, s.start, self.chunk) for s in self.chunks(rank)], dim)

    def natural(self, shards: Sequence[Tensor] | Tensor, dim: int = 1) -> Tensor:
        """Tokens in order along `dim`, padding included, from the ranks' rows in rank order."""
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([h for h, _ in halves] + [t for _, t in reversed(halves)], dim)

    def add_by_rank(self, out: Tensor, long: Tensor, short: Tensor) -> None:
        """Write the sum of two tensors of rows from the sequence's begin on, [B, S, ...] each, to
        every rank's rows out [P, B, 2 chunk, ...], in the dtype of `out`; zeros behind both. The
        longer one comes first."""
        for rank in range(self.ranks):
            for half, rows in enumerate(self.chunks(rank)):
                to = out[rank, :, half * self.chunk : (half + 1) * self.chunk]
                count = max(0, min(self.chunk, long.shape[1] - rows.start))
                to[:, :count].copy_(long[:, rows.start : rows.start + count])
                to[:, count:].zero_()
                both = max(0, min(self.chunk, short.shape[1] - rows.start))
                to[:, :both].add_(short[:, rows.start : rows.start + both])


def layout_of(tokens: int, ranks: int, multiple: int = 1) -> Layout:
    """Layout of a sequence over `ranks`, whose chunks are the shortest multiples of `multiple`.

    Raises ValueError if a rank would have no token.
    """
    for name, value in (("tokens", tokens), ("ranks", ranks), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    blocks = -(-tokens // multiple)
    if blocks < ranks:
        raise ValueError(
            f"{tokens} tokens are {blocks} block(s) of {multiple} and there are {ranks} ranks: "
            f"some would have no token; at most {blocks} rank(s), or more than "
            f"{(ranks - 1) * multiple} tokens would do"
        )
    return Layout(tokens, ranks, -(-blocks // (2 * ranks)) * multiple)


class Sharded(NamedTuple):
    """A rank's rows of a batch; `cu_seqlens` are of the whole sequence, padding included."""

    tokens: Tensor  # [B, TL]
    targets: Int64[Tensor, "B TL"] | None
    positions: Int64[Tensor, " TL"]  # indices of the rows in the sequence
    cu_seqlens: Int[Tensor, " N1"] | None
    layout: Layout


def shard_sequence(
    tokens: Tensor,
    targets: Int64[Tensor, "B T"] | None = None,
    *,
    rank: int,
    ranks: int,
    multiple: int = 64,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
) -> Sharded:
    """Rows of rank `rank` of `ranks` of tokens [B, T] (ids) or [B, T, E] and their targets.

    multiple: chunks have a multiple of so many tokens, of which `select_block` is a good choice.
    T is padded to 2 `ranks` chunks with zeros, targets with -100, which no loss scores; with
    `cu_seqlens` (packed sequences) the padding becomes a sequence of its own. Targets are shifted
    before they are cut: row t's target is token t + 1, which may lie on another rank.

    Raises ValueError for targets of another shape and for too few tokens for the ranks.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is not one of {ranks} rank(s), 0 .. {ranks - 1}")
    if targets is not None and targets.shape != tokens.shape[:2]:
        raise ValueError(
            f"targets are {list(targets.shape)} and tokens {list(tokens.shape)}; both must be "
            "[B, T], of the whole sequence"
        )
    layout = layout_of(tokens.shape[1], ranks, multiple)
    if cu_seqlens is not None and layout.padded > layout.tokens:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([layout.padded])])
    return Sharded(
        layout.shard(tokens, rank),
        None if targets is None else layout.shard(targets, rank, fill=IGNORED),
        layout.positions(rank, tokens.device),
        cu_seqlens,
        layout,
    )
