"""Linear layers of one input: one product where torch.compile makes code of them."""

from collections.abc import Collection, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Projections:
    """What linear layers make of one input x [B, T, E], by the layers' names.

    Each is applied when it is asked for, so that nothing is held before it is used. Where
    torch.compile traces, those of `together`, by default all, are one product with their weights
    end to end, and so are their two in a backward: wide products keep a GPU busier, and x's
    gradient is not added up part by part. There a weight that no loss reaches has a gradient of
    zeros, instead of none, if one does reach another. Layers with a bias, hooks or a forward of
    their own, or of another class, stay apart.
    """

    def __init__(
        self,
        x: Float[Tensor, "B T E"],
        linears: Mapping[str, nn.Module],
        together: Collection[str] | None = None,
    ) -> None:
        self._x = x
        self._linears = linears
        self._made: dict[str, Tensor] = {}
        together = linears if together is None else together
        if torch.compiler.is_compiling() and all(_is_plain(linears[name]) for name in together):
            weights = [linears[name].weight for name in together]
            product = F.linear(x, torch.cat(weights))
            parts = product.split([weight.shape[0] for weight in weights], dim=-1)
            self._made = dict(zip(together, parts, strict=True))

    def __getitem__(self, name: str) -> Float[Tensor, "B T F"]:
        return self._made[name] if name in self._made else self._linears[name](self._x)


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer is its weight and nothing else."""
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and "forward" not in layer.__dict__
        and not _has_hooks(layer)
    )


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
    )
