"""Claims of the selfcheck, each decided by rows and never by hand."""

from collections.abc import Callable, Sequence

from whyhung.process.trial import Outcome
from workbook.rooms.selfcheck import table
from workbook.rooms.selfcheck.judged import Judged
from workbook.runs.claim import Claim, aim_of, verdict_of

COUNTED = {"a GPU": 1.05, "a CPU": 1.10}  # of a step
END_OFF = 0.25  # of a backward


def must_hold(rows: Sequence[Judged]) -> list[Claim]:
    """Claims that must hold; NOT APPLICABLE where the run was not to include their programs."""
    return [every_fault_is_named(rows), _of(table.AIMS[0], rows, verdict_of)]


def should_hold(rows: Sequence[Judged]) -> list[Claim]:
    """Aims, and again those of programs written after the rules were frozen, alone."""
    frozen = [row for row in rows if row.batch == "frozen"]
    return [
        *(_of(aim, rows, aim_of) for aim in table.AIMS[1:]),
        *(_of(aim, frozen, aim_of, "written after the rules: ") for aim in table.AIMS),
    ]


def _of(
    aim: table.Aim, rows: Sequence[Judged], word: Callable[[bool], str], which: str = ""
) -> Claim:
    """Make the claim that an aim is met at each load; word: verdict_of or aim_of."""
    found = {load: aim.count(rows, load) for load in table.loads_of(rows)}
    told = [f"{count} of {of} at load {load}" for load, (count, of) in found.items() if of]
    sentence = f"{which}{aim.text}, {aim.wanted} wanted"
    if not told:
        return Claim.not_here(sentence, "this run is of none that this machine can hold")
    met = all(aim.met(rows, load) for load in found)
    against = [f"{row.name}, load {row.load}: {row.label}" for row in aim.against(rows)]
    claim = Claim(f"{sentence}: {'; '.join(told)}", word(met), {"against it": against})
    return claim.over(aim.lost(rows))


def every_fault_is_named(rows: Sequence[Judged]) -> Claim:
    """Claim that what is planted, slow or fails gets the right kind, and sort if registered."""
    run = [row for row in rows if not row.skipped and row.group not in ("healthy", "hang")]
    missed = {row.name: f"{row.label}, due was {row.due}" for row in run if row.missed}
    right = sum(not row.missed for row in run)
    sentence = f"what is planted, slow or fails is called what it is: {right} of {len(run)}"
    if not run:
        return Claim.not_here(sentence, "this run is of none that this machine can hold")
    late = [row for row in rows if row.late and row.group not in ("healthy", "hang")]
    claim = Claim(sentence, verdict_of(not missed), {"missed": missed})
    return claim.over(f"{row.name}, load {row.load}, round {row.round}" for row in late)


def of_watching(counting: Outcome, estimated: Outcome, *, on_gpu: bool) -> list[Claim]:
    """Aims of watching, each with its measurement; INCONCLUSIVE without one.

    These are a step counted as in a trial relative to an uncounted step, and the estimated end of a
    backward, once half of its nodes have run.
    """
    machine = "a GPU" if on_gpu else "a CPU"
    most = COUNTED[machine]
    cheap = f"counting takes at most {most:.2f} of a step on {machine}"
    early = f"the end of a backward is estimated within {END_OFF:.0%} of it from its half on"
    return [_at_most(cheap, counting, "ratio", most, ".3f"),
            _at_most(early, estimated, "worst", END_OFF, ".0%")]  # fmt: skip


def _at_most(sentence: str, ended: Outcome, name: str, limit: float, form: str) -> Claim:
    if ended.result is None:
        return Claim(f"{sentence}: {ended.message}", "INCONCLUSIVE", {})
    value = ended.result[name]
    return Claim(f"{sentence}: {value:{form}}", aim_of(value <= limit), ended.result)
