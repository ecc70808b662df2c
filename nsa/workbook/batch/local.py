"""Jobs on this machine: each a process of its own, with GPUs of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from nsa.workbook import record
from nsa.workbook.batch.place import BUSY, CHILD, Handle, Job, busy
from nsa.workbook.files import read_json
from whyhung.process import family
from whyhung.process.gpus import all_visible, only

GRACE_S = 20.0  # between the request to end and SIGKILL


class Local:
    """`at_once` jobs beside each other, by default as many as there are GPUs, one where none is.

    A child outlives a driver that is killed, and the next driver adopts it: it knows it by the lock
    of its job.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.free = list(all_visible().names)
        self.has_gpus = bool(self.free)
        self.at_a_time = at_once or len(self.free) or 1
        self._children: dict[Job, subprocess.Popen] = {}
        self._lent: dict[Job, list[str]] = {}
        self._kill_at: dict[Job, float] = {}

    def check(self, jobs: Sequence[Job]) -> None:
        most = len(self.free) + sum(map(len, self._lent.values()))
        for job in jobs:
            if (job.gpus or 0) > most:
                raise ValueError(
                    f"{job.name} wants {job.gpus} GPUs, and this machine lends {most or 'none'}; "
                    "write fewer in the plan, or choose another machine"
                )

    def start(self, ready: Sequence[Job]) -> dict[Job, Handle]:
        started: dict[Job, Handle] = {}
        for job in ready:
            wants = job.gpus if job.gpus is not None else int(self.has_gpus)
            if len(self._lent) >= self.at_a_time or wants > len(self.free):
                break
            started[job] = self._start(job, [self.free.pop(0) for _ in range(wants)])
        return started

    def _start(self, job: Job, gpus: list[str]) -> Handle:
        cookie = family.new_cookie()
        # Of none that it is given it sees none: another job may have them.
        visible = only(",".join(gpus)) if self.has_gpus else {}
        variables = family.environment(os.environ, cookie) | visible
        with job.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(job.file)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is the driver's to hand on
            )
        self._children[job], self._lent[job] = child, gpus
        began = record.process_start(child.pid)
        return {"pid": child.pid, "pid_started": began, "cookie": cookie, "gpus": gpus}

    def adopt(self, started: Mapping[Job, Handle]) -> None:
        for job, handle in started.items():
            gpus = _now(job, handle).get("gpus") or []
            gpus = gpus.split(",") if isinstance(gpus, str) else gpus
            self._lent[job] = [gpu for gpu in gpus if gpu in self.free]
            self.free = [gpu for gpu in self.free if gpu not in gpus]

    def poll(self, started: Mapping[Job, Handle]) -> dict[Job, str]:
        gone = {}
        for job, handle in started.items():
            child = self._children.get(job)
            if child is not None:
                code = child.poll()
                if code is None:
                    self._kill_late(job, handle)
                    continue
                self._children.pop(job)
                why = f"its process was ended by {family.signal_name(-code)}" if code < 0 else ""
                if code == BUSY and busy(job):  # an earlier driver's child is at it
                    self._return_gpus(job)
                    self.adopt({job: handle})
                    continue
            elif busy(job) or _alive(handle):  # alive, and on the way to its lock
                self._kill_late(job, handle)
                continue
            else:
                why = "its process is gone"
            # What a run started and left behind would keep the GPU.
            if cookie := _now(job, handle).get("cookie"):
                family.end_family(cookie)
            self._return_gpus(job)
            self._kill_at.pop(job, None)
            gone[job] = why
        return gone

    def cancel(self, started: Mapping[Job, Handle]) -> None:
        for job, handle in started.items():
            if job not in self._kill_at:
                self._kill_at[job] = time.monotonic() + GRACE_S
                self._signal(job, handle, signal.SIGTERM)

    def _kill_late(self, job: Job, handle: Handle) -> None:
        if time.monotonic() > self._kill_at.get(job, float("inf")):
            self._signal(job, handle, signal.SIGKILL)

    def _signal(self, job: Job, handle: Handle, number: int) -> None:
        """To the process that is at the job, if its number is not another one's by now."""
        now = _now(job, handle)
        if _alive(now):
            with contextlib.suppress(ProcessLookupError):
                os.kill(now["pid"], number)

    def _return_gpus(self, job: Job) -> None:
        self.free += self._lent.pop(job, [])


def _now(job: Job, handle: Handle) -> Handle:
    """Of the child that holds the job: that of an earlier driver, which was not told its handle."""
    return handle | (read_json(job.folder / "started.json") or {})


def _alive(handle: Handle) -> bool:
    began = handle.get("pid_started")
    return bool(began) and record.process_start(handle["pid"]) == began
