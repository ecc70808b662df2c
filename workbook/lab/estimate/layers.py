"""Extend a trace of few layers to many: runs of equal layers are traced with four layers (the
first, two in the middle and the last), and the trace is extended to the whole model.

Both middle layers must have the same events. One is then repeated for all layers left out. Nothing
is fitted: sizes, order and lifetimes are those of a trace of all layers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from workbook.lab.estimate.trace import Trace
from workbook.lab.measure.allocations import FREE
from workbook.lab.training import TrainingSpec

KEPT = 4  # layers traced of a run of equal ones
LAYER = re.compile(r"blocks\.(\d+)")
# A block of memory, without its layer: index of the phase, of the sweep over the layers or the
# section between sweeps, and of the block within one layer's part of it.
Key = tuple[int, int, int]


class Irregular(Exception):
    """Layers that should be equal differ; the message gives the place."""


@dataclass(frozen=True)
class Shortened:
    """A training with fewer layers, and for each original layer the index of its equal there."""

    spec: TrainingSpec
    like: tuple[int, ...]


def shortened(spec: TrainingSpec) -> Shortened | None:
    """Return the spec with fewer layers; None if no layer can be left out."""
    from nsa.model.config import layer_range

    config = spec.config()
    again = layer_range(config.checkpoint, config.layers)
    like: list[int] = []
    kept, recomputed = 0, []
    for kind, run in groupby(range(config.layers), key=lambda layer: layer in again):
        count = len(list(run))
        here = range(kept, kept + min(count, KEPT))
        like += [*here[:1], *[here[1]] * (count - KEPT), *here[1:]] if count > KEPT else here
        recomputed += [*here] * kind
        kept += len(here)
    if kept == config.layers:
        return None
    text = f"{recomputed[0]}:{recomputed[-1] + 1}" if recomputed else ""
    return Shortened(replace(spec, layers=kept, checkpoint=text), tuple(like))


@dataclass
class Part:
    """A section of events: one layer's part of a sweep, or events between sweeps (layer None)."""

    layer: int | None
    events: list[tuple[int, int]] = field(default_factory=list)  # address, and bytes or FREE
    sweep: int = 0


def repeated(short: Trace, like: Sequence[int]) -> Trace:
    """Return the trace of all layers. Raises Irregular if the short one cannot be extended."""
    return _Repeat(short, like).whole()


class _Repeat:
    def __init__(self, short: Trace, like: Sequence[int]) -> None:
        self.short, self.like, self.count = short, like, max(like) + 1
        self.layer_of = {
            address: int(found[1]) if (found := LAYER.search(name)) else None
            for address, name in short.where.items()
        }
        self.symbols: dict[int, tuple[Key, int | None]] = {}  # by address
        self.parts = self._parts()
        self.made = Trace(unknown=short.unknown, operators=short.operators)
        self.addresses: dict[tuple[Key, int | None], int] = {}

    def whole(self) -> Trace:
        tags: dict[int, list[Any]] = defaultdict(list)
        for position, category, addresses in self.short.stream.tags:
            tags[position].append((category, addresses))
        position, stream = 0, self.made.stream
        for number, parts in enumerate(self.parts):
            if number:
                stream.mark(self.short.stream.marks[number - 1][1])
            self._tag(tags.pop(position, ()))
            for part, layer in self._in_order(parts):
                self._emit(part, layer)
            position += sum(len(part.events) for part in parts)
        self._tag(tags.pop(position, ()))
        if tags:
            raise Irregular("something is tagged in the middle of a phase")
        return self.made

    def _parts(self) -> list[list[Part]]:
        """Parts of each phase, and of the events before the first."""
        stream = self.short.stream
        borders = [0, *(at for at, _ in stream.marks), len(stream)]
        names = ["", *(name for _, name in stream.marks)]
        return [
            self._phase(number, names[number], range(*border))
            for number, border in enumerate(pairwise(borders))
        ]

    def _phase(self, number: int, name: str, positions: range) -> list[Part]:
        parts, stream = [Part(None)], self.short.stream
        for at in positions:
            address, size = stream.addresses[at], stream.sizes[at]
            layer = self.layer_of.get(address, -1)  # -1: of no known module
            if size != FREE:
                starts = layer != -1 and layer != parts[-1].layer
            else:  # a backward frees what its layer has saved
                before = next((p.layer for p in reversed(parts) if p.layer is not None), self.count)
                starts = name == "backward" and layer not in (-1, None) and layer == before - 1
            if starts:
                parts.append(Part(layer))
            parts[-1].events.append((address, size))
        self._number(number, parts, name)
        return parts

    def _number(self, number: int, parts: list[Part], name: str) -> None:
        """Find the sweeps, each over all layers in order, and assign keys to allocations."""
        sweep, expected = 0, iter(())
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            if part.layer is not None:
                due = next(expected, None)
                if due is None:
                    up = part.layer == 0 and (self.count == 1 or (after and after.layer == 1))
                    expected = iter(range(self.count) if up else range(self.count - 1, -1, -1))
                    due = next(expected)
                    sweep += 1
                if part.layer != due:
                    raise Irregular(f"layer {part.layer} comes out of turn in {name or 'set-up'}")
            elif next(expected, None) is not None:
                raise Irregular(f"something is between layers in {name or 'set-up'}")
            else:
                sweep += 1
            part.sweep = sweep
            ordinal = 0
            for address, size in part.events:
                if size != FREE:
                    key = number, sweep, ordinal
                    self.symbols[address] = key, part.layer
                    ordinal += 1

    def _in_order(self, parts: list[Part]) -> Iterator[tuple[Part, int | None]]:
        """Yield each part with its layer in the whole model."""
        for _, group in groupby(parts, key=lambda part: part.sweep):
            few = list(group)
            if few[0].layer is None:
                yield few[0], None
                continue
            by_layer = {part.layer: part for part in few}
            self._check(by_layer)
            order = range(len(self.like))
            for layer in order if few[0].layer == 0 else reversed(order):
                yield by_layer[self.like[layer]], layer

    def _check(self, by_layer: dict[int | None, Part]) -> None:
        for layer in {layer for layer in self.like if self.like.count(layer) > 1}:
            forms = [list(self._form(by_layer[x])) for x in (layer, layer + 1)]
            if forms[0] != forms[1]:
                raise Irregular(f"layer {layer + 1} is not like layer {layer}")

    def _form(self, part: Part) -> Iterator[Any]:
        """Yield the events without addresses, with layers relative to this one."""
        for bulk, events in self._runs(part):
            if events[0][1] != FREE:
                names = (self.short.where.get(address, "") for address, _ in events)
                plain = [LAYER.sub("blocks.*", name) for name in names]
                yield [size for _, size in events], plain
                continue
            theirs = [self.symbols[address] for address, _ in events]
            if not bulk:
                theirs = [(k, -self.count if x is None else x - part.layer) for k, x in theirs]
            yield bulk, sorted(theirs)  # simultaneous frees may come in any order

    def _runs(self, part: Part) -> Iterator[tuple[bool, list[tuple[int, int]]]]:
        """Yield runs of frees or of allocations, with True for frees that span many layers, and
        therefore all layers."""
        for frees, run in groupby(part.events, key=lambda event: event[1] == FREE):
            events = list(run)
            layers = {self.symbols[address][1] for address, _ in events} - {None} if frees else ()
            far = part.layer is None or any(abs(x - part.layer) > 1 for x in layers)
            yield bool(layers) and far, events

    def _emit(self, part: Part, layer: int | None) -> None:
        for bulk, events in self._runs(part):
            if bulk:
                for key, other in self._expanded([address for address, _ in events]):
                    self._free(key, other)
                continue
            for address, size in events:
                key, other = self.symbols[address]
                theirs = None if other is None else other - (part.layer or 0) + (layer or 0)
                if size == FREE:
                    self._free(key, theirs)
                else:
                    self.addresses[key, theirs] = self._alloc(address, size, theirs)

    def _alloc(self, like: int, size: int, layer: int | None) -> int:
        address = len(self.made.stream) + 1
        self.made.stream.alloc(address, size)
        if (name := self.short.where.get(like)) is not None:
            self.made.where[address] = LAYER.sub(f"blocks.{layer}", name)
        if number := self.short.streams.get(like):
            self.made.streams[address] = number
        return address

    def _free(self, key: Key, layer: int | None) -> None:
        address = self.addresses.pop((key, layer), None)
        if address is None:
            raise Irregular(f"what layer {layer} should free it has not")
        self.made.stream.free(address)

    def _tag(self, tags: Sequence[tuple[str, frozenset[int]]]) -> None:
        for category, addresses in tags:
            symbols = self._expanded(a for a in addresses if a in self.symbols)
            found = (self.addresses.get(symbol) for symbol in symbols)
            self.made.stream.tag(category, [address for address in found if address is not None])

    def _expanded(self, addresses: Any) -> Iterator[tuple[Key, int | None]]:
        """Expand addresses of the few layers to symbols of all layers, layer by layer."""
        keys: dict[int | None, list[Key]] = defaultdict(list)
        for address in addresses:
            key, layer = self.symbols[address]
            keys[layer].append(key)
        for layer in {layer for layer in self.like if self.like.count(layer) > 1}:
            if sorted(keys[layer]) != sorted(keys[layer + 1]):
                raise Irregular(f"layer {layer + 1} does not keep what layer {layer} keeps")
        yield from ((key, None) for key in keys[None])
        for layer, source in enumerate(self.like):
            yield from ((key, layer) for key in keys[source])
