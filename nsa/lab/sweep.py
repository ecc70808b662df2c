"""The one loop over cells that are each measured in a child process of their own."""

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

from nsa.lab.progress import lines
from whyhung.process.gpus import Gpus, only
from whyhung.process.trial import Outcome, Stopped, run_child

Item, Result = TypeVar("Item"), TypeVar("Result")
RUN_ENDS = "NSA_RUN_ENDS"  # environment variable: when a run's timeout ends it, by time.monotonic()
KEPT, LEAST_KEPT_S = 0.1, 20.0  # share of what a run has left, seconds
_POLL_S = 0.5


class Budget:
    """Seconds that several trials share, from its making on.

    A trial for which no time is left was not tried, which is no finding. Inside a run that a
    timeout will end (RUN_ENDS) the budget is no more than the run has left, without a tenth of
    that, or LEAST_KEPT_S, for what comes after: what was measured must still be judged.
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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `measure`. ended: each cell's Outcome, None where it had not ended."""

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
    """How each cell's child process ended, in the cells' order, with `workers` of them at once.

    A child calls `entry` with spec(cell, its seconds). Where `gpus` has names, one cell runs on
    each of them at once, and `workers` does not count. Beside a child's own endings the status is
    "declined" where its result is {"declined": why}, and "not run" where the budget left no time
    for the cell, or cut it short of its deadline.

    deadline_s: for each cell. budget_s: for all. env: further variables. folder: keeps what each
    child wrote, in `007-its-name`. again_alone: a cell that ran out of memory beside others runs
    again without them before that counts. run: what runs a child instead of `run_child`, with its
    arguments. progress: one line a cell on stderr, with said(result) where it is well, and a bar
    below them on a terminal unless NSA_HEADLESS is set.

    Raises ValueError for an illegal deadline or number of workers before any cell runs, and
    Interrupted after Ctrl-C, when the children have been ended.
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
        if folder is not None:  # the number tells those apart that say the same of themselves
            plain = re.sub("[^A-Za-z0-9.=]+", "-", name(cells[number]))
            place = Path(folder, f"{number:03d}-{plain}")
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
    """function(gpu, item) of each in a thread, in their order: one on each GPU, else `workers`.

    stop: set for those in flight when one raises or the caller is interrupted; what has not begun
    never does. The exception is that of the first to raise. ended(number, result) is called in this
    thread as they end.
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
    """How a cell ended, in one line for a person who waits."""
    if ended.status == "ok":
        return f"{said(ended.result)}, {ended.seconds:.1f} s"
    message = ended.message.splitlines()[0][:100] if ended.message else ""
    return f"{ended.status} after {ended.seconds:.1f} s ({message})"
