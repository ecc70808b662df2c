"""The claims that a committed run's records decide alone, each as a call on what they are of.

The freeze test asks what they say today, the test of blanks what they say without a measurement.
Left out are claims about what is not in the records: trials' own evidence (03, 05, 08), and cells'
accuracy and path witnesses (00, 01, 02, 04).
"""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from whyhung.process.trial import Outcome
from workbook.rooms.selfcheck.judged import Judged
from workbook.runs import metrics, parameters
from workbook.runs.store import Run

LINEAR = ("gather", "packed", "flex")
Calls = dict[str, Callable[[Any], Any]]


def room(name: str, *parts: str) -> SimpleNamespace:
    """The modules `parts` of that room of workbook.rooms."""
    loaded = {part: import_module(f"workbook.rooms.{name}.{part}") for part in parts}
    return SimpleNamespace(**loaded)


def claims_of(folder: Path) -> tuple[Any, Calls]:
    """(what the claims are of, {name: the claim as a function of it}) of the run in `folder`."""
    read = {
        "01": memory, "02": comparison, "04": throughput, "06": settlement,
        "07": selfcheck, "09": estimate, "10": soak, "11": decode,
    }  # fmt: skip
    found = read.get(folder.name[:2])
    return found(Run(folder).metrics(), folder) if found else (None, {})


def memory(df, folder):
    claims = room("memory", "claims").claims
    return df, {
        "case study": lambda df: claims.case_study_is_not_quadratic(),
        "dense masks": partial(claims.dense_masks_cost_more, linear=LINEAR),
        "production": claims.production_fits,
        **{b: partial(claims.linear_backend_is_linear, backend=b) for b in LINEAR},
    }


def comparison(df, folder):
    claims = room("comparison", "claims").claims
    of = {"backend": "triton"}
    calls = [
        claims.memory_is_not_identical,
        claims.nothing_beats_the_limit,
        *(partial(claims.reaches, aim=aim, **of) for aim in claims.AIMS),
        partial(claims.memory_is_linear, **of),
        partial(claims.memory_stays_small, **of),
        partial(claims.beats_dense_from, tokens=8192, **of),
    ]
    return df, numbered(calls)


def throughput(df, folder):
    claims = room("throughput", "claims").claims
    return df, {
        "broke": claims.nothing_broke,
        "meter": claims.the_meter_is_right,
        "compiled": claims.nothing_is_compiled_late,
        "waits": claims.no_step_waits_for_the_device,
        "flat": claims.memory_is_flat,
        "alike": claims.backends_learn_alike,
        "aim 0": claims.is_fast,
        "aim 1": claims.is_near_the_twin,
        "aim 2": claims.beats_the_twin_when_long,
        "aim 3": claims.two_ranks_pay,
        "aim 4": claims.watching_costs_little,
        "aim 5": claims.learns_as_the_twin,
    }


def settlement(df, folder):
    """Facts of the run's rows and of what was mended since."""
    claims = room("case_study.settlement", "claims").claims
    given = parameters.read_file(folder / "parameters.yaml")

    def claim(row, facts):
        return claims.all_claims(claims.settle(facts, [row]))[0]

    def whole(facts):
        return claims.fewer_undecided_than(claims.settle(facts), given["undecided"])

    rows = {row.id: partial(claim, row) for row in claims.all_rows()}
    return claims.all_facts(folder), rows | {"": whole}


def selfcheck(df, folder):
    claims = room("selfcheck", "claims").claims
    calls = [lambda rows, i=i: claims.must_hold(rows)[i] for i in range(2)]
    return judged_of(df), numbered(calls)


def judged_of(df) -> list[Judged]:
    """The rows of a selfcheck, as far as metrics.csv has them."""
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
    return rows


def estimate(df, folder):
    claims = room("estimate", "claims").claims
    return df, {
        "peak": claims.peak_is_estimated,
        "backward": partial(claims.phase_is_estimated, phase="backward"),
        "reserved": claims.reserved_is_estimated,
        "out of memory": claims.what_does_not_fit_is_estimated,
    }


def soak(df, folder):
    """Judge its samples: they are there also of a run that was ended before it judged."""
    here = room("soak", "claims", "table", "trials")
    given = yaml.safe_load((folder / "parameters.yaml").read_text())
    calls = {n: partial(here.claims.memory_does_not_grow, series=n) for n in here.table.SERIES}
    calls["speed"] = here.claims.speed_does_not_drift
    calls["restart"] = here.claims.goes_on_after_the_restart
    return here.trials.stored(folder, given["steps"], given["overlap"]), calls


def decode(df, folder):
    """Judge what each size's process left."""
    here = room("decode", "cells", "claims", "table", "trials")
    claims, frame, gpu = here.claims, here.table.frame, df["device"].iloc[0]
    found = []
    for spec in sorted(folder.glob("trials/*/spec.json")):
        left = json.loads(spec.with_name("result.json").read_text())
        cell = json.loads(spec.read_text())["cell"]
        ended = Outcome(left["status"], left["result"], 0.0, "", 0)
        found.append(here.trials.result_of(here.cells.Cell.from_dict(cell), ended, ()))
    calls = [
        lambda found: claims.is_accurate(frame(found)),
        lambda found: claims.nothing_broke(frame(found)),
        claims.reads_only_its_keys,
        claims.reads_as_the_paper_says,
        *(partial(claims.reaches, aim=aim, gpu=gpu) for aim in claims.AIMS),
        lambda found: claims.pages_cost_little(frame(found), gpu),
        lambda found: claims.nothing_beats_the_limit(frame(found), gpu),
        lambda found: claims.time_shrinks_too(frame(found), gpu),
    ]
    return found, numbered(calls)


def numbered(calls: list) -> Calls:
    return {str(i): call for i, call in enumerate(calls)}
