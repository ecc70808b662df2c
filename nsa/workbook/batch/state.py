"""A batch on disk: a plan with its folder, and where each of its jobs stands.

runs/batches/<plan>/   manifest.json   what `--status` shows; written atomically, made anew from the
                                       jobs' folders where it is lost
                       jobs/<name>-<key>/   a job's files, see place.py
                       cancel          asks the driver to end; whoever drives holds <plan>.lock
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nsa.workbook import environment, record, store
from nsa.workbook.batch.place import Handle, Job, Outcome, busy, locked, outcome
from nsa.workbook.batch.plan import Entry, Plan
from nsa.workbook.files import read_json, write_json
from nsa.workbook.run import runs_of

TO_RUN, RUNNING, OK, FAILED, STOPPED = "to run", "running", "ok", "failed", "stopped"
NOTHING = Outcome("")


@dataclass
class State:
    """Where a job stands. status: to run, running, ok, failed, stopped (cut from outside, and run
    again by the next driver) or "not run: why"."""

    entry: Entry
    job: Job
    status: str = TO_RUN
    outcome: Outcome = NOTHING
    cached: bool = False  # it was there before this driver
    handle: Handle | None = None
    began: float | None = None  # time.monotonic
    written: dict[str, Any] | None = None  # what job.json holds, if this driver wrote it

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def good(self) -> bool:
        return self.status == OK and self.outcome.verdict != "FAIL"


class Batch:
    """A plan with its folder below `root`, and where each of its jobs stands."""

    def __init__(self, plan: Plan, root: str | Path = "runs", evidence: bool = False) -> None:
        self.plan, self.root, self.evidence = plan, Path(root).absolute(), evidence
        self.folder = self.root / "batches" / plan.name
        self.notes: list[str] = []
        self.states = [self._state(entry) for entry in plan.entries]
        self._cached_runs()

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.plan.name}.lock")

    @property
    def manifest(self) -> dict[str, Any]:
        found = read_json(self.folder / "manifest.json")
        jobs = found.get("jobs") if isinstance(found, dict) else None
        whole = isinstance(jobs, list) and all(isinstance(job, dict) for job in jobs)
        return found if whole else {}

    def _state(self, entry: Entry) -> State:
        slug = re.sub(r"[^A-Za-z0-9.=,+-]+", "-", entry.name)[:80].strip("-")
        folder = self.folder / "jobs" / f"{slug}-{entry.key}"
        state = State(entry, Job(entry.name, folder, entry.timeout_s, entry.gpus))
        if not folder.is_dir():
            return state
        found = outcome(folder)
        if busy(state.job):
            state.status = RUNNING
        elif found.status == OK and not self._kept(found.run):
            what = "was not made with --evidence" if self._kept(found.run, False) else "is damaged"
            self.notes.append(f"{entry.name}: {found.run} {what}; it is run again")
            found = NOTHING
        elif found.status:
            state.status, state.cached = found.status, True
        state.outcome = found
        return state

    def _kept(self, run: Path | None, evidence: bool | None = None) -> bool:
        """A finished run that can still be read, and is evidence where that is wanted."""
        content = record.load(run) if run else {}
        wanted = self.evidence if evidence is None else evidence
        return content.get("status") == OK and (content.get("evidence", False) or not wanted)

    def _cached_runs(self) -> None:
        """Finished runs of the same id that no job of this plan has become."""
        taken = {state.outcome.run for state in self.states}
        there: dict[str, list[Path]] = {}
        for state in self.states:
            if state.status != TO_RUN or state.outcome.status:
                continue
            name = state.entry.planned.name
            if name not in there:
                there[name] = [
                    folder.resolve()
                    for folder in runs_of(self.root, name, self.evidence)
                    if record.load(folder).get("status") == OK and folder.resolve() not in taken
                ]
            if there[name]:
                run = there[name].pop(0)
                content = record.load(run)
                verdict = store.overall(read_json(run / "verdicts.json", []))
                state.outcome = Outcome(OK, run, OK, "", content.get("seconds"), verdict)
                state.status, state.cached = OK, True

    def changed(self) -> list[str]:
        """What is not as it was when jobs that have run were planned, in words, one a job."""
        found = []
        for state in self.states:
            before = read_json(state.job.file) or {}
            if state.status not in (OK, RUNNING) or not before:
                continue
            planned = state.entry.planned
            if before.get("source") != state.entry.source:
                found.append(f"{state.name}: {planned.notebook.name} or nsa/")
            elif before.get("name") != planned.name:
                found.append(f"{state.name}: versions of Python or torch, or the GPUs")
        return found

    def check(self) -> None:
        """ValueError where this batch cannot go on: its folder is another plan's, its source
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
                "to that source, or begin the plan anew with --anew; runs that are there stay"
            )
        if self.evidence:
            for notebook in {state.entry.planned.notebook for state in self.states}:
                environment.check_evidence(notebook)

    def put_aside(self) -> None:
        """Give the folder another name, so that the plan begins anew. ValueError where it runs."""
        if not self.folder.is_dir():
            return
        with locked(self.lock) as mine:
            running = [state.name for state in self.states if state.status == RUNNING]
            if not mine or running:
                what = f"{running[0]} of {self.plan.path} runs" if running else self.driver()
                raise ValueError(f"{what}; end it with --cancel before --anew")
            stamp = datetime.now().strftime("%Y%m%dT%H%M%S")
            self.folder.rename(self.folder.with_name(f"{self.plan.name}-{stamp}"))

    def driven(self) -> bool:
        """A driver is at it now."""
        if not self.folder.parent.is_dir():
            return False
        with locked(self.lock) as free:
            return not free

    def driver(self) -> str:
        """Whoever has the lock, in words."""
        me = self.manifest.get("driver") or {}
        here = me.get("machine") == record.machine()
        who = f"process {me.get('pid')}" if here else "another machine"
        return f"{self.plan.path} is being run already, by {who} since {me.get('since')}"

    def reset(self, state: State) -> None:
        """Let it be run again: what its earlier run left stays in that run's folder."""
        for name in ("ended.json", "started.json"):
            (state.job.folder / name).unlink(missing_ok=True)
        state.status, state.outcome, state.cached = TO_RUN, NOTHING, False

    def count(self) -> Counter:
        return Counter("not run" if s.status.startswith("not") else s.status for s in self.states)

    def write(self, place: str, began: str) -> None:
        """The manifest, by the driver. OSError where the disk is full."""
        git = environment.provenance(self.states[0].entry.planned.environment)["commit"]
        me = os.getpid()
        content = {
            "schema": 1,
            "plan": str(self.plan.path.absolute()),
            "question": self.plan.question,
            "began": self.manifest.get("began") or began,
            "commit": git,
            "written": environment.utc_now(),
            "place": place,
            "driver": {
                "pid": me,
                "pid_started": record.process_start(me),
                "machine": record.machine(),
                "since": began,
            },
            "jobs": [
                {
                    "name": state.name,
                    "run_name": state.entry.planned.name,
                    "folder": state.job.folder.name,
                    "status": state.status,
                    "run": state.outcome.run and os.path.relpath(state.outcome.run, self.root),
                    "verdict": state.outcome.verdict,
                    "seconds": state.outcome.seconds,
                    "message": state.outcome.message,
                    "handle": state.handle,
                }
                for state in self.states
            ],
        }
        write_json(self.folder / "manifest.json", content)
