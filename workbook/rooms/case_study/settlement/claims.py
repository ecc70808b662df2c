"""Verdicts on the case study's claims, by rules kept as data.

facts.yaml compares one number of the kept run each with a limit. rows.yaml gives each claim up to
four sides, lists of facts that would confirm it, refute it, explain both of its statements, or void
the comparison. A side holds if all of its facts are as required, fails if one is not, and is
unknown otherwise. The verdict follows from the sides alone:

    sides that hold   sides not known   verdict
    two or more       any               CONTRADICTED
    one               none              that side's: CONFIRMED, REFUTED, EXPLAINED or VOID
    one               some              INCONCLUSIVE, until these are known
    none              any               INCONCLUSIVE

A stated number, of which no record is kept here, decides nothing alone: a side with only such
numbers gives INCONCLUSIVE, and the verdict of a side that has others as well names them.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbook.lab.training import check_fields
from workbook.rooms.case_study.figures import STATED
from workbook.runs import metrics, parameters
from workbook.runs.claim import Claim
from workbook.runs.identity import PACKAGE
from workbook.runs.store import Store

RELATIONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip
SIDES = {"confirms": "CONFIRMED", "refutes": "REFUTED", "explains": "EXPLAINED", "voids": "VOID"}
CONTRADICTED, INCONCLUSIVE = "CONTRADICTED", "INCONCLUSIVE"
KINDS = {"C": "contradictions", "H": "causes proposed", "L": "the report's ledger",
         "N": "research notes", "P": "our predictions"}  # fmt: skip
NOT = "not "


@dataclass(frozen=True)
class Fact:
    """A number and its limit. value: None if the kept run has none."""

    name: str
    sentence: str  # meaning of the value, without figures that move
    value: float | None
    relation: str
    limit: float
    unit: str = ""
    evidence: tuple[str, ...] = ()  # ids: "table:...", "trial:..." or "run:..."

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
    def kind(self) -> str:
        """Kind of its evidence: "run" or "trial" if any of it is, else "table"."""
        kinds = {one.partition(":")[0] for one in self.evidence}
        return next((kind for kind in ("run", "trial") if kind in kinds), "table")

    @property
    def seen(self) -> str:
        """Number with its condition: "1.359 (>= 1.8 asked)"."""
        if self.value is None:
            return f"no number of {self.name} is kept"
        unit = f" {self.unit}" if self.unit else ""
        told = ", stated" if self.stated else ""
        return f"{short(self.value)}{unit} ({self.relation} {short(self.limit)} asked{told})"

    def __str__(self) -> str:
        told = {True: "yes", False: "no", None: "not known"}[self.holds]
        return f"{self.name}, {told}: {self.seen}"


def short(number: float) -> str:
    """Four digits, or thousands without decimals."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"


def _told(name: str) -> dict[str, dict[str, Any]]:
    return parameters.read_file(Path(__file__).with_name(name))


def all_facts(run: str | Path, root: str | Path = PACKAGE.parent / "runs") -> dict[str, Fact]:
    """Facts of facts.yaml by name, with the numbers of that run of 06: its id below `root`, or its
    folder.

    ValueError for an unknown run, or one without facts.
    """
    folder = run if isinstance(run, Path) else Store(root).find(run)
    frame = metrics.read(folder / "metrics.csv")
    frame = frame[frame["metric"] == "fact"]
    configs = metrics.configs(frame)
    kept = {c["fact"]: (value, c) for value, c in zip(frame["median"], configs, strict=True)}
    if not kept:
        raise ValueError(f"{folder.name} has no facts; a run of 06 whose metrics.csv has would do")
    return {name: _fact(name, told, *kept.get(name, (None, {})))
            for name, told in _told("facts.yaml").items()}  # fmt: skip


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values of the notebook's parameters that could not be run."""
    all_facts(values["kept"])


def _fact(name: str, told: Mapping[str, Any], value: float | None, config: Mapping) -> Fact:
    relation, limit, *unit = told["asked"].split(" ", 2)
    evidence = tuple(told.get("evidence", config.get("evidence", ())))
    value = told.get("value", value)
    value = None if value is None or value != value else float(value)
    return Fact(name, told["is"], value, relation, float(limit), "".join(unit), evidence)


@dataclass(frozen=True)
class Row:
    """Claim of the case study, with the fields of rows.yaml; `sides`: facts, by their verdict."""

    id: str
    claim: str
    predicts: str
    sides: Mapping[str, Sequence[str]]
    retraction: str = ""
    otherwise: str = ""


def all_rows() -> list[Row]:
    """Claims of rows.yaml. ValueError for a field that a row does not have."""
    rows = []
    for id, told in _told("rows.yaml").items():
        sides = {verdict: told.pop(side, ()) for side, verdict in SIDES.items()}
        sides = {verdict: names for verdict, names in sides.items() if names}
        check_fields(Row, told, "a row", needed=("claim", "predicts"))
        rows.append(Row(id, **told, sides=sides))
    return rows


@dataclass(frozen=True)
class Settled:
    """A row and its facts, by name."""

    row: Row
    facts: Mapping[str, Fact]

    def asked(self, name: str) -> bool | None:
        """True if a fact is as a side requires ("not NAME": the contrary); None if unknown."""
        holds = self.facts[name.removeprefix(NOT)].holds
        return holds if holds is None else holds is not name.startswith(NOT)

    def side(self, verdict: str) -> bool | None:
        """True if that side holds, False if it fails, None if unknown."""
        found = [self.asked(name) for name in self.row.sides[verdict]]
        return False if False in found else None if None in found else True

    @property
    def verdict(self) -> str:
        sides = {verdict: self.side(verdict) for verdict in self.row.sides}
        holding = [verdict for verdict, holds in sides.items() if holds]
        if len(holding) > 1:
            return CONTRADICTED
        if not holding or None in sides.values() or not self.measured(holding[0]):
            return INCONCLUSIVE
        return holding[0]

    def stated(self, verdict: str) -> list[str]:
        """Facts of a side that rest on stated numbers."""
        names = [name.removeprefix(NOT) for name in self.row.sides.get(verdict, ())]
        return [name for name in names if self.facts[name].stated]

    def measured(self, verdict: str) -> bool:
        """True if a side has a fact that is not stated."""
        return len(self.stated(verdict)) < len(self.row.sides[verdict])

    @property
    def evidence(self) -> list[str]:
        """Ids of the tables, trials and runs behind it, each once."""
        return list(dict.fromkeys(one for fact in self.facts.values() for one in fact.evidence))

    def told(self, *verdicts: str) -> list[str]:
        """Facts of those sides, each once, with its number and limit."""
        names = (name for verdict in verdicts for name in self.row.sides.get(verdict, ()))
        return list(dict.fromkeys(str(self.facts[name.removeprefix(NOT)]) for name in names))

    @property
    def settles(self) -> str:
        """Missing evidence for an undecided row: unknown facts, then the row's own text."""
        if self.verdict != INCONCLUSIVE:
            return ""
        alone = [v for v in self.row.sides if self.side(v) and not self.measured(v)]
        said = [f"{v} by stated numbers alone, {', '.join(self.stated(v))}" for v in alone]
        said += [fact.seen for fact in self.facts.values() if fact.holds is None]
        return "; ".join(filter(None, [*said, self.row.otherwise])) or "no side of it holds"

    def __str__(self) -> str:
        stated = self.stated(self.verdict)
        told = f"; stated, without a record: {', '.join(stated)}" if stated else ""
        return f"{self.row.id} {self.verdict}: {self.row.claim}{told}"


def settle(facts: Mapping[str, Fact], rows: Sequence[Row] = ()) -> list[Settled]:
    """Every row, or those given, with its facts.

    ValueError for a row that names an unknown fact, or has no confirming side, or no other side.
    """
    settled = []
    for row in rows or all_rows():
        names = [name.removeprefix(NOT) for side in row.sides.values() for name in side]
        if unknown := [name for name in names if name not in facts]:
            raise ValueError(f"{row.id} stands on {unknown[0]!r}, which is no fact")
        if SIDES["confirms"] not in row.sides or len(row.sides) < 2:
            raise ValueError(f"{row.id} names no facts that confirm it, or none that do otherwise")
        settled.append(Settled(row, {name: facts[name] for name in names}))
    return settled


def all_claims(settled: Sequence[Settled]) -> list[Claim]:
    """One claim a row for verdicts.json: PASS where one side holds, FAIL where two do."""
    kinds = {CONTRADICTED: "FAIL", INCONCLUSIVE: "INCONCLUSIVE"}
    return [
        Claim(
            str(one),
            kinds.get(one.verdict, "PASS"),
            {
                "evidence": one.evidence,
                "sides": {verdict: list(names) for verdict, names in one.row.sides.items()},
                "facts": {
                    fact.name: [fact.sentence, fact.holds, fact.seen] for fact in one.facts.values()
                },
                "retracted": one.row.retraction,
                "would settle it": one.settles,
            },
        )
        for one in settled
    ]


def fewer_undecided_than(settled: Sequence[Settled], most: int) -> Claim:
    """Claim that the settlement settles: no row contradicted, at most `most` left undecided."""
    undecided = [one.row.id for one in settled if one.verdict == INCONCLUSIVE]
    wrong = [one.row.id for one in settled if one.verdict == CONTRADICTED]
    decided = len(settled) - len(undecided) - len(wrong)
    text = f"{decided} of {len(settled)} rows are decided; open: {', '.join(undecided) or 'none'}"
    if wrong:
        text += f"; contradicted: {', '.join(wrong)}"
    return Claim(
        text,
        "FAIL" if wrong else "PASS" if len(undecided) <= most else INCONCLUSIVE,
        {"contradicted": wrong, "undecided": undecided},
    )
