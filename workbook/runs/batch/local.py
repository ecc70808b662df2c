"""Jobs on this machine: each in its own process, with its own GPUs."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from whyhung.process import family
from whyhung.process.gpus import all_visible, only
from workbook.runs import record
from workbook.runs.batch.job import Job
from workbook.runs.files import write_json

GRACE_S = 20.0  # between the request to end and SIGKILL


class Local:
    """At most `at_once` parallel jobs; the default is the number of GPUs, or one without any.

    A child survives a driver that is killed; the next driver finds it by the lock of its job.
    """

    every_s = 0.2

    def __init__(self, at_once: int | None = None) -> None:
        self.gpus = all_visible().names
        self.at_a_time = at_once or len(self.gpus) or 1
        self._children: dict[Job, subprocess.Popen | None] = {}  # None: another one was faster
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
        lent = {gpu for job in running for gpu in job.says("queued").get("gpus", ())}
        return [gpu for gpu in self.gpus if gpu not in lent]

    def start(self, ready: Sequence[Job], running: Sequence[Job]) -> Iterator[Job]:
        free = self.free(running)
        for job in ready:
            wants = job.gpus if job.gpus is not None else min(len(self.gpus), 1)
            if wants > len(free):
                break
            if not job.busy:  # else a child of an earlier driver has it, and its GPUs
                lent, free, cookie = free[:wants], free[wants:], family.new_cookie()
                # A job without assigned GPUs sees none, since another job may have them.
                visible = only(",".join(lent)) if self.gpus else {}
                write_json(job.folder / "queued.json", {"cookie": cookie, "gpus": lent})
                variables = family.environment(os.environ, cookie) | visible
                self._children[job] = job.start_child(variables)
            yield job

    def poll(self, running: Sequence[Job]) -> dict[Job, str]:
        gone = {}
        for job in running:
            child = self._children.get(job)
            if job.busy if child is None else child.poll() is None:
                if time.monotonic() > self._kill_at.get(job, float("inf")):
                    self._signal(job, signal.SIGKILL)
                continue
            gone[job] = "" if child else "its process is gone"
            if child and child.returncode < 0:
                gone[job] = f"its process was ended by {family.signal_name(-child.returncode)}"
            # Processes that a run left behind would keep the GPU.
            if cookie := job.says("queued").get("cookie"):
                family.end_family(cookie)
            self._children.pop(job, None)
            self._kill_at.pop(job, None)
        return gone

    def cancel(self, running: Sequence[Job]) -> None:
        for job in running:
            self._kill_at[job] = time.monotonic() + GRACE_S
            self._signal(job, signal.SIGTERM)

    def _signal(self, job: Job, number: int) -> None:
        """Send a signal to our child, or to that of an earlier driver if it is on this machine."""
        known = job.says("started")
        if child := self._children.get(job):
            child.send_signal(number)
        elif known and record.process_start(known["pid"]) == known["pid_started"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(known["pid"], number)
