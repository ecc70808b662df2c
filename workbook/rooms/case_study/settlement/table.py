"""Tables of the settlement: its facts, its rows, the retractions. Draws nothing."""

from collections.abc import Mapping, Sequence

import pandas

from whyhung.process.trial import Outcome
from workbook.rooms.case_study import figures as case_study
from workbook.rooms.case_study.figures import ALL_TIMINGS, held_out_us
from workbook.rooms.case_study.loop.design import peak_mib
from workbook.rooms.case_study.settlement.claims import Settled
from workbook.rooms.case_study.settlement.facts import Fact, of_kind, short


def facts(found: Mapping[str, Fact], kind: str) -> pandas.DataFrame:
    """One row for each fact whose evidence is of that kind: "table", "trial" or "run"."""
    rows = {
        fact.name: {
            "number": fact.sentence,
            "is": "" if fact.value is None else f"{short(fact.value)} {fact.unit}".strip(),
            "asked": f"{fact.relation} {short(fact.limit)}",
            "holds": {True: "yes", False: "no", None: fact.why}[fact.holds],
            "evidence": ", ".join(fact.evidence),
        }
        for fact in of_kind(found, kind).values()
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


def trials(ended: Mapping[str, Outcome]) -> pandas.DataFrame:
    """Status of each trial at its end, and its duration."""
    found = {name: (one.status, round(one.seconds, 1), one.message) for name, one in ended.items()}
    columns = ["ended", "seconds", "message"]
    return pandas.DataFrame.from_dict(found, orient="index", columns=columns)


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
    each = [t.microseconds for t in ALL_TIMINGS]
    rows = [
        (str(t), t.seconds, f"{t.operations:,}", f"{us:.1f}", f"{p:.1f}", f"{p / us - 1:+.0%}",
         t.said)
        for t, us, p in zip(ALL_TIMINGS, each, held_out_us(each), strict=True)
    ]  # fmt: skip
    return pandas.DataFrame(rows, columns=columns).set_index("step")


def to_metrics(found: Mapping[str, Fact], ended: Mapping[str, Outcome]) -> list[dict]:
    """Rows of metrics.csv: each fact's number with its condition, and each trial's seconds.

    The device of a row is the one that its trial reports; most ran on the CPU.
    """
    columns = ("operation", "mode", "metric", "unit", "median", "config", "device")
    ran_on = {name: (one.result or {}).get("device", "cpu") for name, one in ended.items()}
    rows: list[tuple] = []
    for fact in found.values():
        trials = (one.removeprefix("trial:") for one in fact.evidence)
        device = max((ran_on.get(name, "cpu") for name in trials), key=len, default="cpu")
        told = {"relation": fact.relation, "limit": fact.limit, "holds": fact.holds}
        config = {"fact": fact.name, "evidence": list(fact.evidence), "why": fact.why}
        config |= told
        rows.append(("settlement", "", "fact", fact.unit or "1", fact.value, config, device))
    for name, one in ended.items():
        seconds = one.seconds if one.status == "ok" else None
        config = {"trial": name, "outcome": one.status}
        rows.append(("settlement", "trial", "latency", "s", seconds, config, ran_on[name]))
    return [dict(zip(columns, row, strict=True)) for row in rows]
