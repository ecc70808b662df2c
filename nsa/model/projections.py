"""Linear projections of a layer: how they are drawn, and several of one input at once."""

from collections.abc import Collection, Iterable, Mapping
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def draw(
    inner: Iterable[nn.Linear], out: nn.Linear, layers: int, generator: torch.Generator | None
) -> None:
    """Draw `inner` with standard deviation 0.02, `out` with 0.02 / sqrt(2 layers), as in GPT-2."""
    for linear in inner:
        nn.init.normal_(linear.weight, std=0.02, generator=generator)
    nn.init.normal_(out.weight, std=0.02 / sqrt(2 * layers), generator=generator)


class Projections:
    """Outputs of linear layers for one input x [B, T, E], by the layers' names.

    Each is computed on access, so that nothing is held before it is used. Under torch.compile,
    those of `together`, by default all, are one product with concatenated weights: wide products
    use a GPU better, and x's gradient is not accumulated part by part. In that case a weight that
    no loss reaches has a gradient of zeros, not None, if a loss reaches another. Layers with a
    bias, hooks or their own forward, or of another class, are computed separately.
    """

    def __init__(
        self,
        x: Float[Tensor, "B T E"],
        linears: Mapping[str, nn.Module],
        together: Collection[str] | None = None,
    ) -> None:
        self._x, self._linears, self._made = x, linears, {}
        together = linears if together is None else together
        if torch.compiler.is_compiling() and all(is_plain(linears[name]) for name in together):
            weights = [linears[name].weight for name in together]
            product = F.linear(x, torch.cat(weights))
            parts = product.split([weight.shape[0] for weight in weights], dim=-1)
            self._made = dict(zip(together, parts, strict=True))

    def __getitem__(self, name: str) -> Float[Tensor, "B T F"]:
        return self._made[name] if name in self._made else self._linears[name](self._x)


def is_plain(layer: nn.Module) -> bool:
    """True if the layer is a plain nn.Linear without bias, hooks or its own forward."""
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and "forward" not in layer.__dict__
        and not (layer._forward_pre_hooks or layer._forward_hooks)
        and not (layer._backward_pre_hooks or layer._backward_hooks)
    )
