"""sdpa: torch's scaled_dot_product_attention with an explicit mask.

Holds a T x T boolean mask for every branch (one a KV head for the selected branch); on kernels
that take no mask, torch itself holds T x T scores for every head as well.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.inputs import Inputs
from nsa.attention.masks import visible_by_branch
from nsa.attention.registry import Backend, Note


def run(inputs: Inputs, note: Note) -> dict[str, Tensor]:
    """o [B, T, HQ, DV] of each branch."""
    outputs = {}
    for branch, k, v, visible in visible_by_branch(inputs, note):
        outputs[branch] = _attend(inputs, k, v, visible)
        note(branch, "sdpa")
    return outputs


def _attend(inputs: Inputs, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    q = inputs.q
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    seen = visible.any(-1)  # [B or 1, HKV or 1, T]
    # A row without keys attends to all of them, which is finite, and is then set to 0.
    mask = visible | ~seen[..., None]
    mask, seen = (_by_head(x, inputs) for x in (mask, seen))
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=inputs.scale,
        enable_gqa=inputs.group > 1,
    )
    return torch.where(seen[..., None], o, 0.0).transpose(1, 2)


def _by_head(x: Tensor, inputs: Inputs) -> Tensor:
    return x if x.shape[1] == 1 else x.repeat_interleave(inputs.group, dim=1)


BACKEND = Backend(
    "sdpa",
    run,
    why_not=lambda inputs: [],
    summary="torch's scaled_dot_product_attention under a mask; T x T masks",
    quadratic=True,
)
