"""Where a step makes the host wait for the GPU, counted from what the CUDA runtime was asked."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa.lab.measure.recorders import profiled

# cudaMemcpyAsync returns at once; where it must not, torch has a cudaStreamSynchronize follow.
WAITS = re.compile(r"cuda\w+Synchronize|cu(Stream|Ctx|Event)Synchronize|cu(da)?Memcpy[^A]*")
# These wait for the device now and then; a warm caching allocator makes none of them.
ALLOCATES = re.compile(r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)\w*")
_RANGE = "nsa.syncs.step"


@dataclass
class Syncs:
    """What one step asked of the CUDA runtime that waits for the device."""

    by_call: dict[str, int]  # cudaStreamSynchronize: 2, ...
    by_line: dict[str, int] = field(default_factory=dict)  # file:line as far as torch tells
    by_operation: dict[str, int] = field(default_factory=dict)  # aten::item: 2, ...

    @property
    def total(self) -> int:
        """Calls that wait for the device; allocations are listed and not counted."""
        return sum(n for name, n in self.by_call.items() if WAITS.fullmatch(name))


def count(step: Callable[[], Any], *, warm: int = 2) -> Syncs:
    """Runs `step` `warm` times, once under the profiler and once more to find the lines.

    Calls of cudaMalloc and cudaFree, which a warm caching allocator does not make, are in `by_call`
    but not in the total.

    Raises ValueError without a GPU: there is nothing to wait for.
    """
    if not torch.cuda.is_available():
        raise ValueError("device syncs are a GPU's, and torch sees none here")
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    activities = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    with profiled(activities) as profile, torch.profiler.record_function(_RANGE):
        step()
    found = found_in(profile.events())
    torch.cuda.synchronize()
    found.by_line = _lines(step)
    return found


def found_in(events: Iterable[Any]) -> Syncs:
    """The waiting calls inside the step's range, of a profile's events."""
    events = list(events)
    ranges = [e.time_range for e in events if e.name == _RANGE and "CPU" in str(e.device_type)]
    if not ranges:
        raise ValueError(f"the profile has no range {_RANGE!r}, so nothing tells where the step is")
    begin, end = ranges[0].start, ranges[0].end
    calls: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for event in events:
        if not begin <= event.time_range.start <= end:
            continue
        if WAITS.fullmatch(event.name):
            operations[_operation(event)] += 1
        elif not ALLOCATES.fullmatch(event.name):
            continue
        calls[event.name] += 1
    return Syncs(dict(calls), by_operation=dict(operations))


def _operation(event: Any) -> str:
    parent = event.cpu_parent
    return parent.name if parent is not None and parent.name != _RANGE else "no operation of torch"


def _lines(step: Callable[[], Any]) -> dict[str, int]:
    """file:line of each sync that torch's own sync debug mode warns of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = (f"{w.filename}:{w.lineno}" for w in seen if "synchronizing CUDA" in str(w.message))
    return dict(Counter(places))
