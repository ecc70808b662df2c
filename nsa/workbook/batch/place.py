"""What the driver hands to a place, what a place promises, and the files that a job leaves.

A job's folder holds job.json (what is to be run, written by the driver), started.json (the run's
folder and the process, written by the child), ended.json (how it ended, by the child) and log.txt.
**Who holds the lock of a folder without ended.json runs the job**, so a child that is started twice,
by a driver that was killed or by a queue that requeues, runs it once. A run that was cut from
outside (a signal, a full disk, a dead node) has no ended.json: the next child begins it again.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nsa.workbook import record, store
from nsa.workbook.files import read_json

Handle = dict[str, Any]  # JSON; a place's own, kept in the manifest for a driver that comes later
CHILD = "nsa.workbook.batch.child"  # run as `python -m CHILD <folder>/job.json`
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

    def start(self, ready: Sequence[Job]) -> dict[Job, Handle]:
        """Start those of `ready`, in order, that there is room for; a queue takes all at once.

        ValueError for a job that can never run here: too many GPUs, no such partition.
        """

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

    status: "" (nothing yet), running, ok, failed (by itself: an error, its timeout) or stopped (cut
    from outside). run: the folder of its latest run, or None.
    """

    status: str
    run: Path | None = None
    reason: str = ""  # the run's stop reason
    message: str = ""
    seconds: float | None = None
    verdict: str = ""


def outcome(job: Job) -> Outcome:
    """Read the job's files; that no child is at it any more is the place's to say."""
    ended = read_json(job.folder / "ended.json")
    found = ended or read_json(job.folder / "started.json")
    if not isinstance(found, dict):
        return Outcome("")
    run = Path(found["run"]) if found.get("run") else None
    content = record.load(run) if run else {}
    said = [content.get(key) or found.get(key) for key in ("stop_reason", "message", "seconds")]
    verdict = store.overall(read_json(run / "verdicts.json", [])) if run else ""
    if ended:
        return Outcome(ended["status"], run, said[0] or "error", said[1] or "", said[2], verdict)
    status = "running" if busy(job) else "stopped"
    return Outcome(status, run, said[0] or "", said[1] or "", said[2], verdict)


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
