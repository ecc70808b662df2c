"""What CUDA's caching allocator reserves for a stream of allocations and frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from nsa.lab.estimate.alloc_conf import Settings
from nsa.lab.estimate.caching import DEFAULT, CachingAllocator, OutOfMemory
from nsa.lab.measure.allocations import FREE, Stream


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
    out_of_memory: OutOfMemory | None  # where it ended, if it did not come to its end


def replay(
    stream: Stream,
    settings: Settings = DEFAULT,
    capacity: int | None = None,
    *,
    total: int | None = None,
    where: Callable[[int], tuple[int, int]] | None = None,
    emptied: int | None = None,
) -> Reserved:
    """What the allocator reserves for these allocations and frees; sizes are what is asked for. An
    address that is given out again was freed before.

    where: (stream, pool) of the allocation at that event; None: all on the default ones.
    emptied: the event before which what is cached is given back, as a capture does.
    """
    allocator = CachingAllocator(settings, capacity, total=total)
    borders = deque([*stream.marks, (len(stream), "end")])
    peak, phases, phase = Peak(), {}, ""
    live: set[int] = set()
    failed: OutOfMemory | None = None

    def ends() -> None:
        nonlocal peak
        seen = Peak(allocator.peak_allocated, allocator.peak_reserved)
        peak |= seen
        if phase not in ("", "end"):
            phases[phase] = phases.get(phase, Peak()) | seen
        allocator.reset_peaks()

    for position, (address, size) in enumerate(zip(stream.addresses, stream.sizes, strict=True)):
        while borders[0][0] <= position:
            ends()
            phase = borders.popleft()[1]
        if position == emptied:
            allocator.empty_cache()
        if address in live:
            allocator.free(address)
            live.remove(address)
        if size != FREE:
            failed = allocator.alloc(address, size, *(where(position) if where else ()))
            if failed is not None:
                failed = replace(failed, event=position, phase=phase)
                borders.clear()
                break
            live.add(address)
    ends()
    for _, phase in borders:  # noqa: B007  without an event
        ends()
    return Reserved(peak, phases, failed)
