"""A batch on disk: a plan with its folder, and the state of each of its jobs.

runs/batches/<plan>/   manifest.json        which plan, from which commit, and its driver
                       jobs/<name>-<key>/   a job's files
                       cancel               asks the driver to end; it holds <plan>.lock

A job's folder holds job.json (what is to be run, written by the driver), queued.json (the place's
data on it), started.json (the run's folder and the process, written by the child), ended.json (how
it ended, by the child) and log.txt. **The holder of the lock of a job that has not ended runs it**:
a child inherits the lock of whoever starts it, so a job that is started twice, by a driver that was
killed or by a queue that requeues, runs once. A run that was cut from outside (a signal, a full
disk, a dead node) is not an end: the next child begins it again.
"""

import contextlib
import errno
import fcntl
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from workbook.runs import environment, record, store
from workbook.runs.batch.plan import Entry, Plan
from workbook.runs.files import read_json, write_json
from workbook.runs.run import CUT, runs_of

CHILD = "workbook.runs.batch.child"  # run as `python -m CHILD <folder>/job.json`
FULL = os.strerror(errno.ENOSPC)
TO_RUN, RUNNING, OK, FAILED, STOPPED = "to run", "running", "ok", "failed", "stopped"
ENDED = OK, FAILED


@dataclass(eq=False)
class Job:
    """One run of a plan, and its state. Its name is unique in the plan.

    gpus: None is one if there are any, else none. status: to run, running, ok, failed (by itself:
    an error, its timeout), stopped (cut from outside, and run again by the next driver) or "not
    run: why".
    """

    name: str
    folder: Path
    timeout_s: float | None = None  # for the notebook; enforced by the child
    gpus: int | None = None
    entry: Entry | None = None
    status: str = TO_RUN
    cached: bool = False  # it existed before this driver
    run: Path | None = None  # folder of its latest run
    reason: str = ""  # the run's stop reason
    message: str = ""
    seconds: float | None = None

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    @property
    def log(self) -> Path:
        """File of the child's output."""
        return self.folder / "log.txt"

    @property
    def verdict(self) -> str:
        return store.overall(store.Run(self.run).verdicts()) if self.run else ""

    @property
    def busy(self) -> bool:
        """True if a child runs it."""
        return is_locked(self.folder / "lock")

    def says(self, name: str) -> dict[str, Any]:
        """Content of one of its files, such as `queued`; {} if it does not exist."""
        return mapping(self.folder / f"{name}.json")

    def look(self) -> str:
        """Read from its files and its run's record how it ended, and return that: "" (not begun),
        ok, failed or stopped, also while it runs, see `busy`."""
        ended = self.says("ended")
        found = ended or self.says("started")
        self.run = Path(found["run"]) if found.get("run") else None
        content = record.load(self.run) if self.run else {}
        told = found | content
        self.reason, self.message = told.get("stop_reason") or "", told.get("message") or ""
        self.seconds = told.get("seconds")
        if ended or not found:
            return ended.get("status", "")
        if content.get("status") == OK:  # its child was killed just after its end
            return OK
        return STOPPED if is_cut(self.reason, self.message) else FAILED

    def close(self, why: str) -> None:
        """Write in the record of its latest run that the child is gone, if that says it runs."""
        self.look()
        if self.run and record.load(self.run).get("status") == "running":
            with contextlib.suppress(OSError):  # on a full disk; the run is still shown as lost
                record.close_lost(self.run, why or "its process is gone")

    def reset(self) -> None:
        """Reset it to run again; files of its earlier run stay in that run's folder."""
        for name in ("job", "ended", "started", "queued"):
            (self.folder / f"{name}.json").unlink(missing_ok=True)
        self.look()
        self.status, self.cached = TO_RUN, False


def is_cut(reason: str, message: str) -> bool:
    """True for a run that was ended from outside, and is to be run again."""
    return not reason or reason in (*CUT, "lost") or FULL in message


def mapping(file: Path) -> dict[str, Any]:
    found = read_json(file)
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def locked(file: Path) -> Iterator[int | None]:
    """Lock a file, and yield its descriptor; None if another process has the lock. The lock is
    released when this process and those that inherit the descriptor have closed it or ended."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = handle
    except BlockingIOError:
        mine = None
    try:
        yield mine
    finally:
        os.close(handle)


def is_locked(file: Path) -> bool:
    """True if a process, on this machine or another one that shares its files' locks, has it."""
    if not file.exists():
        return False
    with locked(file) as free:
        return not free


def start_child(folder: Path, variables: Mapping[str, str], *more: str) -> subprocess.Popen | None:
    """Start a job's child with the lock of the job; None if another child has it. It gets its own
    session, so that only the driver passes on a Ctrl-C."""
    with locked(folder / "lock") as lock, (folder / "log.txt").open("ab") as out:
        if lock is None:
            return None
        return subprocess.Popen(
            [sys.executable, "-m", CHILD, str(folder / "job.json"), *more],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock],
        )


class Batch:
    """A plan with its folder below `root`, and its jobs in their current state."""

    def __init__(self, plan: Plan, root: str | Path = "runs", evidence: bool = False) -> None:
        self.plan, self.root, self.evidence = plan, Path(root).absolute(), evidence
        self.folder = self.root / "batches" / plan.name
        self.lock = self.folder.with_name(f"{plan.name}.lock")
        self.notes: list[str] = []
        self.jobs = [self._job(entry) for entry in plan.entries]
        self._cached_runs()

    @property
    def manifest(self) -> dict[str, Any]:
        return mapping(self.folder / "manifest.json")

    def _job(self, entry: Entry) -> Job:
        slug = re.sub(r"[^A-Za-z0-9.=,+-]+", "-", entry.name)[:80].strip("-")
        folder = self.folder / "jobs" / f"{slug}-{entry.key}"
        job = Job(entry.name, folder, entry.timeout_s, entry.gpus, entry)
        if not folder.is_dir():
            return job
        found = job.look()
        if job.busy or (found not in ENDED and "job" in job.says("queued")):
            job.status = RUNNING
        elif found == OK and not self._kept(job.run, self.evidence):
            damaged = not self._kept(job.run, False)
            what = "is damaged" if damaged else "was not made with --evidence"
            self.notes.append(f"{entry.name}: {job.run} {what}; it is run again")
            job.run = job.seconds = None
        elif found:
            job.status, job.cached = found, True
        return job

    def _kept(self, run: Path | None, evidence: bool) -> bool:
        """True for a finished run that is still readable, and is evidence if that is required."""
        content = record.load(run) if run else {}
        return content.get("status") == OK and (content.get("evidence", False) or not evidence)

    def _cached_runs(self) -> None:
        """Take finished runs of the same id that no job of this plan has used."""
        taken = {job.run for job in self.jobs}
        left: dict[str, Iterator[Path]] = {}
        for job in self.jobs:
            name = job.entry.planned.name
            if job.status != TO_RUN:
                continue
            if name not in left:
                runs = [run.resolve() for run in runs_of(self.root, name, self.evidence)]
                left[name] = iter([r for r in runs if r not in taken and self._kept(r, False)])
            if run := next(left[name], None):
                job.run, job.seconds = run, record.load(run).get("seconds")
                job.status, job.cached = OK, True

    def changed(self) -> list[str]:
        """Changes since jobs that have run were planned, in words, one a job."""
        found = []
        for job in self.jobs:
            before, planned = job.says("job"), job.entry.planned
            begun = job.status == OK or (job.status == RUNNING and job.says("started"))
            if begun and before and before.get("source") != planned.source:
                found.append(f"{job.name}: {planned.notebook.name} or nsa/")
            elif begun and before and before.get("name") != planned.name:
                found.append(f"{job.name}: versions of Python or torch, or the GPUs")
        return found

    def check(self) -> None:
        """Raise ValueError if this batch cannot continue: its folder is another plan's, its source
        changed since it began, or it would be no evidence."""
        other = Path(self.manifest.get("plan") or self.plan.path)
        if other.exists() and not other.samefile(self.plan.path):
            raise ValueError(
                f"{self.folder} is the batch of {other}; give {self.plan.path} another name"
            )
        if changed := self.changed():
            commit = self.manifest.get("commit") or "unknown"
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ValueError(
                f"{self.plan.path} was begun with other source (commit {commit}), and runs of "
                f"both are not mixed. Since then changed: {'; '.join(changed[:3])}{more}. Go back "
                "to that source, or start it over with --anew; runs that are there stay"
            )
        if self.evidence:
            for notebook in {job.entry.planned.notebook for job in self.jobs}:
                environment.check_evidence(notebook)

    def put_aside(self) -> None:
        """Rename the folder, so that the plan starts over. ValueError if it runs."""
        if not self.folder.is_dir():
            return
        with locked(self.lock) as mine:
            running = [job.name for job in self.jobs if job.status == RUNNING]
            if not mine or running:
                what = f"{running[0]} of {self.plan.path} runs" if running else self.driver()
                raise ValueError(f"{what}; end it with --cancel before --anew")
            stamp = datetime.now().strftime("%Y%m%dT%H%M%S")
            self.folder.rename(self.folder.with_name(f"{self.plan.name}-{stamp}"))

    def driven(self) -> bool:
        """True if a driver is running."""
        return is_locked(self.lock)

    def driver(self) -> str:
        """Holder of the lock, in words."""
        me = self.manifest.get("driver") or {}
        here = me.get("machine") == record.machine()
        who = f"process {me.get('pid')}" if here else "another machine"
        return f"{self.plan.path} is being run already, by {who} since {me.get('since')}"

    def count(self) -> Counter:
        """Number of jobs by status."""
        statuses = (job.status for job in self.jobs)
        return Counter("not run" if one.startswith("not") else one for one in statuses)

    def write(self) -> None:
        """Write the manifest of a driver that starts. OSError if the disk is full."""
        now = environment.utc_now()
        content = {
            "plan": str(self.plan.path.absolute()),
            "commit": environment.provenance(self.jobs[0].entry.planned.environment)["commit"],
            "driver": {"pid": os.getpid(), "machine": record.machine(), "since": now},
        }
        write_json(self.folder / "manifest.json", content)
