"""Causes not yet refuted by trials, and results of a bisection, as plain values.

Candidates are all sets of up to three conditions on factors.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import numpy as np

from workbook.lab.search.thresholds import Answer, Bracket, Posterior

Cell = dict[str, Any]  # a value for every factor
SIZE = 3
MOST = 2_000_000  # maximum number of sets of conditions tracked


class Candidates:
    """Sets of up to SIZE conditions on distinct factors that agree with all trials so far.

    A condition is factor = value; for ordered numbers also factor >= value and factor <= value.
    The cause is one such set: cells that satisfy it show the fault, and no others. The empty set,
    which always shows it, is included.
    """

    def __init__(self, factors: Mapping[str, Sequence[Any]]) -> None:
        self.factors = {name: list(values) for name, values in factors.items()}
        self.conditions: list[tuple[str, Callable[[int, int], bool], int]] = []
        by_factor: list[range] = []  # indices of conditions
        for name, values in self.factors.items():
            made = [(name, operator.eq, index) for index in range(len(values))]
            if ordered(values):
                inner = range(1, len(values) - 1)
                made += [(name, how, i) for how in (operator.ge, operator.le) for i in inner]
            start = len(self.conditions)
            self.conditions += made
            by_factor.append(range(start, start + len(made)))
        size = min(SIZE, len(by_factor))
        while size > 1 and sum(map(prod, combinations(map(len, by_factor), size))) > MOST:
            size -= 1
        nothing = len(self.conditions)  # a condition that always holds, for sets smaller than size
        rows: list[np.ndarray] = [np.full((1, size), nothing, dtype=np.int32)]
        for some in range(1, size + 1):
            for chosen in combinations(by_factor, some):
                grid = np.array(list(product(*chosen)), dtype=np.int32)
                rest = np.full((len(grid), size - some), nothing, dtype=np.int32)
                rows.append(np.concatenate([grid, rest], axis=1))
        self._sets = np.concatenate(rows)

    def __len__(self) -> int:
        return len(self._sets)

    def note(self, cell: Mapping[str, Any], answer: Answer) -> None:
        """Drop the sets refuted by this trial; None refutes nothing."""
        if answer is None:
            return
        has = {name: position(values, cell[name]) for name, values in self.factors.items()}
        holds = [compare(has[name], wanted) for name, compare, wanted in self.conditions]
        self._sets = self._sets[np.array([*holds, True])[self._sets].all(axis=1) == answer]


def position(values: Sequence[Any], value: Any) -> int:
    """Return the index of a value; True is not 1. ValueError if it is not in `values`."""
    for index, one in enumerate(values):
        if type(one) is type(value) and one == value:
            return index
    raise ValueError(f"{value!r} is none of {list(values)}")


def word(value: Any) -> str:
    """Format a value as in a plan."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "''"


def ordered(values: Sequence[Any]) -> bool:
    """Return True for strictly increasing or strictly decreasing numbers."""
    if any(not isinstance(v, int | float) or isinstance(v, bool) for v in values):
        return False
    pairs = list(pairwise(values))
    return bool(pairs) and (all(a < b for a, b in pairs) or all(a > b for a, b in pairs))


class Spent(Exception):
    """No trials or no time left."""


@dataclass(frozen=True)
class Tried:
    """Verdict of the trial of one cell."""

    kind: str
    signature: str = ""
    id: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.what}" if self.what else self.kind


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a trial, its hypothesis, and the causes left after it."""

    number: int
    cell: Cell
    changed: str  # differences from the base
    hypothesis: str
    tried: Tried
    eliminated: str
    left: int | None  # causes that agree with all trials; None before there is a fault


@dataclass
class Found:
    """Result of a bisection.

    cause: the values that together show the fault `target`, all others as in `base`; {} if it
    always fires, None if no cause was found. instead: passing values of the same factors.
    brackets: for ordered factors, the threshold; posterior: the threshold of a single factor for a
    flaky fault. finished: True if the search completed; why: the reason it ended.
    """

    base: Cell
    target: Tried | None = None
    cause: Cell | None = None
    instead: Cell = field(default_factory=dict)
    brackets: dict[str, Bracket] = field(default_factory=dict)
    posterior: Posterior | None = None
    rows: list[Row] = field(default_factory=list)
    finished: bool = False
    why: str = ""
    others: list[Tried] = field(default_factory=list)  # faults that are not the target

    @property
    def solved(self) -> bool:
        """True if a cause was found and the search completed."""
        return self.finished and self.cause is not None

    def __str__(self) -> str:
        if self.target is None or self.cause is None:
            return self.why
        if not self.cause:
            return f"{self.target} whatever the factors are"
        if self.posterior is not None:
            ((name, value),) = self.cause.items()
            return f"{self.target} begins at {name}={word(value)} {self.posterior}"
        parts = [
            f"{name} {self.brackets[name]}" if name in self.brackets else f"{name}={word(value)}"
            for name, value in self.cause.items()
        ]
        return f"{self.target} is caused by {' with '.join(parts)}"


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ledger as rows: number, trial, verdict, hypothesis, eliminated, left, changed."""
    names = ("hypothesis", "eliminated", "left", "changed")
    return [
        {"number": row.number, "trial": row.tried.id, "verdict": str(row.tried)}
        | {name: getattr(row, name) for name in names}
        for row in rows
    ]


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of equal keys as lines with aligned columns."""
    if not rows:
        return ""
    told = [[str(name) for name in rows[0]]]
    told += [["" if v is None else str(v) for v in row.values()] for row in rows]
    wide = [max(map(len, column)) for column in zip(*told, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line in told)
