"""Run the jobs of a batch in a place, to the end or until a request to stop."""

import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whyhung.process.printed import last_lines
from workbook.runs import report
from workbook.runs.batch.job import ENDED, FAILED, FULL, OK, RUNNING, STOPPED, TO_RUN, Job
from workbook.runs.batch.show import line
from workbook.runs.batch.state import Batch
from workbook.runs.files import locked
from workbook.runs.signals import signals_handled

FREE = 64 * 2**20  # bytes that a disk must have left for one more run
CANCEL_S = 60.0  # maximum time for a driver to end after a request


@dataclass
class Driver:
    """Runs a batch until its end, a request to stop, the end of its budget or of the disk.

    A failed job is run again only with `retry`. `show(batch)` is called at each poll, `say` with
    lines worth keeping. The methods of a place, `Local` or `Slurm`, do not wait for jobs; `running`
    may hold jobs that an earlier driver started there. `start` yields the jobs that it starts;
    `poll`, called every `every_s` seconds, returns those without a running or waiting child, with
    the reason, or "" if their own files have it all; `cancel` sends their children a SIGTERM and
    leaves them 20 s to close their records.
    """

    batch: Batch
    place: Any
    retry: bool = False
    budget_s: float | None = None
    show: Callable[[Batch], None] = lambda batch: None
    say: Callable[[str], None] = lambda text: None
    why: str = ""  # why it starts no more jobs
    _asked: int = 0
    _cut: bool = False

    def run(self) -> list[Job]:
        """Run the batch and return its jobs. ValueError if another driver has the plan, if its
        source changed since it began, or if a job can never run in this place."""
        batch = self.batch
        self.place.check([job for job in batch.jobs if job.status != OK])
        try:
            batch.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot write to {batch.root} ({error.strerror}); name a folder with --runs"
            ) from None
        with locked(batch.lock) as mine:
            if not mine:
                raise ValueError(f"{batch.driver()}; look with --status, end it with --cancel")
            batch.check()
            (batch.folder / "cancel").unlink(missing_ok=True)
            self._try("manifest", batch.write)
            with signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._ask)):
                self._loop()
            for job in batch.jobs:  # also jobs that ended while no driver ran
                self._report(job)
            self._try("page of all runs", report.index, batch.root)
        return batch.jobs

    def cancel(self) -> None:
        """End running jobs: through their driver, or without one from here, starting nothing.
        ValueError if a driver does not end within a minute."""
        file, ends = self.batch.folder / "cancel", time.monotonic() + CANCEL_S
        if not self.batch.folder.is_dir():
            raise ValueError(f"{self.batch.plan.path} was never run with {self.batch.root}")
        file.touch()
        while time.monotonic() < ends:
            with locked(self.batch.lock) as mine:
                if mine:
                    if file.exists():  # there was no driver to end them
                        self._loop()
                    return
            time.sleep(self.place.every_s)
        raise ValueError(f"{self.batch.driver()}, which has not ended; it will find {file}")

    def _ask(self, _number, _frame) -> None:
        self._asked += 1
        if self._asked > 1:
            self.say("what runs goes on by itself; the same command takes it up, --cancel ends it")
            raise KeyboardInterrupt

    def _loop(self) -> None:
        for left in self.batch.folder.glob(".manifest.json-*"):  # left by a driver that was killed
            left.unlink(missing_ok=True)
        again = (STOPPED, TO_RUN, FAILED) if self.retry else (STOPPED, TO_RUN)
        for job in self.batch.jobs:
            if job.status in again:
                job.close("")
                job.reset()
        ends = time.monotonic() + (math.inf if self.budget_s is None else self.budget_s)
        while True:
            for job, why in self.place.poll(self._running()).items():
                self._settle(job, why)
            self._reasons_to_stop(ends)
            if not self.why:
                self._start()
            self.show(self.batch)
            if not self._running() and (self.why or not self._ready()):
                break
            time.sleep(self.place.every_s)
        for job in self.batch.jobs:
            if job.status == TO_RUN:
                job.status = f"not run: {self.why or self._waits_for(job)}"
        (self.batch.folder / "cancel").unlink(missing_ok=True)
        self.show(self.batch)

    def _reasons_to_stop(self, ends: float) -> None:
        free = shutil.disk_usage(self.batch.root).free
        if self._asked:
            self._stop("stopped", cut=True)
        elif (self.batch.folder / "cancel").exists():
            self._stop("cancelled", cut=True)
        elif time.monotonic() > ends:
            self._stop("the budget is spent", cut=True)
        elif free < FREE:
            self._stop(f"{free / 2**20:.0f} MiB are left on the disk of {self.batch.root}")

    def _stop(self, why: str, cut: bool = False) -> None:
        """Start no more jobs; with `cut` end running ones too."""
        running = self._running()
        if not self.why:
            self.why = why
            goes_on = "" if cut or not running else ", what runs goes on"
            self.say(f"{why}: nothing more is started{goes_on}")
        if cut and not self._cut:
            self._cut = True
            if running:
                self.say(f"waiting for {len(running)} to end")
                self.place.cancel(running)

    def _running(self) -> list[Job]:
        return [job for job in self.batch.jobs if job.status == RUNNING]

    def _settle(self, job: Job, why: str) -> None:
        job.close(why)
        job.status = job.look()
        (job.folder / "queued.json").unlink(missing_ok=True)
        if job.reason == "changed":  # the notebook as it is now is not run
            self._stop(f"{job.name}: {job.message}")
            job.reset()
            return
        if job.status not in ENDED and not job.message:  # only the output of its process is left
            job.message = why or ["its process left nothing", *last_lines(job.log)][-1]
            cut = job.run or why or FULL in job.message
            job.status = STOPPED if cut else FAILED
        self._report(job)
        self.say(line(self.batch, job))
        if FULL in job.message:
            self._stop(f"the disk of {self.batch.root} is full")

    def _report(self, job: Job) -> None:
        run = job.run
        if run and (run / "notebook.ipynb").is_file() and not (run / "report.html").is_file():
            self._try(f"report of {run}", report.render, run)

    def _try(self, what: str, write: Callable, *given: Any) -> None:
        """Write something that no job needs; a failure is told, and has no other consequences."""
        try:
            write(*given)
        except Exception as error:
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self.say(f"no {what}: {words}")

    def _ready(self) -> list[Job]:
        """Jobs to run whose dependencies have all run."""
        left = {job.group for job in self.batch.jobs if job.status != OK}
        ready = (job for job in self.batch.jobs if job.status == TO_RUN)
        return [job for job in ready if left.isdisjoint(job.after)]

    def _waits_for(self, job: Job) -> str:
        before = (other for other in self.batch.jobs if other.group in job.after)
        other = next(other for other in before if other.status != OK)
        return f"after {other.name}, which is {other.status.partition(':')[0]}"

    def _start(self) -> None:
        running = self._running()
        ready = self._ready()[: max(self.place.at_a_time - len(running), 0)]
        try:
            for job in ready:
                job.write(root=str(self.batch.root), evidence=self.batch.evidence)
            for job in self.place.start(ready, running) if ready else ():
                job.status = RUNNING
        except OSError as error:
            self._stop(f"nothing can be started: {error.strerror}")
