"""New queries against a cache on torch: under dense masks, or against the gathered keys alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.attention.branches import empty_slots, pool
from nsa.attention.cache import LayerCache
from nsa.attention.registry import Note
from nsa.attention.span import ELEMENTS, by_kv_head, by_query, chunks, dot, probs_from, wide
from nsa.blocks import compressed_span, count_compressed, count_selectable
from nsa.config import NSAConfig
from nsa.reference.attend import attend, attention_probs
from nsa.reference.compress import Phi
from nsa.reference.nsa import sunk
from nsa.reference.select import select, selected_tokens

GATHERED = {"cpu": 1 << 24, "cuda": 1 << 26}  # elements of keys and values held at once


# k, v [B, w - 1 + N, HKV, *] of the window: see `LayerCache.recent`.
Recent = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Call:
    """Checked arguments of one call. A backend appends and attends, and does not advance."""

    q: Tensor
    k: Tensor | Mapping[str, Tensor]
    v: Tensor | Mapping[str, Tensor]
    gates: Tensor
    cache: LayerCache
    phi: Phi
    counts: Tensor | None  # [B]: how many queries are real
    scale: float
    sinks: Tensor | None  # [HQ, 3]
    blocks: Tensor | None = None  # [B, N, HKV, n]: a selection to use
    selection: Tensor | None = None  # [B, N, HKV, n] int32, -1: receives the one that is scored

    @property
    def new(self) -> int:
        """Number of new tokens, N."""
        return self.q.shape[1]

    @property
    def config(self) -> NSAConfig:
        return self.cache.config

    @property
    def kv_heads(self) -> int:
        return self.cache.shape.kv_heads

    @property
    def positions(self) -> Tensor:
        """Positions of the queries, [B, N] int64."""
        return self.cache.lengths.long()[:, None] + torch.arange(self.new, device=self.q.device)

    @property
    def bound(self) -> int:
        """Upper bound on a sequence's tokens, the new ones included."""
        return self.cache.places.bound(self.new)

    @property
    def ends(self) -> Tensor:
        """Tokens of each sequence [B], the new ones included."""
        counts = self.new if self.counts is None else self.counts.clamp(0, self.new)
        return self.cache.lengths + counts

    def recent(self) -> Recent:
        """Keys and values of the window, before the new tokens are appended."""
        shape, name = self.cache.shape, "slc" if self.cache.shape.shared else "win"
        if "win" not in shape.branches:
            return None
        k, v = (self.cache.given(side, x)[f"{side}_{name}"] for side, x in self.sides())
        return self.cache.recent(name, shape.config.window - 1, k, v, self.counts)

    def sides(self):
        return ("k", self.k), ("v", self.v)

    def append(self) -> None:
        self.cache.append(self.k, self.v, self.phi, self.counts, advance=False)

    def keep(self, blocks: Tensor, rows: slice = slice(None)) -> None:
        """Write blocks [B, M, HKV, n], scored for these rows, to `selection` if it is wanted."""
        if self.selection is not None:
            self.selection[:, rows] = blocks

    def without_rows_behind(self, x: Tensor | Mapping[str, Tensor]) -> Any:
        """x [B, N, *, *], or each of a mapping, with zeros in the rows that are not real."""
        if self.counts is None:
            return x
        if isinstance(x, Mapping):
            return {branch: self.without_rows_behind(one) for branch, one in x.items()}
        row = torch.arange(self.new, device=x.device)
        return x.masked_fill((row >= self.counts[:, None])[..., None, None], 0)

    def window_hidden(self, rows: slice, columns: slice) -> Tensor:
        """[B, M, S]: True where these rows do not see these columns of `recent`."""
        device, reach = self.q.device, self.config.window - 1
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)
        outside = (column < row) | (column > row + reach)
        before = self.cache.lengths[:, None, None] + column - reach < 0
        return outside | before


def masked(call: Call, recent: Recent, note: Note) -> dict[str, Tensor]:
    """o [B, N, HQ, DV] of each branch; holds N x capacity scores per head."""
    cache, config, q, scale = call.cache, call.config, call.q, call.scale
    branches, positions, outputs, lse = cache.shape.branches, call.positions, {}, {}
    if "cmp" in branches or "slc" in branches:
        k_cmp, v_cmp = cache.compressed(count_compressed(call.bound, config), call.ends)
        ended = compressed_span(config).ended(positions)[:, None, :, None]
        visible = torch.arange(k_cmp.shape[1], device=q.device) < ended  # [B, 1, N, C]
    if "cmp" in branches:
        outputs["cmp"], lse["cmp"] = attend(q, k_cmp, v_cmp, visible, scale)
    if "slc" in branches:
        blocks = call.blocks
        if blocks is None:
            p_cmp, _ = attention_probs(q, k_cmp, visible, scale)
            importance = pool(p_cmp.sum(2), count_selectable(call.bound, config), config)
            blocks = select(importance.transpose(1, 2), config, positions[:, :1])
            call.keep(blocks)
        key = torch.arange(call.bound, device=q.device)
        inside = selected_tokens(blocks, call.bound, config)
        inside &= (key <= positions[..., None])[:, None]
        tokens = cache.tokens(call.bound, call.ends)
        outputs["slc"], lse["slc"] = attend(q, *tokens, inside, scale)
    if "win" in branches:
        k_win, v_win = recent
        hidden = call.window_hidden(slice(0, q.shape[1]), slice(0, k_win.shape[1]))
        outputs["win"], lse["win"] = attend(q, k_win, v_win, ~hidden[:, None], scale)
    for branch in branches:
        note(branch, "cached-mask-matmul")
    return sunk(outputs, lse, call.sinks)


def gather(call: Call, recent: Recent, note: Note) -> dict[str, Tensor]:
    """o [B, N, HQ, DV] of each branch; reads the compressed keys once and a query's own tokens.

    Queries are processed in chunks, so that scores and gathered keys stay bounded.
    """
    cache, q = call.cache, call.q
    branches, dim = cache.shape.branches, cache.shape.value_dim
    outputs = {b: q.new_empty(*q.shape[:3], dim) for b in branches}
    kept = () if call.sinks is None else branches
    lse = {b: q.new_empty(*q.shape[:3], 1, dtype=wide(q.dtype)) for b in kept}
    if "cmp" in branches or "slc" in branches:
        _compressed_and_selected(call, outputs, lse)
    if "win" in branches:
        _window(call, recent, outputs["win"], lse.get("win"))
    for branch in branches:
        note(branch, "cached-gather")
    return sunk(outputs, {b: x.squeeze(-1) for b, x in lse.items()}, call.sinks)


def _compressed_and_selected(
    call: Call, outputs: dict[str, Tensor], lse: dict[str, Tensor]
) -> None:
    """One pass over compressed keys for both branches, then the selected tokens."""
    config, q, heads = call.config, call.q, call.kv_heads
    k_cmp, v_cmp = call.cache.compressed(count_compressed(call.bound, config), call.ends)
    k_cmp, v_cmp = (None if x is None else by_kv_head(x, heads) for x in (k_cmp, v_cmp))
    key, positions = torch.arange(k_cmp.shape[1], device=q.device), call.positions
    ended = compressed_span(config).ended(positions)
    selectable = count_selectable(call.bound, config)
    per_row = q.shape[0] * q.shape[2] * max(1, k_cmp.shape[1])
    for rows in chunks(q.shape[1], per_row, ELEMENTS):
        if "cmp" in outputs or call.blocks is None:
            hidden = key >= ended[:, rows, None]  # [B, M, C]
            probs, sums = _probs(q[:, rows], k_cmp, hidden, heads, call.scale)  # [B*HKV, G*M, C]
        if "cmp" in outputs:
            o = dot(probs.to(v_cmp.dtype), v_cmp)
            _put(o, outputs["cmp"], rows, heads)
            _put(sums, lse.get("cmp"), rows, heads)
        if "slc" in outputs and call.blocks is None:
            shape = q.shape[0], heads, q.shape[2] // heads, *hidden.shape[1:]
            importance = pool(probs.view(shape).sum(2), selectable, config)
            blocks = select(importance.transpose(1, 2), config, positions[:, rows][:, :1])
            call.keep(blocks, rows)
            blocks = blocks[..., :selectable]
        elif "slc" in outputs:
            blocks = call.blocks[:, rows]
        if "slc" in outputs:
            _selected(call, rows, blocks, outputs["slc"], lse.get("slc"))


def _put(x: Tensor, to: Tensor | None, rows: slice, heads: int) -> None:
    """Write x, in the layout of `by_kv_head`, to these rows of `to` unless that is None."""
    if to is not None:
        to[:, rows] = by_query(x, to.shape[0], heads, rows.stop - rows.start)


def _selected(call: Call, rows: slice, blocks: Tensor, o: Tensor, lse: Tensor | None) -> None:
    """Write o and lse at these rows, whose blocks [B, M, HKV, n] are ascending, -1 last."""
    cache, size, shape = call.cache, call.config.select_block, call.cache.shape
    heads, device = shape.kv_heads, call.q.device
    inside = torch.arange(size, device=device)
    head = torch.arange(heads, device=device)[:, None, None]
    k, v = cache.rows("k_slc"), cache.rows("v_slc")
    null = k.shape[0] // heads - 1
    per_row = shape.batch * heads * blocks.shape[-1] * size * (shape.dim + shape.value_dim)
    most = GATHERED.get(device.type, GATHERED["cpu"])
    for part in chunks(rows.stop - rows.start, per_row, most):
        at = slice(rows.start + part.start, rows.start + part.stop)
        position = call.positions[:, at][..., None, None, None]
        chosen = blocks[:, part].long()
        first = cache.page_rows(torch.where(empty_slots(chosen, shape.capacity), -1, chosen * size))
        hidden = (first == null)[..., None] | (chosen[..., None] * size + inside > position)
        index = (first[..., None] + inside).where(~hidden, null) * heads + head
        index = index.flatten(3).flatten(0, 2)  # [B*M*HKV, S]
        queries = call.q[:, at].unflatten(2, (heads, -1)).flatten(0, 2)  # [B*M*HKV, G, D]
        scores = dot(queries, k[index].transpose(1, 2)) * call.scale
        probs, sums = _softmax(scores, hidden.flatten(3).flatten(0, 2)[:, None])
        o[:, at] = dot(probs.to(v.dtype), v[index]).view_as(o[:, at]).to(o.dtype)
        if lse is not None:
            lse[:, at] = sums.view_as(lse[:, at])


def _window(call: Call, recent: Recent, o: Tensor, lse: Tensor | None) -> None:
    """Write o and lse; each row sees the `window` columns of `recent` that end at its own."""
    (k, v), q, heads, window = recent, call.q, call.kv_heads, call.config.window
    per_row = q.shape[0] * q.shape[2] * (2 * window)
    most = min(q.shape[1], max(window, 128))
    for rows in chunks(q.shape[1], per_row, min(ELEMENTS, per_row * most)):
        columns = slice(rows.start, rows.stop + window - 1)
        hidden = call.window_hidden(rows, columns)
        keys = by_kv_head(k[:, columns], heads)
        probs, sums = _probs(q[:, rows], keys, hidden, heads, call.scale)
        values = dot(probs.to(v.dtype), by_kv_head(v[:, columns], heads))
        _put(values, o, rows, heads)
        _put(sums, lse, rows, heads)


def _probs(q: Tensor, k: Tensor, hidden: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """([B*HKV, G*M, S], lse [B*HKV, G*M, 1]) of q [B, M, HQ, D], k [B*HKV, S, D] and hidden
    [B, M, S]."""
    scores = dot(by_kv_head(q, heads), k.transpose(1, 2)) * scale
    shape = q.shape[0], heads, q.shape[2] // heads, *hidden.shape[1:]
    probs, lse = _softmax(scores.view(shape), hidden[:, None, None])
    return probs.view_as(scores), lse.view(*scores.shape[:2], 1)


def _softmax(scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax over the unhidden of the last dimension, 0 where all are hidden; its lse)."""
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return probs_from(scores, lse), lse
