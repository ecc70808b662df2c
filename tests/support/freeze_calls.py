"""What a committed run's records say when they are read again: tables, verdicts and figures.

The only place where the freeze test names functions of the rooms: who renames one renames it here.
Left out is what needs more than the records hold: trials' own evidence (03, 05), pictures of
mutants (00), profiles (04), and claims about rows that are not in metrics.csv.
"""

from pathlib import Path

import pandas

from nsa.experiments.case_study.settlement import claims as settlement_claims
from nsa.experiments.case_study.settlement import plots as settlement_plots
from nsa.experiments.case_study.settlement import reread
from nsa.experiments.case_study.settlement import table as settlement_table
from nsa.experiments.case_study.settlement.reread import Fact
from nsa.experiments.case_study.step5 import plots as step5_plots
from nsa.experiments.case_study.step5 import table as step5_table
from nsa.experiments.comparison import claims as comparison_claims
from nsa.experiments.comparison import plots as comparison_plots
from nsa.experiments.comparison import table as comparison_table
from nsa.experiments.correctness import table as correctness_table
from nsa.experiments.memory import claims as memory_claims
from nsa.experiments.memory import plots as memory_plots
from nsa.experiments.memory import table as memory_table
from nsa.experiments.selfcheck import claims as selfcheck_claims
from nsa.experiments.selfcheck import plots as selfcheck_plots
from nsa.experiments.selfcheck import table as selfcheck_table
from nsa.experiments.selfcheck.judged import Judged
from nsa.experiments.throughput import claims as throughput_claims
from nsa.experiments.throughput import plots as throughput_plots
from nsa.experiments.throughput import table as throughput_table
from nsa.workbook import metrics
from nsa.workbook.store import Run

LINEAR = ("gather", "packed", "flex")


def again(folder: Path) -> dict[str, dict]:
    """{"tables": by name, "claims": by name, "figures": by name} of the run in `folder`."""
    read = {
        "00": correctness, "01": memory, "02": comparison, "03": step5, "04": throughput,
        "05": tracing, "06": settlement, "07": selfcheck,
    }  # fmt: skip
    df = Run(folder).metrics()
    found = read[folder.name[:2]](df, folder)
    return {"tables": {}, "claims": {}, "figures": {}} | found


def correctness(df, folder):
    kept = correctness_table.kept_lessons(folder.name, folder.parents[1])
    return {"tables": {"lessons": correctness_table.lessons(kept), "metrics": df}}


def memory(df, folder):
    growing = memory_table.growing(df)
    claims = [
        memory_claims.case_study_is_not_quadratic(),
        memory_claims.dense_masks_cost_more(df, LINEAR),
        memory_claims.production_fits(df),
        *(memory_claims.linear_backend_is_linear(df, backend) for backend in LINEAR),
    ]
    names = ["case study", "dense masks", "production", *LINEAR]
    return {
        "tables": {
            "metrics": df,
            "peaks": memory_table.peaks(df),
            "growing": growing,
            "exponents": memory_table.exponents(growing),
            "case study": memory_table.beside_the_case_study(df),
        },
        "claims": dict(zip(names, claims, strict=True)),
        "figures": {
            "scaling": memory_plots.scaling(df, case_study=memory_table.case_study_curve()),
            "exponents": memory_plots.exponents(df),
            "categories": memory_plots.categories(df[df["backend"] != "sequential"]),
        },
    }


def comparison(df, folder):
    table, plots = comparison_table, comparison_plots
    claims = [
        comparison_claims.memory_is_not_identical(df),
        comparison_claims.nothing_beats_the_limit(df),
        *comparison_claims.aims(df),
    ]
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
        "claims": {str(i): claim for i, claim in enumerate(claims)},
        "figures": {
            "latency": plots.latency(df),
            "of limit": plots.of_limit(df),
            "memory": plots.memory(df),
        },
    }


def step5(df, folder):
    return {
        "tables": {
            "metrics": df,
            "timings": step5_table.timings(),
            "memory": step5_table.memory(),
        },
        "figures": {"memory": step5_plots.memory_table()},
    }


def throughput(df, folder):
    table, claims = throughput_table, throughput_claims
    names = (
        "speed", "step_times", "meters", "phases", "memory_over_steps", "variants", "scaling",
        "break_even", "beside_the_case_study", "cells", "notes", "losses", "final_losses",
    )  # fmt: skip
    said = {
        "broke": claims.nothing_broke(df),
        "meter": claims.the_meter_is_right(df),
        "compiled": claims.nothing_is_compiled_late(df),
        "waits": claims.no_step_waits_for_the_device(df),
        "flat": claims.memory_is_flat(df),
        "alike": claims.backends_learn_alike(df),
    }
    said |= {f"aim {i}": claim for i, claim in enumerate(throughput_claims.aims(df))}
    figures = {"speed": throughput_plots.speed(df), "memory": throughput_plots.memory(df)}
    if len(table.phases(df)):
        figures["phases"] = throughput_plots.phases(df)
    if len(table.losses(df)):
        figures["losses"] = throughput_plots.losses(df)
    if len(table.memory_over_steps(df)):
        figures["memory_over_steps"] = throughput_plots.memory_over_steps(df)
    if len(table.labelled(df)) and (table.labelled(df)["ranks"] > 1).any():
        figures["scaling"] = throughput_plots.scaling(df)
    tables = {name: getattr(table, name)(df) for name in names}
    return {"tables": {"metrics": df} | tables, "claims": said, "figures": figures}


def tracing(df, folder):
    files = sorted(folder.glob("*.csv"))
    return {"tables": {file.stem: pandas.read_csv(file) for file in files}}


def settlement(df, folder):
    facts = {
        c["fact"]: Fact(c["fact"], "", None if pandas.isna(m) else bool(m), tuple(c["evidence"]))
        for c, m in zip(metrics.configs(df), df["median"], strict=True)
        if "fact" in c
    }
    settled = settlement_claims.settle(facts)
    claims = settlement_claims.all_claims(settled)
    now = pandas.DataFrame([{"fact": fact.name, "holds": fact.holds} for fact in reread.reread()])
    return {
        "tables": {
            "metrics": df,
            "contradictions": settlement_table.rows(settled, "C")[["verdict"]],
            "hypotheses": settlement_table.rows(settled, "H")[["verdict"]],
            "memory": settlement_table.memory(),
            "timings": settlement_table.timings(),
            "facts of today": now,
        },
        "claims": {one.row.id: claim for one, claim in zip(settled, claims, strict=True)},
        "figures": {
            "memory": settlement_plots.memory(),
            "microseconds": settlement_plots.microseconds(),
            "verdicts": settlement_plots.verdicts(settled),
        },
    }


def selfcheck(df, folder):
    rows = []
    for config, (_, line) in zip(metrics.configs(df), df.iterrows(), strict=True):
        if line["metric"] != "time_to_verdict":
            continue
        expected = [one.partition(":") for one in config["expected"].split(" or ")]
        found, _, what = config["found"].partition(":")
        rows.append(
            Judged(
                config["fault"],
                line["mode"] == "control",
                tuple(kind for kind, _, _ in expected),
                expected[0][2],
                found,
                what,
                config["rule"],
                seconds=float(line["median"]),
                named_s=config["rested_s"],
                round=int(line["x_value"]),
                skipped=config["skipped"],
            )
        )
    claims = selfcheck_claims.all_claims(rows)
    return {
        "tables": {
            "metrics": df,
            "faults": selfcheck_table.matrix_of(rows, controls=False),
            "controls": selfcheck_table.matrix_of(rows, controls=True),
            "confusion": selfcheck_table.confusion(rows),
        },
        "claims": {str(i): claim for i, claim in enumerate(claims)},
        "figures": {"time": selfcheck_plots.time_to_verdict(rows)},
    }
