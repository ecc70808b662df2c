"""A job, the files that it leaves, and the parts common to all places where jobs run.

A job's folder holds job.json (what is to be run, written by the driver), queued.json (the place's
data on it), started.json (the run's folder and the process, written by the child), ended.json (how
it ended, by the child) and log.txt. **The holder of the lock of a job that has not ended runs it**,
so a child that is started twice, by a driver that was killed or by a queue that requeues, runs it
once. A run that was cut from outside (a signal, a full disk, a dead node) is not an end: the next
child begins it again.
"""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbook.runs import record, store
from workbook.runs.batch.plan import Entry
from workbook.runs.files import read_json
from workbook.runs.run import CUT

CHILD = "workbook.runs.batch.child"  # run as `python -m CHILD <folder>/job.json`
FULL = os.strerror(errno.ENOSPC)
BUSY = 3  # exit code of a child whose job already has a child
TO_RUN, RUNNING, OK, FAILED, STOPPED = "to run", "running", "ok", "failed", "stopped"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job, from its files and its run's record.

    status: "" (not begun), ok, failed (by itself: an error, its timeout) or stopped (cut from
    outside, or still running, see `busy`). run: the folder of its latest run, or None.
    """

    status: str
    run: Path | None = None
    reason: str = ""  # the run's stop reason
    message: str = ""
    seconds: float | None = None
    verdict: str = ""

    @property
    def ended(self) -> bool:
        return self.status in (OK, FAILED)


NOTHING = Outcome("")


@dataclass(eq=False)
class Job:
    """One run of a plan, and its state. Its name is unique in the plan.

    gpus: None is one if there are any, else none. status: to run, running, ok, failed, stopped (cut
    from outside, and run again by the next driver) or "not run: why".
    """

    name: str
    folder: Path
    timeout_s: float | None = None  # for the notebook; enforced by the child
    gpus: int | None = None
    entry: Entry | None = None
    status: str = TO_RUN
    outcome: Outcome = NOTHING
    cached: bool = False  # it existed before this driver
    began: float | None = None  # time.monotonic
    written: bool = False  # job.json, by this driver

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    @property
    def log(self) -> Path:
        """File of the child's output."""
        return self.folder / "log.txt"

    @property
    def good(self) -> bool:
        return self.status == OK and self.outcome.verdict != "FAIL"

    def says(self, name: str) -> dict[str, Any]:
        """Content of one of its files, `queued` or `started`; {} if it does not exist."""
        found = read_json(self.folder / f"{name}.json")
        return found if isinstance(found, dict) else {}


def outcome(folder: Path) -> Outcome:
    """Outcome of the job in this folder."""
    ended = read_json(folder / "ended.json")
    found = ended or read_json(folder / "started.json")
    if not isinstance(found, dict):
        return NOTHING
    run = Path(found["run"]) if found.get("run") else None
    content = record.load(run) if run else {}
    reason, message, seconds = (
        content.get(key) or found.get(key) for key in ("stop_reason", "message", "seconds")
    )
    status = (ended or {}).get("status") or FAILED
    if not ended and content.get("status") == OK:  # its child was killed just after its end
        status = OK
    elif not ended and (not reason or reason in (*CUT, "lost") or FULL in (message or "")):
        status = STOPPED
    return Outcome(status, run, reason or "", message or "", seconds, verdict_of(run))


def verdict_of(run: Path | None) -> str:
    return store.overall(read_json(run / "verdicts.json", [])) if run else ""


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Lock a file; True if this process has the lock, which is released however it ends."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
    finally:
        os.close(handle)


def busy(job: Job) -> bool:
    """True if a child runs the job, on this machine or another one that shares its files' locks."""
    with locked(job.folder / "lock") as free:
        return not free


def is_coming(job: Job) -> bool:
    """True if a child was started, and is in a queue or has not reached its lock yet."""
    queued = job.says("queued")
    return "job" in queued or is_alive(queued)


def is_alive(known: Mapping[str, Any]) -> bool:
    began = known.get("pid_started")
    return bool(began) and record.process_start(known["pid"]) == began


def start_child(file: Path, log: Path, variables: Mapping[str, str], *more: str):
    """Start a job's child in its own session, so that only the driver passes on a Ctrl-C."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", CHILD, str(file), *more],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
