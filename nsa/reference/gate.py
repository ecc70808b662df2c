"""The gates g of Eq. 5: how much of each branch a token takes, in the order cmp, slc, win."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]  # a layer with its weights


def gate_logits(
    x: Float[Tensor, "B T *H E"], first: Linear | None, last: Linear, temperature: float = 1.0
) -> Float[Tensor, "B T *H OUT"]:
    """Input of the gate's nonlinearity: linear, SiLU, linear, divided by the temperature; without
    `first` the last linear layer alone."""
    logits = last(x if first is None else F.silu(first(x)))
    return logits if temperature == 1.0 else logits / temperature


def sigmoid_gates(
    hidden: Float[Tensor, "B T E"], first: Linear | None, last: Linear, temperature: float = 1.0
) -> Float[Tensor, "B T HQ 3"]:
    """The paper's gates: a sigmoid of an MLP of the hidden state, one triple a query head.

    first, last: the MLP's linear layers, E to HIDDEN and HIDDEN to 3 HQ; None and E to 3 HQ for
    gate="linear".
    """
    logits = gate_logits(hidden, first, last, temperature)  # [B, T, HQ*3]
    return logits.unflatten(-1, (-1, 3)).sigmoid()


def softmax_gates(
    q: Float[Tensor, "B T HQ D"],
    kv_heads: int,
    first: Linear,
    last: Linear,
    temperature: float = 1.0,
) -> Float[Tensor, "B T HQ 3"]:
    """The case study's gates: softmax of an MLP of a group's mean query, shared by its heads.

    first, last: the MLP's linear layers, D to HIDDEN and HIDDEN to 3.
    """
    group = q.shape[2] // kv_heads
    mean_query = q.unflatten(2, (kv_heads, group)).mean(3)  # [B, T, HKV, D]
    logits = gate_logits(mean_query, first, last, temperature)
    return logits.softmax(-1).repeat_interleave(group, dim=2)
