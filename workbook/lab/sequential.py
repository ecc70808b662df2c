"""sequential: one token at a time, in a Python loop. For demonstration, not for use.

Structured like the case study's slow path (hundreds of small operations per token, and for each
token a copy of the keys and values in its blocks, kept for the backward pass) without its bugs.
The copies add up to T x n l' rows per KV head and the probabilities to T x (w + n l' + T / d) per
head: it effectively holds T x T tensors while T <= n l'. Its time is proportional to the number of
operations that it dispatches.
"""

from itertools import product

import torch
from torch import Tensor

from nsa.attention.branches import compressed, pool
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Branches, Note
from nsa.attention.span import wide
from nsa.attention.transforms import ALL, VMAP
from nsa.blocks import compressed_span, count_selectable, window_span


def run(inputs: Inputs, note: Note) -> Branches:
    """(o [B, T, HQ, DV], lse) of each branch."""
    config, dtype = inputs.config, inputs.q.dtype
    k_cmp, v_cmp = compressed(inputs)
    # A key's gradient is the sum of one small part a token: in bf16 that sum would lose them.
    q, k_cmp, v_cmp = (x if x is None else x.to(wide(dtype)) for x in (inputs.q, k_cmp, v_cmp))
    k, v = ({b: x[b].to(wide(dtype)) for b in inputs.branches} for x in (inputs.k, inputs.v))
    rows: dict[str, list[tuple[Tensor, Tensor | None]]] = {branch: [] for branch in inputs.branches}
    needed = inputs.needs_lse
    for row in range(q.shape[1]):
        t = inputs.q_start + row
        q_t = q[:, row].unflatten(1, (inputs.kv_heads, -1))  # [B, HKV, G, D]
        if "cmp" in rows:
            ended = slice(*compressed_span(config).seen(t))
            rows["cmp"].append(_attend(q_t, k_cmp[:, ended], v_cmp[:, ended], inputs.scale, needed))
        if "slc" in rows:
            if inputs.blocks is None:
                blocks = _select(q_t, k_cmp, t, inputs)
                note("score", "one-token")
            else:
                blocks = inputs.blocks[:, row]
            rows["slc"].append(_attend_blocks(q_t, k["slc"], v["slc"], blocks, t, inputs))
        if "win" in rows:
            newest = slice(*window_span(config).seen(t))
            rows["win"].append(
                _attend(q_t, k["win"][:, newest], v["win"][:, newest], inputs.scale, needed)
            )
        for branch in rows:
            note(branch, "one-token")
    by_token = {branch: zip(*found, strict=True) for branch, found in rows.items()}
    stacked = {b: tuple(map(_stacked, each)) for b, each in by_token.items()}
    return {b: (o.to(dtype), lse) for b, (o, lse) in stacked.items()}


def _stacked(rows: tuple[Tensor | None, ...]) -> Tensor | None:
    """Stack one [B, HKV, G, ...] per token into [B, T, HQ, ...]; None if the rows are None."""
    return None if rows[0] is None else torch.stack(rows, dim=1).flatten(2, 3)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(o, lse) of one query per head, q [B, HKV, G, D], against all of k, v [B, S, HKV, *]."""
    if k.shape[1] == 0:
        none = q.new_full(q.shape[:3], float("-inf")) if needs_lse else None
        return q.new_zeros(*q.shape[:3], v.shape[3]), none
    scores = _scores(q, k, scale)
    o = torch.einsum("bhgs,bshd->bhgd", scores.softmax(-1), v)
    return o, scores.logsumexp(-1) if needs_lse else None


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("bhgd,bshd->bhgs", q, k) * scale


@torch.no_grad()
def _select(q: Tensor, k_cmp: Tensor, t: int, inputs: Inputs) -> Tensor:
    """Eq. 9-11 for one token: blocks [B, HKV, N], fewer than n while fewer are legal."""
    config = inputs.config
    legal = count_selectable(t + 1, config)
    seen = k_cmp[:, slice(*compressed_span(config).seen(t))]
    scores = pool(_scores(q, seen, inputs.scale).softmax(-1).sum(2), legal, config)
    scores[..., : config.select_initial] = torch.inf
    scores[..., max(0, legal - config.select_local) :] = torch.inf
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., : config.select_count].sort(dim=-1).values


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, t: int, inputs: Inputs
) -> tuple[Tensor, Tensor | None]:
    """The selected branch at token t: keys are stacked per sequence and KV head."""
    size, needed, rows = inputs.config.select_block, inputs.needs_lse, []
    for b, h in product(range(q.shape[0]), range(q.shape[1])):
        starts = [s for j in chosen(blocks[b, h], t, size) if 0 <= (s := j * size) <= t]
        q_h = q[b : b + 1, h : h + 1]
        if not starts:
            rows.append(_attend(q_h, k[:1, :0, :1], v[:1, :0, :1], inputs.scale, needed))
            continue
        keys, values = (
            torch.cat([x[b, s : min(s + size, t + 1), h] for s in starts]) for x in (k, v)
        )
        keys, values = keys[None, :, None], values[None, :, None]
        rows.append(_attend(q_h, keys, values, inputs.scale, needed))
    o, lse = zip(*rows, strict=True)
    shape = q.shape[:3]
    return torch.cat(o).view(*shape, -1), torch.cat(lse).view(shape) if needed else None


def chosen(blocks: Tensor, t: int, size: int) -> list[int]:
    """Unique block indices in blocks [N], ascending. The memory estimate, which has no values,
    substitutes others."""
    return sorted({*blocks.tolist()})


BACKEND = Backend(
    "sequential",
    run,
    summary="one token at a time, as the case study ran; an exhibit",
    quadratic=True,
    transforms=ALL - {VMAP},
    not_for_auto=lambda inputs: ["an exhibit, only by name"],
)
