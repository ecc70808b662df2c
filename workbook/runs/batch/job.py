"""One job of a batch: what the plan says of it, its state, its files and its process.

`python -m workbook.runs.batch.job JOBFILE [SECONDS]` is that process, the child, wherever it runs.
The job's folder holds job.json (what is to be run) and queued.json (the place's data on it),
written by the driver, started.json (the process, the run's folder and how it ended), written by the
child, and log.txt. **The holder of the lock of a job that has not ended runs it**: a child inherits
the lock of whoever starts it, so a job that is started twice, by a driver that was killed or by a
queue that requeues, runs once. A run that was cut from outside (a signal, a full disk, a dead node)
is not an end: the next child begins it again.
"""

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbook.runs import identity, record, store
from workbook.runs.files import is_locked, locked, read_object, write_json
from workbook.runs.opening import Planned
from workbook.runs.run import CUT, run_notebook

CHILD = "workbook.runs.batch.job"  # run as `python -m CHILD <folder>/job.json`
FULL = os.strerror(errno.ENOSPC)
TO_RUN, RUNNING, OK, FAILED, STOPPED = "to run", "running", "ok", "failed", "stopped"
ENDED = OK, FAILED


@dataclass(eq=False)
class Job:
    """A notebook with its parameters, run once. A child knows no more of it than its folder.

    gpus: None is one if there are any, else none. status: to run, running, ok, failed (by itself:
    an error, its timeout), stopped (cut from outside, and run again by the next driver) or "not
    run: why".
    """

    name: str  # from the list's entry, the grid's values and the repeat; unique in the plan
    folder: Path | None = None
    group: str = ""  # the name of the list's entry
    planned: Planned | None = None  # has the name of its run on this machine
    repeat: int = 1
    repeats: int = 1
    after: tuple[str, ...] = ()  # groups
    timeout_s: float | None = None  # for the notebook; enforced by the child
    gpus: int | None = None
    checked: bool = True  # its values were checked together; else its child does it
    status: str = TO_RUN
    cached: bool = False  # it existed before this driver
    run: Path | None = None  # folder of its latest run
    reason: str = ""  # the run's stop reason
    message: str = ""
    seconds: float | None = None

    @property
    def key(self) -> str:
        """8 hex digits that distinguish it from others, also those with the same name."""
        spec = [self.planned.notebook.stem, self.planned.full, self.repeat]
        text = json.dumps(spec, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

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
        return read_object(self.folder / f"{name}.json")

    def look(self) -> str:
        """Read from its files and its run's record how it ended, and return that: "" (not begun),
        ok, failed or stopped, also while it runs, see `busy`."""
        told = self.says("started") | self.says("ended")  # the latter in older batches
        self.run = Path(told["run"]) if told.get("run") else None
        content = record.load(self.run) if self.run else {}
        found = told | content
        self.reason, self.message = found.get("stop_reason") or "", found.get("message") or ""
        self.seconds = found.get("seconds")
        if OK in (told.get("status"), content.get("status")):
            return OK
        cut = not self.reason or self.reason in (*CUT, "lost") or FULL in self.message
        return (STOPPED if cut else FAILED) if told else ""

    def write(self, **options: Any) -> None:
        """Write what its child is to run, unless that is there; options of `run_notebook`."""
        if self.says("job"):
            return
        own = {
            "timeout_s": self.timeout_s,
            "again": self.repeats > 1,  # a repeat is no cache hit of another one
            "checked": self.checked,
        }
        content = {
            "name": self.planned.name,
            "source": self.planned.source,
            "notebook": str(self.planned.notebook.absolute()),
            "parameters": self.planned.given,
            "options": own | options,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "job.json", content)

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

    def start_child(self, variables: Mapping[str, str], *more: str) -> subprocess.Popen | None:
        """Start its child with its lock; None if another child has that. The child gets its own
        session, so that only the driver passes on a Ctrl-C."""
        with locked(self.folder / "lock") as lock, self.log.open("ab") as out:
            if lock is None:
                return None
            return subprocess.Popen(
                [sys.executable, "-m", CHILD, str(self.folder / "job.json"), *more],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )


def main(file: str | Path, *most_s: str) -> int:
    """Run the job unless an earlier child has ended it. Exit code 0: it ran to its end.

    most_s: seconds that the place allows; the job's own timeout may be shorter.
    """
    job = Job("", Path(file).resolve().parent)
    asked = job.says("job")  # nothing, if it was taken back while this child was in a queue
    if asked and job.look() not in ENDED:
        job.close("its process or its node died, and its job was started again")
        limits = [float(limit) for limit in (asked["options"]["timeout_s"], *most_s) if limit]
        asked["options"]["timeout_s"] = min(limits, default=None)
        _run(job, asked)
    return 0 if job.look() == OK else 1


def _run(job: Job, asked: dict[str, Any]) -> None:
    me = os.getpid()
    started = {
        "pid": me,
        "pid_started": record.process_start(me),
        "slurm": os.environ.get("NSA_JOB"),
    }

    def tell(**more: str) -> None:
        write_json(job.folder / "started.json", started | more)

    tell()
    if identity.source(asked["notebook"]) != asked["source"]:
        message = "its notebook or the package changed since the batch was planned"
        return tell(status=FAILED, stop_reason="changed", message=message)
    # papermill's jsonschema would compile a grammar of web addresses: a second, for nothing here.
    sys.modules.setdefault("rfc3987_syntax", None)
    try:
        result = run_notebook(
            asked["notebook"],
            asked["parameters"],
            **asked["options"],
            pages=False,  # left to the driver, so that not each run has to load what draws them
            progress=False,
            began=lambda run: tell(run=str(run)),
            say=lambda text: print(text, flush=True),
        )
    except ValueError as error:
        return tell(status=FAILED, stop_reason="error", message=str(error))
    ended = {"status": result.status, "stop_reason": result.stop_reason, "message": result.message}
    return tell(run=str(result.folder.resolve()), **ended)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
