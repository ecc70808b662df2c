"""A plan of notebooks in phases: one file, run in order, and taken up again where it was cut off.

A phase is a run as `nsa run` makes it, below runs/, and its folder is all that is kept of it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.spelling import nearest
from nsa.workbook import parameters, store
from nsa.workbook.record import load, status_now
from nsa.workbook.run import Planned, plan_run, run_notebook, runs_of

NEEDED, OPTIONAL = ("phase", "question", "notebook"), ("file", "parameters")
FAILURES = ("error", "kernel_died", "rank_died")  # others were cut from outside: time, a signal
CUT = ("interrupted", "terminated")


@dataclass(frozen=True)
class Phase:
    """One line of the file: its name, what it asks, and the run that answers."""

    name: str
    question: str
    planned: Planned


@dataclass(frozen=True)
class Ended:
    """What became of a phase: its run and that run's status and worst verdict.

    Without a run the status is "to run", or why it was not run. cached: it was there before.
    """

    phase: str
    run: str = ""
    status: str = "to run"
    verdict: str = ""
    cached: bool = False

    @property
    def good(self) -> bool:
        return self.status == "ok" and self.verdict != "FAIL"


def read_phases(path: str | Path, notebooks: str | Path = "notebooks") -> list[Phase]:
    """The phases of a YAML file: `phases:`, a list of phase, question, notebook and, if need be,
    file (of parameters, or several, beside this one; later ones win) and parameters.

    ValueError names the file and the phase: an unknown key, notebook or parameter, a wrong value, a
    name that comes twice, no phase at all.
    """
    path = Path(path)
    content = parameters.read_file(path)
    if unknown := sorted(set(content) - {"phases"}):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; a plan of notebooks has `phases`")
    entries = content.get("phases")
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{path}: `phases` must be a list of at least one phase, each with "
            f"{', '.join(NEEDED)}; got {entries!r}"
        )
    found: dict[str, Phase] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}, phase {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is {entry!r}; write {', '.join(NEEDED)}, one a line")
        name = str(entry.get("phase") or "")
        where += f" ({name})" if name else ""
        if unknown := [key for key in entry if key not in (*NEEDED, *OPTIONAL)]:
            near = nearest(unknown[0], (*NEEDED, *OPTIONAL), 0)
            raise ValueError(f"{where}: unknown key {unknown[0]!r}; {near}")
        if missing := [key for key in NEEDED if entry.get(key) in (None, "")]:
            raise ValueError(f"{where} has no {missing[0]!r}")
        if name in found:
            raise ValueError(f"{where}: this name comes twice; give each phase its own")
        try:
            planned = plan_run(str(entry["notebook"]), _given(entry, path.parent), notebooks)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found[name] = Phase(name, " ".join(str(entry["question"]).split()), planned)
    return list(found.values())


def _given(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The parameters of the entry's files, and its own, which win."""
    files = entry.get("file") or []
    own = entry.get("parameters") or {}
    if not isinstance(own, dict):
        raise ValueError(f"parameters is {own!r}; write one `name: value` a line below it")
    given: dict[str, Any] = {}
    for file in files if isinstance(files, list) else [files]:
        given |= parameters.read_file(folder / str(file))
    return given | own


def stand(phase: Phase, root: str | Path, evidence: bool = False) -> Ended:
    """Where a phase stands: its finished run, else the newest, else "to run".

    A run that was cut from outside (time, a signal, a driver that is gone) is "to run" again.
    """
    folders = runs_of(root, phase.planned.name, evidence)
    states = [(status_now(load(folder)), folder) for folder in folders]
    for wanted in ("ok", "running"):
        if found := [folder for status, folder in states if status == wanted]:
            return _ended(phase.name, found[-1], root, cached=True)
    if states and load(states[-1][1]).get("stop_reason") in FAILURES:
        return _ended(phase.name, states[-1][1], root, cached=True)
    return Ended(phase.name)


def run_phases(
    phases: list[Phase],
    *,
    root: str | Path = "runs",
    again: bool = False,
    evidence: bool = False,
    budget_s: float | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> list[Ended]:
    """Run what is "to run", in order; what a phase became is returned, a failure ends nothing.

    A finished phase is taken as it is, a failed one is run anew only with `again`, and one that
    another driver runs is left to it. When `budget_s` is over the phase that runs is cut, to be run
    again; so it is when the driver is told to stop, which also ends the plan.
    """
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s={budget_s} must be more than 0 seconds")
    ends = math.inf if budget_s is None else time.monotonic() + budget_s
    done, why = [], ""
    for number, phase in enumerate(phases, 1):
        now = stand(phase, root, evidence)
        if now.status not in ("to run", "ok", "running") and again:
            now = Ended(phase.name)
        left_s = ends - time.monotonic()
        if now.status == "to run" and not why and left_s <= 0:
            why = "not run: the budget is spent"
        if now.status == "to run" and why:
            now = Ended(phase.name, status=why)
        elif now.status == "to run":
            say(f"[{number}/{len(phases)}] {phase.name}: {phase.question}")
            result = run_notebook(
                phase.planned.notebook,
                phase.planned.given,
                root=root,
                timeout_s=None if budget_s is None else left_s,
                ends_budgets=False,
                again=again,
                evidence=evidence,
                progress=progress,
                say=say,
            )
            now = _ended(phase.name, result.folder, root)
            why = "not run: stopped before it" if result.stop_reason in CUT else ""
        else:
            say(f"[{number}/{len(phases)}] {phase.name}: {now.status}, {now.run}")
        done.append(now)
    return done


def _ended(name: str, folder: Path, root: str | Path, cached: bool = False) -> Ended:
    record = load(folder)
    verdict = store.overall(store.Run(folder).verdicts())
    run = folder.relative_to(root).as_posix()
    return Ended(name, run, status_now(record), verdict, cached)
