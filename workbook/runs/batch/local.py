"""Jobs on this machine: each in its own process, with its own GPUs."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from whyhung.process import family
from whyhung.process.gpus import all_visible, only
from workbook.runs import record
from workbook.runs.batch.place import BUSY, Job, busy, is_alive, start_child
from workbook.runs.files import write_json

GRACE_S = 20.0  # between the request to end and SIGKILL


class Local:
    """At most `at_once` parallel jobs; the default is the number of GPUs, or one without any.

    A child survives a driver that is killed; the next driver finds it by the lock of its job.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.gpus = all_visible().names
        self.at_a_time = at_once or len(self.gpus) or 1
        self._children: dict[Job, subprocess.Popen] = {}
        self._kill_at: dict[Job, float] = {}

    def check(self, jobs: Sequence[Job]) -> None:
        most = len(self.gpus)
        for job in jobs:
            if (job.gpus or 0) > most:
                raise ValueError(
                    f"{job.name} wants {job.gpus} GPUs, and this machine has {most or 'none'}; "
                    "write fewer in the plan, or choose another machine"
                )

    def free(self, running: Sequence[Job]) -> list[str]:
        lent = {gpu for job in running for gpu in _now(job)["gpus"]}
        return [gpu for gpu in self.gpus if gpu not in lent]

    def start(self, ready: Sequence[Job], running: Sequence[Job]) -> list[Job]:
        started, free = [], self.free(running)
        for job in ready[: max(self.at_a_time - len(running), 0)]:
            wants = job.gpus if job.gpus is not None else min(len(self.gpus), 1)
            if wants > len(free):
                break
            self._start(job, free[:wants])
            free = free[wants:]
            started.append(job)
        return started

    def _start(self, job: Job, gpus: list[str]) -> None:
        cookie = family.new_cookie()
        # A job without assigned GPUs sees none, since another job may have them.
        visible = only(",".join(gpus)) if self.gpus else {}
        child = start_child(job.file, job.log, family.environment(os.environ, cookie) | visible)
        self._children[job] = child
        began = record.process_start(child.pid)
        known = {"pid": child.pid, "pid_started": began, "cookie": cookie, "gpus": gpus}
        with contextlib.suppress(OSError):  # on a full disk; the child reports the same
            write_json(job.folder / "queued.json", known)

    def poll(self, running: Sequence[Job]) -> dict[Job, str]:
        gone = {}
        for job in running:
            child = self._children.get(job)
            code = child.poll() if child else None
            if child and code is not None:
                del self._children[job]
                is_there = code == BUSY and busy(job)  # a child of an earlier driver runs it
            else:  # without a child of ours, one may not have reached its lock yet
                is_there = bool(child) or busy(job) or is_alive(_now(job))
            if is_there:
                if time.monotonic() > self._kill_at.get(job, float("inf")):
                    _signal(job, signal.SIGKILL)
                continue
            gone[job] = "" if child else "its process is gone"
            if code is not None and code < 0:
                gone[job] = f"its process was ended by {family.signal_name(-code)}"
            # Processes that a run left behind would keep the GPU.
            if cookie := _now(job).get("cookie"):
                family.end_family(cookie)
            self._kill_at.pop(job, None)
        return gone

    def cancel(self, running: Sequence[Job]) -> None:
        for job in running:
            if job not in self._kill_at:
                self._kill_at[job] = time.monotonic() + GRACE_S
                _signal(job, signal.SIGTERM)


def _now(job: Job) -> dict[str, Any]:
    """State of the job's child; fields from the child that holds the lock take precedence."""
    found = {"gpus": None} | job.says("queued") | job.says("started")
    gpus = found["gpus"] or []
    return found | {"gpus": gpus.split(",") if isinstance(gpus, str) else gpus}


def _signal(job: Job, number: int) -> None:
    """Send a signal to the job's process, unless its pid belongs to another process by now."""
    now = _now(job)
    if is_alive(now):
        with contextlib.suppress(ProcessLookupError):
            os.kill(now["pid"], number)
