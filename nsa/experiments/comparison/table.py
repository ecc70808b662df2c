"""Questions put to the benchmark rows of a metrics table, answered as tables. Draws nothing."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas

from nsa.config import NSAConfig
from nsa.experiments.comparison.cell import NOT_COMPARED
from nsa.experiments.comparison.implementations import DENSE, LIMITS, NSA
from nsa.lab.measure import limits
from nsa.lab.measure.shapes import Shape
from nsa.workbook import metrics
from nsa.workbook.looks import by_tokens
from nsa.workbook.scaling import crossing

LINES = ("shape", "queries", "backend")  # of a table
MODES = ("forward", "backward", "step")
LETTERS = ("l", "d", "l'", "n", "first", "local", "w")  # the paper's, of NSAConfig's fields


def labelled(df: pandas.DataFrame) -> pandas.DataFrame:
    """The benchmark's rows over T, with `shape` ("HQ 64, HKV 4, D 128, bf16"), `queries` and
    `outcome`; of a point measured twice the last."""
    rows = df[df["operation"].isin([NSA, DENSE]) & (df["x_name"] == "tokens")].copy()
    configs = metrics.configs(rows)
    rows["shape"] = [shape_name(config) for config in configs]
    rows["queries"] = [config.get("queries", "") for config in configs]
    rows["outcome"] = [config.get("outcome", "ok") for config in configs]
    rows["comparable"] = [config.get("checked", "") != NOT_COMPARED for config in configs]
    rows["x_value"] = rows["x_value"].astype(int)
    rows["median"] = rows["median"].astype(float)
    point = ["shape", "queries", "operation", "backend", "mode", "metric", "x_value"]
    return rows.drop_duplicates(point, keep="last")


def rows_of(df: pandas.DataFrame, metric: str, *modes: str) -> pandas.DataFrame:
    """The `labelled` rows of one metric, of these modes or of all."""
    rows = labelled(df)
    rows = rows[rows["metric"] == metric]
    return rows[rows["mode"].isin(modes)] if modes else rows


def shape_name(config: dict) -> str:
    """What all T of a curve have in common, queries aside."""
    dims = [config.get("dim"), config.get("value_dim")]
    dim = dims[0] if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    parts = [f"HQ {config.get('heads')}", f"HKV {config.get('kv_heads')}", f"D {dim}"]
    parts += [f"B {config['batch']}"] * (config.get("batch", 1) != 1)
    parts.append(str(config.get("dtype", "")))
    parts += ["own k, v a branch"] * (not config.get("shared_kv", True))
    for field, letter in zip(dataclasses.fields(NSAConfig), LETTERS, strict=True):
        value = config.get(field.name, field.default)
        parts += [f"{letter} {value}"] * (value != field.default)
    return ", ".join(parts)


def wide(df: pandas.DataFrame, metric: str, mode: str) -> pandas.DataFrame:
    """One row a shape, kind of queries and implementation, one column a T; NaN where it failed."""
    return by_tokens(rows_of(df, metric, mode), "median", LINES).astype(float)


def shown(df: pandas.DataFrame, metric: str, mode: str, digits: int = 3) -> pandas.DataFrame:
    """`wide`, for a reader: rounded, a failure by its name, "none" where there is no such mode."""
    rows = rows_of(df, metric, mode)
    texts = [
        _figures(value, digits) if np.isfinite(value) else outcome if outcome != "ok" else "none"
        for value, outcome in zip(rows["median"], rows["outcome"], strict=True)
    ]
    table = by_tokens(rows.assign(text=texts), "text", LINES).fillna("")
    return table if metric != "latency" else _named(table, rows, "T")


def _named(table: pandas.DataFrame, rows: pandas.DataFrame, name: str = "") -> pandas.DataFrame:
    """With a warning over the columns where the times are a CPU's."""
    if len(rows) and rows["gpu"].isin(["", "cpu"]).any():
        name = f"{name} (no GPU: times not meaningful)".strip()
    return table.rename_axis(columns=name or None)


def _figures(value: float, digits: int) -> str:
    if value == 0 or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def notes(df: pandas.DataFrame) -> pandas.DataFrame:
    """What did not run, or not whole, and why: one row an implementation, reason and its T."""
    rows = rows_of(df, "latency", "forward")
    messages = [config.get("message", "") for config in metrics.configs(rows)]
    rows = rows.assign(why=messages)
    rows = rows[rows["why"] != ""]
    if not len(rows):
        return pandas.DataFrame(columns=["outcome", "T", "why"])
    grouped = rows.groupby(["backend", "outcome", "why"], sort=False)["x_value"]
    found = grouped.agg(lambda t: ", ".join(map(str, sorted(set(t))))).rename("T").reset_index()
    return found[["backend", "outcome", "T", "why"]].set_index("backend")


def accuracy(df: pandas.DataFrame) -> pandas.DataFrame:
    """Each implementation's largest error as a share of what the rule allows, and what was checked.

    1 is the limit; it is twice what plain torch strays in the same dtype.
    """
    rows = labelled(df)
    red = rows[rows["outcome"] == "red"]["backend"].unique()
    rows = rows[rows["metric"] == "error"]
    configs = metrics.configs(rows)
    rows = rows.assign(
        share=[m / c["allowed"] for m, c in zip(rows["median"], configs, strict=True)],
        checked=[c.get("checked", "") for c in configs],
    )
    share = rows.pivot_table(
        index="backend", columns="mode", values="share", aggfunc="max", sort=False
    )
    share = share.reindex(columns=[m for m in ("forward", "backward") if m in share]).round(2)
    share = share.assign(checked=rows.groupby("backend", sort=False)["checked"].last())
    wrong = [name for name in red if name in share.index]
    share.loc[wrong, "checked"] = "RED at another shape; " + share.loc[wrong, "checked"]
    return share


def paths(cells: list[dict]) -> dict[str, tuple]:
    """{backend: what served each branch}, from the witnesses of cells."""
    return {
        cell["name"]: tuple((b, ", ".join(p)) for b, p in sorted(cell["paths"].items()))
        for cell in cells
        if cell["paths"] and not cell["name"].startswith("peer ")
    }


def fastest(df: pandas.DataFrame) -> pandas.DataFrame:
    """Where each backend wins: for every shape, T and mode the fastest NSA and dense, and by how
    much. `NSA of limit` is the share of the physical limit that the winner reaches. What computes
    another function takes no part."""
    rows = rows_of(df, "latency", *MODES)
    rows = rows[rows["median"].notna() & rows["comparable"]]
    found, index = [], ["shape", "queries", "T", "mode"]
    for key, group in rows.groupby(["shape", "queries", "x_value", "mode"], sort=False):
        line: dict = dict(zip(index, key, strict=True))
        for operation, label in ((NSA, "NSA"), (DENSE, "dense")):
            mine = group[group["operation"] == operation]
            limit = mine[mine["backend"] == LIMITS[operation]]["median"]
            raced = mine[mine["backend"] != LIMITS[operation]]
            if len(raced):
                best = raced.loc[raced["median"].idxmin()]
                line[label], line[f"{label} ms"] = best["backend"], best["median"]
                if label == "NSA" and len(limit):
                    line["NSA of limit"] = limit.iloc[-1] / best["median"]
        if "NSA" in line:
            line["dense / NSA"] = line.get("dense ms", math.nan) / line["NSA ms"]
            found.append(line)
    columns = ["NSA", "NSA ms", "NSA of limit", "dense", "dense ms", "dense / NSA"]
    table = pandas.DataFrame(found, columns=[*index, *columns]).set_index(index)
    return _named(table, rows)


def break_even(df: pandas.DataFrame) -> pandas.DataFrame:
    """The T from which each NSA implementation beats the fastest dense one, by mode.

    Interpolated between measured T, straight in log-log; "below T" where it wins from the first T
    on, "beyond T" where it does not win up to the last.
    """
    found: dict[tuple, dict[str, str]] = {}
    for mode in MODES:
        rows = rows_of(df, "latency", mode)
        rows = rows[rows["median"].notna() & ~rows["backend"].isin(LIMITS.values())]
        for (shape, queries), group in rows.groupby(["shape", "queries"], sort=False):
            dense = group[group["operation"] == DENSE].groupby("x_value")["median"].min()
            ours = group[group["operation"] == NSA]
            for backend, line in ours.groupby("backend", sort=False):
                both = line.set_index("x_value")["median"].to_frame("ours")
                both = both.join(dense.rename("dense"), how="inner").sort_index()
                if len(both):
                    text = crossing(list(both.index), list(both["ours"]), list(both["dense"]))
                    found.setdefault((shape, queries, backend), {})[mode] = text
    index = pandas.MultiIndex.from_tuples(found, names=["shape", "queries", "backend"])
    return _named(pandas.DataFrame(list(found.values()), index=index).fillna(""), df)


def unions(df: pandas.DataFrame) -> pandas.DataFrame:
    """Mean distinct blocks that 4 and 8 neighbouring queries select, by kind of queries and T."""
    rows = labelled(df)
    rows = rows[rows["metric"].str.startswith("mean_union_of_")]
    rows = rows.assign(neighbours=rows["metric"].str.rpartition("_")[2].astype(int))
    lines = ["shape", "queries", "neighbours"]
    table = rows.pivot_table("median", lines, "x_value", aggfunc="last", sort=False)
    return table.rename_axis(columns="T").round(1)


def outcomes(cells: list[dict]) -> dict[str, str]:
    """{implementation: "ok x2, declined x1"}, in the order of the cells."""
    found: dict[str, Counter] = {}
    for cell in cells:
        found.setdefault(cell["name"], Counter())[cell["outcome"]] += 1
    return {
        name: ", ".join(f"{outcome} x{count}" for outcome, count in counts.items())
        for name, counts in found.items()
    }


def facts(cells: list[dict], shapes: Sequence[Shape]) -> list[str]:
    """Lines that are the same on every machine: how cells ended, work in numbers, paths."""
    lines = [f"{name}: {ended}" for name, ended in outcomes(cells).items()]
    for shape in shapes:
        work = {mode: f"{done.flops:,}" for mode, done in limits.work(shape).items()}
        lines.append(f"T {shape.tokens}: pairs {limits.pairs(shape.tokens, shape.config)}")
        lines.append(f"  operations forward {work['forward']}, backward {work['backward']}")
    for name, served in paths(cells).items():
        lines.append(f"{name}: " + ", ".join(f"{branch} {path}" for branch, path in served))
    return lines
