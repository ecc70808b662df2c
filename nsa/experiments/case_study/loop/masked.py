"""What `loop` computes, with dense masks: a few operations a layer at any length."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.blocks import count_selectable
from nsa.experiments.case_study.loop.design import Design
from nsa.experiments.case_study.loop.one_token import Projected
from nsa.reference.nsa import compressed_visible, window_visible
from nsa.reference.select import importance, select, selected_tokens


def attend_all(inputs: Projected, gate, design: Design) -> Tensor:
    """o [B, T, HQ D]; see `loop.attend_all`."""
    tokens = inputs.q.shape[1]
    positions = torch.arange(tokens, device=inputs.q.device)
    q = inputs.q.transpose(1, 2)  # [B, HQ, T, D]
    causal = positions <= positions[:, None]
    blocks = _select(inputs, design)
    seen = {
        "cmp": compressed_visible(positions, inputs.k["cmp"].shape[1], design.nsa),
        "slc": selected_tokens(blocks, tokens, design.nsa) & causal,
        "win": window_visible(positions, design.nsa),
    }
    weights = gate(inputs.q.unflatten(2, (design.groups, -1)))  # [B, T, HKV, 3]
    group = design.heads // design.groups
    total = 0
    for number, branch in enumerate(("cmp", "slc", "win")):
        visible = seen[branch]
        if branch == "cmp" and design.has("first_compressed"):
            visible = visible & (torch.arange(visible.shape[-1], device=q.device) == 0)
        o = _attend(q, inputs.k[branch], inputs.v[branch], visible, group)  # [B, T, HQ, D]
        weight = weights[..., number].repeat_interleave(group, dim=-1)
        total = total + weight[..., None] * o
    return total.flatten(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, group: int) -> Tensor:
    if k.shape[1] == 0:
        return torch.zeros_like(q).transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, dim=1)
    none = ~visible.any(-1, keepdim=True)
    # A row that sees nothing sees key 0 instead, and its output is taken out again.
    first = torch.arange(k.shape[2], device=q.device) == 0
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | (none & first))
    return o.masked_fill(none, 0.0).transpose(1, 2)


@torch.no_grad()
def _select(inputs: Projected, design: Design) -> Tensor:
    nsa, q = design.nsa, inputs.q
    tokens = q.shape[1]
    positions = torch.arange(tokens, device=q.device)
    k_cmp = inputs.k["cmp"]
    scores = torch.einsum("bthgd,bchd->bhgtc", q.unflatten(2, (design.groups, -1)), k_cmp)
    scores = scores * q.shape[-1] ** -0.5
    visible = compressed_visible(positions, k_cmp.shape[1], nsa)[:, :, None]
    if not design.has("future_scores"):
        scores = scores.masked_fill(~visible, -torch.inf)
    ranked = importance(scores.softmax(-1).nan_to_num(0.0), nsa)
    ranked = F.pad(ranked, (0, count_selectable(tokens, nsa) - ranked.shape[-1]))
    if not design.has("drop_current"):
        return select(ranked, nsa)
    # As if the query stood at the end of the block before its own.
    ended = (positions + 1) // nsa.select_block
    rows = [
        select(ranked[:, t : t + 1], nsa, first_position=int(ended[t]) * nsa.select_block - 1)
        if ended[t]
        else torch.full((*ranked[:, :1].shape[:3], nsa.select_count), -1, device=q.device)
        for t in range(tokens)
    ]
    return torch.cat([row.to(torch.int32) for row in rows], dim=1)
