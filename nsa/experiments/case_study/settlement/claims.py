"""The rows of the settlement, each with the verdict that its facts allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.experiments.case_study.settlement.reread import Fact
from nsa.workbook.claim import Claim

VERDICTS = {
    "REFUTED": "the claim is wrong",
    "CONFIRMED": "the claim is right",
    "EXPLAINED": "both were seen, and this is what differed",
    "VOID": "the comparison could not have told",
    "INCONCLUSIVE": "not decided here",
}
CONTRADICTED = "CONTRADICTED"


@dataclass(frozen=True)
class Row:
    """One claim of the case study, as rows.yaml has it."""

    id: str
    claim: str
    predicts: str
    verdict: str
    facts: Sequence[str] = ()
    retraction: str = ""
    settles: str = ""


def all_rows() -> list[Row]:
    """What the case study claimed, from the rows.yaml beside this module."""
    import yaml

    text = Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8")
    return [Row(id, **fields) for id, fields in yaml.safe_load(text).items()]


@dataclass(frozen=True)
class Settled:
    """A row and what became of it: its own verdict where all of its facts hold.

    CONTRADICTED where a fact does not hold, INCONCLUSIVE where one is not known.
    """

    row: Row
    facts: tuple[Fact, ...]

    @property
    def verdict(self) -> str:
        known = [fact.holds for fact in self.facts]
        if False in known:
            return CONTRADICTED
        return "INCONCLUSIVE" if None in known else self.row.verdict

    @property
    def evidence(self) -> list[str]:
        """Ids of the tables, trials and runs behind it, each once."""
        return list(dict.fromkeys(one for fact in self.facts for one in fact.evidence))

    @property
    def settles(self) -> str:
        """What would decide an undecided row."""
        if self.verdict != "INCONCLUSIVE":
            return ""
        unknown = [fact for fact in self.facts if fact.holds is None]
        open_ = [(fact.evidence or (fact.name,), fact.seen or "not there") for fact in unknown]
        lacking = [f"{one}: {seen}" for evidence, seen in open_ for one in evidence]
        return "; ".join(lacking) or self.row.settles

    def __str__(self) -> str:
        return f"{self.row.id} {self.verdict}: {self.row.claim}"


def settle(facts: Mapping[str, Fact], rows: Sequence[Row] = ()) -> list[Settled]:
    """Every row, or those given, with its facts.

    ValueError for a row that names a fact or verdict there is not, or decides without a fact.
    """
    rows = rows or all_rows()
    for row in rows:
        if unknown := [name for name in row.facts if name not in facts]:
            raise ValueError(f"{row.id} stands on {unknown[0]!r}, which is no fact")
        if row.verdict not in VERDICTS:
            known = ", ".join(VERDICTS)
            raise ValueError(f"{row.id}: verdict {row.verdict!r} is not one of {known}")
        if row.verdict == "INCONCLUSIVE" and not row.settles:
            raise ValueError(f"{row.id} is INCONCLUSIVE and does not say what would settle it")
        if row.verdict != "INCONCLUSIVE" and not row.facts:
            raise ValueError(f"{row.id} is {row.verdict} without a fact")
    return [Settled(row, tuple(facts[name] for name in row.facts)) for row in rows]


def all_claims(settled: Sequence[Settled]) -> list[Claim]:
    """One claim a row for verdicts.json: PASS where its verdict stands on facts that hold."""
    kinds = {CONTRADICTED: "FAIL", "INCONCLUSIVE": "INCONCLUSIVE"}
    return [
        Claim(
            str(one),
            kinds.get(one.verdict, "PASS"),
            {
                "evidence": one.evidence,
                "facts": {fact.name: fact.sentence for fact in one.facts},
                "retracted": one.row.retraction,
                "would settle it": one.settles,
            },
        )
        for one in settled
    ]


def fewer_undecided_than(settled: Sequence[Settled], most: int) -> Claim:
    """Whether the settlement settles: no row contradicted, at most so many left undecided."""
    undecided = [one.row.id for one in settled if one.verdict == "INCONCLUSIVE"]
    wrong = [one.row.id for one in settled if one.verdict == CONTRADICTED]
    decided = len(settled) - len(undecided) - len(wrong)
    return Claim(
        f"{decided} of {len(settled)} rows are decided; open: {', '.join(undecided) or 'none'}",
        "FAIL" if wrong else "PASS" if len(undecided) <= most else "INCONCLUSIVE",
        {"contradicted": wrong, "undecided": undecided},
    )
