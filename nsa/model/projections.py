"""The learned compression phi of a layer, and projections of one input as one product."""

from collections.abc import Collection, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.reference.compress import PhiWeights


class LearnedPhi(nn.Module):
    """Parameters of one side (keys or values), one set per KV head; see `PhiWeights` for shapes.

    For keys that are rotated before phi, the linear kind's `position` and the mlp's `bias2` move
    every compressed key of a head by the same vector, so that a softmax over them does not change:
    their gradient is zero but for rounding.
    """

    def __init__(self, kv_heads: int, block: int, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(kv_heads, block, width))
        self.weight1 = nn.Parameter(torch.zeros(kv_heads, block * width, width))

    def weights(self, dtype: torch.dtype) -> PhiWeights:
        """The parameters in the dtype in which the branch computes."""
        return PhiWeights(**{name: p.to(dtype) for name, p in self.named_parameters()})


class LinearPhi(LearnedPhi):
    """Starts as phi="mean", the mean over the block: l identities over l, positions 0."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Back to the mean; nothing is drawn."""
        block, width = self.position.shape[1:]
        self.position.zero_()
        mean = torch.eye(width, device=self.weight1.device).repeat(block, 1) / block  # [l*D, D]
        self.weight1.copy_(mean.expand_as(self.weight1))


class MLPPhi(LearnedPhi):
    """The paper's learnable MLP with position encoding; its hidden width is the head's own."""

    def __init__(self, kv_heads: int, block: int, width: int) -> None:
        super().__init__(kv_heads, block, width)
        self.bias1 = nn.Parameter(torch.zeros(kv_heads, width))
        self.weight2 = nn.Parameter(torch.zeros(kv_heads, width, width))
        self.bias2 = nn.Parameter(torch.zeros(kv_heads, width))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Matrices Xavier-uniform, positions from a normal of 0.02, biases 0."""
        nn.init.normal_(self.position, std=0.02, generator=generator)
        for matrix in (*self.weight1, *self.weight2):
            nn.init.xavier_uniform_(matrix, generator=generator)
        self.bias1.zero_()
        self.bias2.zero_()


LEARNED_PHI = {"linear": LinearPhi, "mlp": MLPPhi}


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
        and not (layer._forward_pre_hooks or layer._forward_hooks)
        and not (layer._backward_pre_hooks or layer._backward_hooks)
    )
