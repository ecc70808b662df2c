"""Memory and time of training steps, one cell after another, each in a process of its own."""

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from nsa.experiments.memory.cell import Cell
from nsa.lab.process.trial import Outcome, Stopped, place_of, run_child

ENTRY = "nsa.experiments.memory.child:measure_cell"
PHASES = ("data", "forward", "backward", "optimizer")
_SIZES = ("peak_mib", "reserved_mib", "first_step_peak_mib", *(f"{phase}_mib" for phase in PHASES))
_EMPTY = {
    **dict.fromkeys(("parameters", "step_ms", "recorded_s", *_SIZES), math.nan),
    **{name: {} for name in ("by_category_mib", "by_phase_category_mib", "held_mib")},
    **{"cross_check": {}, "losses": [], "step_ms_each": [], "witness": None, "model": None},
    **{"device_name": "", "torch": "", "threads": None},
}


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

    A row has the cell's fields, `outcome` (of trial.STATUSES, or "declined" by the backend),
    `message`, `evidence`, `seconds`, `alone` (nobody ran beside it), and the measured values of
    `training_step.measure_cell`, NaN or empty where the outcome is not "ok". `timing` is "absolute"
    on a GPU, "ratio" on a CPU, whose times may only be compared with each other, and "contended"
    where others ran beside it. A cell that ran out of memory beside others is run again alone
    before that counts.

    threads: torch's CPU threads in each child (None: torch's own choice). folder: keeps each
    trial's files in a folder of its own. progress: one line a cell on stderr, and a bar below them
    on a terminal unless NSA_HEADLESS is set. An interrupt ends the children and returns the rows
    that are done.

    Raises ValueError for an illegal cell, deadline or number of workers, before any cell runs.
    """
    checked = [cell if isinstance(cell, Cell) else Cell.from_dict(cell) for cell in cells]
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s} must be greater than 0 seconds")
    sweep = _Sweep(checked, deadline_s, threads, folder, entry)
    with _lines(len(checked), progress) as say:
        try:
            sweep.run(list(range(len(checked))), workers, say)
            crowded = [n for n, r in sweep.rows.items() if r["outcome"] == "oom" and not r["alone"]]
            sweep.run(crowded, 1, say)
        except KeyboardInterrupt:
            say(f"interrupted: {len(sweep.rows)} of {len(checked)} cells are measured", None)
    return [sweep.rows[number] for number in sorted(sweep.rows)]


class _Sweep:
    """The cells, how to run one, and the rows so far by the cell's number."""

    def __init__(self, cells, deadline_s, threads, folder, entry) -> None:
        self.cells, self.deadline_s, self.threads = cells, deadline_s, threads
        self.folder = None if folder is None else Path(folder)
        self.entry = entry
        self.rows: dict[int, dict] = {}
        self.stop = threading.Event()

    def run(self, numbers: list[int], workers: int, say) -> None:
        alone = min(workers, len(numbers)) == 1
        with ThreadPoolExecutor(workers) as pool:
            jobs = {pool.submit(self._trial, number): number for number in numbers}
            try:
                waiting: set[Future] = set(jobs)
                while waiting:
                    # Woken now and then, because an interrupt may reach another thread than this.
                    done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    for job in done:
                        number = jobs[job]
                        self.rows[number] = row_of(self.cells[number], job.result(), alone)
                        say(line_of(self.cells[number], self.rows[number]), number)
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _trial(self, number: int) -> Outcome:
        if self.stop.is_set():
            raise Stopped("before it started")
        cell = self.cells[number]
        folder = place_of(self.folder, number, cell)
        spec = {"cell": cell.to_dict(), "deadline_s": self.deadline_s, "threads": self.threads}
        return run_child(
            self.entry, spec, deadline_s=self.deadline_s, folder=folder, stop=self.stop
        )


def row_of(cell: Cell, outcome: Outcome, alone: bool = True) -> dict:
    """A cell, how its trial ended and what it measured, as one flat row; see `measure`."""
    measured = dict(outcome.result or {})
    declined = measured.pop("declined", None)
    return {
        **cell.to_dict(),
        "outcome": outcome.status if declined is None else "declined",
        "message": outcome.message if declined is None else declined,
        "evidence": outcome.evidence,
        "seconds": outcome.seconds,
        "alone": alone,
        "timing": "contended" if not alone else "absolute" if cell.device == "cuda" else "ratio",
        **_EMPTY,
        **measured,
    }


def line_of(cell: Cell, row: dict) -> str:
    """One line for a person who waits."""
    if row["outcome"] != "ok":
        message = row["message"].splitlines()[0][:100] if row["message"] else ""
        return f"{cell}: {row['outcome']} after {row['seconds']:.1f} s ({message})"
    return f"{cell}: {row['peak_mib']:.1f} MiB, {row['seconds']:.1f} s"


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


@contextlib.contextmanager
def _lines(total: int, progress: bool):
    """Gives say(line, number): a line on stderr, and a bar on a terminal where tqdm is there."""
    bar = None
    if progress and sys.stderr.isatty() and not os.environ.get("NSA_HEADLESS"):
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, unit="cell")
    said: set[int] = set()

    def say(line: str, number: int | None) -> None:
        again = number in said
        if number is not None:
            said.add(number)
        if bar is not None:
            bar.write(line, file=sys.stderr)
            bar.update(number is not None and not again)
        elif progress:
            count = f"[{len(said)}/{total}] " if number is not None else ""
            print(f"{count}{line}{' (again, alone)' * again}", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if bar is not None:
            bar.close()
