"""The sentences of the selfcheck, each decided by rows and never by hand."""

from collections.abc import Sequence

from nsa.experiments.selfcheck.judged import Judged
from nsa.lab.process.trial import Outcome
from nsa.workbook.claim import Claim, verdict_of

NAMED_WITHIN_S = 15.0
COUNTED = {"a GPU": 1.05, "a CPU": 1.10}  # of a step
FORETOLD = 0.25  # of a backward
FAULTS, CONTROLS = 24, 8


def all_claims(rows: Sequence[Judged]) -> list[Claim]:
    """Every claim; one about what was not run is INCONCLUSIVE."""
    return [
        every_fault_is_named(rows),
        no_control_is_called_a_hang(rows),
        no_control_is_accused(rows),
        hangs_are_told_apart(rows),
        hangs_are_named_soon(rows),
        rounds_agree(rows),
        there_are_enough(rows),
    ]


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


def every_fault_is_named(rows: Sequence[Judged]) -> Claim:
    """Right in kind, and in sort where the registry says which."""
    run = _run(rows, control=False)
    missed = {row.name: f"{row.label}, planted was {row.due}" for row in run if row.missed}
    right = sum(not row.missed for row in run)
    sentence = f"every planted fault is called what it is: {right} of {len(run)}"
    return Claim(sentence, _verdict(not missed, run), {"missed": missed})


def no_control_is_called_a_hang(rows: Sequence[Judged]) -> Claim:
    """Slow, late to start, compiling or silent in native code: none of that hangs."""
    run = _run(rows, control=True)
    hung = [row.name for row in run if row.found == "HANG"]
    sentence = f"no control is called a HANG: {len(hung)} of {len(run)}"
    return Claim(sentence, _verdict(not hung, run), {"called so": hung})


def no_control_is_accused(rows: Sequence[Judged]) -> Claim:
    """False alarms of any other kind."""
    run = _run(rows, control=True)
    accused = {row.name: row.label for row in run if row.missed}
    sentence = f"no control is accused of anything else: {len(accused)} false alarms in {len(run)}"
    return Claim(sentence, _verdict(not accused, run), {"false alarms": accused})


def hangs_are_told_apart(rows: Sequence[Judged]) -> Claim:
    """By what stopped them, not by a timer."""
    run = [row for row in _run(rows, control=False) if "HANG" in row.expected]
    hung = [row for row in run if row.found == "HANG"]
    sorts = ", ".join(sorted({row.found_what for row in hung})) or "none was run"
    unproven = [row.name for row in hung if not row.because]
    sentence = f"hangs are told apart, each with its proof: {sorts}"
    return Claim(sentence, _verdict(not unproven, run), {"without a proof": unproven})


def hangs_are_named_soon(rows: Sequence[Judged]) -> Claim:
    """Those with a proof; one without it takes a rerun at twice the deadline."""
    hung = [row for row in rows if row.found == "HANG" and row.right and row.named_s is not None]
    proven = [row for row in hung if row.found_what != "unproven-native"]
    rested = {f"{row.name}, round {row.round}": row.named_s for row in proven}
    sentence = f"a proven hang is named within {NAMED_WITHIN_S:g} s of the freeze"
    if rested:
        sentence += f"; the latest of {len(rested)} after {max(rested.values()):.1f} s"
    late = {name: seconds for name, seconds in rested.items() if seconds > NAMED_WITHIN_S}
    return Claim(sentence, _verdict(not late, rested), {"late": late})


def rounds_agree(rows: Sequence[Judged]) -> Claim:
    """The same fault gets the same verdict in every round."""
    rounds = len({row.round for row in rows})
    if rounds < 2:
        return Claim.undecided("rounds agree", "there was one")
    found: dict[str, set[str]] = {}
    for row in rows:
        if not row.skipped:
            found.setdefault(row.name, set()).add(row.found)
    torn = {name: sorted(kinds) for name, kinds in found.items() if len(kinds) > 1}
    sentence = f"{rounds} rounds agree on all {len(found)} faults and controls"
    return Claim(sentence, _verdict(not torn, found), {"torn": torn})


def there_are_enough(rows: Sequence[Judged]) -> Claim:
    """A matrix of a few rows says little."""
    faults, controls = (
        len({row.name for row in _run(rows, control=kind)}) for kind in (False, True)
    )
    skipped = {row.name: row.skipped for row in rows if row.skipped}
    enough = faults >= FAULTS and controls >= CONTROLS
    sentence = (
        f"{faults} faults and {controls} controls were planted, {FAULTS} and {CONTROLS} are enough"
    )
    return Claim(sentence, "PASS" if enough else "INCONCLUSIVE", {"skipped": skipped})


def _at_most(sentence: str, ended: Outcome, name: str, limit: float, form: str) -> Claim:
    if ended.result is None:
        return Claim(f"{sentence}: {ended.message}", "INCONCLUSIVE", {})
    value = ended.result[name]
    return Claim(f"{sentence}: {value:{form}}", verdict_of(value <= limit), ended.result)


def _run(rows: Sequence[Judged], *, control: bool) -> list[Judged]:
    return [row for row in rows if not row.skipped and row.control == control]


def _verdict(holds: bool, over: object) -> str:
    """INCONCLUSIVE where there was nothing to hold over."""
    return verdict_of(holds) if over else "INCONCLUSIVE"
