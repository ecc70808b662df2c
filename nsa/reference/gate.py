"""The gates g of Eq. 5: how much of each branch a token takes, in the order cmp, slc, win."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

GATE_KINDS = ("sigmoid", "softmax", "uniform")


def gate_logits(
    x: Float[Tensor, "B T *H E"],
    weight1: Float[Tensor, "HIDDEN E"],
    bias1: Float[Tensor, " HIDDEN"],
    weight2: Float[Tensor, "OUT HIDDEN"],
    bias2: Float[Tensor, " OUT"],
    temperature: float = 1.0,
) -> Float[Tensor, "B T *H OUT"]:
    """What the gate's nonlinearity reads: linear, SiLU, linear, divided by the temperature."""
    logits = F.linear(F.silu(F.linear(x, weight1, bias1)), weight2, bias2)
    return logits if temperature == 1.0 else logits / temperature


def sigmoid_gates(
    hidden: Float[Tensor, "B T E"],
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    temperature: float = 1.0,
) -> Float[Tensor, "B T HQ 3"]:
    """The paper's gates: a sigmoid of an MLP of the hidden state, one triple a query head."""
    logits = gate_logits(hidden, weight1, bias1, weight2, bias2, temperature)  # [B, T, HQ*3]
    return logits.unflatten(-1, (-1, 3)).sigmoid()


def softmax_gates(
    q: Float[Tensor, "B T HQ D"],
    kv_heads: int,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    temperature: float = 1.0,
) -> Float[Tensor, "B T HQ 3"]:
    """The case study's gates: softmax of an MLP of a group's mean query, shared by its heads."""
    group = q.shape[2] // kv_heads
    mean_query = q.unflatten(2, (kv_heads, group)).mean(3)  # [B, T, HKV, D]
    logits = gate_logits(mean_query, weight1, bias1, weight2, bias2, temperature)
    return logits.softmax(-1).repeat_interleave(group, dim=2)
