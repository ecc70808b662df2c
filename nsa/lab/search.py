"""Searches whose every question is a trial: a covering screen, a minimal set, a threshold.

An answer is True (the fault), False (passed) or None (neither: unresolved). "The fault" is the same
verdict kind with the same signature: whoever searches for "not PASS" starts with a hang and ends
with an out-of-memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nsa.lab.thresholds import Answer, Bracket, Posterior, bayes, threshold

__all__ = [
    "Answer", "Bracket", "Cell", "Judged", "Posterior", "allowed", "bayes", "cover", "ddmin",
    "same", "threshold",
]  # fmt: skip

Cell = dict[str, Any]  # a value for every factor


class Judged(Protocol):
    """What is compared of a verdict."""

    kind: str
    signature: str


def same(target: Judged, found: Judged) -> Answer:
    """Whether `found` is the fault of `target`. Another fault hides it, so it is None.

    A run that is slow has no hang, though it was not seen to its end.
    """
    if (found.kind, found.signature) == (target.kind, target.signature):
        return True
    if found.kind == "PASS" or (found.kind == "SLOW" and target.kind == "HANG"):
        return False
    return None


def allowed(cell: Mapping[str, Any], never: Sequence[Mapping[str, Sequence[Any]]]) -> bool:
    """False where `cell` has everything that one of `never` names: {factor: values, ...}.

    A part of a cell is forbidden as soon as nothing could make it legal.
    """
    return not any(
        all(name in cell and _among(cell[name], values) for name, values in one.items())
        for one in never
    )


def cover(
    factors: Mapping[str, Sequence[Any]],
    *,
    never: Sequence[Mapping[str, Sequence[Any]]] = (),
    strength: int = 2,
    tested: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Cell]:
    """Cells that have every combination of the values of any `strength` factors, but for `never`.

    `tested` cells count as done. Few: 29 for the pairs of 11 factors with 138,240 cells.
    """
    names = list(factors)
    if len(names) < 2 or strength < 2:
        for name in names:
            for value in factors[name]:
                yield {**{other: factors[other][0] for other in names}, name: value}
        return
    pairs = _allpairs()

    def cell(numbers: Sequence[int]) -> Cell:
        return {name: factors[name][i] for name, i in zip(names, numbers, strict=False)}

    # Numbers instead of values: True and 1 are two values, a list is one.
    before = [
        [_position(factors[name], done[name]) for name in names]
        for done in tested
        if allowed(done, never)
    ]
    yield from map(
        cell,
        pairs.AllPairs(
            [list(range(len(factors[name]))) for name in names],
            filter_func=lambda numbers: allowed(cell(numbers), never),
            previously_tested=before,
            n=min(strength, len(names)),
        ),
    )


def ddmin(differences: Sequence[Any], test: Callable[[list[Any]], Answer]) -> list[Any]:
    """The part of `differences` that shows the fault and of which no single one can be left out.

    `test(part)` is asked once for each part. Delta debugging by halves: the part needed of one half
    is sought while the other half is there. About 2 k log2(n / k) + k tests for k of n differences,
    as long as adding one never hides the fault; where that fails, one by one.

    Raises ValueError where all of them together do not show it.
    """
    known: dict[frozenset[int], Answer] = {}

    def shows(part: Sequence[int]) -> bool:
        key = frozenset(part)
        if key not in known:
            known[key] = test([differences[i] for i in sorted(key)])
        return known[key] is True

    def needed(there: list[int], looked_for: list[int], ask: bool) -> list[int]:
        if ask and shows(there):
            return []
        if len(looked_for) == 1:
            return looked_for
        half = len(looked_for) // 2
        first, second = looked_for[:half], looked_for[half:]
        of_second = needed([*there, *first], second, True)
        return needed([*there, *of_second], first, bool(of_second)) + of_second

    whole = list(range(len(differences)))
    if not shows(whole):
        raise ValueError(
            f"{len(whole)} difference(s) together do not show the fault: {differences}"
        )
    kept = needed([], whole, True) if whole else []
    kept = kept if shows(kept) else whole
    shrank = True
    while shrank:
        shrank = False
        for one in list(kept):
            rest = [i for i in kept if i != one]
            if shows(rest):
                kept, shrank = rest, True
    return [differences[i] for i in sorted(kept)]


def _among(value: Any, values: Sequence[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


def _position(values: Sequence[Any], value: Any) -> int:
    return next(i for i, one in enumerate(values) if type(one) is type(value) and one == value)


def _allpairs():
    try:
        import allpairspy
    except ModuleNotFoundError:
        raise ValueError("a screen needs allpairspy; pip install 'nsa[lab]' brings it") from None
    return allpairspy
