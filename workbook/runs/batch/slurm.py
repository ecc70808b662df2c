"""Jobs on a Slurm cluster: submitit sends each to the queue; the job's own files and `squeue` show
when it has ended.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from whyhung.cli import seconds
from workbook.runs import record
from workbook.runs.batch.job import ENDED, Job
from workbook.runs.files import write_json

SIGNAL_S = 60  # how long before its end Slurm signals a job; it may do so up to a minute earlier
MARGIN_S = 180  # part of a job's time for its start and for an orderly end
GONE = {  # states of a job that no longer runs, in words; "" if its own files have the reason
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
NAMES = {"cpus": "cpus_per_task", "memory_gb": "mem"}  # of settings, in sbatch and submitit


class Slurm:
    """Place for the plan's `slurm:`, `settings`. ValueError without Slurm or submitit here.

    A job that is preempted or loses its node is queued again by Slurm, and its child starts over.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, every_s: float = 2.0) -> None:
        self.settings = dict(settings or {})
        self.at_a_time = self.settings.get("at_once", 100)
        limit = self.settings.get("time")
        self.most_s = seconds(limit) - MARGIN_S if limit else math.inf  # of a notebook
        if self.most_s <= 0:
            raise ValueError(
                f"slurm.time is {limit}, and {MARGIN_S} s of it are kept for the "
                "start and an end in order; write 5m or more"
            )
        if shutil.which("sbatch") is None:
            raise ValueError(
                "this machine has no Slurm (there is no `sbatch`); start the batch on a cluster's "
                "login node, or leave out `--on slurm` to run it here"
            )
        import submitit  # noqa: F401  where it is missing, nothing is to be written

        self.every_s = every_s
        self._ended: set[Job] = set()  # at the last poll

    def check(self, jobs: Sequence[Job]) -> None:
        shapes = {self._shape(job): job for job in reversed(jobs)}
        for (gpus, minutes), job in shapes.items():
            options = self._options(gpus, minutes).items()
            flags = (f"#SBATCH --{key.replace('_', '-')}={value}" for key, value in options)
            lines = ["#!/bin/sh", *flags, "true\n"]
            asked = _slurm("sbatch", "--test-only", input="\n".join(lines))
            if asked is None:
                raise ValueError("Slurm does not answer; `sinfo` shows if it is up")
            states = self._sinfo("%T").split() or UP
            # While all nodes are down Slurm refuses every job, but only for now.
            if asked.returncode and any(state.startswith(UP) for state in states):
                said = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
                said = said.removeprefix("sbatch: error: ").removeprefix("allocation failure: ")
                there = _slurm("sinfo", "-h", "-o", "%R (at most %l, %G a node)")
                has = there.stdout.replace("(null)", "no GPU").splitlines() if there else "?"
                raise ValueError(
                    f"{job.name} wants {minutes} minutes and {gpus} GPUs, and Slurm would not take "
                    f"it: {said}; it has {', '.join(has)}"
                )

    def start(self, ready: Sequence[Job], running: Sequence[Job]) -> Iterator[Job]:
        # Cancels jobs that a driver sent but was killed before it recorded them: only the lock
        # keeps them from running twice, and a cancelled batch would continue.
        asked = _slurm("squeue", "-h", "-r", "-n", _name(ready[0]), "-t", "PENDING", "-o", "%i")
        _cancel({*asked.stdout.split()} - {*map(_id, running)} if asked else ())
        for shape, group in groupby(sorted(ready, key=self._shape), self._shape):
            jobs = list(group)
            try:
                self._submit(jobs, *shape)
            except Exception as error:  # submitit's exception, with the last line of sbatch
                said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise OSError(errno.EAGAIN, f"Slurm took no job: {said}") from error
            yield from jobs

    def poll(self, running: Sequence[Job]) -> dict[Job, str]:
        states = _states(map(_id, running))
        found = {job: self._gone(job, states) for job in running}
        return {job: why for job, why in found.items() if why is not None}

    def cancel(self, running: Sequence[Job]) -> None:
        _cancel(map(_id, running))

    def _shape(self, job: Job) -> tuple[int, int]:
        """GPUs and minutes of the job in the queue. ValueError if it has no time limit."""
        left_s = min(job.timeout_s or math.inf, self.most_s)
        if left_s == math.inf:
            raise ValueError(
                f"{job.name} has no time, and Slurm ends jobs when theirs is over; say "
                "`--slurm time=2h`, or write `timeout: 2h` in the plan"
            )
        gpus = self._node_gpus if job.gpus is None else job.gpus
        return gpus, math.ceil((left_s + MARGIN_S) / 60)

    @cached_property
    def _node_gpus(self) -> int:
        """GPUs of a job that does not say how many."""
        return int("gpu" in self._sinfo("%G"))

    def _options(self, gpus: int, minutes: int) -> dict[str, Any]:
        """Options under the names that sbatch and submitit share."""
        given = {NAMES.get(key, key): value for key, value in self.settings.items()}
        if "mem" in given:
            given["mem"] = f"{math.ceil(given['mem'] * 1024)}M"
        if gpus:
            given["gpus_per_node"] = gpus
        own = given.keys() - {"at_once", "setup"}
        return {key: given[key] for key in own} | {"time": minutes}

    def _submit(self, jobs: list[Job], gpus: int, minutes: int) -> None:
        """Send the jobs to the queue; two or more are an array."""
        import submitit

        # Without srun, and in the shell's place, the child's parent gets the signals itself.
        executor = submitit.SlurmExecutor(_folder(jobs[0]), python=f"exec {sys.executable}")
        executor.update_parameters(
            job_name=_name(jobs[0]),
            use_srun=False,
            setup=self.settings.get("setup"),
            array_parallelism=len(jobs),
            additional_parameters={"signal": f"B:USR2@{SIGNAL_S}", "requeue": True},
            **self._options(gpus, minutes),
        )
        limits, folders = [60 * minutes - MARGIN_S] * len(jobs), [str(job.folder) for job in jobs]
        own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k.startswith("SBATCH_")}
        with submitit.helpers.clean_env():  # jobs of a driver that is a job inherit no limits
            os.environ.update(own)
            sent = executor.map_array(run_child, folders, limits, [gpus] * len(jobs))
        for job, one in zip(jobs, sent, strict=True):
            write_json(job.folder / "queued.json", {"job": one.job_id})

    def _gone(self, job: Job, states: dict | None) -> str | None:
        """Reason why no child runs or will run the job; None while one runs or waits."""
        with contextlib.suppress(OSError):  # makes a node's writes visible at once, also over NFS
            job.folder.chmod(job.folder.stat().st_mode)
        if job.look() in ENDED and not job.busy:
            queued = job.says("queued").get("job")
            if queued != _id(job):  # an earlier driver's job ran it first
                _cancel([queued])
            return ""
        # Without a heartbeat, or ended.
        silent = job.run and record.status_now(record.load(job.run)) != "running"
        if states is None:
            return "Slurm does not answer, and its run is gone" if silent else None
        state, reason = states.get(_id(job), ("", ""))
        if state == "PENDING" and reason in NEVER:
            _cancel([_id(job)])
            return f"Slurm would never begin it ({reason})"
        if state not in GONE:
            self._ended.discard(job)
            return None
        if job not in self._ended:  # it may be queued again, or its last file is delayed
            self._ended.add(job)
            return None
        if job.busy and not silent:  # another job of Slurm runs it, see `start`
            return None
        if state in ("FAILED", "COMPLETED") and not job.says("started"):
            # The reason was printed before its child started.
            with contextlib.suppress(OSError), job.log.open("a") as log:
                log.write((_folder(job) / f"{_id(job)}_0_log.err").read_text(errors="replace"))
        return GONE[state]

    def _sinfo(self, what: str) -> str:
        partition = os.environ.get("SBATCH_PARTITION", self.settings.get("partition"))
        asked = _slurm("sinfo", "-h", "-o", what, *(["-p", partition] if partition else []))
        return asked.stdout if asked else ""


def run_child(folder: str, timeout_s: float, gpus: int) -> int | None:
    """On the node, run the job's child in its own session; send it SIGTERM when its time ends."""
    import submitit

    from whyhung.process.gpus import only

    variables = {"NSA_JOB": submitit.JobEnvironment().job_id} | ({} if gpus else only(""))
    child = Job("", Path(folder)).start_child(os.environ | variables, str(timeout_s))
    if child is None:
        return None
    for one in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(one, lambda _number, _frame: child.terminate())
    return child.wait()


def _folder(job: Job) -> Path:
    """Folder of scripts that were sent, and of what they printed."""
    return job.folder.parents[1] / "slurm"


def _name(job: Job) -> str:
    """Name of a batch's jobs in `squeue`."""
    folder = job.folder.parents[1]
    return f"nsa-{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"


def _id(job: Job) -> str:
    """Slurm id of the job as `squeue` writes it; "" if unknown. A child records its own."""
    return job.says("started").get("slurm") or job.says("queued").get("job") or ""


def _slurm(*command: str, input: str | None = None) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands; None if its controller does not answer."""
    try:
        asked = subprocess.run(command, input=input, capture_output=True, text=True, timeout=60)
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
