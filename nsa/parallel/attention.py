"""The operation over one sequence on several ranks, by two methods with the same results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.attention.inputs import Inputs, checked
from nsa.attention.placing import sequence_bounds
from nsa.config import NSAConfig
from nsa.parallel.collectives import Gathering, heads_for_tokens, tokens_for_heads
from nsa.parallel.layout import Layout
from nsa.parallel.mesh import ContextParallel
from nsa.parallel.pooling import can_pool, pooled
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
        bounds = _bounds(cu_seqlens, inputs, layout)
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


def _bounds(cu_seqlens: Tensor | None, inputs: Inputs, layout: Layout) -> tuple[int, ...]:
    """cu_seqlens on the host, (0, T) of a single sequence; ValueError unless they end at T."""
    if cu_seqlens is None:
        return 0, layout.padded
    return sequence_bounds(cu_seqlens, inputs.q, layout.padded)


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


def _heads(inputs: Inputs, rows: slice) -> Inputs:
    """Inputs of these KV heads and their query heads; tensors shared by branches stay shared."""
    group, cut = inputs.group, {}
    queries = slice(rows.start * group, rows.stop * group)

    def of(side: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {b: cut.setdefault(id(x), x[:, :, rows]) for b, x in side.items()}

    return replace(
        inputs,
        q=inputs.q[:, :, queries],
        k=of(inputs.k),
        v=of(inputs.v),
        gates=inputs.gates[:, :, queries],
        blocks=None if inputs.blocks is None else inputs.blocks[:, :, rows],
        sinks=None if inputs.sinks is None else inputs.sinks[queries],
        phi=_phi_of(inputs.phi, rows),
    )


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
    step = context.heads_at_once or inputs.kv_heads
    parts = [slice(h, h + step) for h in range(0, inputs.kv_heads, step)]
    outputs, ahead = [], None
    for index, rows in enumerate(parts):
        sent = ahead or _Sent(_heads(inputs, rows), layout, context, bounds)
        # Sent before these heads are computed, and in the backward received after them.
        following = parts[index + 1 : index + 2]
        ahead = _Sent(_heads(inputs, *following), layout, context, bounds) if following else None
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
        self, inputs: Inputs, layout: Layout, context: ContextParallel, bounds: tuple[int, ...]
    ) -> None:
        self.layout, self.chunks, self.bounds = layout, layout.chunks(context.rank), bounds
        self.compressed = None
        if can_pool(inputs, layout, bounds):
            self.compressed = pooled(inputs, layout, context)
            k, v = ({b: x for b, x in s.items() if b != "cmp"} for s in (inputs.k, inputs.v))
            inputs = replace(inputs, k=k, v=v)
        self.inputs = inputs
        held = {id(x): x for x in (*inputs.k.values(), *inputs.v.values())}
        self.keys, self.gathering = list(held), Gathering(list(held.values()), layout, context)

    def own_chunks(self, options: Mapping[str, Any]) -> Any:
        """o, or (o, blocks), of this rank's two chunks, each against the keys up to its end."""
        compressed = ([], []) if self.compressed is None else self.compressed.wait()
        pairs = zip(self.chunks, self.gathering.wait(), compressed, strict=True)
        outputs = [self._chunk(number, *pair, options) for number, pair in enumerate(pairs)]
        return _joined(outputs, dim=1)

    def _chunk(
        self,
        number: int,
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
        own = slice(number * self.layout.chunk, (number + 1) * self.layout.chunk)
        cut = {"q": inputs.q[:, own], "gates": inputs.gates[:, own]}
        cut |= {"k": {b: seen[id(x)] for b, x in inputs.k.items()}}
        cut |= {"v": {b: seen[id(x)] for b, x in inputs.v.items()}}
        cut |= {"blocks": None if inputs.blocks is None else inputs.blocks[:, own]}
        more: dict[str, Any] = {"q_start": chunk.start - start}
        if len(ends) > 1:
            device = inputs.q.device
            more["cu_seqlens"] = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        if compressed:
            keys, *values = compressed
            more["compressed"] = keys, values[0] if values else None
        return _attend(replace(inputs, **cut), options, **more)
