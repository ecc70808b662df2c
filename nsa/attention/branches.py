"""Branch code shared by the torch backends: selection, key ranges, dense masks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.inputs import Inputs
from nsa.attention.operator import operator
from nsa.attention.registry import Branches, Compressed, Note
from nsa.attention.span import probs_from, span_attention, span_chunks, span_scores, wide
from nsa.attention.transforms import active
from nsa.blocks import Span, compressed_span, count_selectable, overlap_band, window_span
from nsa.config import NSAConfig
from nsa.reference.compress import PhiWeights, compress_keys, compress_values
from nsa.reference.nsa import compressed_visible, window_visible
from nsa.reference.select import select, selected_tokens


@torch.no_grad()
def select_blocks(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, scale: float, first: int = 0
) -> Tensor:
    """The blocks that each query selects: [B, T, HKV, N] int32, ascending, -1 where empty.

    q is [B, T, HQ, D], at positions first.., and k_cmp [B, C, HKV, D]. No gradient flows through
    the selection.
    """
    sizes = [getattr(config, field.name) for field in fields(config)]
    return _Selection(q, k_cmp, sizes, scale, first)


@operator("selection")
class _Selection:
    @staticmethod
    def forward(q: Tensor, k_cmp: Tensor, sizes: Sequence[int], scale: float, first: int) -> Tensor:
        config = _config(*sizes)
        blocks, span = _Selection.parts.shapes(q, k_cmp, sizes), compressed_span(config)
        for rows, keys in span_chunks(q, span, first):
            # [B*HKV, G, M, S], then [B*HKV, M, S]
            scores = span_scores(q[:, rows], k_cmp[:, keys], span, scale, first + rows.start)
            p_cmp = probs_from(scores, torch.logsumexp(scores, dim=-1)).sum(1)
            importance = pool(p_cmp, count_selectable(first + rows.stop, config), config)
            importance = importance.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
            blocks[:, rows] = select(importance, config, first_position=first + rows.start)
        return blocks

    @staticmethod
    def shapes(q: Tensor, k_cmp: Tensor, sizes: Sequence[int], *numbers: float) -> Tensor:
        shape = *q.shape[:2], k_cmp.shape[2], _config(*sizes).select_count
        return q.new_empty(shape, dtype=torch.int32)


@lru_cache(maxsize=256)
def _config(*sizes: int) -> NSAConfig:
    return NSAConfig(*sizes)


def pool(p_cmp: Tensor, blocks: int, config: NSAConfig) -> Tensor:
    """Eq. 9 for p_cmp [..., C], summed over a group or not: importance [..., blocks]."""
    offset, weights = overlap_band(config)
    step = config.select_block // config.compress_stride
    right = blocks * step + len(weights) - p_cmp.shape[-1] + offset
    padded = F.pad(p_cmp, (-offset, max(right, 0)))
    bands = [padded[..., m : m + blocks * step : step] * w for m, w in enumerate(weights)]
    return torch.stack(bands).sum(0)


def compressed(inputs: Inputs) -> Compressed:
    """(k_cmp, v_cmp) [B, C, HKV, *]; None for one not requested."""
    if inputs.compressed is not None:
        return inputs.compressed
    k, v, phi, config = inputs.k.get("cmp"), inputs.v.get("cmp"), inputs.phi, inputs.config
    by = by_convolution if torch.compiler.is_exporting() or active() else None
    return (
        None if k is None else compress_keys(k, phi, config, by),
        None if v is None else compress_values(v, phi, config, by),
    )


def by_convolution(x: Tensor, kind: str, weights: PhiWeights, config: NSAConfig) -> Tensor:
    """`compress` for torch.export, which cannot prove that other products' shapes hold for every
    number of blocks, and for torch.func, whose vmap is slow on `unfold`."""
    if x.shape[1] < config.compress_block:
        return x[:, :0]
    heads, stride = x.shape[2], config.compress_stride
    rows = x.flatten(2).transpose(1, 2)
    if kind == "mean":
        means = F.avg_pool1d(rows, config.compress_block, stride)
        return means.transpose(1, 2).unflatten(2, (heads, -1))
    bias = (weights.position.flatten(1)[:, None] @ weights.weight1).flatten()
    bias = bias if weights.bias1 is None else bias + weights.bias1.flatten()
    kernel = weights.weight1.unflatten(1, (config.compress_block, -1))  # [HKV, l, D, HIDDEN]
    kernel = kernel.permute(0, 3, 2, 1).flatten(0, 1)
    hidden = F.conv1d(rows, kernel, bias, stride, groups=heads)  # [B, HKV*HIDDEN, C]
    if kind == "mlp":
        kernel = weights.weight2.transpose(1, 2).flatten(0, 1)[..., None]
        hidden = F.conv1d(F.gelu(hidden), kernel, weights.bias2.flatten(), groups=heads)
    return hidden.transpose(1, 2).unflatten(2, (heads, -1))


def chosen_blocks(inputs: Inputs, k_cmp: Tensor | None, note: Note) -> Tensor:
    """The caller's selection, or a scored one without slots that no query can fill."""
    if inputs.blocks is not None:
        return inputs.blocks
    note("score", "score-chunks")
    blocks = select_blocks(inputs.q, k_cmp, inputs.config, inputs.scale, inputs.q_start)
    if torch.compiler.is_compiling():  # it would specialize on the number of tokens
        return blocks
    return blocks[..., : count_selectable(inputs.q_start + inputs.q.shape[1], inputs.config)]


def scored(inputs: Inputs, note: Note) -> tuple[Tensor, Compressed]:
    """Blocks [B, T, HKV, N] of whole or packed sequences, and (k_cmp, v_cmp), packed ones end to
    end, that they are scored by."""
    note("score", "score-chunks")
    parts = [inputs] if inputs.cu_seqlens is None else list(inputs.sequences(idle=True))
    k_cmp, v_cmp = zip(*map(compressed, parts), strict=True)
    pairs = zip(parts, k_cmp, strict=True)
    blocks = [select_blocks(x.q, k, x.config, x.scale, x.q_start) for x, k in pairs]
    v_cmp = None if v_cmp[0] is None else torch.cat(v_cmp, dim=1)
    return torch.cat(blocks, dim=1), (torch.cat(k_cmp, dim=1), v_cmp)


def no_keys(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(o, lse if needed) of a branch that has no key at all."""
    q = inputs.q
    o = q.new_zeros(*q.shape[:3], inputs.value_dim)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide(q.dtype)) if inputs.needs_lse else None
    return o, lse


def _in_chunks(
    inputs: Inputs, k: Tensor, v: Tensor, span: Span
) -> tuple[tuple[Tensor, Tensor | None], str]:
    given = inputs.q, k, v, span, inputs.scale, inputs.needs_lse, inputs.q_start
    return span_attention(*given), "span-chunks"


def run_with_selected(
    inputs: Inputs,
    note: Note,
    selected: Callable[[Inputs, Tensor, Note], tuple[Tensor, Tensor | None]],
    spans: Callable[[Inputs, Tensor, Tensor, Span], tuple] = _in_chunks,
    compress: Callable = compressed,
    choose: Callable = chosen_blocks,
) -> Branches:
    """(o [B, T, HQ, DV], lse) of each branch.

    The selected one is `selected(inputs, blocks, note)`, the others `spans(inputs, k, v, span)`,
    which returns its implementation too, ((o, lse), name); `compress` and `choose` replace
    `compressed` and `chosen_blocks`.
    """
    outputs, (k_cmp, v_cmp) = {}, compress(inputs)
    if "cmp" in inputs.branches:
        outputs["cmp"], served = spans(inputs, k_cmp, v_cmp, compressed_span(inputs.config))
        note("cmp", served)
    if "slc" in inputs.branches:
        outputs["slc"] = selected(inputs, choose(inputs, k_cmp, note), note)
    if "win" in inputs.branches:
        k, v, span = inputs.k["win"], inputs.v["win"], window_span(inputs.config)
        outputs["win"], served = spans(inputs, k, v, span)
        note("win", served)
    return outputs


def empty_slots(blocks: Tensor, count: int) -> Tensor:
    """Slots of blocks [..., N] that select nothing: outside 0..count-1, or a repeated block.

    Indices ascend, so equal ones are neighbours.
    """
    empty = (blocks < 0) | (blocks >= count)
    empty[..., 1:] |= blocks[..., 1:] == blocks[..., :-1]
    return empty


def visible_by_branch(inputs: Inputs, note: Note) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(branch, k, v, visible [B or 1, HKV or 1, T, S]) for each requested branch."""
    k, v, config, device = inputs.k, inputs.v, inputs.config, inputs.q.device
    keys = torch.arange(inputs.tokens, device=device)
    positions = inputs.q_start + torch.arange(inputs.q.shape[1], device=device)
    k_cmp, v_cmp = compressed(inputs)
    if "cmp" in inputs.branches:
        yield "cmp", k_cmp, v_cmp, compressed_visible(positions, k_cmp.shape[1], config)
    if "slc" in inputs.branches:
        blocks = chosen_blocks(inputs, k_cmp, note)
        visible = selected_tokens(blocks, inputs.tokens, config) & (keys <= positions[:, None])
        yield "slc", k["slc"], v["slc"], visible
    if "win" in inputs.branches:
        yield "win", k["win"], v["win"], window_visible(positions, config, keys)
