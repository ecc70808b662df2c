"""Columns of a batch: tokens and padding, positions, and starts of packed sequences."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nsa.hf.cache import GenerationCache


@dataclass(frozen=True)
class Columns:
    """Tokens [B, T] or embeddings [B, T, E], each sequence's first and padding behind.

    counts: number of real ones, as in `NSACache`. order: new index of each column of the
    input. Both are None if all are real.
    """

    tokens: Tensor
    counts: Tensor | list[int] | None = None
    order: Int[Tensor, "B T"] | None = None

    @staticmethod
    def of(given: Tensor, real: Bool[Tensor, "B T"] | None) -> "Columns":
        """Columns of `given`, of which `real` are tokens; None: all."""
        if real is None:
            return Columns(given)
        wide = real if given.dim() == 2 else real[..., None]
        tokens = given.masked_fill(~wide, 0)
        if tokens.shape[1] == 1:
            return Columns(tokens, real[:, 0].int())
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        counts = None if torch.compiler.is_compiling() else real.sum(1).tolist()
        return Columns(_taken(tokens, order), counts, order.argsort(dim=1))

    def back(self, x: Tensor) -> Tensor:
        """Reorder x to the columns of the input."""
        return x if self.order is None else _taken(x, self.order)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    if x.dim() == 3:
        order = order[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, order)


def check_mask(
    given: Tensor, mask: Tensor | None, cache: GenerationCache | None
) -> Bool[Tensor, "B T"] | None:
    """Mask of new columns that are tokens; None: all. ValueError for masks of other shapes."""
    if mask is None:
        return None
    new, before = given.shape[1], cache.columns if cache is not None else 0
    lengths = (before + new, new) if before else (new,)  # a set would specialize on one T
    wanted = [(given.shape[0], n) for n in lengths]
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in wanted:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        reason = ""
        if isinstance(mask, Tensor) and mask.dim() == 4:
            reason = (
                "; NSA's branches choose their own keys, so that a mask of queries by keys has no "
                "meaning here: packed sequences are told by position_ids or cu_seq_lens_q"
            )
        raise ValueError(
            f"attention_mask has shape {shape} and must be [B, T] = "
            f"{' or '.join(map(str, wanted))}: 0 where there is no token{reason}"
        )
    real = mask[:, -new:].to(given.device).bool()
    # One column, and a traced graph, are checked without waiting for the device.
    if new == 1 or torch.compiler.is_compiling():
        return real
    return None if bool(real.all()) else real


def borders(
    positions: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None
) -> Int[Tensor, " N1"] | None:
    """cu_seqlens [N + 1] int32 of the concatenated rows, split where positions restart in a row;
    None if no row holds two sequences.

    Padding becomes a separate sequence. ValueError for positions that do not count up from 0,
    and while torch.compile traces, which cannot read them.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "torch.compile cannot read where position_ids begin again; leave them out, or give "
            "cu_seq_lens_q for packed sequences"
        )
    begins = positions[:, 1:] != positions[:, :-1] + 1
    turns = torch.zeros_like(begins)
    if real is not None:
        begins = begins & real[:, 1:] & real[:, :-1]
        turns = real[:, 1:] != real[:, :-1]
    if not bool(begins.any()):
        return None
    first = torch.ones_like(positions[:, :1], dtype=torch.bool)
    starts = torch.cat([first, begins | turns], dim=1)
    told = starts if real is None else starts & real
    if bool((positions[told] != 0).any()):
        raise ValueError(
            "position_ids must count up by one and begin again at 0, where the next packed "
            f"sequence begins; one begins at {int(positions[told].max())}"
        )
    found = starts.flatten().nonzero().flatten()
    end = found.new_tensor([starts.numel()])
    return torch.cat([found, end]).to(torch.int32)


def check_positions(
    given: Int[Tensor, "B T"], mask: Tensor | None, cache: GenerationCache | None
) -> None:
    """Raise ValueError unless these are the positions that the model computes itself."""
    first = cache.columns if cache is not None else 0
    new = given.shape[-1]
    if torch.compiler.is_compiling():
        return
    if mask is None:
        wrong = given != first + torch.arange(new, device=given.device)
    else:
        here = mask[:, -new:].to(given.device).bool()
        wrong = (given != (mask.to(given.device).long().cumsum(-1) - 1)[:, -new:]) & here
    if bool(wrong.any()):
        raise ValueError(
            "position_ids differ from 0, 1, ... of each sequence's tokens, which are the "
            "positions here; leave them out, or let each packed sequence begin at 0"
        )
