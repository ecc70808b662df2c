"""What CUDA's caching allocator reserves for a stream of allocations and frees, step after step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from nsa.lab.estimate.alloc_conf import Settings
from nsa.lab.estimate.caching import DEFAULT, CachingAllocator, OutOfMemory
from nsa.lab.measure.allocations import FREE, Stream

Event = tuple[int, int, int]  # position in the stream, number of the allocation, size or FREE


@dataclass(frozen=True)
class Peak:
    """Most bytes at any one time; each number at its own."""

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: Peak) -> Peak:
        held = max(self.allocated, other.allocated)
        return Peak(held, max(self.reserved, other.reserved))


@dataclass(frozen=True)
class Reserved:
    """What a stream held at its peak, in bytes, and how it ended."""

    peak: Peak  # over all events, those before the first phase included
    phases: dict[str, Peak]  # each with what there was when it started
    steps: tuple[Peak, ...]  # of each repetition; the first without what comes before the phases
    growth: int | None  # allocated after the last repetition less after the one before; None of one
    retries: int
    unknown_frees: int
    out_of_memory: OutOfMemory | None  # where it ended, if it did not come to its end


def replay(
    stream: Stream,
    settings: Settings = DEFAULT,
    capacity: int | None = None,
    *,
    total: int | None = None,
    repeat: int = 1,
    where: Callable[[int], tuple[int, int]] | None = None,
    emptied: int | None = None,
) -> Reserved:
    """What the allocator reserves for these allocations and frees; sizes are what is asked for.

    repeat: how often the stretch from the first phase to the end comes, as steps do. What it frees
        of before, later repetitions free of the one before: a block of the same size, in order of
        birth. What finds no such block stays and is `growth`.
    where: (stream, pool) of the allocation at that event; None: all on the default ones.
    emptied: the event before which what is cached is given back, as a capture does.

    ValueError for a repetition of a stream that marks no phase.
    """
    if repeat > 1 and not stream.marks:
        raise ValueError("the stream marks no phase, so no step to repeat; call mark(phase)")
    spans, unknown = _spans(stream)
    sizes = [size for _, span in spans for _, _, size in span if size >= 0]
    first, heirs = _heirs([event for _, span in spans[1:] for event in span], sizes)
    allocator = CachingAllocator(settings, capacity, total=total)

    def run(events: list[Event], turn: int) -> tuple[int, OutOfMemory] | None:
        for position, number, size in events:
            if position == emptied:
                allocator.empty_cache()
            name: int | None = turn * len(sizes) + number
            if size >= 0:
                failed = allocator.alloc(name, size, *(where(position) if where else ()))
                if failed is not None:
                    return position, failed
                continue
            if turn and number < first:  # alive before the step: the one before left another
                name = (turn - 1) * len(sizes) + heirs[number] if number in heirs else None
            if name is not None:
                allocator.free(name)
        return None

    peak, phases, steps, ends, failed = Peak(), {}, [], [], None
    for turn in range(repeat):
        steps.append(Peak())
        for phase, events in spans[1:] if turn else spans:
            allocator.reset_peaks()
            failed = run(events, turn)
            seen = Peak(allocator.peak_allocated, allocator.peak_reserved)
            peak |= seen
            if phase is not None or len(spans) == 1:
                steps[-1] |= seen
            if phase not in (None, "end"):
                phases[phase] = phases.get(phase, Peak()) | seen
            if failed is not None:
                break
        ends.append(allocator.allocated)
        if failed is not None:
            break
    growth = ends[-1] - ends[-2] if failed is None and repeat > 1 else None
    out = None if failed is None else replace(failed[1], event=failed[0], phase=phase or "")
    return Reserved(peak, phases, tuple(steps), growth, allocator.retries, unknown, out)


def _spans(stream: Stream) -> tuple[list[tuple[str | None, list[Event]]], int]:
    """The events of each phase, those before the first under None; and how many frees were of no
    allocation. An address that is given out again was freed before."""
    spans: list[tuple[str | None, list[Event]]] = [(None, [])]
    marks, live, count, unknown = deque(stream.marks), {}, 0, 0
    for position, (address, size) in enumerate(zip(stream.addresses, stream.sizes, strict=True)):
        while marks and marks[0][0] <= position:
            spans.append((marks.popleft()[1], []))
        number = live.pop(address, None)
        if number is not None:
            spans[-1][1].append((position, number, FREE))
        elif size == FREE:
            unknown += 1
        if size != FREE:
            live[address] = count
            spans[-1][1].append((position, count, size))
            count += 1
    return spans + [(phase, []) for _, phase in marks], unknown


def _heirs(step: list[Event], sizes: list[int]) -> tuple[int, dict[int, int]]:
    """The step's first allocation; and for each older one that it frees, the one that it leaves in
    its place: of the same size, in order of birth."""
    born = [number for _, number, size in step if size != FREE]
    ended = {number for _, number, size in step if size == FREE}
    left: dict[int, deque[int]] = defaultdict(deque)
    for number in born:
        if number not in ended:
            left[sizes[number]].append(number)
    first = born[0] if born else len(sizes)
    older = sorted(number for number in ended if number < first)
    return first, {n: left[sizes[n]].popleft() for n in older if left[sizes[n]]}
