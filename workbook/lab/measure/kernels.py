"""Kernels of a profiled step: the longest ones, and the gaps in which the device was idle."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from workbook.lab.measure.counting import WAITS

TOP, LETTERS = 20, 80  # number of names reported, and their maximum length
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # substrings of CUDA runtime and driver call names

Spans = dict[str, list[tuple[float, float]]]  # (start, end) in ms by name


def activities_of(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler activities for work on that device."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")


def of_step(seen: profile, name: str, on_gpu: bool) -> dict[str, Any]:
    """Summarize a profile in which the range `name` encloses one step.

    `kernels`: the most expensive, {name, ms, share, calls}; on a GPU device times, of torch's
    kernels by the operator that launched them, on a CPU each operator's self time. `step_ms` is
    from the first kernel's start to the last one's end, `busy_ms` while at least one ran,
    `idle_ms` the gaps between them, `gaps` their number, `longest_gap_ms`; `launches` and `syncs`
    are counted while the step was issued. On a CPU, where nothing is launched, the last five are
    None.
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
    """Return the spans by operator, and on a GPU also those of the device's own work."""
    if not on_gpu:
        return own_times(seen.profiler.kineto_results.experimental_event_tree()), {}
    events = [event for event in seen.events() if not event.is_user_annotation]
    work = device_work(events)
    return by_operator(events, work), work


def own_times(tree: Iterable) -> Spans:
    """Return each operator's self time on a CPU, without named ranges. Reads the profile's event
    tree, which is available at once: torch's own events take 10 s per 100,000."""
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
    """Rows of the longest names, from their (start, end) in ms; then one row for the rest."""
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
    """step_ms, busy_ms, idle_ms, gaps and longest_gap_ms of work given as (start, end) in ms.
    Overlapping work, as on several streams, counts once. ValueError if there is none."""
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
    """Return {kernel, copy or fill: its (start, end) in ms}, without mirrored annotations."""
    spans = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            span = event.time_range
            spans[event.name].append((span.start / 1e3, span.end / 1e3))
    return spans


def by_operator(events: Iterable, kernels: Spans) -> Spans:
    """Return the device's work under the names of torch's operators: aten::mm rather than one of
    many GEMM kernels, or of templates with opaque names. `kernels` unchanged if the profiler linked
    less than nine tenths of their time to an operator, as in a CUDA graph."""
    spans = defaultdict(list)
    for event in events:
        for kernel in getattr(event, "kernels", ()):
            name = event.name if event.name.startswith("aten::") else kernel.name
            spans[name].append((0.0, kernel.duration / 1e3))
    return spans if total(spans) >= 0.9 * total(kernels) else kernels


def total(spans: Spans) -> float:
    return sum(end - start for found in spans.values() for start, end in found)
