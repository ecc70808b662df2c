"""Softmax attention over an explicit mask."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    q: Float[Tensor, "B T HQ D"],
    k: Float[Tensor, "B S HKV D"],
    v: Float[Tensor, "B S HKV DV"],
    visible: Bool[Tensor, "#B #HKV T S"],
    scale: float,
) -> tuple[Float[Tensor, "B T HQ DV"], Float[Tensor, "B T HQ"]]:
    """Attention over the visible keys: (o, natural-log lse). Seeing none yields 0 and -inf.

    Probabilities and lse are fp32, or fp64 for fp64 inputs. Query head h uses KV head h // G.
    """
    probs, lse = attention_probs(q, k, visible, scale)  # [B, HKV, G, T, S], [B, HKV, G, T]
    o = torch.einsum("bhgts,bshd->bthgd", probs.to(v.dtype), v)
    return o.flatten(2, 3), _by_query(lse)


def log_sum_exp(
    q: Float[Tensor, "B T HQ D"],
    k: Float[Tensor, "B S HKV D"],
    visible: Bool[Tensor, "#B #HKV T S"],
    scale: float,
) -> Float[Tensor, "B T HQ"]:
    """The lse of `attend` alone."""
    return _by_query(attention_probs(q, k, visible, scale)[1])


def _by_query(x: Float[Tensor, "B HKV G T"]) -> Float[Tensor, "B T HQ"]:
    return x.permute(0, 3, 1, 2).flatten(2, 3)


def without_sink(
    lse: Float[Tensor, "*rows HQ"], sink: Float[Tensor, " HQ"]
) -> Float[Tensor, "*rows HQ"]:
    """The share of a softmax that one more logit, without a value, leaves to the keys.

    e^s / (sum of e^s + e^sink) = softmax(s) * sigmoid(lse - sink). A row that sees nothing has
    no keys to weigh, and any number in (0, 1).
    """
    return (lse.masked_fill(lse.isneginf(), 0.0) - sink).sigmoid()  # -inf - -inf would be NaN


def attention_probs(
    q: Float[Tensor, "B T HQ D"],
    k: Float[Tensor, "B S HKV D"],
    visible: Bool[Tensor, "#B #HKV T S"],
    scale: float,
) -> tuple[Float[Tensor, "B HKV G T S"], Float[Tensor, "B HKV G T"]]:
    """Softmax over the visible keys, by KV head and head of the group, and its lse.

    The product q k is plain torch's in the inputs' dtype; what follows is fp32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(2, (k.shape[2], -1))  # [B, T, HKV, G, D]
    scores = torch.einsum("bthgd,bshd->bhgts", grouped, k).to(wide) * scale
    visible = visible[:, :, None]  # the same for every head of a group
    seen = visible.any(-1)
    # A row that sees nothing keeps finite scores, so that neither it nor its gradient is NaN.
    scores = scores.masked_fill(~visible & seen[..., None], float("-inf"))
    probs = scores.softmax(-1).masked_fill(~seen[..., None], 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~seen, float("-inf"))
    return probs, lse
