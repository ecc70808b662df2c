"""The settlement as tables: its facts, its rows, the retractions. Draws nothing."""

from collections.abc import Mapping, Sequence

import pandas

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.figures import TIMINGS
from nsa.experiments.case_study.loop.design import peak_mib
from nsa.experiments.case_study.settlement.claims import Settled
from nsa.experiments.case_study.settlement.reread import Fact
from nsa.lab.process.trial import Outcome


def facts(found: Mapping[str, Fact], kind: str) -> pandas.DataFrame:
    """One row a fact whose evidence is of that kind: "table", "trial" or "run"."""
    rows = {
        fact.name: {
            "fact": fact.sentence,
            "holds": {True: "yes", False: "NO", None: "not known"}[fact.holds],
            "seen": fact.seen,
            "evidence": ", ".join(fact.evidence),
        }
        for fact in found.values()
        if any(one.startswith(kind) for one in fact.evidence)
    }
    table = pandas.DataFrame.from_dict(rows, orient="index")
    return table if kind != "table" or not len(table) else table.drop(columns="seen")


def rows(settled: Sequence[Settled], kind: str) -> pandas.DataFrame:
    """One row each of the contradictions ("C") or of the hypotheses ("H")."""
    found = {
        one.row.id: {
            "claim": one.row.claim,
            "it predicts": one.row.predicts,
            "verdict": one.verdict,
            "evidence": ", ".join(one.evidence) or "none",
            "because": "; ".join(fact.sentence for fact in one.facts),
            "retracted, or what would settle it": one.settles or one.row.retraction,
        }
        for one in settled
        if one.row.id.startswith(kind)
    }
    return pandas.DataFrame.from_dict(found, orient="index")


def trials(ended: Mapping[str, Outcome]) -> pandas.DataFrame:
    """How each trial ended, and after how long."""
    found = {name: (one.status, round(one.seconds, 1), one.message) for name, one in ended.items()}
    columns = ["ended", "seconds", "message"]
    return pandas.DataFrame.from_dict(found, orient="index", columns=columns)


def memory() -> pandas.DataFrame:
    """The memory table beside what shapes say: of the loop as it was, and with a right window."""
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
    """Nine step times of the reports, by their operations."""
    columns = ["step", "seconds", "operations", "us an operation", "said of it"]
    rows = [(str(t), t.seconds, f"{t.operations:,}", f"{t.microseconds:.1f}", t.said)
            for t in TIMINGS]  # fmt: skip
    return pandas.DataFrame(rows, columns=columns).set_index("step")


def to_metrics(found: Mapping[str, Fact], ended: Mapping[str, Outcome]) -> list[dict]:
    """Rows of metrics.csv: a fact as 1, 0 or nothing where not known; a trial's seconds. All of it
    is computed on the CPU, whichever GPU the machine has."""
    columns = ("operation", "mode", "metric", "unit", "median", "config")
    rows: list[tuple] = []
    for fact in found.values():
        holds = None if fact.holds is None else float(fact.holds)
        config = {"fact": fact.name, "evidence": list(fact.evidence), "seen": fact.seen}
        rows.append(("settlement", "", "fact holds", "1", holds, config))
    for name, one in ended.items():
        seconds = one.seconds if one.status == "ok" else None
        config = {"trial": name, "outcome": one.status}
        rows.append(("settlement", "trial", "latency", "s", seconds, config))
    return [dict(zip(columns, row, strict=True)) | {"device": "cpu"} for row in rows]
