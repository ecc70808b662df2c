"""Tables of estimates beside measurements. Draws nothing."""

import math
from collections.abc import Sequence

import numpy as np
import pandas

from workbook.rooms.case_study import figures as case_study
from workbook.rooms.estimate.cells import FACTORS, name_of
from workbook.rooms.estimate.trials import OURS, PHASES, THEIRS
from workbook.runs import metrics

STEP = "step"
_OF_A_CELL = ("outcome", "estimated", "how", "refusal", "message", "calibrated", "uncertainty")


def compared(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table, a row per cell and `what` ("step", a phase, or "reserved"): MiB `foretold` and
    `measured`, the signed relative `error`, and the cell; NaN if either is missing. For a cell
    measured twice, the last counts."""
    found: dict[tuple, dict] = {}
    rows = df[df["x_name"] == "tokens"]
    for row, config in zip(rows.itertuples(), metrics.configs(rows), strict=True):
        kind, _, metric = row.metric.partition("_")
        if kind not in (OURS, THEIRS) or metric not in ("memory", "reserved") or not config:
            continue
        what = "reserved" if metric == "reserved" else row.mode
        cell = {field: config.get(field) for field in FACTORS.values()}
        one = found.setdefault((*map(str, cell.values()), what), cell | {"what": what})
        one |= {name: config.get(name) for name in _OF_A_CELL} | {"device": row.device}
        one["cell"] = name_of(config)
        one["foretold" if kind == OURS else "measured"] = float(row.median)
    table = pandas.DataFrame(list(found.values()), columns=_COLUMNS)
    return table.assign(error=table["foretold"].astype(float) / table["measured"] - 1)


_COLUMNS = ["cell", *FACTORS.values(), "what", "foretold", "measured", *_OF_A_CELL, "device"]


def errors(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table, a row per cell: MiB estimated and measured at the peak, the signed errors of the step,
    each phase and reserved memory, and the method. Failures show their outcome."""
    both, lines = compared(df), []
    for cell, rows in both.groupby("cell", sort=False):
        step = rows[rows["what"] == STEP].iloc[0]
        line = {"cell": cell, "foretold, MiB": _mib(step["foretold"], step["estimated"])}
        line["measured, MiB"] = _mib(step["measured"], step["outcome"])
        for what in (STEP, *PHASES, "reserved"):
            line[what] = _percent(rows.loc[rows["what"] == what, "error"])
        lines.append(line | {"how": step["how"] or ""})
    table = pandas.DataFrame(lines).set_index("cell") if lines else pandas.DataFrame()
    return table.loc[:, (table != "").any()] if lines else table


def _mib(mib: float, ended: str) -> str:
    return f"{mib:,.1f}" if np.isfinite(mib) else str(ended)


def _percent(errors: Sequence[float]) -> str:
    known = [error for error in errors if np.isfinite(error)]
    return signed(known[0]) if known else ""


def signed(error: float) -> str:
    """Format a fraction as "+1.23%"; what rounds to zero has no minus sign."""
    return f"{round(error, 4) + 0.0:+.2%}"


def worst(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table, a row per backend: cells compared, the lowest, mean and highest error of a
    step's peak and of reserved memory."""
    both, lines = compared(df), {}
    for value, rows in both.groupby("backend", sort=False):
        line = {}
        for what in (STEP, "reserved"):
            known = rows.loc[rows["what"] == what, "error"].dropna()
            if len(known):
                line |= {f"{what}: cells": len(known)}
                told = {"lowest": known.min(), "mean": known.mean(), "highest": known.max()}
                line |= {f"{what}: {name}": signed(error) for name, error in told.items()}
        if line:
            lines[value] = line
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("backend")


def recalled(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table, a row per backend: number of committed peaks and estimates, and extreme errors."""
    frame, lines = pandas.DataFrame(rows), {}
    for backend, same in frame.groupby("backend", sort=False) if len(frame) else ():
        known = same["error"].dropna()
        line = {"peaks": len(same), "foretold": len(known)}
        for name, error in (("lowest", known.min()), ("highest", known.max())):
            line[name] = signed(error) if len(known) else ""
        lines[backend] = line
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("backend")


def not_compared(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of cells without an estimate or a measurement, and why."""
    both = compared(df)
    rows = both[(both["what"] == STEP) & both["error"].isna()]
    return rows[["cell", "estimated", "refusal", "outcome", "message"]].set_index("cell")


def beside_the_case_study(ours: Sequence[dict]) -> pandas.DataFrame:
    """Table of the case study's memory figures for which it published an estimate: its measurement
    and estimate, and `ours` ({"tokens", "mib", "how"}), our estimate of its loop."""
    told, lines = {row["tokens"]: row for row in ours}, {}
    for tokens, estimate in case_study.PUBLISHED_ESTIMATE_MB.items():
        reported, row = case_study.MEMORY_MIB[tokens], told.get(tokens)
        mib = row["mib"] if row else math.nan
        lines[tokens] = {
            "it measured": f"{reported:,.1f}",
            "its estimate": f"{estimate:,.1f}",
            "its error": f"{estimate / reported - 1:+.1%}",
            "our estimate": f"{mib:,.1f}" if row else "not made here",
            "our error": f"{mib / reported - 1:+.1%}" if row else "",
            "ours is": row["how"] if row else "",
        }
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("T")


def boundaries(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table, a row per boundary: the estimate, the bracket of real steps, and the difference."""
    lines = {}
    for row in rows:
        found = boundary_error(row)
        real = row["message"] if math.isnan(found) else f"{row['fits']:,} to {row['does_not']:,}"
        lines[row["boundary"]] = {
            "foretold to fit": f"{row['foretold']:,}" if row.get("foretold") else "",
            "found": real,
            "apart": "" if math.isnan(found) else f"{found:+.1%}",
        }
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("boundary")


def boundary_error(row: dict) -> float:
    """Signed relative distance of an estimated boundary from the real bracket; 0 inside it, NaN if
    there is no such bracket."""
    low, high, ours = row.get("fits"), row.get("does_not"), row.get("foretold")
    if low is None or high is None or ours is None or not row.get("monotone"):
        return math.nan
    if low <= ours <= high:
        return 0.0
    return ours / (low if ours < low else high) - 1


def facts(df: pandas.DataFrame) -> list[str]:
    """Machine-independent lines: outcomes of estimates and runs of cells, and how many cells match
    their estimate."""
    both = compared(df)
    steps = both[both["what"] == STEP]
    counts = steps.groupby(["backend", "estimated", "outcome"], sort=False).size()
    lines = [f"{b}: {n} cells, estimated {e}, run {o}" for (b, e, o), n in counts.items()]
    near = steps["error"].abs() <= 0.01
    return [*lines, f"{int(near.sum())} of {len(steps)} are estimated to 1 %"]
