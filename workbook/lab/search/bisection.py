"""Bisection of a fault: the smallest set of factors that causes it, and each trial's result."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbook.lab.search.candidates import (
    Candidates,
    Found,
    Row,
    Spent,
    Tried,
    ordered,
    position,
    word,
)
from workbook.lab.search.covering import Cell, Legal, cover, ddmin, same
from workbook.lab.search.thresholds import Answer, bayes, threshold

FLAKY_TRIALS = 20
_NOT_A_FAULT = ("PASS", "INCONCLUSIVE", "INVALID", "FLAKY")


def is_fault(tried: Tried, kind: str | None = None) -> bool:
    """Return True for the verdict searched for: `kind`, or any verdict that blames the trial."""
    return tried.kind == kind if kind else tried.kind not in _NOT_A_FAULT


@dataclass
class Bisection:
    """Searches for the smallest set of factors behind a fault, in at most `most` trials.

    First run the base, and `seen` or else the cell with every factor at its last value; unless
    these give the fault and a PASS, a screen of all pairs of values, then of all triples. Then
    `ddmin` on the differences between the nearest PASS and the fault, repeated while any trial has
    the whole cause but passed: the result is a set that suffices with defaults elsewhere and is
    minimal. Then the threshold of each factor with ordered values.
    """

    factors: Mapping[str, Sequence[Any]]  # the first value of each is its default, the base
    run: Callable[[Cell, int], Tried]  # judges attempt n of a cell; may raise Spent
    legal: Legal = lambda part: True  # legal cells, see `covering.cover`
    kind: str | None = None  # verdict searched for; None: that of the first failed trial
    most: int = 40
    attempts: int = 1  # runs of a passing cell, for faults that do not always fire
    whole_screen: bool = False  # cover all pairs of values even if a fault was found before
    seen: Mapping[str, Any] = field(default_factory=dict)  # values that showed the fault elsewhere
    say: Callable[[Row], None] = lambda row: None

    def __post_init__(self) -> None:
        if not self.factors or not all(len(values) > 1 for values in self.factors.values()):
            raise ValueError(
                f"a bisection needs factors with two values or more, got {dict(self.factors)}"
            )
        self.base = {name: values[0] for name, values in self.factors.items()}
        self.seen = self.base | self.seen
        for name, value in self.seen.items():
            position(self.factors.get(name, []), value)
        for what, cell in (("the base itself", self.base), ("what was seen", self.seen)):
            if not self.legal(cell):
                raise ValueError(f"{what} is not legal: {cell}")
        self._known: dict[tuple[int, ...], tuple[Cell, Tried]] = {}
        self._left: Candidates | None = None
        self.found = Found(base=self.base)

    def find(self) -> Found:
        """Run the search. If trials or time run out, return the partial result."""
        found = self.found
        try:
            self._screen()
            if found.target is None:
                found.why = (
                    f"no {self.kind or 'fault'} in {len(found.rows)} trials: "
                    "every combination of up to 3 factors was run"
                )
            elif not self._cells(False):
                if len(self._cells(True)) == len(self._known):
                    found.cause = {}
                found.why = f"no trial of {len(self._known)} passed: there is nothing to compare"
            else:
                self._narrow()
                self._refine()
            found.finished = True
        except Spent as spent:
            found.why = f"not at its end: {spent}"
        tried = [one for _, one in self._known.values()]
        others = [one for one in tried if is_fault(one) and self._answer(one) is None]
        found.others = list({(one.kind, one.signature): one for one in others}.values())
        return found

    def find_flaky(self) -> Found:
        """Find the value of the only factor, which is ordered, at which a flaky fault begins.

        Uses at most FLAKY_TRIALS trials; see `bayes`.
        """
        found, ((name, values),) = self.found, self.factors.items()
        asked: Counter[int] = Counter()

        def test(value: Any) -> Answer:
            tried = self.run({name: value}, asked[value])
            asked[value] += 1
            if found.target is None and is_fault(tried, self.kind):
                found.target = tried
            answer, changed = self._answer(tried), f"{name}={word(value)}"
            told = {True: f"it begins no later than at {word(value)}", None: "nothing"}
            eliminated = told.get(answer, f"a little of: it fires from {word(value)} on")
            self._row({name: value}, changed, f"{changed} shows it", tried, eliminated, None)
            return answer

        try:
            found.posterior = bayes(values, test, trials=min(self.most, FLAKY_TRIALS))
            found.finished = True
            found.why = f"no fault in {len(found.rows)} trials"
        except Spent as spent:
            found.why = f"not at its end: {spent}"
        if found.posterior is not None and found.posterior.value is not None:
            found.cause, found.why = {name: found.posterior.value}, ""
        return found

    def _screen(self) -> None:
        self._ask(self.base, "the defaults show it")
        if self._differ(self.seen, self.base):
            self._ask(self.seen, "what was seen shows it again")
        if not self._pair():
            self._ask(self._farthest(), "everything changed shows it")
        for strength, what in ((2, "pair"), (3, "triple")):
            if self._pair() and not (self.whole_screen and strength == 2):
                return
            tested = [cell for cell, _ in self._known.values()]
            for cell in cover(self.factors, legal=self.legal, strength=strength, tested=tested):
                self._ask(cell, f"a {what} of these values shows it")
                if self._pair() and not self.whole_screen:
                    return

    def _narrow(self) -> None:
        shows = self._nearest(self._cells(True), self.base)
        passed = self._nearest(self._cells(False), shows)
        cause: set[str] = set()
        while passed is not None:
            needed = ddmin(self._differ(shows, passed), self._enough(passed, shows))
            cause |= set(needed)
            for name in needed:
                self.found.instead.setdefault(name, passed[name])
            self.found.cause = {name: shows[name] for name in self.factors if name in cause}
            shows = passed | {name: shows[name] for name in needed}
            alone = self.base | self.found.cause
            words = self._words(alone, list(self.found.cause))
            if self._ask(alone, f"{words} is enough beside the defaults"):
                shows = alone
            contrary = [
                cell for cell in self._cells(False) if not cause & set(self._differ(cell, alone))
            ]
            passed = self._nearest(contrary, shows)
        if self._known_answer(self.base) is False:
            self._prune(self.found.cause or {})

    def _prune(self, cause: Cell) -> None:
        """Drop factors that were needed relative to another cell but not to the defaults."""
        changed = self._differ(self.base | cause, self.base)
        alone = self._enough(self.base, cause)
        if alone(changed) is True:
            kept = {*ddmin(changed, alone), *(cause.keys() - set(changed))}
            self.found.cause = {name: cause[name] for name in cause if name in kept}
            instead = self.found.instead | {name: self.base[name] for name in changed}
            self.found.instead = {name: instead[name] for name in self.found.cause}

    def _enough(self, beside: Cell, values: Cell) -> Callable[[list[str]], Answer]:
        """Return a test for the fault with some factors at `values`, all others as in `beside`."""

        def test(part: list[str]) -> Answer:
            cell = beside | {name: values[name] for name in part}
            return self._ask(cell, f"{self._words(cell, part) or 'nothing'} is enough")

        return test

    def _refine(self) -> None:
        for name, value in (self.found.cause or {}).items():
            values = self.factors[name]
            start, end = position(values, self.found.instead[name]), position(values, value)
            between = values[start : end + 1] if start < end else values[end : start + 1][::-1]
            if len(between) < 3 or not ordered(values):
                continue

            def test(one: Any, name: str = name) -> Answer:
                cell = self.base | self.found.cause | {name: one}
                return self._ask(cell, f"{name}={word(one)} is enough")

            self.found.brackets[name] = threshold(between, test)

    def _ask(self, cell: Cell, hypothesis: str) -> Answer:
        key = self._key(cell)
        if key in self._known or not self.legal(cell):
            return self._known_answer(cell)
        passed, unjudged = 0, 0
        while key not in self._known:
            if len(self.found.rows) >= self.most:
                raise Spent(f"{self.most} trials are spent")
            tried = self.run(cell, passed)
            if tried.kind == "PASS":
                passed += 1
                last = passed >= self.attempts
            else:  # an inconclusive trial is retried once
                unjudged += 1
                last = tried.kind != "INCONCLUSIVE" or unjudged > 1
            if last:
                self._known[key] = cell, tried
            self._note(cell, tried, hypothesis, last)
        return self._known_answer(cell)

    def _note(self, cell: Cell, tried: Tried, hypothesis: str, last: bool) -> None:
        if self.found.target is None and is_fault(tried, self.kind):
            self.found.target = tried
            self._left = Candidates(self.factors)
            before = len(self._left)
            for done, one in self._known.values():
                self._left.note(done, self._answer(one))
        elif self._left is not None:
            before = len(self._left)
            if last:
                self._left.note(cell, self._answer(tried))
        left, eliminated = None, ""
        if self._left is not None:
            left = len(self._left)
            eliminated = f"{before - left:,} of {before:,} causes"
            if self._answer(tried) is None:
                eliminated = "nothing: another verdict hides it"
            elif not left:
                eliminated = "every single cause: there are several, or a factor is missing"
        self._row(cell, self._words(cell), hypothesis, tried, eliminated, left)

    def _row(self, cell: Cell, *told: Any) -> None:
        row = Row(len(self.found.rows) + 1, dict(cell), *told)
        self.found.rows.append(row)
        self.say(row)

    def _answer(self, tried: Tried) -> Answer:
        return same(self.found.target, tried)

    def _known_answer(self, cell: Cell) -> Answer:
        known = self._known.get(self._key(cell))
        return None if known is None else self._answer(known[1])

    def _cells(self, answer: bool) -> list[Cell]:
        return [cell for cell, tried in self._known.values() if self._answer(tried) is answer]

    def _pair(self) -> bool:
        """Return True if there is a fault and a PASS to compare it with."""
        return bool(self._cells(True)) and bool(self._cells(False))

    def _farthest(self) -> Cell:
        cell = dict(self.base)
        for name, values in self.factors.items():
            last = position(values, self.base[name]) == len(values) - 1
            end = values[0] if last else values[-1]
            if self.legal(cell | {name: end}):
                cell[name] = end
        return cell

    def _nearest(self, cells: Sequence[Cell], to: Cell) -> Cell | None:
        return min(cells, key=lambda cell: len(self._differ(cell, to)), default=None)

    def _differ(self, one: Cell, other: Cell) -> list[str]:
        keys = zip(self.factors, self._key(one), self._key(other), strict=True)
        return [name for name, index, another in keys if index != another]

    def _key(self, cell: Cell) -> tuple[int, ...]:
        return tuple(position(values, cell[name]) for name, values in self.factors.items())

    def _words(self, cell: Cell, names: Sequence[str] | None = None) -> str:
        if names is None:
            names = self._differ(cell, self.base)
            if not names:
                return "(the defaults)"
        return ", ".join(f"{name}={word(cell[name])}" for name in names)
