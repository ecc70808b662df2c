"""A plan's bisection: the smallest set of factors, or the threshold of one, behind a fault."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nsa.lab.search import Answer, Cell, Posterior, bayes, same
from nsa.lab.search.bisection import Bisection, is_fault
from nsa.lab.search.candidates import Found, Row, Spent, Tried, ordered, word
from nsa.lab.search.execute import Trials
from nsa.lab.search.ledger import Ledger
from nsa.lab.search.plan import Plan

FLAKY_TRIALS = 20


@dataclass
class Threshold:
    """Where a fault begins that does not always fire; rows as a bisection has them."""

    name: str
    target: Tried | None = None
    posterior: Posterior | None = None
    rows: list[Row] = field(default_factory=list)
    why: str = ""

    @property
    def solved(self) -> bool:
        """Whether a threshold was found."""
        return self.posterior is not None and self.posterior.value is not None

    def __str__(self) -> str:
        found = self.posterior
        if found is None or found.value is None or self.target is None:
            return self.why or f"no fault in {len(self.rows)} trials"
        (fired, above), (stray, below) = found.rates
        low, high = found.bracket or (found.value, found.value)
        between = "" if low == high else f", between {word(low)} and {word(high)} at the least"
        return (
            f"{self.target} begins at {self.name}={word(found.value)} "
            f"(probability {found.probability:.3f}{between}); "
            f"it fired {fired} of {above} times from there on, {stray} of {below} below"
        )


def bisect(
    plan: Plan,
    ledger: Ledger,
    *,
    budget_s: float | None = None,
    predict: Callable[[dict[str, Any]], float] | None = None,
    say: Callable[[Row], None] = lambda row: None,
) -> Found | Threshold:
    """Searches for what causes the plan's fault, in at most `plan.most` trials and the budget.

    With `attempts` above 1 a plan of one factor whose values have an order is searched by `bayes`:
    the result is a Threshold. ValueError for a plan in which nothing is varied.
    """
    trials = Trials(plan, ledger, budget_s=budget_s, predict=predict)
    varied = {name: values for name, values in plan.values.items() if len(values) > 1}
    if not varied:
        out = f"; left out: {'; '.join(plan.left_out)}" if plan.left_out else ""
        raise ValueError(f"no factor has two values that can be run{out}")
    fixed = {name: values[0] for name, values in plan.values.items() if name not in varied}

    def run(cell: Cell, attempt: int) -> Tried:
        return trials.judged(fixed | cell, attempt)

    if plan.attempts > 1 and len(varied) == 1 and ordered(*varied.values()):
        ((name, values),) = varied.items()
        return _flaky(name, values, run, kind=plan.kind, most=min(plan.most, FLAKY_TRIALS), say=say)
    return Bisection(
        varied,
        run,
        legal=lambda part: plan.legal(fixed | part),
        kind=plan.kind,
        most=plan.most,
        attempts=plan.attempts,
        whole_screen=plan.screen,
        seen={name: value for name, value in plan.seen.items() if name in varied},
        say=say,
    ).find()


def _flaky(
    name: str,
    values: list[Any],
    run: Callable[[Cell, int], Tried],
    *,
    kind: str | None,
    most: int,
    say: Callable[[Row], None],
) -> Threshold:
    found = Threshold(name)
    asked: Counter[int] = Counter()

    def test(value: Any) -> Answer:
        index = values.index(value)
        tried = run({name: value}, asked[index])
        asked[index] += 1
        if found.target is None and is_fault(tried, kind):
            found.target = tried
        answer = False if tried.kind == "PASS" else None
        if found.target is not None:
            answer = same(found.target, tried)
        told = {True: f"it begins no later than at {word(value)}", None: "nothing"}
        eliminated = told.get(answer, f"a little of: it fires from {word(value)} on")
        changed, number = f"{name}={word(value)}", len(found.rows) + 1
        row = Row(number, {name: value}, changed, f"{changed} shows it", tried, eliminated, None)
        found.rows.append(row)
        say(row)
        return answer

    try:
        found.posterior = bayes(values, test, trials=most)
    except Spent as spent:
        found.why = f"not at its end: {spent}"
    return found
