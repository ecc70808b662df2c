"""The single loop over cells, each measured in its own child process."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TypeVar

from whyhung.process.gpus import Gpus, only
from whyhung.process.trial import Outcome, Stopped, run_child
from workbook.lab.progress import lines

Item, Result = TypeVar("Item"), TypeVar("Result")
RUN_ENDS = "NSA_RUN_ENDS"  # environment variable: time.monotonic() at which a run's timeout ends it
KEPT, LEAST_KEPT_S = 0.1, 20.0  # share of what a run has left, seconds
_POLL_S = 0.5


class Budget:
    """Seconds shared by several trials, counted from construction.

    A trial with no time left is "not run", which is not a finding. Inside a run with a timeout
    (RUN_ENDS) the budget is at most the run's remaining time, less the larger of a tenth of it and
    LEAST_KEPT_S, which is reserved for judging the measurements.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        now = time.monotonic()
        left = float(os.environ.get(RUN_ENDS, math.inf)) - now
        most = max(0.0, min((1 - KEPT) * left, left - LEAST_KEPT_S))
        self.used_up = f"the budget of {seconds:g} s was used up"
        if most < seconds:
            self.used_up = f"the {most:.0f} s that the run's timeout left for this were used up"
        self._end = now + min(seconds, most)

    def share(self, deadline_s: float) -> float:
        """Seconds for the next trial, at most its deadline; 0 or less when none are left."""
        return min(deadline_s, self._end - time.monotonic())


def plain(name: str) -> str:
    """Name of a cell as its folder has it."""
    return re.sub("[^A-Za-z0-9.=]+", "-", name)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `measure`. ended: each cell's Outcome, None if it had not ended."""

    def __init__(self, ended: list[Outcome | None]) -> None:
        super().__init__("the sweep was interrupted")
        self.ended = ended


def measure(
    entry: str,
    cells: Sequence[Item],
    spec: Callable[[Item, float], dict],
    *,
    deadline_s: float,
    budget_s: float = math.inf,
    workers: int = 1,
    gpus: Gpus | None = None,
    env: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    name: Callable[[Item], str] = str,
    said: Callable[[dict], str] = lambda result: "ok",
    progress: bool = True,
    again_alone: bool = False,
    run: Callable[..., Outcome] | None = None,
) -> list[Outcome]:
    """Run each cell in a child process, `workers` at once; return Outcomes in the cells' order.

    A child calls `entry` with spec(cell, its seconds). If `gpus` has names, one cell runs on each
    GPU at once, and `workers` is ignored. Besides the statuses of a child, the status is
    "declined" if its result is {"declined": why}, and "not run" if the budget left no time for
    the cell, or ended it before its deadline.

    deadline_s: per cell. budget_s: for all cells. env: additional variables. folder: stores each
    child's output, in `007-its-name`. again_alone: a cell that ran out of memory beside others is
    rerun alone before that counts. run: replaces `run_child`, with the same arguments.
    progress: one line per cell on stderr, with said(result) on success, and a bar below the lines
    on a terminal unless NSA_HEADLESS is set.

    Raises ValueError for an illegal deadline or number of workers before any cell runs, and
    Interrupted after Ctrl-C, once the children have been ended.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s} must be greater than 0 seconds")
    budget, stop, cells, gpus = Budget(budget_s), Event(), list(cells), gpus or Gpus()
    found: dict[int, Outcome] = {}

    def one(gpu: str | None, number: int) -> Outcome:
        if stop.is_set():
            raise Stopped("before it started")
        share_s = budget.share(deadline_s)
        if share_s <= 0:
            return Outcome("not run", None, 0.0, budget.used_up, None)
        place = None
        if folder is not None:  # the number distinguishes cells of equal names
            place = Path(folder, f"{number:03d}-{plain(name(cells[number]))}")
        ended = (run or run_child)(
            entry,
            spec(cells[number], share_s),
            deadline_s=share_s,
            folder=place,
            env={**(env or {}), **only(gpu)},
            stop=stop,
        )
        if ended.status == "timeout" and share_s < deadline_s:
            message = f"{budget.used_up} after {share_s:.0f} s of this one"
            return replace(ended, status="not run", message=message)
        if "declined" in (ended.result or {}):
            message = ended.result["declined"]
            return replace(ended, status="declined", message=message, result=None)
        return ended

    def through(numbers: Sequence[int], workers: int, gpus: Gpus) -> None:
        alone = min(len(gpus.names) or workers, len(numbers)) == 1

        def keep(index: int, ended: Outcome) -> None:
            number = numbers[index]
            again = number in found
            found[number] = replace(ended, alone=alone)
            line = f"{name(cells[number])}: {_ending(ended, said)}"
            say(line, f"[{len(found)}/{len(cells)}] ", again)

        each(one, numbers, workers=workers, gpus=gpus, stop=stop, ended=keep)

    with lines(len(cells), progress) as say:
        try:
            through(range(len(cells)), workers, gpus)
            if again_alone:
                crowded = [n for n, e in found.items() if e.status == "oom" and not e.alone]
                through(sorted(crowded), 1, Gpus(gpus.names[:1]))
        except KeyboardInterrupt:
            say(f"interrupted: {len(found)} of {len(cells)} cells are measured")
            raise Interrupted([found.get(number) for number in range(len(cells))]) from None
    return [found[number] for number in range(len(cells))]


def each(
    function: Callable[[str | None, Item], Result],
    items: Sequence[Item],
    *,
    workers: int = 1,
    gpus: Gpus | None = None,
    stop: Event | None = None,
    ended: Callable[[int, Result], None] = lambda number, result: None,
) -> list[Result]:
    """Call function(gpu, item) in threads, one per GPU, else `workers`; return results in order.

    stop: set for calls in flight when one raises or the caller is interrupted; pending items are
    never started. The first exception is raised. ended(number, result) is called in this thread as
    each item ends.
    """
    stop, gpus, errors = stop or Event(), gpus or Gpus(), []

    def lent(item: Item) -> Result:
        with gpus.one() as gpu:
            try:
                return function(gpu, item)
            except BaseException as error:
                errors.append(error)  # before `stop`, which makes the others raise
                stop.set()
                raise

    with ThreadPoolExecutor(len(gpus.names) or workers) as pool:
        jobs = {pool.submit(lent, item): number for number, item in enumerate(items)}
        waiting = set(jobs)
        try:
            while waiting:
                # Woken now and then, because an interrupt may reach another thread than this.
                done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                if errors:
                    raise errors[0]
                for job in sorted(done, key=jobs.get):
                    ended(jobs[job], job.result())
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [job.result() for job in jobs]


def _ending(ended: Outcome, said: Callable[[dict], str]) -> str:
    """Return a one-line summary of how a cell ended."""
    if ended.status == "ok":
        return f"{said(ended.result)}, {ended.seconds:.1f} s"
    message = ended.message.splitlines()[0][:100] if ended.message else ""
    return f"{ended.status} after {ended.seconds:.1f} s ({message})"
