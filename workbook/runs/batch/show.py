"""Output of a batch: a line for each job, the table, the failures, and the estimated duration."""

import contextlib
import heapq
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from workbook.runs import parameters, record
from workbook.runs.batch.place import FAILED, OK, RUNNING, STOPPED, TO_RUN, Job
from workbook.runs.batch.state import Batch
from workbook.runs.files import read_json

MOST_FAILURES = 20  # number of failures listed with their cells
ORDER = (OK, FAILED, STOPPED, RUNNING, TO_RUN, "not run")


def line(batch: Batch, job: Job) -> str:
    """Line for a job that has ended: its number, status, time and run."""
    number = 1 + batch.jobs.index(job)
    found = job.outcome
    words = job.status + (f", {found.verdict}" if found.verdict else "")
    words += "" if found.seconds is None else f" in {span(found.seconds)}"
    words += f": {found.message}" if found.message and job.status != OK else ""
    words += f"  {os.path.relpath(found.run, batch.root)}" if found.run else ""
    return f"[{number}/{len(batch.jobs)}] {job.name}: {words}"


def table(batch: Batch) -> list[dict[str, str]]:
    """Table with a row for each job."""
    rows = []
    for job in batch.jobs:
        run, seconds = job.outcome.run, job.outcome.seconds
        row = {
            "job": job.name,
            "status": f"{job.status} (was there)" if job.cached else job.status,
            "verdict": job.outcome.verdict,
            "seconds": "" if seconds is None else f"{seconds:.1f}",
            "run": os.path.relpath(run, batch.root) if run else job.entry.planned.notebook.stem,
        }
        rows.append(row)
    return rows


def counted(batch: Batch) -> str:
    """Counts by status: `3 ok, 1 failed, 36 to run`."""
    count = batch.count()
    return ", ".join(f"{count[status]:,} {status}" for status in ORDER if count[status])


def failures(batch: Batch) -> list[str]:
    """Failed and stopped jobs: the cell, the error, the folder; the first 20."""
    bad = [job for job in batch.jobs if job.status in (FAILED, STOPPED)]
    lines = []
    for job in bad[:MOST_FAILURES]:
        lines.append(f"{job.name}: {job.outcome.reason or job.status}")
        lines += [f"  {text}" for text in (_cell(job.outcome.run), job.outcome.message) if text]
        place = job.outcome.run or job.folder
        lines.append(f"  {os.path.relpath(place, batch.root.parent)}")
    if len(bad) > MOST_FAILURES:
        lines.append(f"and {len(bad) - MOST_FAILURES} more: --status lists them all")
    return lines


def _cell(run: Path | None) -> str:
    """Code cell of a run's notebook that failed: its number and first line."""
    cells = read_json(run / "notebook.ipynb", {}).get("cells", []) if run else []
    code = [cell for cell in cells if cell.get("cell_type") == "code"]
    code = [cell for cell in code if "injected-parameters" not in cell["metadata"].get("tags", [])]
    for number, cell in enumerate(code, 1):
        outputs = cell.get("outputs", [])
        if any(output.get("output_type") == "error" for output in outputs):
            first = "".join(cell["source"]).strip().splitlines() or [""]
            return f"code cell {number} of {len(code)}: {first[0]}"
    return ""


def span(seconds: float) -> str:
    """Duration in words: 42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def estimate(batch: Batch, at_once: int) -> str:
    """Estimated duration of the remaining jobs, from runs below the batch's root on the same
    devices: with the same parameters, else of the same notebook."""
    left = [job.entry.planned for job in batch.jobs if job.status in (TO_RUN, STOPPED)]
    if not left:
        return "nothing is to be run"
    wanted = {planned.notebook.stem for planned in left}
    known: dict[tuple, list[float]] = defaultdict(list)
    for file in batch.root.glob("*/*/record.json"):
        content = record.load(file.parent)
        name, took = content.get("notebook"), content.get("seconds")
        if name not in wanted or content.get("status") != OK or not took:
            continue
        with contextlib.suppress(ValueError):  # a damaged folder gives no estimate
            full = parameters.read_file(file.parent / "parameters.yaml")
            gpus = _gpus(read_json(file.parent / "environment.json", {}))
            known[name, gpus, _text(full)].append(took)
            known[name, gpus].append(took)
    times, exact = [], 0
    for planned in left:
        alike = planned.notebook.stem, _gpus(planned.environment)
        same = known.get((*alike, _text(planned.full)))
        exact += bool(same)
        times.append(statistics.median(same or known.get(alike) or [0.0]))
    unknown = times.count(0.0)
    beside = f", {at_once} at once" if at_once > 1 else ""
    told = f"{len(left) - unknown} of them known from stored runs, {exact} with the same parameters"
    if unknown == len(left):
        return f"{len(left):,} to run{beside}; no stored run to estimate the time from"
    least = "at least " if unknown else "about "
    return f"{len(left):,} to run{beside}: {least}{span(_makespan(times, at_once))} ({told})"


def _makespan(times: list[float], at_once: int) -> float:
    """Total time of jobs begun in order, each as soon as one of `at_once` places is free."""
    free = [0.0] * min(at_once, len(times))
    for seconds in times:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def _gpus(facts: dict) -> tuple[str, ...]:
    return tuple(gpu.get("name", "") for gpu in facts.get("gpus") or [])


def _text(full: dict) -> str:
    return json.dumps(full, sort_keys=True, default=str)


@contextlib.contextmanager
def live(batch: Batch, quiet: bool = False) -> Iterator:
    """(show, say) for a driver: on a terminal a bar with the job that began last and its latest
    output; elsewhere only the lines."""
    if quiet or not sys.stderr.isatty():
        yield lambda batch: None, lambda text: print(text, file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    options = {"desc": batch.plan.name, "unit": "run", "leave": False, "dynamic_ncols": True}
    with tqdm(file=sys.stderr, total=len(batch.jobs), **options) as bar:

        def show(batch: Batch) -> None:
            count = batch.count()
            bar.n = sum(count[status] for status in (OK, FAILED, STOPPED))
            running = [job for job in batch.jobs if job.status == RUNNING]
            last = _now(max(running, key=lambda job: job.began)) if running else ""
            bar.set_postfix_str(counted(batch) + last)

        yield show, lambda text: tqdm.write(text, file=sys.stderr)


def _now(job: Job) -> str:
    """`; memory tokens=128, 1 min 3 s: what it printed last`."""
    printed, run = "", job.says("started").get("run")
    with contextlib.suppress(OSError), Path(run or "", "stdout.log").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
        printed = (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    return f"; {job.name}, {span(time.monotonic() - job.began)}: {printed}"
