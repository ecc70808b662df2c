"""Positions of the tokens of a batch, and rotary embedding of queries and keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nsa.attention.backends import triton
from nsa.attention.transforms import active
from nsa.model.config import ModelConfig
from nsa.parallel.mesh import ContextParallel
from nsa.reference.rotary import rotary_tables, rotate


@dataclass(frozen=True, eq=False)  # torch 2.11 hashes it while it compiles, before it has fields
class Rotary:
    """Tables of angles, computed once for all layers of a forward; calling it rotates q and k."""

    cos: Tensor  # [T, D/2] fp32
    sin: Tensor  # [T, D/2] fp32
    # int64 within each sequence, [T], or [B, T] where sequences differ; None: 0 .. T-1
    positions: Tensor | None = None

    def __call__(self, *xs: Float[Tensor, "B T _ D"]) -> list[Float[Tensor, "B T _ D"]]:
        """Rotate each x; rotate queries and keys in one call for speed."""
        if self.positions is not None and self.positions.dim() == 2:
            end_to_end = Rotary(self.cos, self.sin, self.positions.flatten())
            turned = end_to_end(*(x.flatten(0, 1)[None] for x in xs))
            return [x.unflatten(1, self.positions.shape).squeeze(0) for x in turned]
        if not has_kernel(xs[0]):
            return [rotate(x, self.cos, self.sin, positions=self.positions) for x in xs]
        from nsa.kernels import rotary

        return rotary.rotate(self.cos, self.sin, self.positions, False, list(xs))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "Rotary":
        """Copy the tables to the device; accelerate calls it for models on several devices."""
        if self.cos.device == torch.device(device):
            return self
        tables = self.cos, self.sin, self.positions
        return Rotary(
            *(x if x is None else x.to(device, non_blocking=non_blocking) for x in tables)
        )


def has_kernel(x: Tensor) -> bool:
    """True if one kernel rotates x; torch.compile fuses the plain form itself."""
    return (
        x.is_cuda
        and triton.INSTALLED
        and x.dtype in triton.DTYPES
        and not torch.compiler.is_compiling()
        and not active()
        and torch.cuda.get_device_capability(x.device) >= triton.CAPABILITY
    )


def rotary_for(
    config: ModelConfig,
    tokens: int,
    device: torch.device,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    context: ContextParallel | None = None,
) -> Rotary:
    """Rotary tables of `tokens` tokens; with `cu_seqlens`, positions restart in each sequence.
    With `context`, the tables are of the sequence of all its ranks, and positions those of this
    rank's `tokens` rows in it.

    Raises ValueError for `cu_seqlens` that are empty or not one-dimensional; the attention checks
    the values.
    """
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) == 0):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; needed is [N + 1] int32, rising from "
            f"0 to T={tokens}, one entry more than there are sequences"
        )
    if context is not None:
        whole = rotary_for(config, tokens * context.ranks, device, cu_seqlens)
        rows = context.layout(tokens).positions(context.rank, device)
        return Rotary(
            whole.cos, whole.sin, rows if whole.positions is None else whole.positions[rows]
        )
    base, scale = config.rope_base, config.rope_scale
    cos, sin = rotary_tables(tokens, config.head_dim, base, device=device, scale=scale)
    if cu_seqlens is None:
        return Rotary(cos, sin)
    index = torch.arange(tokens, device=device)
    borders = cu_seqlens.to(index)
    sequence = torch.searchsorted(borders, index, right=True) - 1
    start = borders[sequence.clamp(min=0)]
    # Clamped, so that illegal borders reach the attention's own check and its message.
    return Rotary(cos, sin, (index - start).clamp(0, tokens - 1))


def rotary_after(
    config: ModelConfig, lengths: Int[Tensor, " B"], capacity: int, tokens: int
) -> Rotary:
    """Rotary tables of the next `tokens` tokens of sequences that have `lengths`; the tables cover
    all `capacity` positions."""
    base, scale, device = config.rope_base, config.rope_scale, lengths.device
    tables = rotary_tables(capacity, config.head_dim, base, device=device, scale=scale)
    return Rotary(*tables, next_positions(lengths, capacity, tokens))


def next_positions(lengths: Int[Tensor, " B"], capacity: int, tokens: int) -> Int[Tensor, "B T"]:
    """Positions of the next `tokens` tokens, clamped to the last position."""
    steps = torch.arange(tokens, device=lengths.device)
    return (lengths.long()[:, None] + steps).clamp(max=capacity - 1)
