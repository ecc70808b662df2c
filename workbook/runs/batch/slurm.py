"""Jobs on a Slurm cluster: submitit sends each to the queue; the job's own files, `squeue` and the
deadline show when it has ended.

Nothing here needs sacct, without which submitit waits forever for a job that left no result.
"""

import contextlib
import errno
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whyhung.cli import seconds
from workbook.runs import record
from workbook.runs.batch.place import Job, busy, outcome, start_child
from workbook.runs.files import write_json

SIGNAL_S = 60  # how long before its end Slurm signals a job; it may do so up to a minute earlier
MARGIN_S = 180  # part of a job's time for its start and for an orderly end
ENDED = {  # states of a job that no longer runs, in words; "" if its own files have the reason
    "BOOT_FAIL": "its node did not start",
    "CANCELLED": "its job on Slurm was cancelled",
    "COMPLETED": "",
    "DEADLINE": "its deadline on Slurm was over",
    "FAILED": "",
    "NODE_FAIL": "its node died",
    "OUT_OF_MEMORY": "it took more memory than its job on Slurm has",
    "PREEMPTED": "a job that goes before it took its place",
    "REVOKED": "its job on Slurm was revoked",
    "TIMEOUT": "its time on Slurm was over",
    "": "Slurm does not know its job any more",
}
NEVER = {  # reasons for which a job would wait forever
    "AccountNotAllowed",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSNotAllowed",
    "launch_failed_requeued_held",
}
UP = ("idle", "mix", "alloc", "comp", "resv", "plan")
OPTIONS = ("partition", "account", "qos", "constraint")  # passed on unchanged


class Slurm:
    """Place for the plan's `slurm:`, `settings`. ValueError without Slurm or submitit here.

    A job that is preempted or loses its node is queued again by Slurm, and its child starts over.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, every_s: float = 2.0) -> None:
        self.settings = dict(settings or {})
        self.at_a_time = self.settings.get("at_once", 100)
        time_limit = self.settings.get("time")
        self.time_s = None if time_limit is None else seconds(time_limit)
        if self.time_s is not None and self.time_s <= MARGIN_S:
            raise ValueError(
                f"slurm.time is {time_limit}, and {MARGIN_S} s of it are kept for the start and "
                "an end in order; write 5m or more"
            )
        if shutil.which("sbatch") is None:
            raise ValueError(
                "this machine has no Slurm (there is no `sbatch`); start the batch on a cluster's "
                "login node, or leave out `--on slurm` to run it here"
            )
        import submitit  # noqa: F401  where it is missing, nothing is to be written

        self.every_s, self._next = every_s, 0.0
        self._ended: set[Job] = set()  # at the last poll
        self._strays_are_gone = False
        self._node_gpus: int | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        shapes = {self._shape(job): job for job in reversed(jobs)}
        for shape, job in shapes.items():
            options = self._options(*shape).items()
            flags = (f"#SBATCH --{key.replace('_', '-')}={value}" for key, value in options)
            lines = ["#!/bin/sh", *flags, "true\n"]
            asked = _slurm("sbatch", "--test-only", input="\n".join(lines))
            if asked is None:
                raise ValueError("Slurm does not answer; `sinfo` shows if it is up")
            if asked.returncode and self._nodes_up():
                gpus, minutes = shape
                raise ValueError(
                    f"{job.name} wants {minutes} minutes and {gpus} GPUs, and Slurm would not take "
                    f"it: {_said(asked)}; it has {self._partitions()}"
                )

    def start(self, ready: Sequence[Job], running: Sequence[Job]) -> list[Job]:
        groups: dict[tuple[int, int], list[Job]] = defaultdict(list)
        for job in ready[: max(self.at_a_time - len(running), 0)]:
            groups[self._shape(job)].append(job)
        started: list[Job] = []
        for shape, jobs in groups.items():
            self._end_strays(jobs[0], running)
            try:
                self._submit(jobs, *shape)
            except Exception as error:  # submitit's exception, with the last line of sbatch
                said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                if started:  # the started jobs were sent, and the others are tried again
                    break
                raise OSError(errno.EAGAIN, f"Slurm took no job: {said}") from error
            started += jobs
        return started

    def poll(self, running: Sequence[Job]) -> dict[Job, str]:
        if time.monotonic() < self._next:
            return {}
        states = _states(map(_id, running))
        # squeue tries for 20 s to reach a controller that is down
        self._next = time.monotonic() + self.every_s * (10 if states is None else 1)
        found = {job: self._gone(job, states) for job in running}
        gone = {job: why for job, why in found.items() if why is not None}
        self._ended -= gone.keys()
        return gone

    def cancel(self, running: Sequence[Job]) -> None:
        _cancel(map(_id, running))
        self._next = 0.0

    def _shape(self, job: Job) -> tuple[int, int]:
        """GPUs and minutes of the job in the queue. ValueError if it has no time limit."""
        limits = [job.timeout_s, self.time_s and self.time_s - MARGIN_S]
        if not any(limits):
            raise ValueError(
                f"{job.name} has no time, and Slurm ends jobs when theirs is over; say "
                "`--slurm time=2h`, or write `timeout: 2h` in the plan"
            )
        left_s = min(limit for limit in limits if limit)
        gpus = job.gpus
        if gpus is None and self._node_gpus is None:
            self._node_gpus = int("gpu" in self._sinfo("%G"))
        return self._node_gpus if gpus is None else gpus, math.ceil((left_s + MARGIN_S) / 60)

    def _options(self, gpus: int, minutes: int) -> dict[str, Any]:
        """Options under the names that sbatch and submitit share."""
        named = {key: self.settings[key] for key in OPTIONS if key in self.settings}
        if "memory_gb" in self.settings:
            named["mem"] = f"{math.ceil(self.settings['memory_gb'] * 1024)}M"
        if "cpus" in self.settings:
            named["cpus_per_task"] = self.settings["cpus"]
        if gpus:
            named["gpus_per_node"] = gpus
        return named | {"time": minutes}

    def _submit(self, jobs: list[Job], gpus: int, minutes: int) -> None:
        """Send the jobs to the queue; two or more are an array."""
        import submitit

        folder = jobs[0].folder.parents[1] / "slurm"
        # Without srun, and in the shell's place, the child's parent gets the signals itself.
        command = f"exec {sys.executable}"
        executor = submitit.SlurmExecutor(folder, python=command)
        executor.update_parameters(
            job_name=_name(jobs[0]),
            use_srun=False,
            setup=self.settings.get("setup"),
            array_parallelism=len(jobs),
            additional_parameters={"signal": f"B:USR2@{SIGNAL_S}", "requeue": True},
            **self._options(gpus, minutes),
        )
        limits = [60 * minutes - MARGIN_S] * len(jobs)
        files = [str(job.file) for job in jobs]
        logs = [str(job.log) for job in jobs]
        with _outside_jobs():
            sent = executor.map_array(run_child, files, logs, limits, [gpus] * len(jobs))
        for job, one in zip(jobs, sent, strict=True):
            write_json(job.folder / "queued.json", {"job": one.job_id, "minutes": minutes})

    def _end_strays(self, job: Job, running: Sequence[Job]) -> None:
        """Cancel jobs that a driver sent but was killed before it recorded them: only the lock
        keeps them from running twice, and a cancelled batch would continue."""
        if self._strays_are_gone:
            return
        self._strays_are_gone = True
        asked = _slurm("squeue", "-h", "-r", "-n", _name(job), "-t", "PENDING", "-o", "%i")
        _cancel({*asked.stdout.split()} - {*map(_id, running)} if asked else ())

    def _gone(self, job: Job, states: dict | None) -> str | None:
        """Reason why no child runs or will run the job; None while one runs or waits."""
        with contextlib.suppress(OSError):  # makes a node's writes visible at once, also over NFS
            job.folder.chmod(job.folder.stat().st_mode)
        if outcome(job.folder).ended and not busy(job):
            queued = job.says("queued").get("job")
            if queued != _id(job):  # an earlier driver's job ran it first
                _cancel([queued])
            return ""
        if states is None:
            return _overdue(job)
        state, reason = states.get(_id(job), ("", ""))
        if state == "PENDING" and reason in NEVER:
            _cancel([_id(job)])
            return f"Slurm would never begin it ({reason})"
        if state not in ENDED:
            self._ended.discard(job)
            return None
        if job not in self._ended:  # it may be queued again, or its last file is delayed
            self._ended.add(job)
            return None
        if busy(job) and not _silent(job):  # another job of Slurm runs it, see `_end_strays`
            return None
        begun = (job.folder / "started.json").exists()
        if state in ("FAILED", "COMPLETED") and not begun:  # its log has the reason
            _keep_last_words(job)
        return ENDED[state]

    def _sinfo(self, what: str) -> str:
        partition = os.environ.get("SBATCH_PARTITION", self.settings.get("partition"))
        asked = _slurm("sinfo", "-h", "-o", what, *(["-p", partition] if partition else []))
        return asked.stdout if asked else ""

    def _nodes_up(self) -> bool:
        """True if any node is up; if all are down Slurm refuses every job, but only for now."""
        states = self._sinfo("%T").split()
        return not states or any(state.startswith(UP) for state in states)

    def _partitions(self) -> str:
        asked = _slurm("sinfo", "-h", "-o", "%R (at most %l, %G a node)")
        return ", ".join(asked.stdout.replace("(null)", "no GPU").splitlines()) if asked else "?"


def run_child(file: str, log: str, timeout_s: float, gpus: int) -> int:
    """On the node, run the job's child in its own session; send it SIGTERM when its time ends."""
    from whyhung.process.gpus import only

    number = os.environ.get("SLURM_JOB_ID", "")
    if parent := os.environ.get("SLURM_ARRAY_JOB_ID"):
        number = f"{parent}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    variables = os.environ | {"NSA_JOB": number} | ({} if gpus else only(""))
    child = start_child(Path(file), Path(log), variables, str(timeout_s))
    for one in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(one, lambda _number, _frame: child.terminate())
    return child.wait()


def _name(job: Job) -> str:
    """Name of a batch's jobs in `squeue`."""
    folder = job.folder.parents[1]
    return f"nsa-{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"


def _id(job: Job) -> str:
    """Slurm id of the job as `squeue` writes it; "" if unknown. A child records its own."""
    return job.says("started").get("slurm") or job.says("queued").get("job") or ""


def _slurm(*command: str, input: str | None = None) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands; None if its controller does not answer."""
    options = {"text": True, "capture_output": True, "timeout": 60, "input": input}
    try:
        asked = subprocess.run(command, **options)
    except (subprocess.TimeoutExpired, OSError):
        return None
    lost = ("contact slurm controller", "timed out", "connect failure", "Socket timed")
    return None if asked.returncode and any(one in asked.stderr for one in lost) else asked


def _states(ids: Iterable[str]) -> dict[str, tuple[str, str]] | None:
    """State and reason of each of these jobs known to Slurm; None if it does not answer."""
    wanted = ",".join(sorted({one for one in ids if one}))
    if not wanted:
        return {}
    asked = _slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", wanted)
    if asked is None or (asked.returncode and "Invalid job id" not in asked.stderr):
        return None
    lines = [line.split("|") for line in asked.stdout.splitlines()]
    return {one: (state, reason) for one, state, reason in lines}


def _cancel(ids: Iterable[str | None]) -> None:
    if known := sorted(filter(None, ids)):
        _slurm("scancel", *known)


def _overdue(job: Job) -> str | None:
    """Reason to give up a begun job while Slurm does not answer: its heartbeat or time limit."""
    started = job.folder / "started.json"
    if not started.exists():
        return None
    if _silent(job):
        return "Slurm does not answer, and its run is gone"
    age_s = time.time() - started.stat().st_mtime
    minutes = job.says("queued").get("minutes")
    if minutes and age_s > 60 * minutes + record.LOST_AFTER_S:
        return f"Slurm does not answer, and its {minutes} minutes were over"
    return None


def _silent(job: Job) -> bool:
    """True if its run has no heartbeat, or ended."""
    run = outcome(job.folder).run
    return run is not None and record.status_now(record.load(run)) != "running"


def _keep_last_words(job: Job) -> None:
    """Append the job's output from before its child started to the log that the driver reads."""
    said = job.folder.parents[1] / "slurm" / f"{_id(job)}_0_log.err"
    with contextlib.suppress(OSError), job.log.open("a") as log:
        log.write(said.read_text(errors="replace"))


def _said(asked: subprocess.CompletedProcess[str]) -> str:
    line = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    return line.removeprefix("sbatch: error: ").removeprefix("allocation failure: ")


@contextlib.contextmanager
def _outside_jobs() -> Iterator[None]:
    """Submit from outside any job: jobs of a driver that is a job itself inherit no limits."""
    import submitit

    own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k.startswith("SBATCH_")}
    with submitit.helpers.clean_env():
        os.environ.update(own)
        yield
