"""Tables that summarize the benchmark rows of a metrics table. Draws nothing."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pandas

from nsa.config import NSAConfig
from workbook.lab.measure import limits
from workbook.lab.measure.shapes import Shape
from workbook.rooms.comparison.cell import NOT_COMPARED
from workbook.rooms.comparison.implementations import DENSE, LIMITS, NSA
from workbook.runs import metrics
from workbook.runs.looks import by_tokens
from workbook.runs.scaling import crossing

CURVE = ["shape", "queries"]  # common to all points of a curve
LINES = [*CURVE, "backend"]  # of a table
MODES = ("forward", "backward", "step")
LETTERS = ("l", "d", "l'", "n", "first", "local", "w")  # the paper's, of NSAConfig's fields


def labelled(df: pandas.DataFrame) -> pandas.DataFrame:
    """Benchmark rows over T, with `shape` ("HQ 64, HKV 4, D 128, bf16") and, from the config,
    `queries`, `outcome`, `checked` and `message`; for a point measured twice, the last."""
    rows = df[df["operation"].isin([NSA, DENSE]) & (df["x_name"] == "tokens")].copy()
    configs = metrics.configs(rows)
    rows["shape"] = [shape_name(config) for config in configs]
    usual = {"queries": "", "outcome": "ok", "checked": "", "message": ""}
    for name, value in usual.items():
        rows[name] = [config.get(name, value) for config in configs]
    rows["x_value"] = rows["x_value"].astype(int)
    rows["median"] = rows["median"].astype(float)
    point = [*CURVE, "operation", "backend", "mode", "metric", "x_value"]
    return rows.drop_duplicates(point, keep="last")


def rows_of(df: pandas.DataFrame, metric: str, *modes: str) -> pandas.DataFrame:
    """Return the `labelled` rows of one metric, of these modes or of all."""
    rows = labelled(df)
    rows = rows[rows["metric"] == metric]
    return rows[rows["mode"].isin(modes)] if modes else rows


def shape_name(config: dict) -> str:
    """Name of the shape that all T of a curve share, queries aside."""
    dims = [config.get("dim"), config.get("value_dim")]
    dim = dims[0] if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    parts = [f"HQ {config.get('heads')}", f"HKV {config.get('kv_heads')}", f"D {dim}"]
    parts += [f"B {config['batch']}"] * (config.get("batch", 1) != 1)
    parts.append(str(config.get("dtype", "")))
    parts += ["own k, v a branch"] * (not config.get("shared_kv", True))
    for field, letter in zip(fields(NSAConfig), LETTERS, strict=True):
        value = config.get(field.name, field.default)
        parts += [f"{letter} {value}"] * (value != field.default)
    return ", ".join(parts)


def wide(df: pandas.DataFrame, metric: str, mode: str) -> pandas.DataFrame:
    """Pivot: rows by shape, kind of queries and implementation, columns by T; NaN if it failed."""
    return by_tokens(rows_of(df, metric, mode), "median", LINES).astype(float)


def shown(df: pandas.DataFrame, metric: str, mode: str) -> pandas.DataFrame:
    """Format `wide`: three digits, the outcome for a failure, "none" if there is no such mode."""
    rows = rows_of(df, metric, mode)
    texts = []
    for value, outcome in zip(rows["median"], rows["outcome"], strict=True):
        if not np.isfinite(value):
            texts.append(outcome if outcome != "ok" else "none")
        else:
            texts.append(f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.3g}")
    table = by_tokens(rows.assign(text=texts), "text", LINES).fillna("")
    return table if metric != "latency" else _named(table, rows, "T")


def _named(table: pandas.DataFrame, rows: pandas.DataFrame, name: str = "") -> pandas.DataFrame:
    """Add a warning above the columns if the times are from a CPU."""
    if len(rows) and not metrics.on_gpu(rows):
        name = f"{name} (no GPU: times not meaningful)".strip()
    return table.rename_axis(columns=name or None)


def notes(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of incomplete runs and reasons: a row per implementation and reason, with its T."""
    rows = rows_of(df, "latency", "forward").rename(columns={"message": "why"})
    rows = rows[rows["why"] != ""]
    if not len(rows):
        return pandas.DataFrame(columns=["outcome", "T", "why"])
    grouped = rows.groupby(["backend", "outcome", "why"], sort=False)["x_value"]
    found = grouped.agg(lambda t: ", ".join(map(str, sorted(set(t))))).rename("T").reset_index()
    return found[["backend", "outcome", "T", "why"]].set_index("backend")


def accuracy(df: pandas.DataFrame) -> pandas.DataFrame:
    """Largest error of each implementation as a fraction of the allowed error, and the checks.

    1 is the limit: twice the error of plain torch in the same dtype.
    """
    rows = labelled(df)
    red = rows[rows["outcome"] == "red"]["backend"].unique()
    rows = rows[rows["metric"] == "error"]
    allowed = [config["allowed"] for config in metrics.configs(rows)]
    share = rows.assign(share=rows["median"] / allowed).pivot_table(
        index="backend", columns="mode", values="share", aggfunc="max", sort=False
    )
    share = share.reindex(columns=[m for m in ("forward", "backward") if m in share]).round(2)
    share = share.assign(checked=rows.groupby("backend", sort=False)["checked"].last())
    wrong = [name for name in red if name in share.index]
    share.loc[wrong, "checked"] = "RED at another shape; " + share.loc[wrong, "checked"]
    return share


def paths(cells: Sequence[dict]) -> dict[str, dict[str, str]]:
    """Return {backend: {branch: what served it}}, from the witnesses of cells."""
    return {
        cell["name"]: {b: ", ".join(served) for b, served in sorted(cell["paths"].items())}
        for cell in cells
        if cell["paths"] and not cell["name"].startswith("peer ")
    }


def fastest(df: pandas.DataFrame) -> pandas.DataFrame:
    """Fastest NSA and dense implementation for every shape, T and mode, and the ratio between
    them. `NSA of limit` is the fraction of the physical limit that the winner reaches.
    Implementations that compute another function are excluded."""
    rows = rows_of(df, "latency", *MODES)
    rows = rows[rows["median"].notna() & (rows["checked"] != NOT_COMPARED)]
    found, index = [], [*CURVE, "T", "mode"]
    for key, group in rows.groupby([*CURVE, "x_value", "mode"], sort=False):
        line: dict = dict(zip(index, key, strict=True))
        for operation, label in ((NSA, "NSA"), (DENSE, "dense")):
            mine = group[group["operation"] == operation].set_index("backend")["median"]
            raced = mine.drop(LIMITS[operation], errors="ignore")
            if len(raced):
                line |= {label: raced.idxmin(), f"{label} ms": raced.min()}
                line[f"{label} of limit"] = mine.get(LIMITS[operation], math.nan) / raced.min()
        if "NSA" in line:
            line["dense / NSA"] = line.get("dense ms", math.nan) / line["NSA ms"]
            found.append(line)
    columns = ["NSA", "NSA ms", "NSA of limit", "dense", "dense ms", "dense / NSA"]
    table = pandas.DataFrame(found, columns=[*index, *columns]).set_index(index)
    return _named(table, rows)


def break_even(df: pandas.DataFrame) -> pandas.DataFrame:
    """Break-even T beyond which each NSA implementation beats the fastest dense one, by mode.

    Interpolated between measured T, linear in log-log; "below T" if it wins at every T, "beyond T"
    if it does not win up to the last.
    """
    rows = rows_of(df, "latency", *MODES)
    rows = rows[rows["median"].notna() & ~rows["backend"].isin(LIMITS.values())]
    found: dict[tuple, dict[str, str]] = {}
    for mode in MODES:
        for curve, group in rows[rows["mode"] == mode].groupby(CURVE, sort=False):
            dense = group[group["operation"] == DENSE].groupby("x_value")["median"].min()
            for backend, ours in group[group["operation"] == NSA].groupby("backend", sort=False):
                both = ours.join(dense.rename("dense"), on="x_value", how="inner")
                both = both.sort_values("x_value")
                if len(both):
                    columns = (list(both[name]) for name in ("x_value", "median", "dense"))
                    found.setdefault((*curve, backend), {})[mode] = crossing(*columns)
    index = pandas.MultiIndex.from_tuples(found, names=LINES)
    return _named(pandas.DataFrame(list(found.values()), index=index).fillna(""), df)


def unions(df: pandas.DataFrame) -> pandas.DataFrame:
    """Mean number of distinct blocks of 4 and 8 neighbouring queries, by kind of queries and T."""
    rows = labelled(df)
    rows = rows[rows["metric"].str.startswith("mean_union_of_")]
    rows = rows.assign(neighbours=rows["metric"].str.removeprefix("mean_union_of_").astype(int))
    lines = [*CURVE, "neighbours"]
    table = rows.pivot_table("median", lines, "x_value", aggfunc="last", sort=False)
    return table.rename_axis(columns="T").round(1)


def facts(cells: Sequence[dict], shapes: Sequence[Shape]) -> list[str]:
    """Machine-independent lines: outcomes of cells, operation counts, paths."""
    outcomes: dict[str, Counter] = {}
    for cell in cells:
        outcomes.setdefault(cell["name"], Counter())[cell["outcome"]] += 1
    lines = [
        f"{name}: {', '.join(f'{outcome} x{count}' for outcome, count in counts.items())}"
        for name, counts in outcomes.items()
    ]
    for shape in shapes:
        work = {mode: f"{done.flops:,}" for mode, done in limits.work(shape).items()}
        lines.append(f"T {shape.tokens}: pairs {limits.pairs(shape.tokens, shape.config)}")
        lines.append(f"  operations forward {work['forward']}, backward {work['backward']}")
    for name, served in paths(cells).items():
        lines.append(f"{name}: " + ", ".join(map(" ".join, served.items())))
    return lines
