"""Threshold of a fault along one ordered factor, for deterministic and flaky faults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Answer = bool | None  # the fault, passed, neither
SURE = 0.99
_TOLD = {True: "the fault", False: "passed", None: "unresolved"}


@dataclass
class Bracket:
    """Threshold of a fault, known to lie between two values.

    below: the last value that passed, None if all values show the fault; above: the first that
    showed it, None if none does. monotone: True if all answers agree with one threshold.
    """

    below: Any = None
    above: Any = None
    monotone: bool = True
    answers: list[tuple[Any, Answer]] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.monotone:
            told = ", ".join(f"{value}: {_TOLD[answer]}" for value, answer in self.answers)
            return f"no single threshold ({told})"
        if self.above is None:
            return f"nowhere up to {self.below}"
        return f"from {self.above}" if self.below is None else f"{self.below} to {self.above}"


def threshold(values: Sequence[Any], test: Callable[[Any], Answer]) -> Bracket:
    """Bisect `values`, ordered from harmless to faulty; each is tested at most once.

    Both ends and the midpoint are tested first; finally, on each side, the middle of the longest
    untested interval, because a bisection alone cannot find a contradicting answer. Unresolved
    values are skipped, which widens the bracket.

    Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"a threshold lies between two values, got {list(values)}")
    known: dict[int, Answer] = {}
    last = len(values) - 1
    for index in dict.fromkeys((0, last, last // 2)):
        known[index] = test(values[index])
    while (index := _between(known)) is not None:
        known[index] = test(values[index])
    for side in (False, True):
        if _monotone(known) and (index := _unseen(known, side)) is not None:
            known[index] = test(values[index])
    passed, showed = _ends(known)
    return Bracket(
        below=None if passed is None else values[passed],
        above=None if showed is None else values[showed],
        monotone=_monotone(known),
        answers=[(values[i], known[i]) for i in sorted(known)],
    )


def _ends(known: Mapping[int, Answer]) -> tuple[int | None, int | None]:
    """Return the last index that passed and the first that showed the fault."""
    passed = max((i for i, answer in known.items() if answer is False), default=None)
    return passed, min((i for i, answer in known.items() if answer is True), default=None)


def _monotone(known: Mapping[int, Answer]) -> bool:
    passed, showed = _ends(known)
    return passed is None or showed is None or passed < showed


def _between(known: Mapping[int, Answer]) -> int | None:
    """Index of the untested value nearest to the middle of the bracket."""
    low, high = _ends(known)
    if low is None or high is None:
        return None
    unseen = [i for i in range(low + 1, high) if i not in known]
    return min(unseen, key=lambda i: abs(2 * i - low - high), default=None)


def _unseen(known: Mapping[int, Answer], side: bool) -> int | None:
    """Middle index of the longest interval between two answers that are both `side`."""
    seen = sorted(i for i, answer in known.items() if answer is not None)
    gaps = [
        (b - a, (a + b) // 2)
        for a, b in pairwise(seen)
        if known[a] is side and known[b] is side and b - a > 1 and (a + b) // 2 not in known
    ]
    return max(gaps)[1] if gaps else None


@dataclass
class Posterior:
    """Posterior of the threshold of a flaky fault.

    value: the most probable first faulty value; None if it never fired. probability: that of value.
    bracket: the shortest range of values containing the threshold with probability SURE; rates:
    (fired, trials) at or above `value`, and below it.
    """

    value: Any
    probability: float
    bracket: tuple[Any, Any] | None
    rates: tuple[tuple[int, int], tuple[int, int]]
    distribution: list[float]
    answers: list[tuple[Any, Answer]]

    def __str__(self) -> str:
        (fired, above), (stray, below) = self.rates
        low, high = self.bracket
        between = "" if low == high else f", between {low} and {high} at the least"
        return (
            f"(probability {self.probability:.3f}{between}); "
            f"it fired {fired} of {above} times from there on, {stray} of {below} below"
        )


def bayes(values: Sequence[Any], test: Callable[[Any], Answer], *, trials: int = 20) -> Posterior:
    """Find the first of `values`, ordered from harmless to faulty, at which a flaky fault fires.

    Each trial tests the most informative value, so a value may be tested repeatedly (`test` must
    not cache), unless it was unresolved. Ends after `trials`, or when one value has probability
    SURE. Prior rates: below the threshold the fault is rare (Beta(0.02, 0.98): a signature does not
    occur by chance), above it the rate is unknown (Beta(0.7, 0.3)).
    """
    if len(values) < 2 or trials < 1:
        raise ValueError(f"bayes needs two values and a trial, got {list(values)} and {trials}")
    try:
        from git_bayesect import Bisector
    except ModuleNotFoundError:
        raise ValueError(
            "a threshold of a flaky fault needs git-bayesect; pip install 'nsa[lab]' brings it"
        ) from None
    last = len(values) - 1
    bisector = Bisector(
        [1.0] * len(values), alpha_new=0.7, beta_new=0.3, alpha_old=0.02, beta_old=0.98
    )
    answers: list[tuple[int, Answer]] = []
    rest = list(range(len(values)))  # indices not known to be unresolved
    while rest and len(answers) < trials and max(bisector.distribution) < SURE:
        wanted = last - int(bisector.select())  # it searches for the last faulty one
        index = min(rest, key=lambda i: abs(i - wanted))
        answer = test(values[index])
        answers.append((index, answer))
        if answer is None:  # not recorded: the bisector would rule the value out
            rest.remove(index)
        else:
            bisector.record(last - index, answer)
    distribution = [float(x) for x in bisector.distribution[::-1]]
    told = [(values[i], answer) for i, answer in answers]
    resolved = [(i, answer) for i, answer in answers if answer is not None]
    if not any(answer for _, answer in resolved):
        return Posterior(None, 0.0, None, ((0, 0), (0, len(resolved))), distribution, told)
    best = max(range(len(values)), key=distribution.__getitem__)
    low = high = best
    while sum(distribution[low : high + 1]) < SURE and high - low < last:
        before = distribution[low - 1] if low else -1.0
        after = distribution[high + 1] if high < last else -1.0
        low, high = (low - 1, high) if before >= after else (low, high + 1)
    above = [answer for i, answer in resolved if i >= best]
    below = [answer for i, answer in resolved if i < best]
    return Posterior(
        value=values[best],
        probability=distribution[best],
        bracket=(values[low], values[high]),
        rates=((sum(above), len(above)), (sum(below), len(below))),
        distribution=distribution,
        answers=told,
    )
