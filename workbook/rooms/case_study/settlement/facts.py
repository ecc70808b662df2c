"""Facts of the settlement: each compares one number with a limit, so it can come out either way.

facts.yaml defines the number, the condition on it, and its computation from `Sources`; the sources
that are read are the fact's evidence. If one is missing or incomplete, the fact is unknown, and
`why` gives the reason.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from workbook.rooms.case_study.figures import STATED
from workbook.rooms.case_study.settlement.sources import MALFORMED, Lacking, Sources
from workbook.rooms.case_study.settlement.values import FUNCTIONS

RELATIONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A number and its limit. value: None if unknown, and then `why` gives the reason."""

    name: str
    sentence: str  # meaning of the value, without figures that move
    value: float | None
    relation: str
    limit: float
    unit: str = ""
    evidence: tuple[str, ...] = ()  # ids: "table:...", "trial:..." or "run:..."
    why: str = ""

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return bool(RELATIONS[self.relation](self.value, self.limit))

    @property
    def stated(self) -> bool:
        """True if it rests on a number without a record here."""
        return any(one.partition(":")[2] in STATED for one in self.evidence)

    @property
    def seen(self) -> str:
        """Number with its condition: "1.359 (>= 1.8 asked)"."""
        if self.value is None:
            return self.why
        unit = f" {self.unit}" if self.unit else ""
        told = ", stated" if self.stated else ""
        return f"{short(self.value)}{unit} ({self.relation} {short(self.limit)} asked{told})"

    def __str__(self) -> str:
        told = {True: "yes", False: "no", None: "not known"}[self.holds]
        return f"{self.name}, {told}: {self.seen}"


def short(number: float) -> str:
    """Four digits, or thousands without decimals."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"


@dataclass(frozen=True)
class Asked:
    """A fact before it is answered. asked: "<= 0.1 MB", a relation, a limit and a unit.

    ValueError for another form.
    """

    name: str
    sentence: str
    asked: str
    value: Callable[[Sources], float]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(<|<=|>|>=|=) [-+.\de]+( .+)?", self.asked):
            raise ValueError(
                f"{self.name} asks {self.asked!r}; a relation, a limit and perhaps a unit, "
                "'<= 0.1 MB', would do"
            )

    def answer(self, given: Sources) -> Fact:
        """Evaluate the fact; unknown if a source is missing or lacks what the value needs."""
        seen, value, why = given.unread(), None, ""
        try:
            value = float(self.value(seen))
            if math.isnan(value):
                value, why = None, "it is not a number"
        except Lacking as error:
            why = str(error)
        except MALFORMED as error:
            why = f"{', '.join(map(seen.label, seen.read))}: {error!r}"
        relation, limit, *unit = self.asked.split(" ", 2)
        evidence = tuple(map(seen.label, seen.read))
        form = relation, float(limit), "".join(unit)
        return Fact(self.name, self.sentence, value, *form, evidence, why)


class Names(dict[str, Any]):
    """Names in a `value` expression: FUNCTIONS, and any other name is a source."""

    def __init__(self, see: Sources) -> None:
        kinds = {kind: lambda name, kind=kind: see[f"{kind}:{name}"] for kind in ("trial", "run")}
        super().__init__(FUNCTIONS | kinds)
        self.see = see

    def __missing__(self, name: str) -> Any:
        return self.see[name]


def evaluated(value: CodeType, see: Sources) -> float:
    return eval(value, {"__builtins__": {}}, Names(see))


def all_asked() -> list[Asked]:
    """Every fact of facts.yaml beside this module.

    SyntaxError for a value that is no expression.
    """
    import yaml

    told = yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text(encoding="utf-8"))
    return [
        Asked(
            name, one["is"], one["asked"], partial(evaluated, compile(one["value"], name, "eval"))
        )
        for name, one in told.items()
    ]


def all_facts(given: Sources) -> dict[str, Fact]:
    """Every fact by name."""
    return {one.name: one.answer(given) for one in all_asked()}


def of_kind(found: Mapping[str, Fact], kind: str) -> dict[str, Fact]:
    """Facts by their evidence: "run" or "trial" if any of it is, else "table"."""

    def last(fact: Fact) -> str:
        kinds = {one.partition(":")[0] for one in fact.evidence}
        return next((k for k in ("run", "trial") if k in kinds), "table")

    return {name: fact for name, fact in found.items() if last(fact) == kind}
