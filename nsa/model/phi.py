"""The learned compression phi as modules: one for keys and one for values in each layer."""

import torch
from torch import nn

from nsa.reference.compress import PhiWeights


class LearnedPhi(nn.Module):
    """Parameters of one side (keys or values), one set per KV head; see `PhiWeights` for shapes.

    For keys that are rotated before phi, the linear kind's `position` and the mlp's `bias2` move
    every compressed key of a head by the same vector, so a softmax over them does not change:
    their gradient is zero up to rounding, at most half of the dtype's epsilon of the largest
    gradient. AdamW, which normalizes gradients, updates them nevertheless, without any effect.
    """

    def __init__(self, kv_heads: int, block: int, width: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(kv_heads, block, width))
        self.weight1 = nn.Parameter(torch.zeros(kv_heads, block * width, width))

    def forward(self, dtype: torch.dtype) -> PhiWeights:
        """Return the parameters in the dtype in which the branch computes."""
        return PhiWeights(**{name: p.to(dtype) for name, p in self.named_parameters()})


class LinearPhi(LearnedPhi):
    """Initialized to phi="mean", the mean over the block: l identities over l, positions 0.

    No random numbers are drawn.
    """

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        block, width = self.position.shape[1:]
        self.position.zero_()
        mean = torch.eye(width, device=self.weight1.device).repeat(block, 1) / block  # [l*D, D]
        self.weight1.copy_(mean.expand_as(self.weight1))


class MLPPhi(LearnedPhi):
    """The paper's learnable MLP with position encoding: linear, GELU (the paper names no
    nonlinearity), linear; its hidden width is the head's own.

    Initialization: matrices Xavier-uniform, positions normal with deviation 0.02, biases 0.
    """

    def __init__(self, kv_heads: int, block: int, width: int) -> None:
        super().__init__(kv_heads, block, width)
        self.bias1 = nn.Parameter(torch.zeros(kv_heads, width))
        self.weight2 = nn.Parameter(torch.zeros(kv_heads, width, width))
        self.bias2 = nn.Parameter(torch.zeros(kv_heads, width))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.position, std=0.02, generator=generator)
        for matrix in (*self.weight1, *self.weight2):
            nn.init.xavier_uniform_(matrix, generator=generator)
        self.bias1.zero_()
        self.bias2.zero_()


LEARNED_PHI = {"linear": LinearPhi, "mlp": MLPPhi}
