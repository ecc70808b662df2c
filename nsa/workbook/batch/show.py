"""What a batch says: a line a job, the table, what failed and where, and how long it may take."""

import contextlib
import heapq
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nsa.workbook import parameters, record
from nsa.workbook.batch.state import FAILED, OK, RUNNING, STOPPED, TO_RUN, Batch, State
from nsa.workbook.files import read_json

MOST_FAILURES = 20  # that are told with their cells
ORDER = (OK, FAILED, STOPPED, RUNNING, TO_RUN, "not run")


def line(batch: Batch, state: State) -> str:
    """One job that has ended: its number, status, time and run."""
    number = 1 + batch.states.index(state)
    found = state.outcome
    words = state.status + (f", {found.verdict}" if found.verdict else "")
    words += "" if found.seconds is None else f" in {span(found.seconds)}"
    words += f": {found.message}" if found.message and state.status != OK else ""
    words += f"  {_run(batch, state)}" if found.run else ""
    return f"[{number}/{len(batch.states)}] {state.name}: {words}"


def table(batch: Batch) -> list[dict[str, str]]:
    """A row a job."""
    return [
        {
            "job": state.name,
            "status": f"{state.status} (was there)" if state.cached else state.status,
            "verdict": state.outcome.verdict,
            "seconds": "" if state.outcome.seconds is None else f"{state.outcome.seconds:.1f}",
            "run": _run(batch, state) if state.outcome.run else state.entry.planned.notebook.stem,
        }
        for state in batch.states
    ]


def counted(batch: Batch) -> str:
    """`3 ok, 1 failed, 36 to run`."""
    count = batch.count()
    return ", ".join(f"{count[status]:,} {status}" for status in ORDER if count[status])


def failures(batch: Batch) -> list[str]:
    """What did not end well: the cell, the error, the folder; the first 20."""
    bad = [state for state in batch.states if state.status in (FAILED, STOPPED)]
    lines = []
    for state in bad[:MOST_FAILURES]:
        lines.append(f"{state.name}: {state.outcome.reason or state.status}")
        lines += [f"  {text}" for text in (_cell(state.outcome.run), state.outcome.message) if text]
        place = state.outcome.run or state.job.folder
        lines.append(f"  {os.path.relpath(place, batch.root.parent)}")
    if len(bad) > MOST_FAILURES:
        lines.append(f"and {len(bad) - MOST_FAILURES} more: --status lists them all")
    return lines


def _cell(run: Path | None) -> str:
    """The code cell of a run's notebook that failed: its number and first line."""
    cells = read_json(run / "notebook.ipynb", {}).get("cells", []) if run else []
    code = [cell for cell in cells if cell.get("cell_type") == "code"]
    code = [cell for cell in code if "injected-parameters" not in cell["metadata"].get("tags", [])]
    for number, cell in enumerate(code, 1):
        outputs = cell.get("outputs", [])
        if any(output.get("output_type") == "error" for output in outputs):
            first = "".join(cell["source"]).strip().splitlines() or [""]
            return f"code cell {number} of {len(code)}: {first[0]}"
    return ""


def _run(batch: Batch, state: State) -> str:
    return os.path.relpath(state.outcome.run, batch.root)


def span(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def estimate(batch: Batch, at_once: int) -> str:
    """How long what is to run may take, from runs below the batch's root on such devices: of the
    same parameters, else of the same notebook."""
    left = [state.entry.planned for state in batch.states if state.status in (TO_RUN, STOPPED)]
    if not left:
        return "nothing is to be run"
    wanted = {planned.notebook.stem for planned in left}
    same: dict[tuple, list[float]] = {}
    alike: dict[tuple, list[float]] = {}
    for file in batch.root.glob("*/*/record.json"):
        content = record.load(file.parent)
        name, took = content.get("notebook"), content.get("seconds")
        if name not in wanted or content.get("status") != OK or not took:
            continue
        with contextlib.suppress(ValueError):  # a folder that somebody damaged tells nothing
            full = parameters.read_file(file.parent / "parameters.yaml")
            gpus = _gpus(read_json(file.parent / "environment.json", {}))
            same.setdefault((name, gpus, _text(full)), []).append(took)
            alike.setdefault((name, gpus), []).append(took)
    times, exact, unknown = [], 0, 0
    for planned in left:
        name, gpus = planned.notebook.stem, _gpus(planned.environment)
        known = same.get((name, gpus, _text(planned.full)))
        exact += bool(known)
        known = known or alike.get((name, gpus))
        unknown += not known
        times.append(statistics.median(known) if known else 0.0)
    beside = f", {at_once} at once" if at_once > 1 else ""
    told = f"{len(left) - unknown} of them known from stored runs, {exact} with the same parameters"
    if unknown == len(left):
        return f"{len(left):,} to run{beside}; no stored run of these notebooks tells how long"
    least = "at least " if unknown else "about "
    return f"{len(left):,} to run{beside}: {least}{span(_makespan(times, at_once))} ({told})"


def _makespan(times: list[float], at_once: int) -> float:
    """Of jobs that are begun in order, each as soon as one of so many places is free."""
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
    """(show, say) for a driver: on a terminal a bar over a line for each job that runs, with what
    it printed last; elsewhere only the lines."""

    def plain(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if quiet or not sys.stderr.isatty():
        yield lambda batch: None, plain
        return
    from tqdm import tqdm

    bars: list[tqdm] = []

    def bar(position: int, **options) -> tqdm:
        return tqdm(file=sys.stderr, position=position, leave=False, dynamic_ncols=True, **options)

    def show(batch: Batch) -> None:
        count = batch.count()
        whole.n = sum(count[status] for status in (OK, FAILED, STOPPED))
        whole.set_postfix_str(counted(batch), refresh=False)
        whole.refresh()
        running = [state for state in batch.states if state.status == RUNNING]
        while len(bars) < min(len(running), 16):
            bars.append(bar(len(bars) + 1, bar_format="{desc}"))
        for number, one in enumerate(bars):
            one.set_description_str(_now(running[number]) if number < len(running) else "")

    whole = bar(0, total=len(batch.states), desc=batch.plan.name, unit="run")
    try:
        yield show, lambda text: tqdm.write(text, file=sys.stderr)
    finally:
        for one in (*bars, whole):
            one.close()


def _now(state: State) -> str:
    """`  memory tokens=128  1 min 3 s  what it printed last`."""
    printed = ""
    run = (read_json(state.job.folder / "started.json") or {}).get("run")
    with contextlib.suppress(OSError), Path(run or "", "stdout.log").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
        printed = (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    return f"  {state.name}  {span(time.monotonic() - state.began)}  {printed}"
