"""Estimate cells first and run them afterwards, both in supervised child processes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.measure.allocations import CATEGORIES
from workbook.lab.training import TrainingSpec
from workbook.rooms.estimate import committed
from workbook.rooms.estimate.cells import Boundary, name_of
from workbook.runs import metrics

CHILD = "workbook.rooms.estimate.child"
MIB = 2**20
UNSEEN = {"CUDA_VISIBLE_DEVICES": ""}
PHASES = ("forward", "backward", "optimizer")
OURS, THEIRS = "predicted", "peak"  # prefixes of metrics of estimates and of real steps
NEAR, STEP = 0.1, 0.005  # fractions of an estimated boundary: range and resolution of the search


def estimates(cells: Sequence[TrainingSpec], *, gpu: str, **options: Any) -> list[dict]:
    """Estimate each cell before anything runs, in processes that see no GPU: see
    `child.estimates` and `_swept`."""
    return _swept("estimates", cells, {"gpu": gpu}, _told_estimate, env=UNSEEN, **options)


def measure(cells: Sequence[TrainingSpec], *, threads: int | None, **options: Any) -> list[dict]:
    """Measure the memory of a real step of each cell: see `child.measure` and `_swept`. A cell that
    ran out of memory beside others is rerun alone."""
    return _swept("measure", cells, {"threads": threads}, _told, **options)


def _swept(
    function: str,
    cells: Sequence[TrainingSpec],
    more: Mapping[str, Any],
    said: Callable[[dict], str],
    *,
    together: int,
    deadline_s: float,
    workers: int,
    folder: Path,
    env: Mapping[str, str] | None = None,
    progress: bool = True,
) -> list[dict]:
    """Sweep the cells; return a row each, in order. `together` cells of one backend share a child
    process; if it fails, or leaves no time for a cell, these cells run in separate processes.

    deadline_s: for one cell. The rest is as in `sweep.measure`.
    """
    rows: dict[int, dict] = {}

    def through(groups: Sequence[Sequence[int]], most: int, size: int, place: str) -> None:
        ended = sweep.measure(
            f"{CHILD}:{function}",
            groups,
            lambda group, s: {"cells": [cells[n].to_dict() for n in group], "deadline_s": s} | more,
            deadline_s=deadline_s * size,
            workers=most,
            env=env,
            folder=folder / place,
            name=lambda group: _names([cells[n] for n in group]),
            said=lambda result: "; ".join(map(said, result["rows"])),
            progress=progress,
        )
        for group, one in zip(groups, ended, strict=True):
            for n, row in zip(group, _rows(one, len(group)), strict=True):
                rows[n] = row | {"alone": one.alone}

    groups = []
    for _, same in groupby(range(len(cells)), key=lambda n: cells[n].backend):
        numbers = list(same)
        groups += [numbers[n : n + together] for n in range(0, len(numbers), together)]
    through(groups, workers, together, "together")
    again = [n for n, row in rows.items() if _again(row, together)]
    if again:
        through([[n] for n in sorted(again)], 1, 1, "alone")
    return [rows[n] for n in range(len(cells))]


def _rows(ended: Outcome, count: int) -> list[dict]:
    if ended.result is not None:
        return ended.result["rows"]
    return [{"outcome": ended.status, "message": ended.message, "lost": True}] * count


def _again(row: dict, together: int) -> bool:
    """Return True if other cells may have caused this cell's outcome."""
    lost = row.get("lost") or row["outcome"] == "not run"
    return (together > 1 and lost) or (row["outcome"] == "oom" and not row["alone"])


def _names(group: Sequence[TrainingSpec]) -> str:
    more = f" and {len(group) - 1} more" * (len(group) > 1)
    return f"{name_of(group[0])}{more}"


def _told(row: dict) -> str:
    held = row.get("allocated")
    return row["outcome"] if held is None else f"{held / MIB:,.1f} MiB"


def _told_estimate(row: dict) -> str:
    return _told(row) + " estimated" * (row["outcome"] == "ok")


def recall(runs: Path, count: int, **options: Any) -> list[dict]:
    """Estimate peaks that committed runs measured on an H200, for `count` of their trainings, from
    the shortest T to the longest. A row per peak: {"run", "cell", "backend", "mode", "measured",
    "foretold", "error"}, in MiB; no rows if the runs are missing."""
    if not all((runs / run / "metrics.csv").is_file() for run in committed.RUNS):
        return []
    peaks: dict[str, list[committed.Cell]] = {}
    for cell in committed.cells(runs):
        peaks.setdefault(repr(cell.spec), []).append(cell)
    every = sorted(peaks.values(), key=lambda same: (same[0].spec.tokens, str(same[0])))
    places = sorted({n * (len(every) - 1) // max(1, count - 1) for n in range(count)})
    chosen = sorted((every[n] for n in places if n < len(every)), key=lambda s: s[0].spec.backend)
    ours = estimates([same[0].spec for same in chosen], gpu="NVIDIA H200", **options)
    rows = []
    for same, row in zip(chosen, ours, strict=True):
        sizes = {"step": row.get("allocated")} | (row.get("phases") or {})
        for cell in same:
            size = sizes.get(cell.mode)
            mib = math.nan if size is None else size / MIB
            told = {"run": cell.run, "cell": str(cell), "backend": cell.spec.backend}
            told |= {"mode": cell.mode, "measured": cell.mib, "foretold": mib}
            rows.append(told | {"error": mib / cell.mib - 1, "message": row["message"]})
    return rows


def to_metrics(
    cells: Iterable[TrainingSpec], estimated: Iterable[dict], measured: Iterable[dict]
) -> list[dict]:
    """Rows of metrics.csv for the estimate and the measurement of each cell: "predicted_memory" and
    "peak_memory" (mode step, forward, backward, optimizer), "predicted_reserved" and
    "peak_reserved", in MiB, and "estimate_time" in processor seconds. Missing values are NaN.

    `config` has the cell, the `outcome` of its real step, and of its estimate `estimated` and
    `refusal`, `how`, `calibrated`, `uncertainty`, the `unknown` operators and the phase.
    """
    found = []
    for cell, ours, theirs in zip(cells, estimated, measured, strict=True):
        config = cell.to_dict() | {"outcome": theirs["outcome"], "message": theirs["message"]}
        config |= {"estimated": ours["outcome"], "refusal": ours["message"]}
        config |= {n: theirs.get(n) for n in ("agrees", "before", "alone")}
        config |= {n: ours.get(n) for n in ("how", "calibrated", "uncertainty", "unknown")}
        same = {"operation": "training_step", "backend": cell.backend, "config": config}
        same |= {"x_name": "tokens", "x_value": cell.tokens, "device": cell.device}
        for kind, row in ((OURS, ours), (THEIRS, theirs)):
            phases = row.get("phases") or {}
            values = {(f"{kind}_memory", "step"): row.get("allocated")}
            values |= {(f"{kind}_memory", phase): phases.get(phase) for phase in PHASES}
            values[f"{kind}_reserved", "step"] = row.get("reserved")
            held = row.get("by_category") or {}
            start = "predicted_memory" if kind == OURS else "memory"
            values |= {(f"{start}_{name}", "step"): held.get(name) for name in CATEGORIES}
            for (metric, mode), size in values.items():
                mib = math.nan if size is None else size / MIB
                found.append(same | metrics.values(metric, "MiB", mib, mode=mode))
        took, on = ours.get("processor_s", math.nan), {"mode": "processor", "device": "cpu"}
        found.append(same | metrics.values("estimate_time", "s", took, **on))
    return found


def find_boundaries(
    wanted: Sequence[Boundary], *, gpu: str, on_gpu: bool, deadline_s: float, folder: Path
) -> list[dict]:
    """Estimate each boundary and, if `on_gpu`, find it with real steps, by bisection within NEAR of
    the estimate on either side; one child process and one row each."""
    rows = [{"boundary": str(one), "find": one.find, "gib": one.gib, "gpu": gpu} for one in wanted]

    def swept(function: str, numbers: list[int], said: Callable[[dict], str], **more: Any) -> None:
        ended = sweep.measure(
            f"{CHILD}:{function}",
            numbers,
            lambda n, _: rows[n] | more | {"cell": wanted[n].spec.to_dict()},
            deadline_s=deadline_s,
            env=UNSEEN if function == "estimate_boundary" else None,
            folder=folder / function,
            name=lambda n: str(wanted[n]),
            said=said,
        )
        for n, one in zip(numbers, ended, strict=True):
            rows[n] |= {"outcome": one.status, "message": one.message} | (one.result or {})

    swept("estimate_boundary", list(range(len(rows))), lambda found: f"{found['foretold']:,}")
    known = [n for n, row in enumerate(rows) if row.get("foretold")]
    for row in rows if not on_gpu else ():
        if row["outcome"] == "ok":
            row |= {"outcome": "not run", "message": "there is no GPU"}
    if on_gpu and known:
        for n in known:
            rows[n]["values"] = values_near(rows[n]["foretold"])
        context = gpu_named(gpu).context
        said = "between {fits} and {does_not}".format_map
        swept("boundary", known, said, context=context)
    return rows


def values_near(estimated: int) -> list[int]:
    """Values around an estimate, up to the fraction NEAR to either side, in steps of STEP of it."""
    step = max(1, round(STEP * estimated))
    reach = max(2, round(NEAR * estimated / step))
    return [v for n in range(-reach, reach + 1) if (v := estimated + n * step) > 0]
