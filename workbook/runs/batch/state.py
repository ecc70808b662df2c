"""A batch on disk: a plan with its folder, and its jobs in their current state.

runs/batches/<plan>/   manifest.json        which plan, from which commit, and its driver
                       jobs/<name>-<key>/   a job's files
                       cancel               asks the driver to end; it holds <plan>.lock
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from workbook.runs import environment, record
from workbook.runs.batch.job import ENDED, OK, RUNNING, TO_RUN, Job
from workbook.runs.batch.plan import Plan
from workbook.runs.files import is_locked, locked, read_object, write_json
from workbook.runs.run import finished_runs, is_finished


class Batch:
    """A plan with its folder below `root`, and its jobs in their current state."""

    def __init__(self, plan: Plan, root: str | Path = "runs", evidence: bool = False) -> None:
        self.plan, self.root, self.evidence = plan, Path(root).absolute(), evidence
        self.folder = self.root / "batches" / plan.name
        self.lock = self.folder.with_name(f"{plan.name}.lock")
        self.notes: list[str] = []
        self.jobs = [self._job(job) for job in plan.jobs]
        self._cached_runs()

    @property
    def manifest(self) -> dict[str, Any]:
        return read_object(self.folder / "manifest.json")

    def _job(self, planned: Job) -> Job:
        slug = re.sub(r"[^A-Za-z0-9.=,+-]+", "-", planned.name)[:80].strip("-")
        job = replace(planned, folder=self.folder / "jobs" / f"{slug}-{planned.key}")
        found, kept = job.look(), record.load(job.run) if job.run else {}
        if job.busy or (found not in ENDED and "job" in job.says("queued")):
            job.status = RUNNING
        elif found == OK and not is_finished(kept, self.evidence):
            what = "was not made with --evidence" if is_finished(kept) else "is damaged"
            self.notes.append(f"{job.name}: {job.run} {what}; it is run again")
            job.run = job.seconds = None
        elif found:
            job.status, job.cached = found, True
        return job

    def _cached_runs(self) -> None:
        """Take finished runs of the same id that no job of this plan has used."""
        taken = {job.run for job in self.jobs}

        @cache
        def unused(name: str) -> Iterator[Path]:
            runs = map(Path.resolve, finished_runs(self.root, name, self.evidence))
            return iter([run for run in runs if run not in taken])

        for job in self.jobs:
            if job.status == TO_RUN and (run := next(unused(job.planned.name), None)):
                job.run, job.seconds = run, record.load(run).get("seconds")
                job.status, job.cached = OK, True

    def changed(self) -> list[str]:
        """Changes since jobs that have run were planned, in words, one a job."""
        found = []
        for job in self.jobs:
            before, planned = job.says("job"), job.planned
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
            for notebook in {job.planned.notebook for job in self.jobs}:
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

    def driver(self) -> str:
        """Holder of the lock, in words; "" if nobody has it."""
        if not is_locked(self.lock):
            return ""
        me = self.manifest.get("driver") or {}
        here = me.get("machine") == record.machine()
        who = f"process {me.get('pid')}" if here else "another machine"
        return f"{self.plan.path} is being run already, by {who} since {me.get('since')}"

    def write(self) -> None:
        """Write the manifest of a driver that starts. OSError if the disk is full."""
        now = environment.utc_now()
        content = {
            "plan": str(self.plan.path.absolute()),
            "commit": environment.provenance(self.jobs[0].planned.environment)["commit"],
            "driver": {"pid": os.getpid(), "machine": record.machine(), "since": now},
        }
        write_json(self.folder / "manifest.json", content)
