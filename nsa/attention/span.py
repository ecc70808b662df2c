"""Code shared by blockwise backends: products, softmax statistics, attention on key ranges.

In the compressed and the window branch a query sees one contiguous range of keys. Queries are
processed in chunks whose scores fill about ELEMENTS elements, so memory beyond inputs and outputs
is bounded, not T x T.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.attention.operator import operator
from nsa.blocks import Span

ELEMENTS = 1 << 22  # scores held at once; more of them mean fewer and larger launches


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, statistics and accumulators: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """[N, M, K] @ [N, K, P] with the sums and the result in the wide dtype."""
    if a.dtype == wide(a.dtype):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, M, HQ, D] -> [B*HKV, G*M, D]: the rows of a group stacked head by head."""
    grouped = x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return grouped.reshape(x.shape[0] * kv_heads, -1, x.shape[3])


def by_query(x: Tensor, batch: int, kv_heads: int, rows: int) -> Tensor:
    """Inverse of `by_kv_head`: [B*HKV, G*M, D] -> [B, M, HQ, D]."""
    grouped = x.view(batch, kv_heads, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return grouped.reshape(batch, rows, -1, x.shape[-1])


def probs_from(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) with lse [..., M] for scores [..., M, S]; 0 where a row has no key."""
    shift = torch.where(lse.isneginf(), 0.0, lse)  # exp(-inf - -inf) would be NaN
    return torch.exp(scores - shift[..., None])


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    scale: float,
    needs_lse: bool = False,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """(o [B, T, HQ, DV], lse [B, T, HQ] if needed) for q [B, T, HQ, D] at positions first..,
    k and v [B, S, HKV, *]."""
    if not needs_lse:
        return _SpanAttention(q, k, v, *span, scale, first), None
    o, lse = _SpanAttention.with_lse(q, k, v, *span, scale, first)  # lse [B*HKV, G, T]
    return o, lse.unflatten(0, (q.shape[0], -1)).flatten(1, 2).transpose(1, 2)


def span_scores(q: Tensor, k: Tensor, span: Span, scale: float, first: int) -> Tensor:
    """Masked scores of the queries at positions first.. against keys [0, S) or a slice of them.

    q is [B, M, HQ, D] and k holds exactly the keys [low, high) that any of the M queries sees.
    Returns [B*HKV, G, M, high - low] in the wide dtype, -inf where a query does not see a key.
    """
    batch, rows, heads, _ = q.shape
    kv_heads = k.shape[2]
    low, _ = span.seen(first)
    scores = dot(by_kv_head(q, kv_heads), by_kv_head(k, kv_heads).transpose(1, 2)) * scale
    scores = scores.view(batch * kv_heads, heads // kv_heads, rows, k.shape[1])
    t = torch.arange(first, first + rows, device=q.device)[:, None]
    s = torch.arange(low, low + k.shape[1], device=q.device)
    # Tokens since the key's last one: not negative once that is at or before t.
    ended = t + 1 - span.length - s * span.stride
    hidden = ended < 0
    if span.lookback is not None:
        hidden |= ended >= span.lookback * span.stride
    return scores.masked_fill(hidden, float("-inf"))


@operator("span_attention")
class _SpanAttention:
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int,
        stride: int,
        lookback: int | None,
        scale: float,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        span = Span(length, stride, lookback)
        batch, kv_heads = q.shape[0], k.shape[2]
        o, lse = _SpanAttention.parts.shapes(q, k, v)
        for rows, keys in span_chunks(q, span, first):
            scores = span_scores(q[:, rows], k[:, keys], span, scale, first + rows.start)
            lse[..., rows] = torch.logsumexp(scores, dim=-1)
            probs = probs_from(scores, lse[..., rows]).to(v.dtype).flatten(1, 2)
            values = dot(probs, by_kv_head(v[:, keys], kv_heads))
            o[:, rows] = by_query(values, batch, kv_heads, rows.stop - rows.start)
        return o, lse

    @staticmethod
    def shapes(q: Tensor, k: Tensor, v: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        o = q.new_empty(batch, tokens, heads, v.shape[3])
        rows = batch * k.shape[2], heads // k.shape[2], tokens
        return o, q.new_empty(rows, dtype=wide(q.dtype))

    @staticmethod
    def backward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        length: int,
        stride: int,
        lookback: int | None,
        scale: float,
        first: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        span = Span(length, stride, lookback)
        batch, kv_heads = q.shape[0], k.shape[2]
        dq, accumulate = q.new_empty(q.shape), wide(q.dtype)
        dk, dv = (x.new_zeros(batch * kv_heads, *x.shape[1::2], dtype=accumulate) for x in (k, v))
        for rows, keys in span_chunks(q, span, first):
            count = rows.stop - rows.start
            scores = span_scores(q[:, rows], k[:, keys], span, scale, first + rows.start)
            probs = probs_from(scores, lse[..., rows]).flatten(1, 2)
            do_rows = by_kv_head(do[:, rows], kv_heads)
            dprobs = dot(do_rows, by_kv_head(v[:, keys], kv_heads).transpose(1, 2))
            # Equal to sum(do * o), but nothing of o was rounded, and o need not be kept.
            delta = (probs * dprobs).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= dlse[..., rows].flatten(1)[..., None]
            dscores = (probs * (dprobs - delta) * scale).to(q.dtype)
            dq_rows = dot(dscores, by_kv_head(k[:, keys], kv_heads))
            dq[:, rows] = by_query(dq_rows, batch, kv_heads, count)
            dk[:, keys] += dot(dscores.transpose(1, 2), by_kv_head(q[:, rows], kv_heads))
            dv[:, keys] += dot(probs.to(v.dtype).transpose(1, 2), do_rows)
        dk, dv = (x.unflatten(0, (batch, kv_heads)).transpose(1, 2) for x in (dk, dv))
        return dq, k.new_empty(k.shape).copy_(dk), v.new_empty(v.shape).copy_(dv)


def span_chunks(q: Tensor, span: Span, first: int = 0) -> Iterator[tuple[slice, slice]]:
    """(rows, keys): as many queries as ELEMENTS allows and the keys that any of them sees.

    q [B, T, HQ, D] is at positions first...
    """
    batch, tokens, heads, _ = q.shape
    longest = span.seen(first + tokens - 1)[1]
    most = tokens
    if span.lookback is not None and span.lookback < longest:
        # Rows see lookback keys each and lookback + rows together: more rows would mask the most.
        most = max(span.lookback, 128)
        longest = span.lookback + most
    per_row = batch * heads * max(longest, 1)
    for rows in chunks(tokens, per_row, min(ELEMENTS, per_row * most)):
        yield rows, slice(span.seen(first + rows.start)[0], span.seen(first + rows.stop - 1)[1])


def chunks(rows: int, per_row: int, elements: int) -> Iterator[slice]:
    """Slices of all rows in order, each of at most `elements` elements but at least one row."""
    step = max(1, elements // per_row)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
