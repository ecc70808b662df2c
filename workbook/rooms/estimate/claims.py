"""Claims of the notebook on estimates, each decided by rows and never by hand."""

import math
from collections.abc import Sequence

import pandas

from workbook.rooms.case_study import figures as case_study
from workbook.rooms.estimate import table
from workbook.rooms.estimate.cells import name_of
from workbook.rooms.estimate.trials import PHASES
from workbook.runs import metrics
from workbook.runs.claim import ANSWERS, Claim, NotHere, Undecided, aim

ALLOCATED = {True: 0.05, False: 0.01}  # the aim on a GPU, and on a CPU
RESERVED = 0.1
BOUNDARY = 0.05
SECONDS = 3.0  # processor seconds per estimate
NEITHER = "no cell was both estimated and measured"


def all_claims(
    df: pandas.DataFrame,
    boundaries: Sequence[dict],
    study: Sequence[dict],
    recalled: Sequence[dict],
) -> list[Claim]:
    """All claims, from rows of trials.find_boundaries, the case study's loop, and trials.recall."""
    return [
        peak_is_estimated(df),
        *(phase_is_estimated(df, phase) for phase in PHASES),
        phase_of_the_peak_is_estimated(df),
        reserved_is_estimated(df),
        what_does_not_fit_is_estimated(df),
        nothing_is_left_out(df),
        estimates_are_quick(df),
        committed_peaks_are_estimated(recalled),
        nearer_than_the_case_study(study),
        boundary_is_estimated(boundaries),
    ]


def peak_is_estimated(df: pandas.DataFrame) -> Claim:
    """Claim that estimated peaks are right in every cell; the worst decides, not the mean."""
    both = table.compared(df)
    return _within("the peak of every cell is estimated", both, table.STEP, _aim(both))


def phase_is_estimated(df: pandas.DataFrame, phase: str) -> Claim:
    """Claim that a phase's own estimated peak is right, even if the step's peak is elsewhere."""
    both = table.compared(df)
    return _within(f"the {phase}'s own peak is estimated in every cell", both, phase, _aim(both))


def reserved_is_estimated(df: pandas.DataFrame) -> Claim:
    """Claim that the estimate of memory reserved by the allocator on the device is right."""
    both, sentence = table.compared(df), "what the allocator reserves is estimated in every cell"
    if len(both) and not metrics.on_gpu(both):
        return Claim.not_here(sentence, "a CPU's allocator reserves nothing")
    return _within(sentence, both, "reserved", RESERVED)


@aim("{sentence}, to {most:.0%}")
def _within(sentence: str, both: pandas.DataFrame, what: str, most: float):
    rows = both[both["what"] == what]
    known = rows[rows["error"].notna()]
    if not len(known):
        raise Undecided(NEITHER)
    at = known["error"].abs().idxmax()
    evidence = {
        "cells": len(known),
        "worst": known["cell"][at],
        "lowest": round(float(known["error"].min()), 5),
        "highest": round(float(known["error"].max()), 5),
        "over the aim": int((known["error"].abs() > most).sum()),
    }
    found = f"the worst of {len(known)} is {table.signed(known['error'][at])}"
    return found, abs(known["error"][at]) <= most, evidence, _lost(rows)


def _aim(both: pandas.DataFrame) -> float:
    return ALLOCATED[metrics.on_gpu(both)]


def _lost(both: pandas.DataFrame, column: str = "error") -> list[str]:
    """Cells that lack a number, except those that do not run."""
    return metrics.unmeasured(both.assign(median=both[column]), ["cell"], ["what"])


@aim("the phase that is named has the step's peak")
def phase_of_the_peak_is_estimated(df: pandas.DataFrame):
    """Claim that the estimated peak phase has the step's measured peak, within a peak's aim."""
    both, short = table.compared(df), {}
    phases = both[both["what"].isin(PHASES)]
    for cell, rows in phases[phases["error"].notna()].groupby("cell", sort=False):
        rows = rows.set_index("what")
        named = rows["foretold"].idxmax()
        short[cell] = rows["measured"][named] / rows["measured"].max() - 1
    if not short:
        raise Undecided(NEITHER)
    worst = min(short, key=lambda cell: short[cell])
    evidence = {"cells": len(short), "worst": worst, "short by": round(float(-short[worst]), 5)}
    return "", short[worst] >= -_aim(both), evidence, _lost(phases)


@aim("a cell that ran out of memory was estimated not to fit")
def what_does_not_fit_is_estimated(df: pandas.DataFrame):
    """Claim that estimates of cells that ran out of memory exceed the peak of any that did not."""
    both = table.compared(df)
    steps = both[both["what"] == table.STEP]
    out = steps[steps["outcome"] == "oom"].dropna(subset="foretold")
    if not len(out):
        raise NotHere("no cell ran out of memory")
    most = steps["measured"].max()
    wrong = list(out.loc[out["foretold"] <= most, "cell"])
    evidence = {"out of memory": len(out), "the most that fitted, MiB": most, "wrong": wrong}
    lost = _lost(steps[~steps["outcome"].isin(ANSWERS)], "measured")
    lost += list(steps.loc[(steps["outcome"] == "oom") & steps["foretold"].isna(), "cell"])
    return "", not wrong, evidence, lost


@aim("every cell that ran was estimated")
def nothing_is_left_out(df: pandas.DataFrame):
    """Claim that every cell that ran has an estimate; an estimator that refuses hard cells would
    look too good."""
    both = table.compared(df)
    ran = both[(both["what"] == table.STEP) & (both["outcome"] == "ok")]
    if not len(ran):
        raise Undecided("none ran")
    without = ran[ran["estimated"] != "ok"].set_index("cell")["refusal"].to_dict()
    lost = both.loc[~both["outcome"].isin(("ok", *ANSWERS)), "cell"]
    return "", not without, {"ran": len(ran), "not estimated": without}, lost


@aim(f"to trace a training takes at most {SECONDS:g} s of a processor")
def estimates_are_quick(df: pandas.DataFrame):
    """Claim that estimates are fast, in processor seconds, which other load affects less.
    `sequential`, which calls hundreds of operators per token, takes longer and is left out."""
    cells = df[(df["x_name"] == "tokens") & (df["backend"] != "sequential")]
    configs = metrics.configs(cells)
    cells = cells.assign(cell=list(map(name_of, configs)), outcome="ok")
    cells = cells[["trace" in str(config.get("how")) for config in configs]]
    took = cells.loc[cells["metric"] == "estimate_time", "median"].dropna()
    if not len(took):
        raise Undecided("none was traced")
    evidence = {"estimates": len(took), "median, s": round(float(took.median()), 2)}
    evidence["longest, s"] = round(float(took.max()), 2)
    lost = metrics.unmeasured(cells, ["cell"], of={"metric": ["estimate_time"]})
    return "", took.max() <= SECONDS, evidence, lost


@aim(f"peaks that committed runs measured on an H200 are estimated, to {ALLOCATED[True]:.0%}")
def committed_peaks_are_estimated(rows: Sequence[dict]):
    """Claim that peaks of earlier H200 runs, made without estimates in mind, are estimated well."""
    if not rows:
        raise NotHere("this run was not to estimate any, or has none beside it")
    known = {f"{row['run']}: {row['cell']}": row["error"] for row in rows}
    lost = [name for name, error in known.items() if math.isnan(error)]
    known = {name: error for name, error in known.items() if name not in lost}
    if not known:
        raise Undecided("none was", {"not estimated": lost})
    worst = max(known, key=lambda name: abs(known[name]))
    found = f"the worst of {len(known)} is {table.signed(known[worst])}"
    evidence = {"peaks": len(known), "worst": worst, "not estimated": lost}
    return found, not lost and abs(known[worst]) <= ALLOCATED[True], evidence


@aim("our estimate of the case study's loop is within 5 % of its table, and nearer than its own")
def nearer_than_the_case_study(study: Sequence[dict]):
    """Claim that our estimate of the case study's rebuilt loop beats its own, by its figures."""
    errors = {}
    for row in study:
        reported = case_study.MEMORY_MIB[row["tokens"]]
        theirs = case_study.PUBLISHED_ESTIMATE_MB[row["tokens"]] / reported - 1
        errors[row["tokens"]] = (row["mib"] / reported - 1, theirs)
    if not errors:
        raise NotHere("this run was not to make one")
    good = all(abs(ours) <= min(0.05, abs(theirs)) for ours, theirs in errors.values())
    evidence = {t: {"ours": round(a, 4), "its": round(b, 4)} for t, (a, b) in errors.items()}
    return f", at {len(errors)} of its {len(case_study.PUBLISHED_ESTIMATE_MB)} T", good, evidence


@aim(f"the largest T and batch that fit are estimated, to {BOUNDARY:.0%}")
def boundary_is_estimated(rows: Sequence[dict]):
    """Claim that the largest value estimated to fit agrees with the bracket of real steps."""
    if not rows:
        raise NotHere("this run was not to look for one")
    found = {row["boundary"]: table.boundary_error(row) for row in rows}
    found = {name: error for name, error in found.items() if not math.isnan(error)}
    if not found and all(row["outcome"] == "not run" for row in rows):
        raise NotHere("there is no GPU whose memory could end")
    lost = {row["boundary"]: row["message"] for row in rows if row["boundary"] not in found}
    if not found:
        raise Undecided("no bracket was found", lost)
    worst = max(found.values(), key=abs)
    evidence = {name: round(error, 4) for name, error in found.items()}
    evidence |= {"without a bracket": lost} if lost else {}
    return (
        f"the worst of {len(found)} is {worst:+.1%}",
        not lost and abs(worst) <= BOUNDARY,
        evidence,
    )
