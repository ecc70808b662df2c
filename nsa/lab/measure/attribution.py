"""Who holds a step's memory: each block by category, module, phase and line of source."""

from __future__ import annotations

import heapq
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from nsa.lab.measure import allocators
from nsa.lab.measure.allocations import CATEGORIES, Lifetimes, Stream, blocks_of, lifetimes
from nsa.lab.measure.allocators import BORDER, MIB, Allocation
from nsa.lab.measure.lines import Lines, named_range, shown
from nsa.lab.measure.owners import (
    LOOKED_AT,
    MOST_LOOKED_AT,
    NOBODY,
    Owner,
    Parts,
    holders,
    local_names,
)
from nsa.lab.measure.recorders import Recorder, live_cpu_storages, live_tensors, profiled
from nsa.lab.oracles.steps import anywhere
from whyhung.verdict.frames import is_code

ENOUGH = 0.95  # of the peak, told by line


class Attributing(Recorder):
    """Records as `CpuRecorder` and `CudaRecorder` do, and of each allocation who made it.

    Both devices report to torch's profiler, which also numbers the nodes of autograd: so what a
    backward allocates leads to the forward that made its node. Cost: 3 us a call of torch's, and 55
    each to read what was seen. The peaks are those without it: see `measure.lines`. lines: False
    where something was compiled.
    """

    def __init__(self, device: torch.device, parts: Parts, *, lines: bool = True) -> None:
        super().__init__(parts.watched)
        self.device, self.parts, self.lines = device, parts, lines
        self.index = device.index or 0
        self.owners: dict[int, Owner] = {}  # by the event at which the block was born
        self.named: dict[int, Owner] = {}  # by address: what was there before
        self.phases: list[str] = []  # as they began
        self._tags: list[dict[str, set[int]]] = []  # at each of their beginnings
        self._watched: set[int] = set()  # addresses of what was there before ...
        self._gone: list[Allocation] = []  # ... whose end torch does not tell
        self._ends: list[weakref.finalize] = []

    def _before(self) -> dict[int, int]:
        if self.device.type == "cpu":
            found = live_cpu_storages()
            self._watched = set(found)
            for tensor in live_tensors("cpu"):
                storage = tensor.untyped_storage()
                if storage.data_ptr() in found:
                    end = weakref.finalize(storage, self._ended, storage.data_ptr())
                    self._ends.append(end)
            return found
        if torch.cuda.get_allocator_backend() != "native":
            return {}
        return blocks_of(torch.cuda.memory._snapshot(), self.index)

    def _addresses(self) -> dict[str, set[int]]:
        for address, owner in self.parts.owners().items():
            if not self.named.get(address, NOBODY).module:
                self.named[address] = owner
        return super()._addresses()

    def __enter__(self) -> Attributing:
        super().__enter__()
        self._name_the_rest(sum(self.stream.sizes))
        return self

    def on_phase(self, name: str, step: int) -> None:
        """As of all recorders. One profile has them all: a range of somebody's that is open where
        one profile ends would write into it when the next is on."""
        if not self.phases:
            self._phase.enter_context(self._recording(name))
        with named_range(f"{BORDER}{len(self.phases)}"):
            self.phases.append(name)
            self._tags.append(self._addresses())
        if name == "end":
            self._phase.close()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        while self._ends:  # they would keep all of this as long as the tensors live
            self._ends.pop().detach()

    def _ended(self, address: int) -> None:
        phase = str(len(self.phases) - 1)
        self._gone.append(Allocation(time.time_ns(), address, -1, phase=phase))

    def _with_ends(self, found: list[Allocation]) -> Iterator[Allocation]:
        """The events, and among them the ends of what was there before, if no event tells them: of
        a block that was allocated before a profile torch does not."""
        ended, self._gone = self._gone, []
        of_ours = {id(a) for a in ended}
        for a in sorted([*found, *ended], key=lambda a: a.time):
            known = a.address in self._watched
            self._watched.discard(a.address)
            if known or id(a) not in of_ours:
                yield a

    def _name_the_rest(self, total: int) -> None:
        """Large tensors that are no part of the model: who holds them."""
        sizes = zip(self.stream.sizes, self.stream.addresses, strict=True)
        unnamed = [(s, a) for s, a in sizes if s > LOOKED_AT * total and a not in self.named]
        large = {address for _, address in heapq.nlargest(MOST_LOOKED_AT, unnamed)}
        if not large:
            return
        tensors = [
            tensor
            for tensor in live_tensors(self.device.type)
            if tensor.untyped_storage().data_ptr() in large
        ]
        names = holders(tensors) | local_names()
        for tensor in tensors:
            if said := names.get(id(tensor)):
                self.named[tensor.untyped_storage().data_ptr()] = Owner(said)

    @contextmanager
    def _recording(self, phase: str) -> Iterator[None]:
        with profiled([ProfilerActivity.CPU], profile_memory=True) as seen, ExitStack() as on:
            torch.autograd._enable_record_function(True)  # a recording nobody ended had it off
            if self.lines:
                on.enter_context(Lines())
            yield
        tree = seen.profiler.kineto_results.experimental_event_tree()
        begun = 0
        for a in self._with_ends(allocators.read(tree, self.device.type)):
            for _ in range(begun, int(a.phase or 0) + 1):
                self._begins(begun)
                begun += 1
            if a.size > 0:
                phase = self.phases[int(a.phase or 0)]
                module = anywhere(a.where)
                again = " (recomputed)" if a.where and phase == "backward" else ""
                module = module + again or anywhere(a.maker)
                self.owners[len(self.stream)] = Owner(module, a.line, a.operator, phase)
                self.stream.alloc(a.address, a.size)
            else:
                self.stream.free(a.address)
        for number in range(begun, len(self.phases)):
            self._begins(number)

    def _begins(self, number: int) -> None:
        self.stream.mark(self.phases[number])
        for category, addresses in self._tags[number].items():
            self.stream.tag(category, addresses)

    def rename(self, before: str, after: str) -> None:
        """The last phase was no `before`, but an `after`."""
        if self.phases[-1] == before:
            self.phases[-1] = after

    def fill(self, trace: list[dict[str, Any]]) -> None:
        """Lines that are missing, from the stacks of a CUDA allocator's history: of compiled code,
        for one, those that called it. A block is told by its address and turn."""
        stacks: dict[int, deque[list[dict[str, Any]]]] = defaultdict(deque)
        for entry in trace:
            if entry["action"] == "alloc":
                stacks[entry["addr"]].append(entry.get("frames", []))
        for event, owner in self.owners.items():
            turns = stacks[self.stream.addresses[event]]
            frames = turns.popleft() if turns else []
            if not owner.line and (line := _line_of(frames)):
                self.owners[event] = replace(owner, line=line)

    def attribution(self) -> Attribution:
        """What the recorded step held. ValueError where no phase was recorded."""
        lives = lifetimes(self.stream)
        addresses = self.stream.addresses
        owners = [
            self.owners.get(born) or self.named.get(addresses[born], NOBODY)
            for born in lives.born.tolist()
        ]
        return Attribution(lives, owners, self.stream)


def _line_of(frames: list[dict[str, Any]]) -> str:
    """The innermost of a program's own."""
    for frame in frames:
        file, line, name = frame["filename"], frame["line"], frame["name"]
        if is_code(f"{file}:{line} {name}"):
            return f"{shown(file)}:{line} {name}"
    return ""


class Attribution:
    """A step's blocks with their owners; sizes in bytes."""

    def __init__(self, lives: Lifetimes, owners: list[Owner], stream: Stream) -> None:
        self.lives, self.owners, self.stream = lives, owners, stream
        peaks, total = lives.peaks(), lives.level()
        self.phase = max(peaks, key=lambda phase: total[peaks[phase]])
        self.at, self.peak = peaks[self.phase], int(total[peaks[self.phase]])

    def around(self, phase: str) -> tuple[int, int] | None:
        """The numbers of events before the step's last `phase`, and behind it."""
        spans = [(start, end) for name, start, end in self.lives.spans if name == phase]
        return spans[-1] if spans else None

    def rows(self) -> list[dict[str, Any]]:
        """Who holds the peak: {module, phase, line, operator, category, mib, share, blocks}, the
        largest first; `phase` in which it was allocated, `operator` where no line is known."""
        sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for block in self.lives.alive(self.at).nonzero()[0].tolist():
            owner, category = self.owners[block], CATEGORIES[self.lives.categories[block]]
            operator = "" if owner.line else owner.operator
            row = sums[owner.module, owner.phase, owner.line, operator, category]
            row[0] += int(self.lives.sizes[block])
            row[1] += 1
        names = ("module", "phase", "line", "operator", "category")
        return [
            dict(zip(names, key, strict=True))
            | {"mib": size / MIB, "share": size / self.peak, "blocks": count}
            for key, (size, count) in sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
        ]

    def statistics(self, at: int) -> dict[str, int]:
        """After `at` events, by torch.cuda.memory_stats' names; counted since the step began, but
        for what is held."""
        lives, first = self.lives, self.lives.spans[0][1]
        alive, born = lives.alive(at), (lives.born >= first) & (lives.born < at)
        level = lives.level()
        asked, held = int(lives.sizes[born].sum()), int(level[at])
        return {
            "allocated_bytes.all.current": held,
            "allocated_bytes.all.peak": int(level[first : at + 1].max()),
            "allocated_bytes.all.allocated": asked,
            "allocated_bytes.all.freed": int(level[first]) + asked - held,
            "allocation.all.current": int(alive.sum()),
            "allocation.all.allocated": int(born.sum()),
        }
