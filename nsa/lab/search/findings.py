"""What a bisection asks and finds, as plain values: trials, its ledger, the cause."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nsa.lab.search.candidates import word
from nsa.lab.search.covering import Cell
from nsa.lab.search.thresholds import Bracket


class Spent(Exception):
    """There is no trial left, or no time."""


@dataclass(frozen=True)
class Tried:
    """How the trial of one cell was judged."""

    kind: str
    signature: str = ""
    id: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.what}" if self.what else self.kind


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a trial, what it was to decide, and what it left."""

    number: int
    cell: Cell
    changed: str  # what differs from the base
    hypothesis: str
    tried: Tried
    eliminated: str
    left: int | None  # causes that agree with all trials; None before there is a fault


@dataclass
class Found:
    """What a bisection came to.

    cause: the values that together show the fault `target`, all else as in `base`; {} where it
    shows whatever they are, None where no cause was found. instead: the values of the same factors
    with which it passed. brackets: for factors with an order, where it begins. finished: whether
    the search came to its end; why: what ended it.
    """

    base: Cell
    target: Tried | None = None
    cause: Cell | None = None
    instead: Cell = field(default_factory=dict)
    brackets: dict[str, Bracket] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    finished: bool = False
    why: str = ""
    others: list[Tried] = field(default_factory=list)  # faults that are not the target

    @property
    def solved(self) -> bool:
        """Whether there is a cause, and the search came to its end."""
        return self.finished and self.cause is not None

    def __str__(self) -> str:
        if self.target is None or self.cause is None:
            return self.why
        if not self.cause:
            return f"{self.target} whatever the factors are"
        parts = [
            f"{name} {self.brackets[name]}" if name in self.brackets else f"{name}={word(value)}"
            for name, value in self.cause.items()
        ]
        return f"{self.target} is caused by {' with '.join(parts)}"


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ledger as rows: number, trial, verdict, hypothesis, eliminated, left, changed."""
    return [
        {
            "number": row.number,
            "trial": row.tried.id,
            "verdict": str(row.tried),
            "hypothesis": row.hypothesis,
            "eliminated": row.eliminated,
            "left": row.left,
            "changed": row.changed,
        }
        for row in rows
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as lines, columns as wide as they need."""
    if not rows:
        return ""
    told = [[str(name) for name in rows[0]]]
    told += [["" if v is None else str(v) for v in row.values()] for row in rows]
    wide = [max(len(line[i]) for line in told) for i in range(len(told[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip()
        for line in told
    )
