"""Output of a batch: a line for each job, the table, the failures, and the estimated duration."""

import contextlib
import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from whyhung.process.printed import last_lines
from workbook.runs import record
from workbook.runs.batch.job import FAILED, OK, RUNNING, STOPPED, TO_RUN, Job
from workbook.runs.batch.state import Batch
from workbook.runs.files import read_json
from workbook.runs.report import lasted
from workbook.runs.store import Store

MOST_FAILURES = 20  # number of failures listed with their cells
ORDER = (OK, FAILED, STOPPED, RUNNING, TO_RUN, "not run")


def line(batch: Batch, job: Job) -> str:
    """Line for a job that has ended: its number, status, time and run."""
    number = 1 + batch.jobs.index(job)
    words = job.status + (f", {job.verdict}" if job.verdict else "")
    words += "" if job.seconds is None else f" in {lasted(job.seconds)}"
    words += f": {job.message}" if job.message and job.status != OK else ""
    words += f"  {os.path.relpath(job.run, batch.root)}" if job.run else ""
    return f"[{number}/{len(batch.jobs)}] {job.name}: {words}"


def table(batch: Batch) -> list[dict[str, str]]:
    """Table with a row for each job."""
    rows = []
    for job in batch.jobs:
        run = job.run
        row = {
            "job": job.name,
            "status": f"{job.status} (was there)" if job.cached else job.status,
            "verdict": job.verdict,
            "seconds": "" if job.seconds is None else f"{job.seconds:.1f}",
            "run": os.path.relpath(run, batch.root) if run else job.planned.notebook.stem,
        }
        rows.append(row)
    return rows


def counted(batch: Batch) -> str:
    """Counts by status: `3 ok, 1 failed, 36 to run`."""
    statuses = (job.status for job in batch.jobs)
    count = Counter("not run" if one.startswith("not") else one for one in statuses)
    return ", ".join(f"{count[status]:,} {status}" for status in ORDER if count[status])


def failures(batch: Batch) -> list[str]:
    """Failed and stopped jobs: the cell, the error, the folder; the first 20."""
    bad = [job for job in batch.jobs if job.status in (FAILED, STOPPED)]
    lines = []
    for job in bad[:MOST_FAILURES]:
        lines.append(f"{job.name}: {job.reason or job.status}")
        lines += [f"  {text}" for text in (_cell(job.run), job.message) if text]
        place = job.run or job.folder
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
        if any(output.get("output_type") == "error" for output in cell.get("outputs", [])):
            first = "".join(cell["source"]).strip().partition("\n")[0]
            return f"code cell {number} of {len(code)}: {first}"
    return ""


def estimate(batch: Batch, at_once: int) -> str:
    """Number of jobs left and their duration, estimated from the median run of each notebook below
    the batch's root on the same devices."""
    left = [job.planned for job in batch.jobs if job.status in (TO_RUN, STOPPED)]
    if not left:
        return "nothing is to be run"
    wanted, seconds = {planned.notebook.stem for planned in left}, defaultdict(list)
    for folder in Store(batch.root).folders():
        content = record.load(folder)
        if content.get("notebook") in wanted and content.get("status") == OK:
            facts = read_json(folder / "environment.json", {})
            seconds[content["notebook"], _gpus(facts)].append(content.get("seconds") or 0.0)
    usual = {kind: statistics.median(times) for kind, times in seconds.items()}
    kinds = [(planned.notebook.stem, _gpus(planned.environment)) for planned in left]
    known = [usual[kind] for kind in kinds if kind in usual]
    told = f"{len(left):,} to run" + (f", {at_once} at once" if at_once > 1 else "")
    if not known:
        return f"{told}; no stored run to estimate the time from"
    least = "at least" if len(known) < len(left) else "about"
    time = lasted(sum(known) / min(at_once, len(known)))
    return f"{told}: {least} {time} ({len(known)} of them known from stored runs)"


def _gpus(facts: dict) -> tuple[str, ...]:
    return tuple(gpu.get("name", "") for gpu in facts.get("gpus") or [])


@contextlib.contextmanager
def live(batch: Batch, quiet: bool = False) -> Iterator:
    """(show, say) for a driver: on a terminal a bar with counts and what the last of the running
    jobs printed last; elsewhere only the lines."""
    if quiet or not sys.stderr.isatty():
        yield lambda batch: None, lambda text: print(text, file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    options = {"desc": batch.plan.name, "unit": "run", "leave": False, "dynamic_ncols": True}
    with tqdm(file=sys.stderr, total=len(batch.jobs), **options) as bar:

        def show(batch: Batch) -> None:
            bar.n = sum(job.status in (OK, FAILED, STOPPED) for job in batch.jobs)
            running = [job for job in batch.jobs if job.status == RUNNING]
            text = counted(batch)
            for job in running[-1:]:
                log = Path(job.says("started").get("run") or "", "stdout.log")
                text += f"; {job.name}: {''.join(last_lines(log)[-1:])}"
            bar.set_postfix_str(text)

        yield show, lambda text: tqdm.write(text, file=sys.stderr)
