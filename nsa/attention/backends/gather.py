"""gather: each query's own keys, gathered from its blocks; the other branches by key ranges.

Memory beyond inputs and outputs is bounded by the chunk of queries: it holds no T x T tensor.
Gradients of keys and values are added up in fp32 (by atomics on a GPU, so not bit-repeatable
there unless torch.use_deterministic_algorithms is on).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.attention.branches import empty_slots, run_with_selected
from nsa.attention.inputs import Inputs
from nsa.attention.operator import operator
from nsa.attention.registry import Backend, Note
from nsa.attention.span import chunks, dot, probs_from, wide
from nsa.attention.transforms import FIRST

# Gathered key and value elements held at once, by device; the more, the fewer and larger the
# launches, of which a GPU needs large ones: half the time of 2^24 there.
ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}


def _selected(inputs: Inputs, blocks: Tensor, note: Note) -> tuple[Tensor, Tensor | None]:
    note("slc", "gather-chunks")
    q, k, v = inputs.q, inputs.k["slc"], inputs.v["slc"]
    given = q, k, v, blocks, inputs.config.select_block, inputs.scale, inputs.q_start
    if not inputs.needs_lse:
        return _GatherAttention(*given), None
    return _GatherAttention.with_lse(*given)


@operator("gather_attention")
class _GatherAttention:
    """q [B, T, HQ, D] at positions first.., k and v [B, S, HKV, *], blocks [B, T, HKV, N] ->
    o [B, T, HQ, DV], lse."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, scale: float, first: int
    ) -> tuple[Tensor, Tensor]:
        o, lse = _GatherAttention.parts.shapes(q, k, v)
        for rows in _chunks(k, v, blocks, size):
            queries = _rows_by_kv_head(q[:, rows], k.shape[2])
            index, hidden = _tokens(blocks[:, rows], size, first + rows.start, k.shape[1])
            scores = _scores(queries, _take(k, index), hidden, scale)  # [M', G, S]
            lse_rows = torch.logsumexp(scores, dim=-1)
            probs = probs_from(scores, lse_rows).to(v.dtype)
            o[:, rows] = dot(probs, _take(v, index)).reshape_as(o[:, rows])
            lse[:, rows] = lse_rows.reshape_as(lse[:, rows])
        return o, lse

    @staticmethod
    def shapes(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | float) -> tuple[Tensor, Tensor]:
        o = q.new_empty(*q.shape[:3], v.shape[3])
        return o, q.new_empty(*q.shape[:3], dtype=wide(q.dtype))

    @staticmethod
    def backward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        lse: Tensor,
        size: int,
        scale: float,
        first: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads, dq = k.shape[2], q.new_empty(q.shape)
        dk, dv = (x.new_zeros(x.shape, dtype=wide(q.dtype)) for x in (k, v))
        for rows in _chunks(k, v, blocks, size):
            queries = _rows_by_kv_head(q[:, rows], kv_heads)
            do_rows = _rows_by_kv_head(do[:, rows], kv_heads)
            lse_rows = lse[:, rows].reshape(queries.shape[:2])
            index, hidden = _tokens(blocks[:, rows], size, first + rows.start, k.shape[1])
            keys = _take(k, index)
            probs = probs_from(_scores(queries, keys, hidden, scale), lse_rows)
            dprobs = dot(do_rows, _take(v, index).transpose(1, 2))
            # Equal to sum(do * o), but nothing of o was rounded, and o need not be kept.
            delta = (probs * dprobs).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= dlse[:, rows].reshape(*queries.shape[:2], 1)
            dscores = (probs * (dprobs - delta) * scale).to(q.dtype)
            dq[:, rows] = dot(dscores, keys).reshape_as(dq[:, rows])
            _add(dk, index, dot(dscores.transpose(1, 2), queries))
            _add(dv, index, dot(probs.to(v.dtype).transpose(1, 2), do_rows))
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _chunks(k: Tensor, v: Tensor, blocks: Tensor, size: int) -> Iterator[slice]:
    """Slices of query rows whose gathered keys and values fill about ELEMENTS elements."""
    batch, tokens, kv_heads, slots = blocks.shape
    per_row = batch * kv_heads * slots * size * (k.shape[3] + v.shape[3])
    return chunks(tokens, per_row, ELEMENTS.get(k.device.type, ELEMENTS["cpu"]))


def _tokens(blocks: Tensor, size: int, first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(index, hidden), both [M', S]: rows of k.flatten(0, 2) to gather, and a mask of unseen ones.

    M' counts (sequence, query, KV head). A repeated block counts once; since the order is
    ascending, the repeat is detectable.
    """
    batch, rows, kv_heads, _ = blocks.shape
    device = blocks.device
    token = blocks.long()[..., None] * size + torch.arange(size, device=device)
    position = torch.arange(first, first + rows, device=device)[:, None, None, None]
    hidden = empty_slots(blocks, -(-tokens // size))[..., None] | (token > position)
    token = torch.where(hidden, position, token)  # in range, and 0 times a NaN elsewhere is NaN
    sequence = torch.arange(batch, device=device)[:, None, None, None, None]
    head = torch.arange(kv_heads, device=device)[:, None, None]
    index = (sequence * tokens + token) * kv_heads + head  # [B, M, HKV, N, size]
    return index.flatten(3).flatten(0, 2), hidden.flatten(3).flatten(0, 2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """[B, S, HKV, D] by index [M', S'] -> [M', S', D]."""
    return x.reshape(-1, x.shape[-1])[index]


def _add(total: Tensor, index: Tensor, x: Tensor) -> None:
    """Transpose of `_take`: accumulate x [M', S, D] into total [B, T, HKV, D]."""
    total.view(-1, total.shape[-1]).index_add_(0, index.flatten(), x.flatten(0, 1))


def _scores(queries: Tensor, keys: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[M', G, S] in the wide dtype, -inf where hidden."""
    scores = dot(queries, keys.transpose(1, 2)) * scale
    return scores.masked_fill(hidden[:, None], float("-inf"))


def _rows_by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, M, HQ, D] -> [M', G, D]."""
    return x.unflatten(2, (kv_heads, -1)).flatten(0, 2)


BACKEND = Backend(
    "gather",
    partial(run_with_selected, selected=_selected),
    summary="gathers each query's blocks, a chunk of queries at a time; linear memory",
    quadratic=False,
    transforms=FIRST,
)
