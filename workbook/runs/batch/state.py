"""A batch on disk: a plan with its folder, and the state of each of its jobs.

runs/batches/<plan>/   manifest.json        which plan, from which commit, and its driver
                       jobs/<name>-<key>/   a job's files, see place.py
                       cancel               asks the driver to end; it holds <plan>.lock
"""

import os
import re
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

from workbook.runs import environment, record
from workbook.runs.batch.place import (
    NOTHING,
    OK,
    RUNNING,
    TO_RUN,
    Job,
    Outcome,
    busy,
    is_coming,
    locked,
    outcome,
    verdict_of,
)
from workbook.runs.batch.plan import Entry, Plan
from workbook.runs.files import read_json, write_json
from workbook.runs.run import runs_of


class Batch:
    """A plan with its folder below `root`, and its jobs in their current state."""

    def __init__(self, plan: Plan, root: str | Path = "runs", evidence: bool = False) -> None:
        self.plan, self.root, self.evidence = plan, Path(root).absolute(), evidence
        self.folder = self.root / "batches" / plan.name
        self.lock = self.folder.with_name(f"{plan.name}.lock")
        self.notes: list[str] = []
        self.jobs = [self._job(entry) for entry in plan.entries]
        self._cached_runs()

    @property
    def manifest(self) -> dict[str, Any]:
        found = read_json(self.folder / "manifest.json")
        return found if isinstance(found, dict) else {}

    def _job(self, entry: Entry) -> Job:
        slug = re.sub(r"[^A-Za-z0-9.=,+-]+", "-", entry.name)[:80].strip("-")
        folder = self.folder / "jobs" / f"{slug}-{entry.key}"
        job = Job(entry.name, folder, entry.timeout_s, entry.gpus, entry)
        if not folder.is_dir():
            return job
        found = outcome(folder)
        if busy(job) or (not found.ended and is_coming(job)):
            job.status = RUNNING
        elif found.status == OK and not self._kept(found.run, self.evidence):
            damaged = not self._kept(found.run, False)
            what = "is damaged" if damaged else "was not made with --evidence"
            self.notes.append(f"{entry.name}: {found.run} {what}; it is run again")
            found = NOTHING
        elif found.status:
            job.status, job.cached = found.status, True
        job.outcome = found
        return job

    def _kept(self, run: Path | None, evidence: bool) -> bool:
        """True for a finished run that is still readable, and is evidence if that is required."""
        content = record.load(run) if run else {}
        return content.get("status") == OK and (content.get("evidence", False) or not evidence)

    def _cached_runs(self) -> None:
        """Take finished runs of the same id that no job of this plan has used."""
        taken = {job.outcome.run for job in self.jobs}
        alike: dict[str, list[Job]] = defaultdict(list)
        for job in self.jobs:
            if job.status == TO_RUN and not job.outcome.status:
                alike[job.entry.planned.name].append(job)
        for name, jobs in alike.items():
            found = [run.resolve() for run in runs_of(self.root, name, self.evidence)]
            there = (run for run in found if self._kept(run, False) and run not in taken)
            for job, run in zip(jobs, there, strict=False):
                seconds = record.load(run).get("seconds")
                job.outcome = Outcome(OK, run, OK, seconds=seconds, verdict=verdict_of(run))
                job.status, job.cached = OK, True

    def changed(self) -> list[str]:
        """Changes since jobs that have run were planned, in words, one a job."""
        found = []
        for job in self.jobs:
            before, planned = read_json(job.file) or {}, job.entry.planned
            begun = job.status == OK or (job.status == RUNNING and job.outcome.status)
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
            for notebook in {job.entry.planned.notebook for job in self.jobs}:
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

    def driven(self) -> bool:
        """True if a driver is running."""
        if not self.folder.parent.is_dir():
            return False
        with locked(self.lock) as free:
            return not free

    def driver(self) -> str:
        """Holder of the lock, in words."""
        me = self.manifest.get("driver") or {}
        here = me.get("machine") == record.machine()
        who = f"process {me.get('pid')}" if here else "another machine"
        return f"{self.plan.path} is being run already, by {who} since {me.get('since')}"

    def reset(self, job: Job) -> None:
        """Reset the job to run again; files of its earlier run stay in that run's folder."""
        for name in ("ended", "started", "queued"):
            (job.folder / f"{name}.json").unlink(missing_ok=True)
        job.status, job.outcome, job.cached = TO_RUN, NOTHING, False

    def count(self) -> Counter:
        statuses = (job.status for job in self.jobs)
        return Counter("not run" if one.startswith("not") else one for one in statuses)

    def write(self) -> None:
        """Write the manifest of a driver that starts. OSError if the disk is full."""
        now = environment.utc_now()
        content = {
            "plan": str(self.plan.path.absolute()),
            "commit": environment.provenance(self.jobs[0].entry.planned.environment)["commit"],
            "driver": {"pid": os.getpid(), "machine": record.machine(), "since": now},
        }
        write_json(self.folder / "manifest.json", content)
