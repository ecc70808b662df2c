"""What a profile says of a step's kernels: which took longest, and when the device had none."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nsa.lab.measure.counting import WAITS

TOP, LETTERS = 20, 80  # names that a profile tells, and how much of each
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of CUDA's own names, runtime's and driver's

Spans = dict[str, list[tuple[float, float]]]  # of each name (start, end) in ms


def activities_of(device: torch.device) -> list[ProfilerActivity]:
    """What a profile of work on that device records."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")


def of_step(seen: profile, name: str, on_gpu: bool) -> dict[str, Any]:
    """Of a profile in which the range `name` is around one step.

    `kernels`: the most expensive, {name, ms, share, calls}; on a GPU the device's own times, of
    torch's kernels by the operator that launched them, on a CPU each operator's own without those
    it calls. `step_ms` from the first kernel's start to the last one's end, `busy_ms` while at
    least one ran, `idle_ms` the gaps between them, `gaps` how many, `longest_gap_ms`; `launches`
    and `syncs` counted while the step was issued. On a CPU, where nothing is launched, the last
    five are None.
    """
    spans, work = measured(seen, on_gpu)
    hosted = [(e.name, e.time_range) for e in seen.events() if e.device_type == DeviceType.CPU]
    step = next(at for one, at in hosted if one == name)
    if on_gpu:
        issued = [one for one, at in hosted if step.start <= at.start and at.end <= step.end]
        return {
            "kernels": top(spans),
            **gaps([span for found in work.values() for span in found]),
            "launches": sum(any(part in one for part in LAUNCHES) for one in issued),
            "syncs": sum(bool(WAITS.fullmatch(one)) for one in issued),
        }
    step_ms = (step.end - step.start) / 1e3
    unknown = dict.fromkeys(("idle_ms", "gaps", "longest_gap_ms", "launches", "syncs"))
    return {"kernels": top(spans), "step_ms": step_ms, "busy_ms": total(spans), **unknown}


def measured(seen: profile, on_gpu: bool) -> tuple[Spans, Spans]:
    """What took how long, by operator; and on a GPU the device's own work."""
    if not on_gpu:
        return own_times(seen.profiler.kineto_results.experimental_event_tree()), {}
    events = [event for event in seen.events() if not event.is_user_annotation]
    work = device_work(events)
    return by_operator(events, work), work


def own_times(tree: Iterable) -> Spans:
    """Each operator's own time on a CPU, without those that it calls, off a profile's event tree,
    which is there at once: torch needs 10 s for 100,000 events. Without named ranges."""
    kinds, ranges = torch._C._profiler._EventType, torch._C._profiler.RecordScope.USER_SCOPE
    spans, waiting = defaultdict(list), list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == kinds.TorchOp and event.extra_fields.scope != ranges:
            called = sum(c.duration_time_ns for c in event.children if c.tag == kinds.TorchOp)
            spans[event.name].append((0.0, (event.duration_time_ns - called) / 1e6))
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
