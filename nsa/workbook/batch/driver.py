"""Has the jobs of a batch run in a place, to the end or until it is told to stop."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from nsa.workbook import environment, record, report
from nsa.workbook.batch.place import FULL, Handle, Job, Place, locked, outcome
from nsa.workbook.batch.show import line
from nsa.workbook.batch.state import FAILED, OK, RUNNING, STOPPED, TO_RUN, Batch, State
from nsa.workbook.files import write_json
from nsa.workbook.run import signals_handled

FREE = 64 * 2**20  # bytes that a disk must have left for one more run
POLL_S = 0.2
CANCEL_S = 60.0  # in which a driver that is asked to end has ended


class Driver:
    """Runs a batch until its end, a request to stop, the end of its budget or of the disk.

    A job that failed is run again only with `retry`. `show(batch)` is called at each look, `say`
    with lines worth keeping.
    """

    def __init__(
        self,
        batch: Batch,
        place: Place,
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
        self.why = ""  # it starts no more
        self._began = environment.utc_now()
        self._asked, self._cut, self._unwritten = 0, False, False

    def run(self) -> list[State]:
        """The jobs' states at the end. ValueError where another driver has the plan, where its
        source changed since it began, or where a job can never run in this place."""
        batch = self.batch
        self.place.check([state.job for state in batch.states if state.status != OK])
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
            self._prepare()
            with signals_handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._ask)):
                self._loop()
            for state in batch.states:  # also of those that ended while nobody drove
                self._report(state)
            try:
                report.index(batch.root)
            except OSError as error:
                self.say(f"no page of all runs: {error.strerror}")
        return batch.states

    def cancel(self) -> None:
        """End what runs: by its driver, or where there is none by this one, which starts nothing.
        ValueError where a driver does not end within a minute."""
        file, ends, asked = self.batch.folder / "cancel", time.monotonic() + CANCEL_S, False
        if not self.batch.folder.is_dir():
            raise ValueError(f"{self.batch.plan.path} was never run with {self.batch.root}")
        while time.monotonic() < ends:
            with locked(self.batch.lock) as mine:
                if mine and asked and not file.exists():
                    return  # its driver did
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
        """Take over what an earlier driver started, and what is to be run again."""
        for left in self.batch.folder.glob(".manifest.json-*"):  # of a driver that was killed
            left.unlink(missing_ok=True)
        before, handles = self.batch.manifest, {}
        if before.get("place") == type(self.place).__name__:
            handles = {one.get("name"): one.get("handle") for one in before.get("jobs", [])}
        for state in self.batch.states:
            handle = handles.get(state.name)
            if state.status == RUNNING or (handle and state.status in (TO_RUN, STOPPED)):
                state.status, state.handle, state.began = RUNNING, handle or {}, time.monotonic()
            elif state.status in (STOPPED, TO_RUN) or (state.status == FAILED and self.retry):
                self._again(state)
        self.place.adopt(self._running())
        for state, why in self._gone():
            state.outcome = outcome(state.job.folder)
            state.status, state.cached = state.outcome.status, True
            if not state.outcome.ended:
                self._again(state, why)

    def _again(self, state: State, why: str = "") -> None:
        self._close(state, why)
        self.batch.reset(state)

    def _ask(self, _number, _frame) -> None:
        self._asked += 1
        if self._asked > 1:
            self.say("what runs goes on by itself; the same command takes it up, --cancel ends it")
            raise KeyboardInterrupt

    def _loop(self) -> None:
        self._write()
        while True:
            changed = False
            for state, why in self._gone():
                self._settle(state, why)
                changed = True
            self._reasons_to_stop()
            if not self.why:
                changed = self._start() or changed
            if changed:
                self._write()
            self.show(self.batch)
            if not self._running() and (self.why or not self._ready()):
                break
            time.sleep(POLL_S)
        for state in self.batch.states:
            if state.status == TO_RUN:
                state.status = f"not run: {self.why or self._waits_for(state)}"
        (self.batch.folder / "cancel").unlink(missing_ok=True)
        self._write()
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
        """Start no more; with `cut` end what runs too."""
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

    def _running(self) -> dict[Job, Handle]:
        return {s.job: s.handle or {} for s in self.batch.states if s.status == RUNNING}

    def _gone(self) -> list[tuple[State, str]]:
        running = {s.job: s for s in self.batch.states if s.status == RUNNING}
        gone = self.place.poll(self._running()) if running else {}
        return [(running[job], why) for job, why in gone.items()]

    def _settle(self, state: State, why: str) -> None:
        self._close(state, why)
        found, state.handle = outcome(state.job.folder), None
        if found.reason == "changed":  # of what its notebook says now no run is made
            self.batch.reset(state)
            self._stop(f"{state.name}: {found.message}")
            return
        if not found.ended and not found.message:  # all that is left is what its process printed
            log = state.job.log.read_text(errors="replace") if state.job.log.exists() else ""
            said = why or (log.strip().splitlines() or ["its process left nothing"])[-1]
            cut = found.run or why or FULL in said
            found = replace(found, status=STOPPED if cut else FAILED, message=said)
        state.outcome, state.status = found, found.status
        self._report(state)
        self.say(line(self.batch, state))
        if FULL in found.message:
            self._stop(f"the disk of {self.batch.root} is full")

    def _report(self, state: State) -> None:
        run = state.outcome.run
        if run and (run / "notebook.ipynb").is_file() and not (run / "report.html").is_file():
            try:
                report.render(run)
            except Exception as error:  # it costs nothing but itself
                self.say(f"no report of {run}: {type(error).__name__}: {error}")

    def _close(self, state: State, why: str) -> None:
        """The record of a run whose child is gone says so."""
        run = outcome(state.job.folder).run
        if run and record.load(run).get("status") == "running":
            with contextlib.suppress(OSError):  # of a full disk; it is shown as lost all the same
                record.close_lost(run, why or "its process is gone")

    def _ready(self) -> list[State]:
        """To run, and all that they wait for has run."""
        done = {state.name for state in self.batch.states if state.status == OK}
        left = [state for state in self.batch.states if state.status == TO_RUN]
        # All jobs of a grid wait for the same ones; with thousands each is looked at once.
        waits = {id(state.entry.after): state.entry.after for state in left}
        free = {key for key, after in waits.items() if done.issuperset(after)}
        return [state for state in left if id(state.entry.after) in free]

    def _waits_for(self, state: State) -> str:
        states = {other.name: other for other in self.batch.states}
        other = next(states[name] for name in state.entry.after if states[name].status != OK)
        return f"after {other.name}, which is {other.status.partition(':')[0]}"

    def _start(self) -> bool:
        ready = {state.job: state for state in self._ready()[: self.place.at_a_time]}
        try:
            for state in ready.values():
                self._write_job(state)
            started = self.place.start(list(ready)) if ready else {}
        except OSError as error:
            self._stop(f"nothing can be started: {error.strerror}")
            return False
        for job, handle in started.items():
            state = ready[job]
            state.status, state.handle, state.began = RUNNING, handle, time.monotonic()
        return bool(started)

    def _write_job(self, state: State) -> None:
        planned = state.entry.planned
        content = {
            "name": planned.name,
            "source": state.entry.source,
            "notebook": str(planned.notebook.absolute()),
            "parameters": planned.given,
            "root": str(self.batch.root),
            "timeout_s": state.job.timeout_s,
            "again": state.entry.repeats > 1,  # a repeat is no cache hit of another one
            "evidence": self.batch.evidence,
        }
        if state.written != content:
            state.job.folder.mkdir(parents=True, exist_ok=True)
            write_json(state.job.file, content)
            state.written = content

    def _write(self) -> None:
        try:
            self.batch.write(type(self.place).__name__, self._began)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self.say(f"no manifest: {error.strerror}; the jobs' own files hold what is needed")
            self._unwritten = True
