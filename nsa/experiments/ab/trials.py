"""Runs a plan's arms in turns, each trial in processes of its own, and holds what came of it."""

import math
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.experiments.ab.plan import ABPlan, Arm
from nsa.experiments.ab.rules import TIMED
from nsa.lab import sweep
from nsa.lab.measure.steps import MEASURED
from nsa.lab.search.candidates import Spent
from nsa.lab.search.execute import Done, Trials
from nsa.lab.search.ledger import Ledger
from whyhung.process.gpus import Gpus


@dataclass(frozen=True)
class Trial:
    """One trial of an arm. values: what was measured of it, nothing unless it passed."""

    arm: Arm
    number: int  # of the turn, from 0
    done: Done
    values: dict[str, float]

    @property
    def id(self) -> str:
        return self.done.id

    @property
    def losses(self) -> list[float]:
        return self.done.evidence.losses


@dataclass
class Results:
    """A plan's trials in the order in which they were run; `why` there are not more, if so."""

    plan: ABPlan
    trials: list[Trial] = field(default_factory=list)
    why: str = ""

    def of(self, arm: Arm) -> list[Trial]:
        """Its trials, by turn."""
        found = [trial for trial in self.trials if trial.arm.name == arm.name]
        return sorted(found, key=lambda trial: trial.number)

    def values(self, arm: Arm, of: str) -> list[float]:
        """One value a turn, NaN where there is none."""
        found = {trial.number: trial.values.get(of, math.nan) for trial in self.of(arm)}
        return [found.get(number, math.nan) for number in range(self.plan.repeats)]

    def middle(self, arm: Arm, of: str) -> float:
        """The median of an arm's turns, NaN unless each has a value."""
        values = self.values(arm, of)
        return statistics.median(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def missing(self) -> int:
        """Trials that were not run."""
        return len(self.plan.listed) * self.plan.repeats - len(self.trials)

    def finish(self) -> None:
        """RuntimeError where trials are missing: a run that was stopped is not the plan's."""
        if self.missing:
            raise RuntimeError(
                f"{self.missing} of {self.missing + len(self.trials)} trials were not run: "
                f"{self.why}; the same command goes on with them"
            )


def run(
    plan: ABPlan,
    ledger: Ledger,
    *,
    budget_s: float | None = None,
    gpus: Gpus | None = None,
    say: Callable[[Trial], None] = lambda trial: None,
) -> Results:
    """All arms once, then all again, `plan.repeats` times: what drifts meets every arm alike.

    One trial at a time, all on one of `gpus`, or several ranks on all; those in the ledger are not
    run again. It stops in order when the budget of seconds, or of the run, is spent.
    """
    left = sweep.Budget(budget_s or math.inf)
    seconds = left.share(math.inf)
    runner = Trials(plan.trials, ledger, None if seconds == math.inf else max(seconds, 1e-3))
    results, several = Results(plan), any(plan.trials.spec(a.trial).ranks > 1 for a in plan.listed)
    try:
        with (Gpus() if several or gpus is None else gpus).one() as gpu:
            for number in range(plan.repeats):
                for arm in plan.listed:
                    done = runner.run(arm.trial, number, gpu)
                    results.trials.append(Trial(arm, number, done, _values(done, plan.warmup)))
                    say(results.trials[-1])
    except Spent as spent:
        results.why = left.used_up if seconds < math.inf else str(spent)
    return results


def _values(done: Done, warmup: int) -> dict[str, float]:
    """Of what is there for each step, the median after warm-up; of memory the most."""
    if done.verdict.kind != "PASS":  # what fails gets no timing
        return {}
    found: dict[str, float] = {}
    for name in MEASURED:
        value: Any = (done.evidence.result or {}).get(name)
        if isinstance(value, Sequence) and len(value) > warmup:
            value = (statistics.median if name in TIMED else max)(value[warmup:])
        if isinstance(value, int | float):
            found[name] = float(value)
    if done.evidence.began_s is not None:
        found["startup"] = done.evidence.began_s
    return found


def adopt(plan: ABPlan, ledger: Ledger, folder: Path) -> int:
    """Copies finished trials of earlier runs of the same id, which did not reach their end.

    folder: of this run, `runs/<day>/<name>-<id>`, also with a number behind it.
    """
    named = re.fullmatch(r"(.+-[0-9a-f]{8})(-\d+)?", folder.name)
    if named is None:  # no run of `nsa run`
        return 0
    below = ledger.root.relative_to(folder)
    earlier = [one / below for one in folder.parent.parent.glob(f"*/{named[1]}*") if one != folder]
    adopted = 0
    for arm in plan.listed:
        for number in range(plan.repeats):
            options = plan.trials.options(arm.trial)
            id = ledger.id(plan.trials.spec(arm.trial, number), **options)
            for root in earlier:
                if ledger.get(id) is None and Ledger(root).settled(id):
                    shutil.copytree(root / id, ledger.root / id)
                    adopted += 1
    return adopted
