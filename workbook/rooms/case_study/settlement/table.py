"""Tables of the settlement: its facts, its rows, the reports' peaks and timings. Draws nothing."""

from collections.abc import Mapping, Sequence

import pandas

from workbook.rooms.case_study import figures as case_study
from workbook.rooms.case_study.figures import HELD_OUT_US, OFF
from workbook.rooms.case_study.loop.design import peak_mib
from workbook.rooms.case_study.settlement.claims import Fact, Settled, short


def facts(found: Mapping[str, Fact], kind: str) -> pandas.DataFrame:
    """One row for each fact whose evidence is of that kind: "table", "trial" or "run"."""
    rows = {
        fact.name: {
            "number": fact.sentence,
            "is": "" if fact.value is None else f"{short(fact.value)} {fact.unit}".strip(),
            "asked": f"{fact.relation} {short(fact.limit)}",
            "holds": {True: "yes", False: "no", None: fact.seen}[fact.holds],
            "evidence": ", ".join(fact.evidence),
        }
        for fact in found.values()
        if fact.kind == kind
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


def rows(settled: Sequence[Settled], kind: str) -> pandas.DataFrame:
    """One row for each Row of that kind in claims.KINDS, with the facts for and against it.

    For: of the side that holds, or the confirming side if none does; against: of all others.
    """
    found = {}
    for one in settled:
        if one.row.id[0] == kind:
            sides = list(one.row.sides)
            chosen = one.verdict if one.verdict in sides else sides[0]
            others = [verdict for verdict in sides if verdict != chosen]
            found[one.row.id] = {
                "claim": one.row.claim,
                "it predicts": one.row.predicts,
                "verdict": one.verdict,
                "facts for it": "; ".join(one.told(chosen)),
                "facts for another verdict": "; ".join(one.told(*others)),
                "evidence": ", ".join(one.evidence),
                "retracted, or what would settle it": one.settles or one.row.retraction,
            }
    return pandas.DataFrame.from_dict(found, orient="index")


def memory() -> pandas.DataFrame:
    """Memory table with predictions from shapes: of the loop as it was, and with a right window."""
    found = {}
    for (layers, tokens), mib in case_study.PEAKS_MIB.items():
        copies, estimate = peak_mib(layers, tokens), case_study.ESTIMATE_MIB[tokens]
        found[layers, tokens] = {
            "reported, MiB": f"{mib:,.0f}",
            "copies": f"{copies:,.0f}",
            "off by": f"{copies / mib - 1:+.1%}",
            "its estimator": f"{estimate:,.0f}" if layers == 5 else "",
            "was off by": f"{estimate / mib - 1:+.1%}" if layers == 5 else "",
            "with a right window": f"{peak_mib(layers, tokens, right_window=True):,.0f}",
        }
    table = pandas.DataFrame.from_dict(found, orient="index")
    table.index.names = ["layers", "T"]
    return table


def timings() -> pandas.DataFrame:
    """Every known step by its operations, and its prediction by the constant of all others."""
    columns = ["step", "seconds", "operations", "us each", "others give", "off by", "source"]
    rows = [
        (str(t), t.seconds, f"{t.operations:,}", f"{t.microseconds:.1f}", f"{us:.1f}",
         f"{OFF[t]:+.0%}", t.said)
        for t, us in HELD_OUT_US.items()
    ]  # fmt: skip
    return pandas.DataFrame(rows, columns=columns).set_index("step")
