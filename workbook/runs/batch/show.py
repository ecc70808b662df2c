"""Output of a batch: a line for each job, the table, the failures, and the estimated duration."""

import contextlib
import heapq
import json
import os
import statistics
import sys
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
        measured = content.get("status") == OK and content.get("seconds")
        if measured and content.get("notebook") in wanted:
            with contextlib.suppress(ValueError):  # a damaged folder gives no estimate
                full = parameters.read_file(file.parent / "parameters.yaml")
                alike = content["notebook"], _gpus(read_json(file.parent / "environment.json", {}))
                for key in (alike, (*alike, _text(full))):
                    known[key].append(content["seconds"])
    free, exact, unknown = [0.0] * min(at_once, len(left)), 0, 0
    for planned in left:  # begun in order, each as soon as a place is free
        alike = planned.notebook.stem, _gpus(planned.environment)
        same = known.get((*alike, _text(planned.full)))
        times = same or known.get(alike)
        exact, unknown = exact + bool(same), unknown + (not times)
        heapq.heapreplace(free, free[0] + (statistics.median(times) if times else 0.0))
    beside = f", {at_once} at once" if at_once > 1 else ""
    if unknown == len(left):
        return f"{len(left):,} to run{beside}; no stored run to estimate the time from"
    told = f"{len(left) - unknown} of them known from stored runs, {exact} with the same parameters"
    least = "at least " if unknown else "about "
    return f"{len(left):,} to run{beside}: {least}{span(max(free))} ({told})"


def _gpus(facts: dict) -> tuple[str, ...]:
    return tuple(gpu.get("name", "") for gpu in facts.get("gpus") or [])


def _text(full: dict) -> str:
    return json.dumps(full, sort_keys=True, default=str)


@contextlib.contextmanager
def live(batch: Batch, quiet: bool = False) -> Iterator:
    """(show, say) for a driver: on a terminal a bar with counts and what the job that began last
    printed last; elsewhere only the lines."""
    if quiet or not sys.stderr.isatty():
        yield lambda batch: None, lambda text: print(text, file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    options = {"desc": batch.plan.name, "unit": "run", "leave": False, "dynamic_ncols": True}
    with tqdm(file=sys.stderr, total=len(batch.jobs), **options) as bar:

        def show(batch: Batch) -> None:
            running = [job for job in batch.jobs if job.status == RUNNING]
            bar.n = sum(job.status in (OK, FAILED, STOPPED) for job in batch.jobs)
            last = _printed(max(running, key=lambda job: job.began)) if running else ""
            bar.set_postfix_str(counted(batch) + last)

        yield show, lambda text: tqdm.write(text, file=sys.stderr)


def _printed(job: Job) -> str:
    """`; memory tokens=128: what it printed last`."""
    text, log = "", Path(job.says("started").get("run") or "", "stdout.log")
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400))
        text = file.read().decode(errors="replace").strip()
    return f"; {job.name}: {text.rpartition(chr(10))[2]}"
