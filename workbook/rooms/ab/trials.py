"""Run a plan's variants interleaved, each trial in its own processes, and hold the results."""

import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyhung.process.gpus import Gpus
from whyhung.process.runner import Spec
from workbook.lab import sweep
from workbook.lab.measure.steps import MEASURED
from workbook.lab.search.candidates import Spent
from workbook.lab.search.execute import Done, Trials
from workbook.lab.search.ledger import Ledger
from workbook.rooms.ab.plan import ABPlan, Variant
from workbook.rooms.ab.rules import TIMED


@dataclass(frozen=True)
class Trial:
    """One trial of a variant. values: its measurements, empty unless it passed."""

    variant: Variant
    number: int  # of the repeat, from 0
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
    """A plan's trials in the order they ran; why: the reason that trials are missing, if any."""

    plan: ABPlan
    trials: list[Trial] = field(default_factory=list)
    why: str = ""

    def of(self, variant: Variant) -> list[Trial]:
        """Trials of a variant, by repeat."""
        found = [trial for trial in self.trials if trial.variant.name == variant.name]
        return sorted(found, key=lambda trial: trial.number)

    def values(self, variant: Variant, of: str) -> list[float]:
        """One value per repeat, NaN if there is none."""
        found = {trial.number: trial.values.get(of, math.nan) for trial in self.of(variant)}
        return [found.get(number, math.nan) for number in range(self.plan.repeats)]

    def middle(self, variant: Variant, of: str) -> float:
        """Median over a variant's repeats, NaN unless each has a value."""
        values = self.values(variant, of)
        return statistics.median(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def missing(self) -> int:
        """Number of trials that were not run."""
        return len(self.plan.listed) * self.plan.repeats - len(self.trials)

    def finish(self) -> None:
        """Raise RuntimeError if trials are missing: a stopped run does not fulfill the plan."""
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
    """Run all variants once per repeat, interleaved, so that drift affects every variant alike.

    One trial runs at a time, on one of `gpus`, or on all with several ranks; trials in the ledger
    are not run again. It stops cleanly when the budget of seconds, or of the run, is spent.
    """
    left = sweep.Budget(budget_s or math.inf)
    seconds = left.share(math.inf)
    runner = Trials(plan.trials, ledger, None if seconds == math.inf else max(seconds, 1e-3))
    results, turns = Results(plan), list(_turns(plan))
    several = any(spec.ranks > 1 for _, _, spec, _ in turns)
    try:
        with (Gpus() if several or gpus is None else gpus).one() as gpu:
            for variant, number, spec, options in turns:
                id, evidence, verdict, cached = runner.found_or_run(spec, options, gpu)
                done = Done(variant.trial, id, verdict, evidence, cached)
                results.trials.append(Trial(variant, number, done, _values(done, plan.warmup)))
                say(results.trials[-1])
    except Spent as spent:
        results.why = left.used_up if seconds < math.inf else str(spent)
    return results


def _turns(plan: ABPlan) -> Iterator[tuple[Variant, int, Spec, dict[str, Any]]]:
    """Every trial in its turn: variant, number of the repeat, and what runs under which options."""
    for number in range(plan.repeats):
        for variant in plan.listed:
            options = plan.trials.options(variant.trial)
            yield variant, number, plan.trials.spec(variant.trial, number), options


def _values(done: Done, warmup: int) -> dict[str, float]:
    """Median of per-step times after warm-up; maximum of the other per-step values."""
    if done.verdict.kind != "PASS":  # failures get no timing
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
    """Copy finished trials of earlier, incomplete runs of the same id; return how many.

    folder: this run's, `runs/<day>/<name>-<id>`, possibly with a numeric suffix.
    """
    named = re.fullmatch(r"(.+-[0-9a-f]{8})(-\d+)?", folder.name)
    if named is None:  # no run of `nsa run`
        return 0
    below = ledger.root.relative_to(folder)
    earlier = [one / below for one in folder.parent.parent.glob(f"*/{named[1]}*") if one != folder]
    adopted = 0
    for _, _, spec, options in _turns(plan):
        id = ledger.id(spec, **options)
        for root in earlier:
            if ledger.get(id) is None and Ledger(root).settled(id):
                shutil.copytree(root / id, ledger.root / id)
                adopted += 1
    return adopted
