"""Claims of the comparison, each with its interval over seeds."""

from collections.abc import Sequence
from typing import Any

from workbook.rooms.quality import table
from workbook.rooms.quality.cells import BASE, CONTROLS, DENSE
from workbook.rooms.quality.planted import KINDS
from workbook.rooms.quality.table import Interval
from workbook.runs.claim import Claim, verdict_of
from workbook.runs.looks import length

Rows = Sequence[dict[str, Any]]
CLOSE = 0.005  # of dense's bits a byte
SHARE = 0.02  # of a task's bytes that may be lost
FOUND = 0.1  # of a task's bytes; fewer are found by chance, one in 26
FALL = 0.02  # bits a byte; where dense's loss falls by less, there is nothing to use at a distance
FROM = 2048  # positions beyond which the loss must still fall
LEARNT = 3.0  # bits a byte; worse models have learnt hardly more than which bytes are frequent
UNLEARNT = f"dense attention itself has more than {LEARNT:g} bits a byte: too little was learnt"
NAMES = {BASE: "NSA", DENSE: "dense"}
NO_SEEDS = "no two seeds of both ended well"


def all_claims(rows: Rows) -> list[Claim]:
    """Claims of every length, and of divergence. Another variant of several seeds is held against
    dense attention as NSA is, and against NSA."""
    found = [nothing_diverged(rows)]
    for tokens in table.lengths(rows):
        for variant in table.compared(rows, tokens):
            found.append(as_good_at_equal_tokens(rows, tokens, variant))
            found.append(better_at_equal_minutes(rows, tokens, variant))
            found.append(falls_with_position(rows, tokens, variant))
            found += [recalls_as_dense(rows, tokens, kind, variant) for kind in KINDS]
            if variant != BASE:
                found.append(as_good_at_equal_tokens(rows, tokens, variant, BASE))
        found += [control_loses(rows, tokens, variant) for variant in CONTROLS]
    return found


def nothing_diverged(rows: Rows) -> Claim:
    """Claim that no seed of any variant diverged; it counts them."""
    ended = [row["outcome"] for row in rows]
    lost = [table.notes([row]).index[0] for row in rows if row["outcome"] not in ("ok", "diverged")]
    count = ended.count("diverged")
    sentence = f"{count} of {len(rows)} trainings diverged, and stand in no mean"
    if not len(rows):
        return Claim.undecided(sentence, "there is none")
    return Claim(sentence, verdict_of(not count), {"outcomes": ended}).over(lost)


def as_good_at_equal_tokens(
    rows: Rows, tokens: int, variant: str = BASE, other: str = DENSE
) -> Claim:
    """Claim that a variant's bits a byte are at most 0.5 % above another's, on the same bytes."""
    base = table.over_seeds(rows, other, tokens, table.bits).mean
    found = table.paired(rows, variant, other, tokens, table.bits)
    share = Interval(tuple(100 * value / base for value in found.values))
    told = f"{share.told('+.2f')} % of {_name(other)}'s bits a byte more, " if share.values else ""
    sentence = f"at {length(tokens)} and equal tokens {_name(variant)} has {told}"
    sentence += f"at most {100 * CLOSE:g} %"
    sentence += "" if told else f" more bits a byte than {_name(other)}"
    sentence += _too_early(rows, tokens) if other == DENSE else ""
    return _decided(rows, tokens, sentence, share, most=100 * CLOSE)


def better_at_equal_minutes(rows: Rows, tokens: int, variant: str = BASE) -> Claim:
    """Claim that it has fewer bits a byte after the seconds that the faster of both took."""
    sentence = f"at {length(tokens)} and equal minutes {_name(variant)} has fewer bits a byte"
    sentence += " than dense"
    if any(row.get("device") == "cpu" for row in rows):
        return Claim.not_here(sentence, "seconds of a CPU say nothing about a GPU's")
    found = table.equal_minutes(rows, tokens, variant)
    sentence += f": {found.told('+.4f')}" if found.values else ""
    sentence += _too_early(rows, tokens)
    return _decided(rows, tokens, sentence, found, most=0.0)


def falls_with_position(rows: Rows, tokens: int, variant: str = BASE) -> Claim:
    """Claim that its loss falls beyond 2k by at least as much as dense's, but for a tenth."""
    sentence = f"at {length(tokens)} {_name(variant)}'s loss falls from position {length(FROM)} on"
    if tokens < 2 * FROM:
        return Claim.not_here(sentence, f"rows of {length(tokens)} do not go far beyond it")
    mine, dense = (table.over_seeds(rows, one, tokens, _fall) for one in (variant, DENSE))
    found = table.paired(rows, DENSE, variant, tokens, _fall)
    if mine.values and dense.values:
        sentence += f" by {mine.told()} bits a byte, as dense's does by {dense.told()}"
    if dense.values and dense.mean < FALL:
        return Claim.not_here(sentence, f"dense attention's own falls by less than {FALL:g}")
    return _decided(rows, tokens, sentence, found, most=dense.mean / 10)


def recalls_as_dense(rows: Rows, tokens: int, kind: str, variant: str = BASE) -> Claim:
    """Claim that it answers at least as many bytes as dense at the trained length."""
    correct = table.accuracy(kind)
    mine, dense = (table.over_seeds(rows, one, tokens, correct) for one in (variant, DENSE))
    found = table.paired(rows, DENSE, variant, tokens, correct)
    mean, other = (f"{x.told('.3f')}, " if x.values else "" for x in (mine, dense))
    sentence = f"at {length(tokens)} {_name(variant)}'s accuracy of {kind} is {mean}at least that "
    sentence += f"of dense, {other}less {SHARE:g}"
    if dense.values and dense.mean < FOUND:
        return Claim.not_here(sentence, f"dense attention itself answers fewer than {FOUND:g}")
    return _decided(rows, tokens, sentence, found, most=SHARE)


def control_loses(rows: Rows, tokens: int, variant: str) -> Claim:
    """Claim that one branch alone has more bits a byte than all three: else the comparison would
    not show a loss of attention."""
    sentence = f"at {length(tokens)} the {variant} branch alone is worse than NSA"
    if not any(row["cell"]["variant"] == variant for row in rows):
        return Claim.not_here(sentence, "this run is without it")
    found = table.paired(rows, BASE, variant, tokens, table.bits)
    if found.values:
        sentence += f": {Interval(tuple(-x for x in found.values)).told('+.4f')} bits a byte"
    return _decided(rows, tokens, sentence, found, most=0.0, aim=False)


def _name(variant: str) -> str:
    return NAMES.get(variant, variant)


def _fall(row: dict[str, Any]) -> float:
    return table.falls(row, FROM)


def _too_early(rows: Rows, tokens: int) -> str:
    """Warning where dense attention does not use distance: NSA learns to copy first, and may be
    passed later (docs/quality.md)."""
    if tokens < 2 * FROM:
        return ""
    dense = table.over_seeds(rows, DENSE, tokens, _fall)
    if not dense.values or dense.mean >= FALL:
        return ""
    told = f"; it may be too early: dense attention itself gains little beyond {length(FROM)}"
    return f"{told} (its loss falls by {dense.told()} there)"


def _decided(
    rows: Rows, tokens: int, sentence: str, found: Interval, most: float, aim: bool = True
) -> Claim:
    """Decide by the whole interval whether `found` is at most `most`."""
    dense = table.over_seeds(rows, DENSE, tokens, table.bits).mean
    evidence = {"values": list(found.values), "at most": most}
    if len(found.values) < 2:
        return Claim.undecided(sentence, NO_SEEDS, evidence)
    if not dense < LEARNT:
        return Claim.not_here(sentence, UNLEARNT)
    if found.high <= most:
        return Claim(sentence, "PASS", evidence)
    if found.low > most:
        return Claim(sentence, "AIM MISSED" if aim else "FAIL", evidence)
    return Claim.undecided(sentence, f"the interval holds {most:g}", evidence)
