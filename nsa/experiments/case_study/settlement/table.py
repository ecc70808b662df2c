"""The settlement as tables: its facts, its rows, the retractions. Draws nothing."""

from collections.abc import Mapping, Sequence

import pandas

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.figures import TIMINGS
from nsa.experiments.case_study.loop.design import production
from nsa.experiments.case_study.loop.saved import held, with_correct_window
from nsa.experiments.case_study.settlement.claims import Settled
from nsa.experiments.case_study.settlement.reread import Fact
from nsa.experiments.case_study.settlement.trials import Ended

MIB = 2**20


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


def trials(ended: Mapping[str, Ended]) -> pandas.DataFrame:
    """How each trial ended, and after how long."""
    found = {
        name: {"ended": one.outcome, "seconds": round(one.seconds, 1), "message": one.message}
        for name, one in ended.items()
    }
    columns = ["ended", "seconds", "message"]
    return pandas.DataFrame.from_dict(found, orient="index", columns=columns)


def memory() -> pandas.DataFrame:
    """The memory table beside what shapes say: of the loop as it was, and with a right window."""
    found = {}
    cells = [(5, tokens, mib) for tokens, mib in case_study.MEMORY_MIB.items()]
    for layers, tokens, mib in [*cells, (12, 2048, case_study.PRODUCTION_PEAK_MIB)]:
        copies = held(production(layers), tokens).total / MIB
        right = held(with_correct_window(production(layers)), tokens).total / MIB
        estimate = case_study.ESTIMATE_MIB[tokens] if layers == 5 else None
        found[(layers, tokens)] = {
            "reported, MiB": f"{mib:,.0f}",
            "copies": f"{copies:,.0f}",
            "off by": f"{copies / mib - 1:+.1%}",
            "its estimator": "" if estimate is None else f"{estimate:,.0f}",
            "was off by": "" if estimate is None else f"{estimate / mib - 1:+.1%}",
            "with a right window": f"{right:,.0f}",
        }
    table = pandas.DataFrame.from_dict(found, orient="index")
    table.index = pandas.MultiIndex.from_tuples(found, names=["layers", "T"])
    return table


def timings() -> pandas.DataFrame:
    """Nine step times of the reports, by their operations."""
    return pandas.DataFrame(
        {
            "step": [str(t) for t in TIMINGS],
            "seconds": [t.seconds for t in TIMINGS],
            "operations": [f"{t.operations:,}" for t in TIMINGS],
            "us an operation": [f"{t.microseconds:.1f}" for t in TIMINGS],
            "said of it": [t.said for t in TIMINGS],
        }
    ).set_index("step")


def to_metrics(found: Mapping[str, Fact], ended: Mapping[str, Ended]) -> list[dict]:
    """Rows of metrics.csv: a fact as 1, 0 or nothing where not known; a trial's seconds."""
    lines = [
        {"operation": "settlement", "mode": "", "metric": "fact holds", "unit": "1",
         "median": None if fact.holds is None else float(fact.holds),
         "config": {"fact": fact.name, "evidence": list(fact.evidence), "seen": fact.seen}}
        for fact in found.values()
    ]  # fmt: skip
    return lines + [
        {"operation": "settlement", "mode": "trial", "metric": "latency", "unit": "s",
         "median": one.seconds if one.outcome == "ok" else None,
         "config": {"trial": name, "outcome": one.outcome}}
        for name, one in ended.items()
    ]  # fmt: skip
