"""What a committed run's records say when they are read again: tables, verdicts and figures.

The only place where the freeze test names functions of the rooms: who renames one renames it here.
Left out is what needs more than the records hold: trials' own evidence (03, 05), pictures of
mutants (00), profiles (04), and claims about rows that are not in metrics.csv.
"""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pandas
import yaml

from nsa.experiments.selfcheck.judged import Judged
from nsa.lab.process.trial import Outcome
from nsa.workbook import metrics
from nsa.workbook.store import Run


def room(name: str, *parts: str) -> SimpleNamespace:
    """The modules `parts` of that room of nsa.experiments."""
    loaded = {part: import_module(f"nsa.experiments.{name}.{part}") for part in parts}
    return SimpleNamespace(**loaded)


LINEAR = ("gather", "packed", "flex")


def again(folder: Path) -> dict[str, dict]:
    """{"tables": by name, "claims": by name, "figures": by name} of the run in `folder`."""
    read = {
        "00": correctness, "01": memory, "02": comparison, "03": step5, "04": throughput,
        "05": tracing, "06": settlement, "07": selfcheck,
        "08": ab, "09": estimate, "10": soak, "11": decode,
    }  # fmt: skip
    df = Run(folder).metrics()
    found = read[folder.name[:2]](df, folder)
    return {"tables": {}, "claims": {}, "figures": {}} | found


def ab(df, folder):
    """Its rules need the trials' processes; what is held is the table that they left."""
    return {"tables": {"metrics": df}}


def estimate(df, folder):
    here = room("estimate", "claims", "plots", "table")
    return {
        "tables": {"errors": here.table.errors(df), "worst": here.table.worst(df)},
        "claims": {
            "peak": here.claims.peak_is_foretold(df),
            "backward": here.claims.phase_is_foretold(df, "backward"),
            "reserved": here.claims.reserved_is_foretold(df),
            "out of memory": here.claims.what_does_not_fit_is_foretold(df),
        },
        "figures": {"against": here.plots.against(df), "errors": here.plots.errors(df)},
    }


def soak(df, folder):
    """Of its samples: they are there also of a run that was ended before it judged."""
    here = room("soak", "claims", "plots", "table", "trials")
    given = yaml.safe_load((folder / "parameters.yaml").read_text())
    found = here.trials.stored(folder, given["steps"], given["overlap"])
    claims = {name: here.claims.memory_does_not_grow(found, name) for name in here.table.SERIES}
    claims["speed"] = here.claims.speed_does_not_drift(found)
    claims["restart"] = here.claims.goes_on_after_the_restart(found)
    return {"tables": {"drifts": here.table.drifts(found)}, "claims": claims}


def decode(df, folder):
    """Of what each size's process left."""
    here = room("decode", "cells", "claims", "plots", "table", "trials")
    found = []
    for spec in sorted(folder.glob("trials/*/spec.json")):
        left = json.loads(spec.with_name("result.json").read_text())
        cell = json.loads(spec.read_text())["cell"]
        ended = Outcome(left["status"], left["result"], 0.0, "", 0)
        found.append(here.trials.result_of(here.cells.Cell.from_dict(cell), ended, ()))
    frame, gpu = here.table.frame(found), df["device"].iloc[0]
    claims = [here.claims.is_accurate(frame), here.claims.nothing_broke(frame)]
    claims += [here.claims.reads_only_its_keys(found), here.claims.reads_as_the_paper_says(found)]
    claims += here.claims.aims(found, gpu)
    return {
        "tables": {
            "metrics": df,
            "times": here.table.times(frame, True),
            "ratios": here.table.ratios(frame, found),
            "memory": here.table.memory(frame),
        },
        "claims": {str(i): claim for i, claim in enumerate(claims)},
        "figures": {"latency": here.plots.latency(found, "", True)},
    }


def correctness(df, folder):
    table = room("correctness", "table").table
    kept = table.kept_lessons(folder.name, folder.parents[1])
    return {"tables": {"lessons": table.lessons(kept), "metrics": df}}


def memory(df, folder):
    here = room("memory", "claims", "plots", "table")
    claims, plots, table = here.claims, here.plots, here.table
    growing = table.growing(df)
    return {
        "tables": {
            "metrics": df,
            "peaks": table.peaks(df),
            "growing": growing,
            "exponents": table.exponents(growing),
            "case study": table.beside_the_case_study(df),
        },
        "claims": {
            "case study": claims.case_study_is_not_quadratic(),
            "dense masks": claims.dense_masks_cost_more(df, LINEAR),
            "production": claims.production_fits(df),
            **{backend: claims.linear_backend_is_linear(df, backend) for backend in LINEAR},
        },
        "figures": {
            "scaling": plots.scaling(df, case_study=table.case_study_curve()),
            "exponents": plots.exponents(df),
            "categories": plots.categories(df[df["backend"] != "sequential"]),
        },
    }


def comparison(df, folder):
    here = room("comparison", "claims", "plots", "table")
    claims, plots, table = here.claims, here.plots, here.table
    found = [claims.memory_is_not_identical(df), claims.nothing_beats_the_limit(df)]
    found += claims.aims(df)
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
        "claims": {str(i): claim for i, claim in enumerate(found)},
        "figures": {
            "latency": plots.latency(df),
            "of limit": plots.of_limit(df),
            "memory": plots.memory(df),
        },
    }


def step5(df, folder):
    here = room("case_study.step5", "plots", "table")
    tables = {"timings": here.table.timings(), "memory": here.table.memory()}
    return {"tables": {"metrics": df} | tables, "figures": {"memory": here.plots.memory_table()}}


def throughput(df, folder):
    here = room("throughput", "claims", "plots", "table")
    claims, plots, table = here.claims, here.plots, here.table
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
    said |= {f"aim {i}": claim for i, claim in enumerate(claims.aims(df))}
    drawn = {name: bool(len(getattr(table, name)(df)))
             for name in ("phases", "losses", "memory_over_steps")}  # fmt: skip
    cells = table.labelled(df)
    drawn |= {"speed": True, "memory": True, "scaling": len(cells) and (cells["ranks"] > 1).any()}
    figures = {name: getattr(plots, name)(df) for name, wanted in drawn.items() if wanted}
    tables = {name: getattr(table, name)(df) for name in names}
    return {"tables": {"metrics": df} | tables, "claims": said, "figures": figures}


def tracing(df, folder):
    files = sorted(folder.glob("*.csv"))
    return {"tables": {file.stem: pandas.read_csv(file) for file in files}}


def settlement(df, folder):
    here = room("case_study.settlement", "claims", "facts", "plots", "sources", "table")
    claims, plots, table = here.claims, here.plots, here.table
    quoted = here.facts.all_facts(here.sources.sources({}))
    now = [{"fact": f.name, "holds": f.holds} for f in here.facts.of_kind(quoted, "table").values()]
    found = {
        "tables": {
            "metrics": df,
            "memory": table.memory(),
            "timings": table.timings(),
            "facts of today": pandas.DataFrame(now),
        },
        "figures": {"memory": plots.memory(), "microseconds": plots.microseconds()},
    }
    found["claims"] = {claims.subject(c.claim): c for c in table.judged_again(Run(folder))}
    return found


def selfcheck(df, folder):
    here = room("selfcheck", "claims", "plots", "table")
    rows = []
    for config, (_, line) in zip(metrics.configs(df), df.iterrows(), strict=True):
        if line["metric"] != "time_to_verdict":
            continue
        found, _, what = config["found"].partition(":")
        row = Judged(
            config["fault"],
            line["mode"] == "control",
            config["expected"],
            found,
            what,
            config["rule"],
            seconds=float(line["median"]),
            named_s=config["rested_s"],
            round=int(line["x_value"]),
            skipped=config["skipped"],
            load=config.get("load", 0),
            group=config.get("group", "planted"),
            batch=config.get("batch", "first"),
        )
        rows.append(row)
    return {
        "tables": {
            "metrics": df,
            "faults": here.table.matrix_of(rows, controls=False),
            "controls": here.table.matrix_of(rows, controls=True),
            "confusion": here.table.confusion(rows),
        },
        "claims": {str(i): claim for i, claim in enumerate(here.claims.must_hold(rows))},
        "figures": {"matrices": here.plots.matrices(rows)},
    }
