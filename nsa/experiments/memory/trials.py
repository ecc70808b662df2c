"""Memory and time of training steps, one cell after another, each in a process of its own."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from nsa.experiments.memory.cell import Cell, Measured
from nsa.lab import sweep
from nsa.lab.process.trial import Outcome

ENTRY = "nsa.experiments.memory.child:measure_cell"
PHASES = ("data", "forward", "backward", "optimizer")


def measure(
    cells: Sequence[Cell | dict],
    *,
    deadline_s: float,
    workers: int = 1,
    threads: int | None = None,
    progress: bool = True,
    folder: str | Path | None = None,
    entry: str = ENTRY,
) -> list[dict]:
    """One row a cell, in the cells' order, with `workers` child processes at once.

    A row has the cell's fields, `outcome` (as of `sweep.measure`), `message`, `evidence`,
    `seconds`, `alone` (nobody ran beside it), and what was `Measured`. `timing` is "absolute" on a
    GPU, "ratio" on a CPU, whose times may only be compared with each other, and "contended" where
    others ran beside it. A cell that ran out of memory beside others is run again alone before that
    counts.

    threads: torch's CPU threads in each child (None: torch's own choice). folder, progress: as of
    `sweep.measure`. An interrupt ends the children and returns the rows that are done.

    Raises ValueError for an illegal cell, deadline or number of workers, before any cell runs.
    """
    checked = [cell if isinstance(cell, Cell) else Cell.from_dict(cell) for cell in cells]
    try:
        ended: Sequence[Outcome | None] = sweep.measure(
            entry,
            checked,
            lambda cell, s: {"cell": cell.to_dict(), "deadline_s": s, "threads": threads},
            deadline_s=deadline_s,
            workers=workers,
            folder=folder,
            said=lambda result: f"{result['peak_mib']:.1f} MiB",
            progress=progress,
            again_alone=True,
        )
    except sweep.Interrupted as interrupt:
        ended = interrupt.ended
    return [row_of(cell, how) for cell, how in zip(checked, ended, strict=True) if how is not None]


def row_of(cell: Cell, ended: Outcome) -> dict:
    """A cell, how its trial ended and what it measured, as one flat row; see `measure`."""
    timing = "absolute" if cell.device == "cuda" else "ratio"
    return {
        **cell.to_dict(),
        "outcome": ended.status,
        "message": ended.message,
        "evidence": ended.evidence,
        "seconds": ended.seconds,
        "alone": ended.alone,
        "timing": timing if ended.alone else "contended",
        **asdict(Measured(**(ended.result or {}))),
    }


def rows_to_metrics(rows: Sequence[dict]) -> list[dict]:
    """The rows in the long format of a run's metrics.csv; values that failed are NaN.

    Metrics: "peak_memory" (mode "step", "forward", "backward", "optimizer"), "memory_<category>" at
    the overall peak (mode "step") and "step_time". `config` is JSON of the cell and how it ended;
    the model, the witness and the cross-check stay in the trial's own folder.
    """
    return [metric for row in rows for metric in _metrics(row)]


def _metrics(row: dict) -> Iterator[dict]:
    from nsa.lab.measure.allocations import CATEGORIES

    fields = [name for name in Cell.__dataclass_fields__ if name not in ("tokens", "backend")]
    fields += ["outcome", "message", "alone", "timing", "parameters"]
    config = {name: row[name] for name in fields}
    values = {("peak_memory", "MiB", "step"): row["peak_mib"]}
    values |= {("peak_memory", "MiB", phase): row[f"{phase}_mib"] for phase in PHASES[1:]}
    values |= {
        (f"memory_{category}", "MiB", "step"): row["by_category_mib"].get(category, math.nan)
        for category in CATEGORIES
    }
    values["step_time", "ms", "step"] = row["step_ms"]
    for (metric, unit, mode), value in values.items():
        yield {
            "operation": "training_step",
            "backend": row["backend"],
            "mode": mode,
            "metric": metric,
            "unit": unit,
            "x_name": "tokens",
            "x_value": row["tokens"],
            "median": value,
            "q20": value,
            "q80": value,
            "config": json.dumps(_plain(config), sort_keys=True),
        }


def _plain(value):
    """NaN as null: strict readers of JSON refuse it."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
