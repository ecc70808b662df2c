"""The exhibit's language model, and its attention on both paths: one token at a time, or NSA's
reference with its dense masks.

Every key and value that a token reads is copied out for it, expanded over heads in the window and
compressed branch, and kept for the backward, which explains the memory of the case study's table.
Every copy is a few dispatched operations forward and as many backward, which explains its time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa.attention.branches import pool
from nsa.blocks import compressed_span, count_selectable
from nsa.reference.compress import compress
from nsa.reference.nsa import BRANCHES, nsa
from nsa.reference.rotary import rotary_tables, rotate
from workbook.rooms.case_study.loop.design import Design


@dataclass
class Projected:
    """q [B, T, HQ, D]; k and v by branch, [B, T, HKV, D]."""

    q: Tensor
    k: dict[str, Tensor]
    v: dict[str, Tensor]


def attend_loop(inputs: Projected, gate, design: Design) -> Tensor:
    """o [B, T, HQ D], one token at a time; `gate(q_t [B, HKV, G, D])` gives weights [B, HKV, 3]."""
    window = design.nsa.window
    k_win, v_win = inputs.k["win"], inputs.v["win"]
    k_cmp, v_cmp = (compress(x["cmp"], "mean", None, design.nsa) for x in (inputs.k, inputs.v))
    if design.has("truncated_cache"):
        k_win, v_win = k_win[:, -window:], v_win[:, -window:]
    rows = []
    for t in range(inputs.q.shape[1]):
        q_t = inputs.q[:, t].unflatten(1, (design.groups, -1))  # [B, HKV, G, D]
        seen = compressed_span(design.nsa).seen(t)[1]
        o_cmp = _copied(q_t, k_cmp[:, :seen], v_cmp[:, :seen], design)
        o_slc = _selected(q_t, k_cmp, inputs, t, design)
        first = max(0, t + 1 - window)
        o_win = _copied(q_t, k_win[:, first : t + 1], v_win[:, first : t + 1], design)
        weights = gate(q_t)[..., None, :]  # [B, HKV, 1, 3]
        o = weights[..., 0:1] * o_cmp + weights[..., 1:2] * o_slc + weights[..., 2:3] * o_win
        rows.append(o.flatten(1))
    return torch.stack(rows, dim=1)


def _copied(q: Tensor, k: Tensor, v: Tensor, design: Design) -> Tensor:
    """Attention of q [B, HKV, G, D] over k, v [B, S, HKV, D], which are copied for every head."""
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    heads = q.shape[2]
    k, v = (x.transpose(1, 2)[:, :, None].expand(-1, -1, heads, -1, -1) for x in (k, v))
    k, v = k.contiguous(), v.contiguous()  # [B, HKV, G, S, D]
    return attend(q[..., None, :], k, v, design.has("one_key"))[..., 0, :]


def _selected(q: Tensor, k_cmp: Tensor, inputs: Projected, t: int, design: Design) -> Tensor:
    """Attention over each sequence and KV head's own ranges, whose keys all heads of a group share.

    The heads take the axis of query positions, so a causal mask treats them as time steps.
    """
    ranges = select_ranges(q, k_cmp, t, design)
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            index = torch.cat([torch.arange(*r, device=q.device) for r in ranges[b][h]])
            k, v = inputs.k["slc"][b, index, h], inputs.v["slc"][b, index, h]  # [S, D]
            rows.append(attend(q[b, h], k, v, design.has("heads_as_time")))
    return torch.stack(rows).unflatten(0, q.shape[:2])


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of q [..., M, D] over k, v [..., S, D], with torch's meaning of `is_causal`.

    Its mask is aligned with the first key, so a single query sees only that key; a decode step
    needs the last row of the mask, which masks nothing. It is written out because what torch keeps
    for the backward depends on the kernel that it picks.
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
    importance[..., : nsa.select_initial] = torch.inf
    importance[..., max(0, blocks - nsa.select_local) :] = torch.inf
    order = importance.argsort(dim=-1, descending=True, stable=True)
    best = order[..., : nsa.select_count].sort(dim=-1).values
    return [[_merged(row, t, nsa.select_block) for row in rows] for rows in best]


def _merged(blocks: Tensor, t: int, size: int) -> list[tuple[int, int]]:
    """Merge neighbouring blocks into ranges, cut at the query; one host sync a block."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        start = block.item() * size
        end = min(start + size, t + 1)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return ranges


def attend_masked(inputs: Projected, gate, design: Design) -> Tensor:
    """Return o [B, T, HQ D] by the reference of NSA, whose operations are as many at any T."""
    gates = gate(inputs.q.unflatten(2, (design.groups, -1)))  # [B, T, HKV, 3]
    gates = gates.repeat_interleave(design.heads // design.groups, dim=2)
    return nsa(inputs.q, inputs.k, inputs.v, gates, design.nsa).o.flatten(2)


class Gate(nn.Module):
    """Mean query of a group -> three weights that sum to 1."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(head_dim, head_dim // 2)
        self.fc2 = nn.Linear(head_dim // 2, 3)
        nn.init.xavier_uniform_(self.fc2.weight, gain=0.1)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, q: Tensor) -> Tensor:
        """q [..., HKV, G, D] -> [..., HKV, 3]."""
        return self.fc2(F.silu(self.fc1(q.mean(-2)))).softmax(-1)


class Attention(nn.Module):
    """q, six K/V projections, the gate and the output projection; all but the gate bias-free."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        width = design.groups * design.head_dim
        self.q = nn.Linear(design.dim, design.dim, bias=False)
        self.k = nn.ModuleDict({b: nn.Linear(design.dim, width, bias=False) for b in BRANCHES})
        self.v = nn.ModuleDict({b: nn.Linear(design.dim, width, bias=False) for b in BRANCHES})
        self.gate = Gate(design.head_dim)
        self.out = nn.Linear(design.dim, design.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        attend = attend_loop if self.design.path == "loop" else attend_masked
        return self.out(attend(self.project(x), self.gate, self.design))

    def project(self, x: Tensor) -> Projected:
        design = self.design
        angles = rotary_tables(x.shape[1], design.head_dim, device=x.device)
        q = rotate(self.q(x).unflatten(-1, (design.heads, -1)), *angles)
        k = {b: self.k[b](x).unflatten(-1, (design.groups, -1)) for b in BRANCHES}
        v = {b: self.v[b](x).unflatten(-1, (design.groups, -1)) for b in BRANCHES}
        return Projected(q, {b: rotate(k[b], *angles) for b in BRANCHES}, v)


class Block(nn.Module):
    """Norm, attention, residual, norm, SiLU MLP of four times the width, residual."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(design.dim, eps=1e-6)
        self.attention = Attention(design)
        self.norm2 = nn.RMSNorm(design.dim, eps=1e-6)
        self.fc1 = nn.Linear(design.dim, 4 * design.dim, bias=False)
        self.fc2 = nn.Linear(4 * design.dim, design.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class LoopModel(nn.Module):
    """(logits, loss) of tokens and targets [B, T] int64.

    checkpointing: recompute every block in the backward, the bound block, or with the defect
    `late_checkpoint` the one that the loop variable refers to by then, which is the last.
    """

    def __init__(self, design: Design, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.design, self.checkpointing = design, checkpointing
        self.embed = nn.Embedding(design.vocab, design.dim)
        self.blocks = nn.ModuleList(Block(design) for _ in range(design.layers))
        self.norm = nn.RMSNorm(design.dim, eps=1e-6)
        self.head = nn.Linear(design.dim, design.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor):
        x = self.embed(tokens)
        for block in self.blocks:
            if not self.checkpointing:
                x = block(x)
            elif self.design.has("late_checkpoint"):
                x = checkpoint(lambda inp: block(inp), x, use_reentrant=False)  # noqa: B023
            else:
                x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(design: Design, seed: int = 1337, device: str | torch.device = "cpu", **options):
    """LoopModel with weights from `seed`; in fp16 for the defect `fp16_adamw`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LoopModel(design, **options)
    return model.to(device, torch.float16 if design.has("fp16_adamw") else torch.float32)
