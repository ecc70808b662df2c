"""Memory reserved by CUDA's caching allocator for a stream of allocations and frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from workbook.lab.estimate.alloc_conf import Settings
from workbook.lab.estimate.caching import DEFAULT, CachingAllocator, OutOfMemory
from workbook.lab.measure.allocations import FREE, Stream


@dataclass(frozen=True)
class Peak:
    """Maximum bytes over time; each number has its own peak."""

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: Peak) -> Peak:
        held = max(self.allocated, other.allocated)
        return Peak(held, max(self.reserved, other.reserved))


@dataclass(frozen=True)
class Reserved:
    """Peaks of a replayed stream, in bytes, and its outcome."""

    peak: Peak  # over all events, including those before the first phase
    phases: dict[str, Peak]  # each including blocks held at its start
    out_of_memory: OutOfMemory | None  # the failed allocation, if the replay did not complete


def replay(
    stream: Stream,
    settings: Settings = DEFAULT,
    capacity: int | None = None,
    *,
    total: int | None = None,
    where: Callable[[int], tuple[int, int]] | None = None,
    emptied: int | None = None,
) -> Reserved:
    """Replay these allocations and frees in the allocator model; sizes are requested bytes. A
    reused address counts as freed before.

    where: returns (stream, pool) of the allocation at that event; None: the default ones.
    emptied: the event before which the cache is emptied, as a capture does.
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
    for _, phase in borders:  # noqa: B007  phases without events
        ends()
    return Reserved(peak, phases, failed)
