"""What a profile says of a step's kernels: which took longest, and when the device had none."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from nsa.lab.measure.counting import WAITS

TOP, LETTERS = 20, 80  # names that a profile tells, and how much of each
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of CUDA's own names, runtime's and driver's

Spans = dict[str, list[tuple[float, float]]]  # of each name (start, end) in ms


def activities_of(device: torch.device) -> list[ProfilerActivity]:
    """What a profile of work on that device records."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")


def of_step(events: Iterable, name: str, on_gpu: bool) -> dict[str, Any]:
    """Of a profile in which the range `name` is around one step.

    `kernels`: the most expensive, {name, ms, share, calls}; on a GPU the device's own times, of
    torch's kernels by the operator that launched them, on a CPU each operator's own without those
    it calls. `step_ms` from the first kernel's start to the last one's end, `busy_ms` while at
    least one ran, `idle_ms` the gaps between them, `gaps` how many, `longest_gap_ms`; `launches`
    and `syncs` counted while the step was issued. On a CPU, where nothing is launched, the last
    five are None.
    """
    events = list(events)
    whole = next(e for e in events if e.name == name and e.device_type == DeviceType.CPU)
    events = [event for event in events if not event.is_user_annotation]
    if on_gpu:
        kernels, step = device_work(events), whole.time_range
        hosted = [(e.name, e.time_range) for e in events if e.device_type == DeviceType.CPU]
        issued = [name for name, at in hosted if step.start <= at.start and at.end <= step.end]
        return {
            "kernels": top(by_operator(events, kernels)),
            **gaps([span for spans in kernels.values() for span in spans]),
            "launches": sum(any(part in name for part in LAUNCHES) for name in issued),
            "syncs": sum(bool(WAITS.fullmatch(name)) for name in issued),
        }
    spans = operators(events)
    step_ms = (whole.time_range.end - whole.time_range.start) / 1e3
    unknown = dict.fromkeys(("idle_ms", "gaps", "longest_gap_ms", "launches", "syncs"))
    return {"kernels": top(spans), "step_ms": step_ms, "busy_ms": total(spans), **unknown}


def own_times(tree: Iterable) -> Spans:
    """`operators` of a profile's event tree, which is there at once: torch needs 10 s for 100,000
    events. Without named ranges."""
    kinds, ranges = torch._C._profiler._EventType, torch._C._profiler.RecordScope.USER_SCOPE
    spans, waiting = defaultdict(list), list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == kinds.TorchOp and event.extra_fields.scope != ranges:
            called = sum(c.duration_time_ns for c in event.children if c.tag == kinds.TorchOp)
            spans[event.name].append((0.0, (event.duration_time_ns - called) / 1e6))
    return spans


def operators(events: Iterable) -> Spans:
    """Each operator's own time on a CPU, without those that it calls."""
    spans = defaultdict(list)
    for event in events:
        spans[event.name].append((0.0, event.self_cpu_time_total / 1e3))
    return spans


def top(spans: Spans, count: int = TOP) -> list[dict[str, Any]]:
    """The names that took longest, by each one's (start, end) in ms; then a row for the rest."""
    rows = [
        {"name": name[:LETTERS], "ms": total({name: found}), "calls": len(found)}
        for name, found in spans.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    if rest := rows[count:]:
        both = {key: sum(row[key] for row in rest) for key in ("ms", "calls")}
        rows = [*rows[:count], {"name": f"{len(rest)} others"} | both]
    whole = total(spans)
    return [row | {"share": row["ms"] / whole if whole else 0.0} for row in rows]


def gaps(spans: Iterable[tuple[float, float]]) -> dict[str, float | int]:
    """step_ms, busy_ms, idle_ms, gaps and longest_gap_ms of work given as (start, end) in ms. Work
    that overlaps, as on several streams, is busy once. ValueError where there is none."""
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("no kernel ran on the device during the step")
    first, reached = ordered[0]
    idle = []
    for start, end in ordered[1:]:
        if start > reached:
            idle.append(start - reached)
        reached = max(reached, end)
    step_ms, idle_ms = reached - first, sum(idle)
    found = {"step_ms": step_ms, "busy_ms": step_ms - idle_ms, "idle_ms": idle_ms}
    return found | {"gaps": len(idle), "longest_gap_ms": max(idle, default=0.0)}


def device_work(events: Iterable) -> Spans:
    """{kernel, copy or fill: its (start, end) in ms}; annotations mirrored there are no work."""
    spans = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            span = event.time_range
            spans[event.name].append((span.start / 1e3, span.end / 1e3))
    return spans


def by_operator(events: Iterable, kernels: Spans) -> Spans:
    """The device's work, that of torch's operators under their names: aten::mm rather than one of
    many matrix products, or of templates whose names tell nothing. `kernels` as they are where the
    profiler linked less than nine tenths of them to an operator, as in a CUDA graph."""
    spans = defaultdict(list)
    for event in events:
        for kernel in getattr(event, "kernels", ()):
            name = event.name if event.name.startswith("aten::") else kernel.name
            spans[name].append((0.0, kernel.duration / 1e3))
    return spans if total(spans) >= 0.9 * total(kernels) else kernels


def total(spans: Spans) -> float:
    return sum(end - start for found in spans.values() for start, end in found)
