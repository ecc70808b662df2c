"""packed: queries that share a block, packed into tiles, so a block is read once per tile.

The selection is inverted (which queries chose block j?) and cut into tiles of ROWS queries
against one block; partial results are merged by their log-sum-exp. Memory beyond inputs and
outputs: an fp32 output kept for the backward; while it runs, T x n log-sum-exps per head, the
inverted selection (a few times 8 n bytes per query and KV head) and a bounded number of tiles;
nothing T x T. No size depends on data, so nothing waits for the GPU. Sums over tiles use atomics
there, so they are not bit-repeatable unless torch.use_deterministic_algorithms is on.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.attention.branches import empty_slots, run_with_selected
from nsa.attention.inputs import Inputs
from nsa.attention.operator import operator
from nsa.attention.registry import Backend, Note
from nsa.attention.span import dot, probs_from, wide
from nsa.attention.transforms import FIRST

ROWS = 64  # queries in a tile
ELEMENTS = 1 << 23  # query, key and score elements of the tiles that are held at once


def selected(inputs: Inputs, blocks: Tensor, note: Note) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HQ, DV], lse [B, T, HQ] if needed) of the selected branch for blocks."""
    note("slc", "packed-tiles")
    q, k, v = inputs.q, inputs.k["slc"], inputs.v["slc"]
    given = q, k, v, blocks, inputs.config.select_block, inputs.scale, inputs.q_start
    if not inputs.needs_lse:
        return _PackedAttention(*given), None
    o, lse = _PackedAttention.with_lse(*given)
    return o, lse.view(q.shape[:3])


@dataclass(frozen=True)
class _Tiles:
    """A chunk of tiles. Rows are (sequence, query, KV head) of one (sequence, KV head, block)."""

    pair: Tensor  # [N, ROWS]: index into blocks.flatten(), or its length for a row left over
    row: Tensor  # [N, ROWS]: index into q as [B*T*HKV, G, D]
    token: Tensor  # [N, size]: index into k as [B*S*HKV, D]
    hidden: Tensor  # [N, ROWS, size]: the query does not see the key


@operator("packed_attention")
class _PackedAttention:
    """q [B, T, HQ, D] at positions first.., k and v [B, S, HKV, *], blocks [B, T, HKV, N] ->
    o [B, T, HQ, DV], lse.

    The backward computes row sums from the unrounded o, which is kept only if o is rounded.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, scale: float, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        group, accumulate = q.shape[2] // k.shape[2], wide(q.dtype)
        queries, keys, values = _flat(q, group), _flat(k), _flat(v)
        plan = _invert(blocks, k.shape[1], size)
        # First every tile's log-sum-exp, so that each partial result is final when it is added.
        parts = q.new_full((blocks.numel() + 1, group), float("-inf"), dtype=accumulate)
        for tiles in _chunks(plan, blocks, q, k, v, size, first):
            scores = _scores(queries, keys, tiles, scale)
            parts[tiles.pair] = torch.logsumexp(scores, dim=-1)
        parts = parts[:-1].view(-1, blocks.shape[-1], group)
        lse = torch.logsumexp(parts, dim=1)  # [B*T*HKV, G]
        o = torch.zeros(queries.shape[0], group, v.shape[3], dtype=accumulate, device=q.device)
        for tiles in _chunks(plan, blocks, q, k, v, size, first):
            probs = probs_from(_scores(queries, keys, tiles, scale), lse[tiles.row])
            part = dot(probs.to(v.dtype).flatten(1, 2), values[tiles.token])
            o.index_add_(0, tiles.row.flatten(), part.view(-1, *o.shape[1:]))
        before = o.new_empty(o.shape[0], 0) if o.dtype == q.dtype else o
        return o.to(q.dtype).view(*q.shape[:3], v.shape[3]), before, lse

    @staticmethod
    def shapes(
        q: Tensor, k: Tensor, v: Tensor, *others: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, group = wide(q.dtype), q.shape[2] // k.shape[2]
        rows = q.shape[0] * q.shape[1] * k.shape[2]
        o = q.new_empty(*q.shape[:3], v.shape[3])
        before = rows, *((0,) if dtype == q.dtype else (group, v.shape[3]))
        before = q.new_empty(before, dtype=dtype)
        return o, before, q.new_empty(rows, group, dtype=dtype)

    @staticmethod
    def backward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        o: Tensor,
        lse: Tensor,
        size: int,
        scale: float,
        first: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group, accumulate = q.shape[2] // k.shape[2], wide(q.dtype)
        queries, keys, values = _flat(q, group), _flat(k), _flat(v)
        douts = _flat(do, group)
        delta = (douts.to(accumulate) * o.reshape(douts.shape)).sum(-1)  # [B*T*HKV, G]
        if dlse is not None:
            delta -= dlse
        dq, dk, dv = (x.new_zeros(x.shape, dtype=accumulate) for x in (queries, keys, values))
        plan = _invert(blocks, k.shape[1], size)
        for tiles in _chunks(plan, blocks, q, k, v, size, first):
            probs = probs_from(_scores(queries, keys, tiles, scale), lse[tiles.row])
            probs = probs.flatten(1, 2)  # [N, ROWS*G, size]
            do_rows = douts[tiles.row].flatten(1, 2)
            dprobs = dot(do_rows, values[tiles.token].transpose(1, 2))
            dscores = probs * (dprobs - delta[tiles.row].flatten(1)[..., None]) * scale
            dscores = dscores.to(q.dtype)
            token = tiles.token.flatten()
            dq_rows = dot(dscores, keys[tiles.token]).view(-1, *dq.shape[1:])
            dk_rows = dot(dscores.transpose(1, 2), queries[tiles.row].flatten(1, 2))
            dv_rows = dot(probs.to(v.dtype).transpose(1, 2), do_rows)
            dq.index_add_(0, tiles.row.flatten(), dq_rows)
            dk.index_add_(0, token, dk_rows.flatten(0, 1))
            dv.index_add_(0, token, dv_rows.flatten(0, 1))
        grads = (dx.to(x.dtype).view(x.shape) for dx, x in ((dq, q), (dk, k), (dv, v)))
        return tuple(grads)


def _flat(x: Tensor, group: int | None = None) -> Tensor:
    """[B, T, H, D] -> [B*T*H, D], or [B*T*HKV, G, D] for query heads in groups."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if group is None else flat.view(-1, group, x.shape[-1])


@dataclass(frozen=True)
class _Plan:
    """The selection inverted: pairs (query, slot) in the order of their (sequence, head, block)."""

    order: Tensor  # [P]: pairs sorted by key; those without a block come last
    start: Tensor  # [K + 1]: where each key's pairs begin in `order`
    first_tile: Tensor  # [K + 1]: number of tiles of all keys before it


def _invert(blocks: Tensor, tokens: int, size: int) -> _Plan:
    batch, _, kv_heads, _ = blocks.shape
    count = -(-tokens // size)
    owner = torch.arange(batch * kv_heads, device=blocks.device).view(batch, 1, kv_heads, 1)
    none = batch * kv_heads * count  # a key of its own for empty and repeated slots
    key = torch.where(empty_slots(blocks, count), none, owner * count + blocks.long()).flatten()
    sizes = key.new_zeros(none + 1).scatter_add(0, key, torch.ones_like(key))[:none]
    zero = sizes.new_zeros(1)
    return _Plan(
        order=key.argsort(stable=True),
        start=torch.cat([zero, sizes.cumsum(0)]),
        first_tile=torch.cat([zero, ((sizes + ROWS - 1) // ROWS).cumsum(0)]),
    )


def _chunks(plan: _Plan, blocks: Tensor, q: Tensor, k: Tensor, v: Tensor, size: int, position: int):
    """Chunks of tiles. Their number is an upper bound, so it does not depend on data."""
    group = q.shape[2] // k.shape[2]
    keys = plan.start.numel() - 1
    most = -(-blocks.numel() // ROWS) + keys
    row = k.shape[3] + v.shape[3]
    step = max(1, ELEMENTS // (ROWS * group * (row + size) + size * row))
    for first in range(0, most, step):
        index = torch.arange(first, min(first + step, most), device=blocks.device)
        yield _tiles(index, plan, blocks, k.shape[1], size, position)


def _tiles(
    index: Tensor, plan: _Plan, blocks: Tensor, tokens: int, size: int, first: int
) -> _Tiles:
    # Queries are at positions first.., and `tokens` have keys.
    kv_heads, slots = blocks.shape[2], blocks.shape[3]
    keys = plan.start.numel() - 1
    key = torch.searchsorted(plan.first_tile, index, right=True) - 1
    real = key < keys
    key = key.clamp(max=keys - 1)
    ordinal = plan.start[key] + (index - plan.first_tile[key]) * ROWS
    ordinal = ordinal[:, None] + torch.arange(ROWS, device=index.device)  # [N, ROWS]
    filled = (ordinal < plan.start[key + 1][:, None]) & real[:, None]
    pair = plan.order[ordinal.clamp(max=plan.order.numel() - 1)]
    row = torch.where(filled, pair // slots, 0)
    # (sequence, KV head, block) of each tile, and the tokens of that block.
    count = keys // (blocks.shape[0] * kv_heads)
    owner, block = key // count, key % count
    token = block[:, None] * size + torch.arange(size, device=index.device)  # [N, size]
    position = first + row // kv_heads % blocks.shape[1]
    hidden = (token[:, None] > position[..., None]) | ~filled[..., None]
    token = token.clamp(max=tokens - 1)
    sequence, head = owner[:, None] // kv_heads, owner[:, None] % kv_heads
    return _Tiles(
        pair=torch.where(filled, pair, blocks.numel()),
        row=row,
        token=(sequence * tokens + token) * kv_heads + head,
        hidden=hidden,
    )


def _scores(queries: Tensor, keys: Tensor, tiles: _Tiles, scale: float) -> Tensor:
    """[N, ROWS, G, size] in the wide dtype, -inf where hidden."""
    rows = queries[tiles.row]  # [N, ROWS, G, D]
    scores = dot(rows.flatten(1, 2), keys[tiles.token].transpose(1, 2)) * scale
    scores = scores.view(*rows.shape[:3], -1)
    return scores.masked_fill(tiles.hidden[:, :, None], float("-inf"))


BACKEND = Backend(
    "packed",
    partial(run_with_selected, selected=selected),
    summary="packs the queries that share a block into tiles; linear memory",
    quadratic=False,
    transforms=FIRST,
)
