"""The sentences of the selfcheck, each decided by rows and never by hand."""

from collections.abc import Sequence

from nsa.experiments.selfcheck import table
from nsa.experiments.selfcheck.judged import Judged
from nsa.lab.process.trial import Outcome
from nsa.workbook.claim import Claim, verdict_of

COUNTED = {"a GPU": 1.05, "a CPU": 1.10}  # of a step
FORETOLD = 0.25  # of a backward


def all_claims(rows: Sequence[Judged]) -> list[Claim]:
    """Every claim; one about what was not run is INCONCLUSIVE.

    What was written after the rules were frozen is in all of them, and has them once more alone.
    """
    frozen = [row for row in rows if row.batch == "frozen"]
    return [
        every_fault_is_named(rows),
        *of_programs(rows, "of all programs"),
        *of_programs(frozen, "of those written after the rules"),
    ]


def of_programs(rows: Sequence[Judged], which: str) -> list[Claim]:
    """A claim for each aim, which must be met at each load."""
    found, claims = table.aims(rows), []
    for aim in table.AIMS:
        mine = found[(found["aim"] == aim.text) & (found["of"] > 0)]
        told = ", ".join(f"{m.count} of {m.of} at load {m.load}" for m in mine.itertuples(False))
        sentence = f"{which}, {aim.text} ({aim.wanted})"
        if mine.empty:
            claims.append(Claim.undecided(sentence, "none was run"))
        else:
            against = [f"{row.name}, load {row.load}: {row.label}" for row in aim.against(rows)]
            verdict = verdict_of(bool(mine["met"].all()))
            claims.append(Claim(f"{sentence}: {told}", verdict, {"against it": against}))
    return claims


def every_fault_is_named(rows: Sequence[Judged]) -> Claim:
    """What is planted, slow or fails: right in kind, and in sort where the registry says which."""
    run = [row for row in rows if not row.skipped and row.group not in ("healthy", "hang")]
    missed = {row.name: f"{row.label}, due was {row.due}" for row in run if row.missed}
    right = sum(not row.missed for row in run)
    sentence = f"what is planted, slow or fails is called what it is: {right} of {len(run)}"
    return Claim(sentence, verdict_of(not missed) if run else "INCONCLUSIVE", {"missed": missed})


def aims(counting: Outcome, foretold: Outcome, *, on_gpu: bool) -> list[Claim]:
    """Each aim of watching with what was measured; INCONCLUSIVE where it was not.

    A step counted as in a trial, over the same step without; the end of a backward, from half of
    its nodes on.
    """
    machine = "a GPU" if on_gpu else "a CPU"
    most = COUNTED[machine]
    cheap = f"counting takes at most {most:.2f} of a step on {machine}"
    early = f"the end of a backward is foretold within {FORETOLD:.0%} of it from its half on"
    return [_at_most(cheap, counting, "ratio", most, ".3f"),
            _at_most(early, foretold, "worst", FORETOLD, ".0%")]  # fmt: skip


def _at_most(sentence: str, ended: Outcome, name: str, limit: float, form: str) -> Claim:
    if ended.result is None:
        return Claim(f"{sentence}: {ended.message}", "INCONCLUSIVE", {})
    value = ended.result[name]
    return Claim(f"{sentence}: {value:{form}}", verdict_of(value <= limit), ended.result)
