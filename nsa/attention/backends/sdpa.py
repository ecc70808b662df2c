"""sdpa: torch's scaled_dot_product_attention with an explicit mask.

Holds a T x T boolean mask for every head of a group and every branch (times the KV heads for the
selected branch); where no fused kernel takes a mask, torch itself holds T x T scores for every
head as well.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.branches import visible_by_branch
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Note


def run(inputs: Inputs, note: Note) -> dict[str, Tensor]:
    """o [B, T, HQ, DV] of each branch."""
    outputs = {}
    for branch, k, v, visible in visible_by_branch(inputs, note):
        outputs[branch] = _attend(inputs, k, v, visible)
        note(branch, "sdpa")
    return outputs


def _attend(inputs: Inputs, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    q, group = inputs.q, inputs.group
    batch, tokens, heads, _ = q.shape
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    seen = visible.any(-1, keepdim=True)  # [B or 1, HKV or 1, T, 1]
    # A row without keys attends to all of them, which is finite, and is then set to 0.
    mask = (visible | ~seen).repeat(1, 1, group, 1)
    # The heads of a group as further rows of one head: K and V are not repeated, their gradients
    # not rounded head by head, and torch's memory-efficient kernel takes the mask.
    rows = q.reshape(batch, tokens, -1, group, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    o = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=inputs.scale
    )
    o = torch.where(seen.repeat(1, 1, group, 1), o, 0.0)
    o = o.unflatten(2, (group, tokens)).permute(0, 3, 1, 2, 4)  # [B, T, HKV, G, DV]
    return o.reshape(batch, tokens, heads, -1)


BACKEND = Backend(
    "sdpa",
    run,
    summary="torch's scaled_dot_product_attention under a mask; T x T masks",
    quadratic=True,
)
