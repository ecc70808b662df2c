"""Run the jobs of a batch in a place, to the end or until a request to stop."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbook.runs import record, report
from workbook.runs.batch.place import (
    FAILED,
    FULL,
    OK,
    RUNNING,
    STOPPED,
    TO_RUN,
    Job,
    locked,
    outcome,
)
from workbook.runs.batch.show import line
from workbook.runs.batch.state import Batch
from workbook.runs.files import write_json
from workbook.runs.signals import signals_handled

FREE = 64 * 2**20  # bytes that a disk must have left for one more run
POLL_S = 0.2
CANCEL_S = 60.0  # maximum time for a driver to end after a request


class Driver:
    """Runs a batch until its end, a request to stop, the end of its budget or of the disk.

    A failed job is run again only with `retry`. `show(batch)` is called at each poll, `say` with
    lines worth keeping. The methods of a place, `Local` or `Slurm`, do not wait for jobs; `running`
    may hold jobs that an earlier driver started there. `poll` returns those without a running or
    waiting child, with the reason, or "" if their own files have it all; `cancel` sends their
    children a SIGTERM and leaves them 20 s to close their records.
    """

    def __init__(
        self,
        batch: Batch,
        place: Any,
        *,
        retry: bool = False,
        budget_s: float | None = None,
        show: Callable[[Batch], None] = lambda batch: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s={budget_s} must be more than 0 seconds")
        self.batch, self.place, self.retry = batch, place, retry
        self.ends = float("inf") if budget_s is None else time.monotonic() + budget_s
        self.show, self.say = show, say
        self.why = ""  # why it starts no more jobs
        self._asked, self._cut = 0, False

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
            try:
                batch.write()
            except OSError as error:
                self.say(f"no manifest: {error.strerror}; the jobs' own files hold what is needed")
            self._prepare()
            with signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._ask)):
                self._loop()
            for job in batch.jobs:  # also jobs that ended while no driver ran
                self._report(job)
            try:
                report.index(batch.root)
            except OSError as error:
                self.say(f"no page of all runs: {error.strerror}")
        return batch.jobs

    def cancel(self) -> None:
        """End running jobs: through their driver, or without one from here, starting nothing.
        ValueError if a driver does not end within a minute."""
        file, ends, asked = self.batch.folder / "cancel", time.monotonic() + CANCEL_S, False
        if not self.batch.folder.is_dir():
            raise ValueError(f"{self.batch.plan.path} was never run with {self.batch.root}")
        while time.monotonic() < ends:
            with locked(self.batch.lock) as mine:
                if mine and asked and not file.exists():
                    return  # ended by its driver
                if mine:
                    self._prepare()
                    self._stop("cancelled", cut=True)
                    self._loop()
                    return
            if not asked:
                file.touch()
                asked = True
            time.sleep(POLL_S)
        raise ValueError(f"{self.batch.driver()}, which has not ended; it will find {file}")

    def _prepare(self) -> None:
        """Take over the jobs of an earlier driver, and reset those to be run again."""
        for left in self.batch.folder.glob(".manifest.json-*"):  # left by a driver that was killed
            left.unlink(missing_ok=True)
        for job in self.batch.jobs:
            if job.status == RUNNING:
                job.began = time.monotonic()
            elif job.status in (STOPPED, TO_RUN) or (job.status == FAILED and self.retry):
                self._again(job)
        for job, why in self.place.poll(self._running()).items():
            job.outcome = outcome(job.folder)
            job.status, job.cached = job.outcome.status, True
            if not job.outcome.ended:
                self._again(job, why)

    def _again(self, job: Job, why: str = "") -> None:
        self._close(job, why)
        self.batch.reset(job)

    def _ask(self, _number, _frame) -> None:
        self._asked += 1
        if self._asked > 1:
            self.say("what runs goes on by itself; the same command takes it up, --cancel ends it")
            raise KeyboardInterrupt

    def _loop(self) -> None:
        while True:
            for job, why in self.place.poll(self._running()).items():
                self._settle(job, why)
            self._reasons_to_stop()
            if not self.why:
                self._start()
            self.show(self.batch)
            if not self._running() and (self.why or not self._ready()):
                break
            time.sleep(POLL_S)
        for job in self.batch.jobs:
            if job.status == TO_RUN:
                job.status = f"not run: {self.why or self._waits_for(job)}"
        (self.batch.folder / "cancel").unlink(missing_ok=True)
        self.show(self.batch)

    def _reasons_to_stop(self) -> None:
        free = shutil.disk_usage(self.batch.root).free
        if self._asked:
            self._stop("stopped", cut=True)
        elif (self.batch.folder / "cancel").exists():
            self._stop("cancelled", cut=True)
        elif time.monotonic() > self.ends:
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
        self._close(job, why)
        found = outcome(job.folder)
        (job.folder / "queued.json").unlink(missing_ok=True)
        if found.reason == "changed":  # the notebook as it is now is not run
            self.batch.reset(job)
            self._stop(f"{job.name}: {found.message}")
            return
        if not found.ended and not found.message:  # only the output of its process is left
            log = job.log.read_text(errors="replace") if job.log.exists() else ""
            said = why or (log.strip().splitlines() or ["its process left nothing"])[-1]
            cut = found.run or why or FULL in said
            found = replace(found, status=STOPPED if cut else FAILED, message=said)
        job.outcome, job.status = found, found.status
        self._report(job)
        self.say(line(self.batch, job))
        if FULL in found.message:
            self._stop(f"the disk of {self.batch.root} is full")

    def _report(self, job: Job) -> None:
        run = job.outcome.run
        if run and (run / "notebook.ipynb").is_file() and not (run / "report.html").is_file():
            try:
                report.render(run)
            except Exception as error:  # a failed report has no other consequences
                self.say(f"no report of {run}: {type(error).__name__}: {error}")

    def _close(self, job: Job, why: str) -> None:
        """Write in the record of a run that its child is gone."""
        run = outcome(job.folder).run
        if run and record.load(run).get("status") == "running":
            with contextlib.suppress(OSError):  # on a full disk; the run is still shown as lost
                record.close_lost(run, why or "its process is gone")

    def _ready(self) -> list[Job]:
        """Jobs to run whose dependencies have all run."""
        done = {job.name for job in self.batch.jobs if job.status == OK}
        left = [job for job in self.batch.jobs if job.status == TO_RUN]
        # All jobs of a grid share their dependencies; with thousands of jobs each set is read once.
        waits = {id(job.entry.after): job.entry.after for job in left}
        free = {key for key, after in waits.items() if done.issuperset(after)}
        return [job for job in left if id(job.entry.after) in free]

    def _waits_for(self, job: Job) -> str:
        jobs = {other.name: other for other in self.batch.jobs}
        other = next(jobs[name] for name in job.entry.after if jobs[name].status != OK)
        return f"after {other.name}, which is {other.status.partition(':')[0]}"

    def _start(self) -> None:
        ready = self._ready()[: self.place.at_a_time]
        try:
            for job in ready:
                self._write_job(job)
            started = self.place.start(ready, self._running()) if ready else []
        except OSError as error:
            self._stop(f"nothing can be started: {error.strerror}")
            return
        for job in started:
            job.status, job.began = RUNNING, time.monotonic()

    def _write_job(self, job: Job) -> None:
        entry = job.entry
        content = {
            "name": entry.planned.name,
            "source": entry.planned.source,
            "notebook": str(entry.planned.notebook.absolute()),
            "parameters": entry.planned.given,
            "root": str(self.batch.root),
            "timeout_s": job.timeout_s,
            "again": entry.repeats > 1,  # a repeat is no cache hit of another one
            "checked": entry.checked,
            "evidence": self.batch.evidence,
        }
        if not job.written:
            job.folder.mkdir(parents=True, exist_ok=True)
            write_json(job.file, content)
            job.written = True
