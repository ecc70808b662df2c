"""phi: one compressed key or value from l tokens (Eq. 7)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from nsa.blocks import count_compressed
from nsa.config import PHI_KINDS, NSAConfig
from nsa.reference.rotary import rotate
from nsa.spelling import choice


@dataclass(frozen=True)
class PhiWeights:
    """The learned part of phi, per KV head. `weight1` is [HKV, l*D, D] for linear.

    For mlp, with a GELU between its matrices, the shapes are weight1 [HKV, l*D, HIDDEN],
    bias1 [HKV, HIDDEN], weight2 [HKV, HIDDEN, D], bias2 [HKV, D]; position is [HKV, l, D] for both.
    """

    position: Tensor
    weight1: Tensor
    bias1: Tensor | None = None
    weight2: Tensor | None = None
    bias2: Tensor | None = None


@dataclass(frozen=True)
class Phi:
    """Keys and values of the compressed branch.

    `rotary` is a (cos, sin) pair of tables [T, D/2]: when given, compressed key i is rotated at
    position i d after phi; otherwise keys come rotated, or not at all, from the caller.
    """

    kind: str = "mean"
    key: PhiWeights | None = None
    value: PhiWeights | None = None
    rotary: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        choice("phi kind", self.kind, PHI_KINDS)
        if self.kind != "mean" and (self.key is None or self.value is None):
            raise ValueError(f"phi kind {self.kind!r} needs weights for key and for value")

    def tensors(self) -> list[Tensor]:
        """Every tensor that takes part."""
        weights = [w for w in (self.key, self.value) if w is not None]
        found = [t for w in weights for t in vars(w).values() if t is not None]
        return found + list(self.rotary or ())


def compress_keys(
    k: Float[Tensor, "B T HKV D"], phi: Phi, config: NSAConfig, by: Callable | None = None
) -> Float[Tensor, "B C HKV D"]:
    """The keys of the compressed branch; `by` stands for `compress`."""
    compressed = (by or compress)(k, phi.kind, phi.key, config)
    if phi.rotary is None:
        return compressed
    starts = torch.arange(compressed.shape[1], device=k.device) * config.compress_stride
    return rotate(compressed, *phi.rotary, positions=starts)


def compress_values(
    v: Float[Tensor, "B T HKV DV"], phi: Phi, config: NSAConfig, by: Callable | None = None
) -> Float[Tensor, "B C HKV DV"]:
    """The values of the compressed branch; `by` stands for `compress`."""
    return (by or compress)(v, phi.kind, phi.value, config)


def compress(
    x: Float[Tensor, "B T HKV D"], kind: str, weights: PhiWeights | None, config: NSAConfig
) -> Float[Tensor, "B C HKV D"]:
    """C = max(0, (T - l) // d + 1) blocks of l tokens, d apart; none when T < l."""
    count = count_compressed(x.shape[1], config)
    if count == 0:
        return x[:, :0]
    windows = x.unfold(1, config.compress_block, config.compress_stride)  # [B, C, HKV, D, l]
    if kind == "mean":
        return windows.mean(-1)
    tokens = windows.transpose(-1, -2)  # [B, C, HKV, l, D]
    flat = (tokens + weights.position).flatten(-2)  # [B, C, HKV, l*D]
    hidden = torch.einsum("bchi,hio->bcho", flat, weights.weight1)
    if kind == "linear":
        return hidden
    hidden = F.gelu(hidden + weights.bias1)
    return torch.einsum("bchi,hio->bcho", hidden, weights.weight2) + weights.bias2
