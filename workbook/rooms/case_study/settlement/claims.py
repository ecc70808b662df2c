"""Rows of the settlement, each with the verdict that its facts allow.

A row has up to four sides, each a list of facts that would confirm it, refute it, explain both of
its statements, or void the comparison. A side holds if all of its facts are as required, fails if
one is not, and is unknown otherwise. The verdict follows from the sides alone:

    sides that hold   sides not known   verdict
    two or more       any               CONTRADICTED
    one               none              that side's: CONFIRMED, REFUTED, EXPLAINED or VOID
    one               some              INCONCLUSIVE, until these are known
    none              any               INCONCLUSIVE

A stated number, of which no record is kept here, decides nothing alone: a side with only such
numbers gives INCONCLUSIVE, and the verdict of a side that has others as well names them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from nsa.spelling import choice
from workbook.rooms.case_study.settlement.facts import Fact
from workbook.runs.claim import Claim

SIDES = {"confirms": "CONFIRMED", "refutes": "REFUTED", "explains": "EXPLAINED", "voids": "VOID"}
CONTRADICTED, INCONCLUSIVE = "CONTRADICTED", "INCONCLUSIVE"
KINDS = {"C": "contradictions", "H": "causes proposed", "L": "the report's ledger",
         "N": "research notes", "P": "our predictions"}  # fmt: skip
NOT = "not "


@dataclass(frozen=True)
class Row:
    """Claim of the case study, with the fields of rows.yaml."""

    id: str
    claim: str
    predicts: str
    confirms: Sequence[str] = ()
    refutes: Sequence[str] = ()
    explains: Sequence[str] = ()
    voids: Sequence[str] = ()
    retraction: str = ""
    otherwise: str = ""

    @property
    def sides(self) -> dict[str, Sequence[str]]:
        """Facts of each side that the row has, by its verdict."""
        found = {verdict: getattr(self, side) for side, verdict in SIDES.items()}
        return {verdict: names for verdict, names in found.items() if names}


def all_rows() -> list[Row]:
    """Claims of the case study, from the rows.yaml beside this module.

    ValueError for a field that Row does not have.
    """
    import yaml

    known = [field.name for field in fields(Row)]
    text = Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)
    for one in rows.values():
        for name in one:
            choice("field of a row", name, known)
    return [Row(id, **one) for id, one in rows.items()]


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
        unknown = dict.fromkeys(fact.why for fact in self.facts.values() if fact.holds is None)
        alone = [v for v in self.row.sides if self.side(v) and not self.measured(v)]
        said = [f"{v} by stated numbers alone, {', '.join(self.stated(v))}" for v in alone]
        said += [*unknown, self.row.otherwise]
        return "; ".join(filter(None, said)) or "no side of it holds"

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
        if not row.confirms or len(row.sides) < 2:
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


def subject(sentence: str) -> str:
    """Row of a claim, whatever its verdict; "" for the claim on all rows."""
    return found[0] if (found := re.match(r"[A-Z]\d+(?= )", sentence)) else ""


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
