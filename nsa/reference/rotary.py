"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split as in Llama."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_tables(
    positions: int,
    head_dim: int,
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [positions, head_dim / 2]: pair i at t turns by (t / scale) base^(-2i/D).

    A scale above 1 is position interpolation (arXiv 2306.15595): a model that was trained on T
    positions reads scale T of them without an angle that it has not met.

    Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"rotary needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    times = torch.arange(positions, device=device, dtype=dtype) / scale
    angles = torch.outer(times, base**-exponents)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B T H D"],
    cos: Float[Tensor, "P HALF"],
    sin: Float[Tensor, "P HALF"],
    positions: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """x turned by its position: token t stands at positions[t], or at t. Dtype in, dtype out."""
    if positions is None:
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    else:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, D/2]
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
