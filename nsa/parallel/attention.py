"""The operation over one sequence on several ranks, by two methods with the same results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.attention.inputs import Inputs, checked
from nsa.attention.placing import sequence_bounds
from nsa.attention.registry import Compress
from nsa.config import NSAConfig
from nsa.parallel.collectives import Gathering, heads_for_tokens, tokens_for_heads
from nsa.parallel.layout import Layout
from nsa.parallel.mesh import ContextParallel
from nsa.parallel.pooling import can_pool, compress_of, pooled
from nsa.reference.compress import Phi, PhiWeights
from nsa.reference.nsa import BRANCHES


def context_parallel_attention(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    context: ContextParallel,
    *,
    cu_seqlens: Tensor | None = None,
    phi: Phi | None = None,
    blocks: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    strict: bool = False,
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """This rank's rows of `nsa_attention` over the sequence of all ranks: o [B, TL, HQ, DV].

    A collective call: every rank passes its rows, TL of each, as `shard_sequence` cuts them.
    Gradients of the rows are whole; those of phi and sinks are this rank's part, and their sum over
    the ranks is the gradient.

    Args:
        q, k, v, gates, blocks: this rank's rows, [B, TL, ...]; otherwise as in `nsa_attention`.
            Keys and queries are rotated, if at all, by their positions in the whole sequence, and
            phi's tables cover all P TL positions. `blocks` are indices in the whole sequence, and
            so are those that `return_blocks` adds to the result.
        context: the ranks, and the method.
        cu_seqlens: [N + 1], borders from 0 to P TL in the whole sequence, the same on each rank.

    Raises:
        ValueError: inputs do not fit, here or on another rank; HKV that P does not divide
            ("ulysses") or that heads_at_once does not divide ("gather").
        RuntimeError: a collective failed, because another rank has ended.
    """
    given = {"phi": phi, "blocks": blocks, "branches": branches, "scale": scale, "sinks": sinks}
    inputs = layout = bounds = error = None
    try:
        inputs = checked(q, k, v, gates, config, **given)
        layout = context.layout(q.shape[1])
        bounds = 0, layout.padded
        if cu_seqlens is not None:
            bounds = sequence_bounds(cu_seqlens, q, layout.padded)
        context.check_heads(inputs.kv_heads)
    except ValueError as refused:
        error = refused
    context.agree({} if error else _sizes(inputs, bounds, context), error)
    options = {"backend": backend, "strict": strict, "branches": inputs.branches}
    options |= {"scale": inputs.scale, "return_blocks": return_blocks}
    if context.ranks == 1:
        return _attend(inputs, options, cu_seqlens=cu_seqlens)
    if context.method == "ulysses":
        return _ulysses(inputs, layout, context, options, cu_seqlens)
    return _gather(inputs, layout, context, options, bounds)


def _sizes(inputs: Inputs, bounds: tuple[int, ...], context: ContextParallel) -> dict[str, Any]:
    """All that must be alike on each rank, by name."""
    named = {"q": inputs.q, "gates": inputs.gates, "blocks": inputs.blocks}
    named |= {f"{side}[{b!r}]": x for side in "kv" for b, x in getattr(inputs, side).items()}
    found = {n: f"{list(x.shape)} {x.dtype}" for n, x in named.items() if x is not None}
    held = {id(x) for x in (*inputs.k.values(), *inputs.v.values())}
    more = {"phi": inputs.phi.kind, "cu_seqlens": bounds, "tensors of k and v": len(held)}
    more |= {"sinks": inputs.sinks is not None}
    more |= {name: getattr(inputs, name) for name in ("branches", "config", "scale")}
    return found | more | {n: getattr(context, n) for n in ("method", "heads_at_once")}


def _attend(inputs: Inputs, options: Mapping[str, Any], **more: Any) -> Any:
    """o of one call on this rank alone, or (o, blocks) if options ask for them."""
    config, blocks = inputs.config, inputs.blocks
    given = {"phi": inputs.phi, "blocks": blocks, "sinks": inputs.sinks} | options | more
    return nsa_attention(inputs.q, inputs.k, inputs.v, inputs.gates, config, **given)


def _by_heads(inputs: Inputs, each: int) -> list[Inputs]:
    """Inputs of `each` KV heads at a time and their query heads; tensors that branches share stay
    shared. Cut at once, since the gradients of a cut are one copy: slices would each add zeros."""
    group, count = inputs.group, inputs.kv_heads // each
    if count == 1:
        return [inputs]
    held = {id(x): x.split(each, 2) for x in (*inputs.k.values(), *inputs.v.values())}
    parts = {"q": inputs.q.split(each * group, 2), "gates": inputs.gates.split(each * group, 2)}
    if inputs.blocks is not None:
        parts["blocks"] = inputs.blocks.split(each, 2)
    if inputs.sinks is not None:
        parts["sinks"] = inputs.sinks.split(each * group)
    return [
        replace(
            inputs,
            k={b: held[id(x)][index] for b, x in inputs.k.items()},
            v={b: held[id(x)][index] for b, x in inputs.v.items()},
            phi=_phi_of(inputs.phi, slice(index * each, (index + 1) * each)),
            **{name: pieces[index] for name, pieces in parts.items()},
        )
        for index in range(count)
    ]


def _phi_of(phi: Phi, rows: slice) -> Phi:
    """Phi of these KV heads."""

    def of(weights: PhiWeights | None) -> PhiWeights | None:
        if weights is None:
            return None
        return PhiWeights(**{n: None if x is None else x[rows] for n, x in vars(weights).items()})

    return replace(phi, key=of(phi.key), value=of(phi.value))


def _ulysses(
    inputs: Inputs,
    layout: Layout,
    context: ContextParallel,
    options: Mapping[str, Any],
    cu_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All tokens of 1/P of the heads on each rank (arXiv 2309.14509), then back."""
    each, group = inputs.kv_heads // context.ranks, inputs.group
    held = {id(x): x for x in (*inputs.k.values(), *inputs.v.values())}
    given = [inputs.q, *held.values(), inputs.gates]
    given += [] if inputs.blocks is None else [inputs.blocks]
    q, *found = tokens_for_heads(given, layout, context)
    blocks = None if inputs.blocks is None else found.pop()
    gates = found.pop()
    moved = dict(zip(held, found, strict=True))
    rows = slice(context.rank * each, (context.rank + 1) * each)
    queries = slice(rows.start * group, rows.stop * group)
    mine = replace(
        inputs,
        q=q,
        k={b: moved[id(x)] for b, x in inputs.k.items()},
        v={b: moved[id(x)] for b, x in inputs.v.items()},
        gates=gates,
        blocks=blocks,
        sinks=None if inputs.sinks is None else inputs.sinks[queries],
        phi=_phi_of(inputs.phi, rows),
    )
    found = _attend(mine, options, cu_seqlens=cu_seqlens)
    if options["return_blocks"]:
        return heads_for_tokens(found, layout, context)
    return heads_for_tokens([found], layout, context)[0]


def _gather(
    inputs: Inputs,
    layout: Layout,
    context: ContextParallel,
    options: Mapping[str, Any],
    bounds: tuple[int, ...],
) -> Tensor | tuple[Tensor, Tensor]:
    """Own queries against gathered keys and values, a few KV heads at a time."""
    parts = _by_heads(inputs, context.heads_at_once or inputs.kv_heads)
    pools = can_pool(inputs, layout, bounds)
    compress = compress_of(options["backend"], inputs) if pools else None
    outputs, ahead = [], None
    for index, part in enumerate(parts):
        sent = ahead or _Sent(part, layout, context, bounds, compress)
        # Sent before these heads are computed, and in the backward received after them.
        following = parts[index + 1 : index + 2]
        ahead = _Sent(*following, layout, context, bounds, compress) if following else None
        outputs.append(sent.own_chunks(options))
    return _joined(outputs, dim=2)


def _joined(outputs: Sequence[Any], dim: int) -> Any:
    """Tensors, or pairs (o, blocks) of them, end to end."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(parts, dim) for parts in zip(*outputs, strict=True))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=dim)


class _Sent:
    """Inputs of some KV heads, whose keys and values are on their way to all ranks."""

    def __init__(
        self,
        inputs: Inputs,
        layout: Layout,
        context: ContextParallel,
        bounds: tuple[int, ...],
        compress: Compress | None,
    ) -> None:
        self.layout, self.chunks, self.bounds = layout, layout.chunks(context.rank), bounds
        self.inputs, self.compressed = inputs, None
        if compress is not None:
            k, v = ({b: x for b, x in s.items() if b != "cmp"} for s in (inputs.k, inputs.v))
            self.inputs = replace(inputs, k=k, v=v)
        held = {id(x): x for x in (*self.inputs.k.values(), *self.inputs.v.values())}
        self.keys, self.gathering = list(held), Gathering(list(held.values()), layout, context)
        if compress is not None:  # while the others are on their way
            self.compressed = pooled(inputs, layout, context, compress)

    def own_chunks(self, options: Mapping[str, Any]) -> Any:
        """o, or (o, blocks), of this rank's two chunks, each against the keys up to its end."""
        compressed = ([], []) if self.compressed is None else self.compressed.wait()
        given = self._queries(), self.chunks, self.gathering.wait(), compressed
        outputs = [self._chunk(*each, options) for each in zip(*given, strict=True)]
        return _joined(outputs, dim=1)

    def _queries(self) -> list[dict[str, Tensor | None]]:
        """Tensors of each chunk's queries, cut at once: see `_by_heads`."""
        inputs, chunk = self.inputs, self.layout.chunk
        whole = {"q": inputs.q, "gates": inputs.gates, "blocks": inputs.blocks}
        halves = {n: (None, None) if x is None else x.split(chunk, 1) for n, x in whole.items()}
        return [{name: pair[number] for name, pair in halves.items()} for number in range(2)]

    def _chunk(
        self,
        queries: Mapping[str, Tensor | None],
        chunk: slice,
        gathered: list[Tensor],
        compressed: list[Tensor],
        options: Mapping[str, Any],
    ) -> Any:
        inputs, bounds = self.inputs, self.bounds
        # Keys of sequences that ended before the chunk are seen by none of its queries.
        start = max(bound for bound in bounds if bound <= chunk.start)
        ends = [min(bound, chunk.stop) - start for bound in bounds if bound > start]
        ends = list(dict.fromkeys(ends))  # those behind the chunk all end with it
        seen = {key: x[:, start:] for key, x in zip(self.keys, gathered, strict=True)}
        k = {b: seen[id(x)] for b, x in inputs.k.items()}
        v = {b: seen[id(x)] for b, x in inputs.v.items()}
        more: dict[str, Any] = {"q_start": chunk.start - start}
        if len(ends) > 1:
            device = inputs.q.device
            more["cu_seqlens"] = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        if compressed:
            keys, *values = compressed
            more["compressed"] = keys, values[0] if values else None
        return _attend(replace(inputs, k=k, v=v, **queries), options, **more)
