"""What the driver hands to a place, what a place promises, and the files that a job leaves.

A job's folder holds job.json (what is to be run, written by the driver), started.json (the run's
folder and the process, written by the child), ended.json (how it ended, by the child) and log.txt.
**Who holds the lock of a job that has not ended runs it**, so a child that is started twice, by a
driver that was killed or by a queue that requeues, runs it once. A run that was cut from outside (a
signal, a full disk, a dead node) is not an end: the next child begins it again.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nsa.workbook import record, store
from nsa.workbook.files import read_json
from nsa.workbook.run import CUT

Handle = dict[str, Any]  # JSON; a place's own, kept in the manifest for a driver that comes later
CHILD = "nsa.workbook.batch.child"  # run as `python -m CHILD <folder>/job.json`
FULL = os.strerror(errno.ENOSPC)
BUSY = 3  # exit code of a child that found another one at its job


@dataclass(frozen=True)
class Job:
    """One run of a plan. Its name is unique in the plan; its folder is there, with job.json.

    gpus: None is one where there are any, and none elsewhere.
    """

    name: str
    folder: Path
    timeout_s: float | None = None  # for the notebook; the child keeps it
    gpus: int | None = None

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    @property
    def log(self) -> Path:
        """Where a place puts what the child prints."""
        return self.folder / "log.txt"


class Place(Protocol):
    """Where jobs run. No method waits for a job."""

    at_a_time: int  # so many jobs are given to `start`, at most

    def check(self, jobs: Sequence[Job]) -> None:
        """ValueError, before anything is written, for a job that can never run here."""

    def start(self, ready: Sequence[Job]) -> dict[Job, Handle]:
        """Start those of `ready`, in order, that there is room for; a queue takes all at once."""

    def adopt(self, started: Mapping[Job, Handle]) -> None:
        """Jobs that an earlier driver started here and that may run still."""

    def poll(self, started: Mapping[Job, Handle]) -> dict[Job, str]:
        """Those of which no child runs or waits any more, and what the place knows of why, in words
        ("the node died"); "" where the job's own files say all."""

    def cancel(self, started: Mapping[Job, Handle]) -> None:
        """Ask them to end. Their children get a SIGTERM and 20 s to close their records; `poll`
        tells when they are gone. Those that are gone are no error."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job, by its files and its run's record.

    status: "" (not begun), ok, failed (by itself: an error, its timeout) or stopped (cut from
    outside, or still running: `busy` tells). run: the folder of its latest run, or None.
    """

    status: str
    run: Path | None = None
    reason: str = ""  # the run's stop reason
    message: str = ""
    seconds: float | None = None
    verdict: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ("ok", "failed")


def outcome(folder: Path) -> Outcome:
    """Of the job in this folder."""
    ended = read_json(folder / "ended.json")
    found = ended or read_json(folder / "started.json")
    if not isinstance(found, dict):
        return Outcome("")
    run = Path(found["run"]) if found.get("run") else None
    content = record.load(run) if run else {}
    reason, message, seconds = (
        content.get(key) or found.get(key) for key in ("stop_reason", "message", "seconds")
    )
    verdict = store.overall(read_json(run / "verdicts.json", [])) if run else ""
    status = (ended or {}).get("status") or "failed"
    if not ended and content.get("status") == "ok":  # its child was killed just behind its end
        status = "ok"
    elif not ended and (not reason or reason in (*CUT, "lost") or FULL in (message or "")):
        status = "stopped"
    return Outcome(status, run, reason or "", message or "", seconds, verdict)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Whether this process has the lock, which ends with it, however it ends."""
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
    """A child is at it, on this machine or another one that shares its files' locks."""
    with locked(job.folder / "lock") as free:
        return not free
