"""Attention one token at a time: three small attentions, a gate and hundreds of operations each.

Every key and value that a token reads is copied out for it, expanded over heads in the window and
compressed branch, and kept for the backward: that is the memory of the case study's table. Every
copy is a handful of dispatched operations forward and as many backward: that is its time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.scoring import pool
from nsa.blocks import compressed_span, count_selectable
from nsa.experiments.case_study.loop.design import Design


@dataclass
class Projected:
    """q [B, T, HQ, D]; k and v by branch, [B, T, HKV, D], for cmp [B, C, HKV, D]."""

    q: Tensor
    k: dict[str, Tensor]
    v: dict[str, Tensor]


def attend_all(inputs: Projected, gate, design: Design) -> Tensor:
    """o [B, T, HQ D]. `gate(q_t [B, HKV, G, D])` weighs the branches, [B, HKV, 3]."""
    window = design.nsa.window
    k_win, v_win = inputs.k["win"], inputs.v["win"]
    if design.has("truncated_cache"):
        k_win, v_win = k_win[:, -window:], v_win[:, -window:]
    rows = []
    for t in range(inputs.q.shape[1]):
        q_t = inputs.q[:, t].unflatten(1, (design.groups, -1))  # [B, HKV, G, D]
        o_cmp = _compressed(q_t, inputs, t, design)
        o_slc = _selected(q_t, inputs, t, design)
        first = max(0, t + 1 - window)
        o_win = _copied(q_t, k_win[:, first : t + 1], v_win[:, first : t + 1], design)
        weights = gate(q_t)[..., None, :]  # [B, HKV, 1, 3]
        o = weights[..., 0:1] * o_cmp + weights[..., 1:2] * o_slc + weights[..., 2:3] * o_win
        rows.append(o.flatten(1))
    return torch.stack(rows, dim=1)


def _compressed(q: Tensor, inputs: Projected, t: int, design: Design) -> Tensor:
    seen = compressed_span(design.nsa).seen(t)[1]
    if design.has("first_compressed") and seen:
        seen = 1
    return _copied(q, inputs.k["cmp"][:, :seen], inputs.v["cmp"][:, :seen], design)


def _copied(q: Tensor, k: Tensor, v: Tensor, design: Design) -> Tensor:
    """q [B, HKV, G, D] over k, v [B, S, HKV, D], which are copied for every head."""
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    heads = q.shape[2]
    k, v = (x.transpose(1, 2)[:, :, None].expand(-1, -1, heads, -1, -1) for x in (k, v))
    k, v = k.contiguous(), v.contiguous()  # [B, HKV, G, S, D]
    return attend(q[..., None, :], k, v, design.has("one_key"))[..., 0, :]


def _selected(q: Tensor, inputs: Projected, t: int, design: Design) -> Tensor:
    """Each sequence and KV head has ranges of its own, whose keys all heads of the group share.

    The heads stand where queries of other times would: a causal mask parts them.
    """
    ranges = select_ranges(q, inputs.k["cmp"], t, design)
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            if not ranges[b][h]:
                rows.append(torch.zeros_like(q[b, h]))
                continue
            index = torch.cat([torch.arange(*r, device=q.device) for r in ranges[b][h]])
            k, v = inputs.k["slc"][b, index, h], inputs.v["slc"][b, index, h]  # [S, D]
            rows.append(attend(q[b, h], k, v, design.has("heads_as_time")))
    return torch.stack(rows).unflatten(0, q.shape[:2])


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q [..., M, D] over k, v [..., S, D]; what torch's own attention means by `is_causal`.

    Its mask is aligned with the first key, so of one query it leaves that key alone; a decode step
    wants the last row of the mask, which is no mask at all. Written out, for what torch keeps for
    the backward depends on the kernel that it picks.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [..., M, S]
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v


@torch.no_grad()
def select_ranges(q: Tensor, k_cmp: Tensor, t: int, design: Design) -> list[list[list[tuple]]]:
    """Eq. 8-11 for one token: [start, end) of the tokens it reads, by sequence and KV head."""
    nsa = design.nsa
    seen = compressed_span(nsa).seen(t)[1]
    keys = k_cmp if design.has("future_scores") else k_cmp[:, :seen]
    scores = torch.einsum("bhgd,bchd->bhgc", q, keys) * q.shape[-1] ** -0.5
    blocks = count_selectable(t + 1, nsa)
    importance = pool(scores.softmax(-1).sum(2), blocks, nsa)[..., :blocks]  # [B, HKV, NB]
    ended = (t + 1) // nsa.select_block
    if design.has("drop_current"):
        importance, blocks = importance[..., :ended], ended
    if blocks == 0:
        return [[[] for _ in range(q.shape[1])] for _ in range(q.shape[0])]
    importance[..., : nsa.select_initial] = torch.inf
    importance[..., max(0, blocks - nsa.select_local) :] = torch.inf
    order = importance.argsort(dim=-1, descending=True, stable=True)
    best = order[..., : nsa.select_count].sort(dim=-1).values
    return [[_merged(row, t, nsa.select_block) for row in rows] for rows in best]


def _merged(blocks: Tensor, t: int, size: int) -> list[tuple[int, int]]:
    """Neighbouring blocks as one range, cut at the query; one host sync a block."""
    ranges: list[list[int]] = []
    for block in blocks:
        start = block.item() * size
        end = min(start + size, t + 1)
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = end
        else:
            ranges.append([start, end])
    return [(start, end) for start, end in ranges]
