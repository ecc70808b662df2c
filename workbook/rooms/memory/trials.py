"""Measure memory and time of training steps, each cell in a separate process."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.model.train import Trainer
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.allocations import CATEGORIES
from workbook.lab.measure.recorders import MIB, recorded_step
from workbook.lab.measure.steps import StepMeter, facts
from workbook.lab.training import TrainingSpec, open_trainer
from workbook.rooms.memory.cell import Measured
from workbook.runs import metrics

ENTRY = "workbook.rooms.memory.trials:measure_cell"
PHASES = ("data", "forward", "backward", "optimizer")
OF_A_CELL = ("preset", "layers", "batch", "checkpoint", "device", "seed", "data", "changes")
ENDED = ("outcome", "message", "alone", "timing", "parameters")
TIMED_STEPS = 3
TIMING_SHARE = 0.5  # of the time to the deadline, so that timing never endangers the memory figures


def measure(
    cells: Sequence[TrainingSpec],
    *,
    deadline_s: float,
    workers: int = 1,
    threads: int | None = None,
    progress: bool = True,
    folder: str | Path | None = None,
) -> list[dict]:
    """Measure the cells, one row each, in order, with up to `workers` concurrent child processes.

    A row has the cell's fields, `outcome` (see `sweep.measure`), `message`, `evidence`, `seconds`,
    `alone` (no other cell ran beside it), and the fields of `Measured`. `timing` is "absolute" on
    a GPU, "ratio" on a CPU, whose times may only be compared with each other, and "contended" if
    others ran beside it. A cell that ran out of memory beside others is rerun alone before that
    counts. An interrupt ends the children and returns the finished rows.

    threads: torch's CPU threads in each child (None: torch's default). The rest, and exceptions
    raised before any cell runs, are as in `sweep.measure`.
    """
    try:
        ended: Sequence[Outcome | None] = sweep.measure(
            ENTRY,
            cells,
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
    return [row_of(cell, how) for cell, how in zip(cells, ended, strict=True) if how is not None]


def row_of(cell: TrainingSpec, ended: Outcome) -> dict:
    """Make one flat row of a cell, its trial's outcome and its measurements; see `measure`."""
    timing = "absolute" if cell.device == "cuda" else "ratio"
    how = {"outcome": ended.status, "message": ended.message, "evidence": ended.evidence}
    how |= {"seconds": ended.seconds, "alone": ended.alone}
    how["timing"] = timing if ended.alone else "contended"
    how |= {"backend": cell.name}
    return cell.to_dict() | how | asdict(Measured(**(ended.result or {})))


def rows_to_metrics(rows: Sequence[dict]) -> list[dict]:
    """Convert rows to the long format of a run's metrics.csv; failed values are NaN.

    Metrics: "peak_memory" (mode "step", "forward", "backward", "optimizer"), "memory_<category>" at
    the overall peak (mode "step") and "step_time". `config` is the cell and its outcome; the
    model, the witness and the cross-check stay in the trial's own folder.
    """
    found = []
    for row in rows:
        config = {name: row[name] for name in (*OF_A_CELL, *ENDED)} | {"dtype": row["precision"]}
        same = {"operation": "training_step", "backend": row["backend"], "x_name": "tokens"}
        same |= {"x_value": row["tokens"], "config": config}
        peaks = {"step": row["peak_mib"]} | {phase: row[f"{phase}_mib"] for phase in PHASES[1:]}
        sizes = [("peak_memory", mode, mib) for mode, mib in peaks.items()]
        held = row["by_category_mib"]
        sizes += [(f"memory_{name}", "step", held.get(name, math.nan)) for name in CATEGORIES]
        found += [same | metrics.values(name, "MiB", mib, mode=mode) for name, mode, mib in sizes]
        found.append(same | metrics.values("step_time", "ms", row["step_ms"], mode="step"))
    return found


def measure_cell(spec: dict) -> dict:
    """Measure a cell: {"cell": its fields, "deadline_s", "threads": int or None} -> `Measured`.

    Step 0 warms up: kernels are compiled, the optimizer's state is made. Step 1 is recorded. Up to
    three further steps are timed, as time permits. An error names the step and phase in which it
    occurred. If the backend declines the model, the result is {"declined": why}.
    """
    started = time.monotonic()
    cell, place = TrainingSpec.from_dict(spec["cell"]), _Place()
    with open_trainer(cell, threads=spec["threads"], observers=(place,)) as trainer:
        try:
            losses = [float(trainer.step(0))]
            recorded = _record(trainer, losses)
            left = spec["deadline_s"] - (time.monotonic() - started)
            times = _time(trainer, losses, TIMING_SHARE * left - recorded["recorded_s"])
        except Declined as refusal:
            return {"declined": str(refusal)}
        except Exception as error:
            error.add_note(place.text)
            raise
    measured = Measured(
        **recorded,
        step_ms=1e3 * sorted(times)[len(times) // 2] if times else math.nan,
        step_ms_each=[1e3 * seconds for seconds in times],
        losses=losses,
        model=cell.config().to_dict(),
        **facts(trainer),
    )
    return asdict(measured)


def _record(trainer: Trainer, losses: list[float]) -> dict:
    """Record one step; return its fields of Measured, and append its loss to `losses`."""
    started = time.monotonic()
    with witness.recording() as seen:
        loss, recorder = recorded_step(trainer)
    losses.append(float(loss))
    found = recorder.record()
    recorded_s = time.monotonic() - started
    told = {"cross_check": found.pop("cross_check"), "witness": seen.record()}
    told["timeline"] = found.pop("timeline")
    sizes = found.pop("phases") | found
    sizes = {f"{name}_mib": _in_mib(size) for name, size in sizes.items()}
    return sizes | told | {"recorded_s": recorded_s}


def _in_mib(size):
    """Convert bytes, or a nested mapping of bytes, to MiB."""
    if isinstance(size, dict):
        return {name: _in_mib(inner) for name, inner in size.items()}
    return size / MIB


def _time(trainer: Trainer, losses: list[float], budget_s: float) -> list[float]:
    meter = StepMeter()
    times = meter.found["seconds"]
    while len(times) < TIMED_STEPS and sum(times) + max(times, default=0.0) < budget_s:
        meter.begin()
        losses.append(float(trainer.step(len(losses))))
        meter.end()
    return times


class _Place:
    """Tracker of the loop's step and phase, for error messages."""

    text = "before the first step"

    def on_phase(self, name: str, step: int) -> None:
        self.text = f"in step {step}, phase {name}"
