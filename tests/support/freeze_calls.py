"""Tables, verdicts and figures of a committed run's records, read again.

With `claim_calls` the only place where the freeze test names functions of the rooms: who renames
one renames it here.
Left out is what needs more than the records hold: trials' own evidence (03, 05), pictures of
mutants (00), profiles (04), and claims about rows that are not in metrics.csv.
"""

from pathlib import Path

import pandas
from claim_calls import claims_of, room

from workbook.runs import parameters
from workbook.runs.store import Run


def again(folder: Path) -> dict[str, dict]:
    """{"tables": by name, "claims": by name, "figures": by name} of the run in `folder`."""
    read = {
        "00": correctness, "01": memory, "02": comparison, "03": metrics_alone, "04": throughput,
        "05": tracing, "06": settlement, "07": selfcheck,
        "08": metrics_alone, "09": estimate, "10": soak, "11": decode,
        "12": long_context, "13": quality,
    }  # fmt: skip
    df = Run(folder).metrics()
    of, calls = claims_of(folder)
    claims = {name: call(of) for name, call in calls.items()}
    found = read[folder.name[:2]](df, folder, of)
    return {"tables": {}, "figures": {}, "claims": claims} | found


def metrics_alone(df, folder, of):
    """Table of the metrics alone: everything else in this notebook needs its trials' evidence."""
    return {"tables": {"metrics": df}}


def estimate(df, folder, of):
    here = room("estimate", "plots", "table")
    return {
        "tables": {"errors": here.table.errors(df), "worst": here.table.worst(df)},
        "figures": {"against": here.plots.against(df), "errors": here.plots.errors(df)},
    }


def soak(df, folder, of):
    return {"tables": {"drifts": room("soak", "table").table.drifts(of)}}


def decode(df, folder, of):
    here = room("decode", "plots", "table")
    frame = here.table.frame(of)
    return {
        "tables": {
            "metrics": df,
            "times": here.table.times(frame, True),
            "ratios": here.table.ratios(frame, of),
            "memory": here.table.memory(frame),
        },
        "figures": {"latency": here.plots.latency(of, "", True)},
    }


def quality(df, folder, of):
    """Its rows are a record beside the run, which its parameters name."""
    here = room("quality", "claims", "plots", "table", "trials")
    rows = here.trials.of_run(folder)
    claims = {str(n): one for n, one in enumerate(here.claims.all_claims(rows))}
    return {
        "tables": {
            "metrics": df,
            "overview": here.table.overview(rows),
            "selected": here.table.selected(rows),
        },
        "figures": {"by position": here.plots.by_position(rows, "")},
        "claims": claims,
    }


def long_context(df, folder, of):
    """Its rows are a record beside the run, which its parameters name."""
    here = room("long_context", "claims", "plots", "table", "trials")
    rows = here.trials.read(parameters.read_file(folder / "parameters.yaml")["rows"])
    claims = {str(n): one for n, one in enumerate(here.claims.all_claims(rows))}
    figures = {"efficiency": here.plots.efficiency(rows, ""), "split": here.plots.split(rows, "")}
    return {
        "tables": {
            "metrics": df,
            "times": here.table.frame(rows).reset_index(),
            "faster": here.table.faster(rows).reset_index(),
        },
        "figures": figures,
        "claims": claims,
    }


def correctness(df, folder, of):
    table = room("correctness", "table").table
    kept = table.kept_lessons(folder.name, folder.parents[1])
    return {"tables": {"lessons": table.lessons(kept), "metrics": df}}


def memory(df, folder, of):
    here = room("memory", "plots", "table")
    plots, table = here.plots, here.table
    growing = table.growing(df)
    return {
        "tables": {
            "metrics": df,
            "peaks": table.peaks(df),
            "growing": growing,
            "exponents": table.exponents(growing),
            "case study": table.beside_the_case_study(df),
        },
        "figures": {
            "scaling": plots.scaling(df, case_study=table.case_study_curve()),
            "exponents": plots.exponents(df),
            "categories": plots.categories(df[df["backend"] != "sequential"]),
        },
    }


def comparison(df, folder, of):
    here = room("comparison", "plots", "table")
    plots, table = here.plots, here.table
    return {
        "tables": {
            "metrics": df,
            "forward": table.shown(df, "latency", "forward"),
            "backward": table.shown(df, "latency", "backward"),
            "peak": table.shown(df, "peak_memory", "backward"),
            "notes": table.notes(df),
            "accuracy": table.accuracy(df),
            "fastest": table.fastest(df),
            "break even": table.break_even(df),
            "unions": table.unions(df),
        },
        "figures": {
            "latency": plots.latency(df),
            "of limit": plots.of_limit(df),
            "memory": plots.memory(df),
        },
    }


def throughput(df, folder, of):
    here = room("throughput", "plots", "table")
    plots, table = here.plots, here.table
    names = (
        "speed", "step_times", "meters", "phases", "memory_over_steps", "variants", "scaling",
        "break_even", "beside_the_case_study", "cells", "notes", "losses", "final_losses",
    )  # fmt: skip
    drawn = {name: bool(len(getattr(table, name)(df)))
             for name in ("phases", "losses", "memory_over_steps")}  # fmt: skip
    cells = table.labelled(df)
    drawn |= {"speed": True, "memory": True, "scaling": len(cells) and (cells["ranks"] > 1).any()}
    figures = {name: getattr(plots, name)(df) for name, wanted in drawn.items() if wanted}
    tables = {name: getattr(table, name)(df) for name in names}
    return {"tables": {"metrics": df} | tables, "figures": figures}


def tracing(df, folder, of):
    files = sorted(folder.glob("*.csv"))
    return {"tables": {file.stem: pandas.read_csv(file) for file in files}}


def settlement(df, folder, of):
    here = room("case_study.settlement", "claims", "plots", "table")
    plots, table = here.plots, here.table
    facts = here.claims.all_facts(folder).values()
    now = [{"fact": fact.name, "holds": fact.holds} for fact in facts if fact.kind == "table"]
    return {
        "tables": {
            "metrics": df,
            "memory": table.memory(),
            "timings": table.timings(),
            "facts of today": pandas.DataFrame(now),
        },
        "figures": {"memory": plots.memory(), "microseconds": plots.microseconds()},
    }


def selfcheck(df, folder, of):
    here = room("selfcheck", "plots", "table")
    return {
        "tables": {
            "metrics": df,
            "faults": here.table.matrix_of(of, controls=False),
            "controls": here.table.matrix_of(of, controls=True),
            "confusion": here.table.confusion(of),
        },
        "figures": {"matrices": here.plots.matrices(of)},
    }
