"""flash: flash-attn for the window and, regrouped, for the compressed branch.

The d queries at l-1 + a d .. l-1 + a d + d-1 see the same compressed keys, 0..a. Taken as d times
as many heads of one query at position a, they turn the compressed branch into causal attention
over C positions, at flash-attn's speed, for one copy of q and of o. Scores and the selected branch
come from our Triton kernels where those run, else from `packed`. Memory is linear in T: it holds
no T x T tensor.
"""

import torch
from torch import Tensor

from nsa.attention import branches, dense
from nsa.attention.backends import packed, triton
from nsa.attention.dense import dense_attention
from nsa.attention.inputs import Inputs
from nsa.attention.operator import plain_backward
from nsa.attention.registry import Backend, Branches, Compressed, Note
from nsa.blocks import Span
from nsa.config import NSAConfig


def run(inputs: Inputs, note: Note) -> Branches:
    """(o [B, T, HQ, DV], None) of each branch."""
    if triton.why_not(inputs):
        return branches.run_with_selected(inputs, note, packed.selected, _attend_span)
    ours = triton.selected, _attend_span, triton.compressed, _chosen_by_kernels
    return branches.run_with_selected(inputs, note, *ours)


def compress(inputs: Inputs) -> Compressed:
    """(k_cmp, v_cmp), by our kernels where those run."""
    return (branches if triton.why_not(inputs) else triton).compressed(inputs)


def score(inputs: Inputs, note: Note) -> tuple[Tensor, Compressed]:
    """Blocks and (k_cmp, v_cmp), by our kernels where those run."""
    return branches.scored(inputs, note) if triton.why_not(inputs) else triton.score(inputs, note)


def _chosen_by_kernels(inputs: Inputs, k_cmp: Tensor | None, note: Note) -> Tensor:
    if inputs.blocks is not None:
        return inputs.blocks
    note("score", "triton")
    with torch.no_grad():
        return triton.select_blocks(inputs, k_cmp)


def _attend_span(
    inputs: Inputs, k: Tensor, v: Tensor, span: Span
) -> tuple[tuple[Tensor, None], str]:
    q, config, scale = inputs.q, inputs.config, inputs.scale
    if span.lookback is not None:
        o, library = dense_attention(q, k, v, scale=scale, window=span.lookback)
        return (o, None), library
    count, kv_heads = k.shape[1:3]
    if count == 0:
        return branches.no_keys(inputs), "no-keys"
    grouped = _Moved.apply(q, regroup, ungroup, config, count, kv_heads)
    o, library = dense_attention(grouped, k, v, scale=scale)
    o = _Moved.apply(o, ungroup, regroup, config, q.shape[1], kv_heads)
    return (o, None), f"{library}-regrouped"


def regroup(x: Tensor, config: NSAConfig, count: int, kv_heads: int) -> Tensor:
    """[B, T, H, D] -> [B, count, HKV * d * G, D]: tokens l-1 and later, d under one position.

    Heads stay in the order of their KV head; the last position is padded with 0.
    """
    batch, tokens, heads, dim = x.shape
    first, stride = config.compress_block - 1, config.compress_stride
    whole, rest = divmod(tokens - first, stride)
    grouped = x.new_empty(batch, count, kv_heads, stride, heads // kv_heads, dim)
    by_token = grouped.transpose(2, 3)  # [B, count, d, HKV, G, D]
    x = x[:, first:].unflatten(2, (kv_heads, -1))
    by_token[:, :whole] = x[:, : whole * stride].unflatten(1, (whole, stride))
    if rest:
        by_token[:, whole, :rest] = x[:, whole * stride :]
        by_token[:, whole, rest:] = 0.0
    return grouped.flatten(2, 4)


def ungroup(x: Tensor, config: NSAConfig, tokens: int, kv_heads: int) -> Tensor:
    """Inverse of `regroup`; tokens before l-1 are 0."""
    batch, _, heads, dim = x.shape
    first, stride = config.compress_block - 1, config.compress_stride
    whole, rest = divmod(tokens - first, stride)
    by_token = x.unflatten(2, (kv_heads, stride, -1)).transpose(2, 3)  # [B, count, d, HKV, G, D]
    flat = x.new_empty(batch, tokens, heads // stride, dim)
    flat[:, :first] = 0.0
    tail = flat[:, first:].unflatten(2, (kv_heads, -1))
    tail[:, : whole * stride].unflatten(1, (whole, stride)).copy_(by_token[:, :whole])
    if rest:
        tail[:, whole * stride :] = by_token[:, whole, :rest]
    return flat


class _Moved(torch.autograd.Function):
    """Apply `there` (`regroup` or `ungroup`); its transpose `back` is the other: one copy each."""

    @staticmethod
    def forward(ctx, x, there, back, config, length, kv_heads):
        ctx.way_back = back, config, x.shape[1], kv_heads
        return there(x, config, length, kv_heads)

    @staticmethod
    @plain_backward
    def backward(ctx, dx):
        back, *sizes = ctx.way_back
        return back(dx, *sizes), None, None, None, None, None


def why_not(inputs: Inputs) -> list[str]:
    """Reasons why flash-attn does not support the inputs."""
    reasons = dense.why_not(inputs.q, inputs.value_dim, inputs.scale)
    if inputs.offset:
        reasons.append("takes queries at the positions of all keys, and no q_start")
    if inputs.needs_lse:
        reasons.append(
            "flash-attn hands out no log-sum-exp with a gradient, which sinks need, and return_lse "
            "one of every branch"
        )
    return reasons


BACKEND = Backend(
    "flash",
    run,
    summary="flash-attn for window and compressed; our kernels or packed for selected",
    quadratic=False,
    why_not=why_not,
    compress=compress,
    score=score,
)
