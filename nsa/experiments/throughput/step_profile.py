"""One training step under torch.profiler: its kernels, launches, gaps and waits."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from nsa.experiments.throughput.child import warmup_of
from nsa.experiments.throughput.trials import TrainCell
from nsa.lab.measure.recorders import profiled
from nsa.lab.measure.timing import wait
from nsa.lab.observers.syncs import WAITS
from nsa.lab.process.trial import Outcome, run_child

ENTRY = "nsa.experiments.throughput.step_profile:profile_cell"
STEP = "nsa training step"
TOP = 20
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of CUDA's own names, runtime's and driver's
_NAME = 80

Spans = dict[str, list[tuple[float, float]]]  # of each name (start, end) in ms


def profile_step(cell: TrainCell, *, threads: int | None = None, **options: Any) -> Outcome:
    """How `profile_cell` ended in a process of its own; options: deadline_s, folder."""
    return run_child(ENTRY, {"cell": cell.to_dict(), "threads": threads}, **options)


def profile_cell(spec: dict) -> dict[str, Any]:
    """The step after the warm-up: {"cell": TrainCell.to_dict(), "threads": int or None}.

    `kernels`: the most expensive, {name, ms, share, calls}; on a GPU the device's own times, of
    torch's kernels by the operator that launched them, on a CPU each operator's own without those
    it calls. `step_ms` from the first kernel's start to the last one's end, `busy_ms` while at
    least one ran, `idle_ms` the gaps between them, `gaps` how many, `longest_gap_ms`; `launches`
    and `syncs` counted while the step was issued. On a CPU, where nothing is launched, the last
    five are None.
    """
    cell = TrainCell.from_dict(spec["cell"])
    with cell.opened(spec.get("threads")) as trainer:
        for step in range(warmup_of(trainer, cell)):
            trainer.step(step)
        device = trainer.device
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] * (device.type == "cuda")
        wait(device)
        with profiled(activities) as seen:
            with record_function(STEP):
                trainer.step(trainer.steps_done)
            wait(device)
        events = list(seen.events())
    whole = next(e for e in events if e.name == STEP and e.device_type == DeviceType.CPU)
    events = [event for event in events if event.name != STEP]
    if device.type == "cuda":
        kernels, step = _device_work(events), whole.time_range
        hosted = [(e.name, e.time_range) for e in events if e.device_type == DeviceType.CPU]
        issued = [name for name, at in hosted if step.start <= at.start and at.end <= step.end]
        return {
            "kernels": top(by_operator(events, kernels)),
            **gaps([span for spans in kernels.values() for span in spans]),
            "launches": sum(any(part in name for part in LAUNCHES) for name in issued),
            "syncs": sum(bool(WAITS.fullmatch(name)) for name in issued),
        }
    spans = defaultdict(list)
    for event in events:
        spans[event.name].append((0.0, event.self_cpu_time_total / 1e3))
    step_ms = (whole.time_range.end - whole.time_range.start) / 1e3
    unknown = dict.fromkeys(("idle_ms", "gaps", "longest_gap_ms", "launches", "syncs"))
    return {"kernels": top(spans), "step_ms": step_ms, "busy_ms": _total(spans), **unknown}


def top(spans: Spans, count: int = TOP) -> list[dict[str, Any]]:
    """The names that took longest, by each one's (start, end) in ms; then a row for the rest."""
    rows = [
        {"name": name[:_NAME], "ms": _total({name: found}), "calls": len(found)}
        for name, found in spans.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    if rest := rows[count:]:
        both = {key: sum(row[key] for row in rest) for key in ("ms", "calls")}
        rows = [*rows[:count], {"name": f"{len(rest)} others"} | both]
    total = _total(spans)
    return [row | {"share": row["ms"] / total if total else 0.0} for row in rows]


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


def _device_work(events: Iterable) -> Spans:
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
    return spans if _total(spans) >= 0.9 * _total(kernels) else kernels


def _total(spans: Spans) -> float:
    return sum(end - start for found in spans.values() for start, end in found)
