"""Attribution of a step's memory: each block by category, module, phase and source line."""

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

from whyhung.verdict.frames import is_code
from workbook.lab.measure import allocators
from workbook.lab.measure.allocations import CATEGORIES, Lifetimes, Stream, blocks_of, lifetimes
from workbook.lab.measure.allocators import BORDER, MIB, Allocation
from workbook.lab.measure.lines import line_ranges, named_range, shown
from workbook.lab.measure.owners import (
    LOOKED_AT,
    MOST_LOOKED_AT,
    NOBODY,
    Owner,
    Parts,
    holders,
    local_names,
)
from workbook.lab.measure.recorders import Recorder, live_cpu_storages, live_tensors, profiled
from workbook.lab.oracles.steps import anywhere

ENOUGH = 0.95  # share of the peak attributed by line


class Attributing(Recorder):
    """Records like `CpuRecorder` and `CudaRecorder`, and also the owner of each allocation.

    Both devices report to torch's profiler, which also numbers autograd nodes: so allocations of a
    backward lead to the forward that created the node. Cost: 3 us per torch call, plus 55 us per
    call to read the profile. Peaks are the same as without it: see `measure.lines`. lines: False
    if anything was compiled.
    """

    def __init__(self, device: torch.device, parts: Parts, *, lines: bool = True) -> None:
        super().__init__(parts.watched)
        self.device, self.parts, self.lines = device, parts, lines
        self.index = device.index or 0
        self.owners: dict[int, Owner] = {}  # by the event that allocated the block
        self.named: dict[int, Owner] = {}  # by address: blocks that existed before
        self.phases: list[str] = []  # in order
        self._tags: list[dict[str, set[int]]] = []  # at the start of each phase
        self._watched: set[int] = set()  # addresses of earlier blocks ...
        self._gone: list[Allocation] = []  # ... whose frees torch does not report
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
        """See `Recorder.on_phase`. One profile covers all phases: a foreign range left open at the
        end of one profile would write into it during the next."""
        if not self.phases:
            self._phase.enter_context(self._recording(name))
        with named_range(f"{BORDER}{len(self.phases)}"):
            self.phases.append(name)
            self._tags.append(self._addresses())
        if name == "end":
            self._phase.close()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        while self._ends:  # they would keep this object alive as long as the tensors
            self._ends.pop().detach()

    def _ended(self, address: int) -> None:
        phase = str(len(self.phases) - 1)
        self._gone.append(Allocation(time.time_ns(), address, -1, phase=phase))

    def _with_ends(self, found: list[Allocation]) -> Iterator[Allocation]:
        """Yield the events merged with frees of earlier blocks that no event reports: torch does
        not report frees of blocks allocated before the profile."""
        ended, self._gone = self._gone, []
        of_ours = {id(a) for a in ended}
        for a in sorted([*found, *ended], key=lambda a: a.time):
            known = a.address in self._watched
            self._watched.discard(a.address)
            if known or id(a) not in of_ours:
                yield a

    def _name_the_rest(self, total: int) -> None:
        """Find the holders of large tensors that are not part of the model."""
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
            torch.autograd._enable_record_function(True)  # may have been left off
            if self.lines:
                on.enter_context(line_ranges())
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
        """Rename the last phase to `after` if it is `before`."""
        if self.phases[-1] == before:
            self.phases[-1] = after

    def fill(self, trace: list[dict[str, Any]]) -> None:
        """Fill in missing lines from the stacks of a CUDA allocator's history, for instance the
        callers of compiled code. A block is identified by its address and its turn there."""
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
        """Return the recorded step's blocks and owners. ValueError if no phase was recorded."""
        lives = lifetimes(self.stream)
        addresses = self.stream.addresses
        owners = [
            self.owners.get(born) or self.named.get(addresses[born], NOBODY)
            for born in lives.born.tolist()
        ]
        return Attribution(lives, owners, self.stream)


def _line_of(frames: list[dict[str, Any]]) -> str:
    """Innermost frame in user code, or ""."""
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
        """Event counts at the start and the end of the step's last `phase`, or None."""
        spans = [(start, end) for name, start, end in self.lives.spans if name == phase]
        return spans[-1] if spans else None

    def rows(self) -> list[dict[str, Any]]:
        """Owners of the peak: {module, phase, line, operator, category, mib, share, blocks}, the
        largest first; `phase` is that of the allocation, `operator` is set if no line is known."""
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
        """Statistics after `at` events, named as in torch.cuda.memory_stats; counted since the
        start of the step, except the held bytes and blocks."""
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
