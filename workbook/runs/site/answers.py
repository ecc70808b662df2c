"""Answers on the front page, from stored rows: which backend at a T, what fits, who hangs."""

import re
from collections.abc import Iterable
from typing import Any

from workbook.runs import metrics
from workbook.runs.looks import length
from workbook.runs.site.data import rows_of

Run = dict[str, Any]
MODES = ("forward", "backward")
HUNG = (("07", r"healthy ones called HANG"), ("07", r"healthy ones that stay STALLED"),
        ("03", r"of \d+ trials that the old rule calls HANG"))  # fmt: skip
NOT_A_BACKEND = re.compile(r"limit$")  # a limit of physics is no implementation


def speed(runs: Iterable[Run]) -> list[dict]:
    """Tables of attention's forward and backward on GPUs, one a GPU, shape and kind of queries;
    those with the most T first. `runs`, newest first: the newest value of a point is used."""
    found: dict[tuple, dict[float, dict]] = {}
    for run in runs:
        here: dict[tuple, dict[str, dict]] = {}
        for row in rows_of(run, "latency", _is_time):
            shape = tuple((name, row.get(name)) for name in SHAPE if row.get(name) is not None)
            point = (row["device"], shape, row.get("queries") or "", row["x_value"])
            kind = "nsa" if row["operation"] == "nsa_attention" else "dense"
            here.setdefault((point, kind, row["backend"]), {})[row["mode"]] = row["median"]
        for (point, kind, backend), times in here.items():
            if set(times) == set(MODES):
                *table, tokens = point
                kinds = found.setdefault(tuple(table), {}).setdefault(tokens, {})
                value = {"total": sum(times.values()), "run": run["run"], "backend": backend}
                value["text"] = " + ".join(_short(times[mode]) for mode in MODES)
                kinds.setdefault(kind, {}).setdefault(backend, value)
    tables = []
    for (device, shape, queries), points in found.items():
        sizes = dict(shape)
        words = [f"{letter} {sizes[name]}" for name, letter in SHAPE.items() if name in sizes]
        title = ", ".join([device, *words, *([f"{queries} queries"] if queries else [])])
        rows = [_fastest(tokens, points[tokens]) for tokens in sorted(points)]
        tables.append({"title": title, "rows": rows})
    return sorted(tables, key=lambda t: (-len(t["rows"]), t["title"]))


HOW = {"compile": "compiled", "cuda_graph": "CUDA graph"}
SHAPE = {"heads": "HQ", "kv_heads": "HKV", "dim": "D", "dtype": ""}


def _is_time(row: dict) -> bool:
    return (
        row["operation"] in ("nsa_attention", "dense_attention")
        and row["mode"] in MODES
        and row["x_name"] == "tokens"
        and row["median"] is not None
        and metrics.is_gpu(row["device"])
        and not NOT_A_BACKEND.search(row["backend"])
    )


def _fastest(tokens: float, kinds: dict[str, dict[str, dict]]) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "ratio": "", "nsa": None, "dense": None}
    for kind, values in kinds.items():
        first, *others = sorted(values.values(), key=lambda v: v["total"])
        row[kind] = first | {"others": others}
    nsa, dense = row["nsa"], row["dense"]
    row["said"] = f"T {length(tokens)}: "
    if nsa:
        row["said"] += f"{nsa['backend']}, {nsa['text']} ms"
    if nsa and dense:
        row["ratio"] = _ratio(dense["total"] / nsa["total"], nsa["run"] != dense["run"])
        row["said"] += f"; {row['ratio']} than {dense['backend']} ({dense['text']} ms)"
    return row


def _ratio(times: float, two_runs: bool) -> str:
    word = f"{times:.1f}x faster" if times >= 1 else f"{1 / times:.1f}x slower"
    return word + (" (of two runs)" if two_runs else "")


def training(runs: Iterable[Run]) -> list[dict]:
    """Tables of tokens a second of one rank, by GPU and model, rows as in `speed`: the newest value
    of each way to train."""
    found: dict[tuple, dict[float, dict]] = {}
    for run in runs:
        best: dict[tuple, dict] = {}
        for row in rows_of(run, "tokens_per_second"):
            settled = _same(run) | row
            if row["mode"] != "step" or row["median"] is None or not metrics.is_gpu(row["device"]):
                continue
            if row["x_name"] != "tokens":  # a soak's, over its steps
                continue
            if (settled.get("ranks") or 1) != 1 or settled.get("observe"):
                continue
            kind = "dense" if "dense" in (settled.get("attention"), row["backend"]) else "nsa"
            model = f"{metrics.model_name(settled)}, {settled.get('precision') or ''}".strip(", ")
            name = "dense twin" if kind == "dense" else row["backend"]
            name = ", ".join([name, *(word for key, word in HOW.items() if settled.get(key))])
            value = {"backend": name, "total": 1 / row["median"], "run": run["run"]}
            value["text"] = f"{row['median']:,.0f}"
            point = ((row["device"], model), row["x_value"], kind, name)
            if point not in best or value["total"] < best[point]["total"]:  # the better of two
                best[point] = value
        for (table, tokens, kind, name), value in best.items():
            kinds = found.setdefault(table, {}).setdefault(tokens, {})
            kinds.setdefault(kind, {}).setdefault(name, value)
    tables = [
        {
            "title": f"{model}, one {device}",
            "rows": [_fastest(t, points[t]) for t in sorted(points)],
        }
        for (device, model), points in found.items()
    ]
    return sorted(tables, key=lambda t: (-len(t["rows"]), t["title"]))


def _same(run: Run) -> dict[str, Any]:
    """Settings that all rows of a run share."""
    columns = run["rows"]["columns"]
    return {name: c["values"][0] for name, c in columns.items() if len(c["values"]) == 1}


# Settings that affect a step's peak beside GPU, model, backend and T: the default of each, and its
# words. `dtype` is the name of the precision in runs of 01.
SETTINGS: dict[str, tuple[Any, str]] = {
    "attention": ("nsa", "{}"), "batch": (1, "batch {}"), "precision": (None, "{}"),
    "dtype": (None, "{}"), "checkpoint": ("", "layers {} recomputed"),
    "compile": (False, "compiled"), "cuda_graph": (False, "CUDA graph"), "ranks": (1, "{} ranks"),
    "parallel": ("none", "{}"), "optimizer": (None, "{}"), "changes": (None, "{}"),
}  # fmt: skip


def _setting(row: dict) -> str:
    """Settings of a row that are not the defaults, and its batch, in words."""
    given = {name: row.get(name) for name in SETTINGS}
    given = {n: SETTINGS[n][0] if value is None else value for n, value in given.items()}
    told = [
        SETTINGS[n][1].format(v) for n, v in given.items() if n == "batch" or v != SETTINGS[n][0]
    ]
    return ", ".join(told)


def memory(runs: Iterable[Run]) -> list[dict]:
    """Tables of a training step's peak in GiB, one a GPU, model and setting: backends by T.

    A row is of one run, since code changes what a step holds: of the newest that has several T, or
    else of the newest. Rows measured at one T alone make no table.
    """
    found: dict[tuple, dict[str, list[dict[float, dict]]]] = {}
    for run in runs:
        here: dict[tuple, dict[float, dict]] = {}
        for row in rows_of(run, "peak_memory", _is_peak):
            settled = _same(run) | row
            model = f"{metrics.model_name(settled)}, {_setting(settled)}"
            gib = None if row["median"] is None else row["median"] / 1024
            cell = {"tokens": row["x_value"], "gib": gib, "run": run["run"]}
            key = ((row["device"], model), row["backend"])
            here.setdefault(key, {}).setdefault(row["x_value"], cell)
        for (table, backend), cells in here.items():
            found.setdefault(table, {}).setdefault(backend, []).append(cells)
    tables = []
    for (device, model), measured in found.items():
        several = {name: [of for of in all if len(of) > 1] for name, all in measured.items()}
        backends = {name: (several[name] or all)[0] for name, all in measured.items()}
        tokens = sorted({t for cells in backends.values() for t in cells})
        if len(tokens) < 2:
            continue
        rows = []
        for backend in sorted(backends):
            cells = [backends[backend].get(t, {"tokens": t, "gib": None}) for t in tokens]
            for cell in cells:
                cell["text"] = "not measured" if cell["gib"] is None else _short(cell["gib"])
            fit = [c["tokens"] for c in cells if c["gib"] is not None and c["gib"] <= 80]
            largest = length(max(fit)) if fit else "none"
            rows.append({"backend": backend, "cells": cells, "largest": largest})
        tables.append({"title": f"{model}, measured on {device}", "tokens": tokens, "rows": rows})
    return sorted(tables, key=lambda t: (-_measured(t), t["title"]))


def _measured(table: dict) -> int:
    return sum(cell["gib"] is not None for row in table["rows"] for cell in row["cells"])


def _is_peak(row: dict) -> bool:
    return (
        row["operation"] == "training_step"
        and row["mode"] == "step"
        and row["x_name"] == "tokens"
        and row["unit"] == "MiB"
        and not row.get("arm")  # an A/B's variants are no backends
        and metrics.is_gpu(row["device"])
    )


def hung(runs: Iterable[Run]) -> list[dict]:
    """Sentences on reported hangs, from the newest runs that decide them."""
    runs, said = list(runs), []
    for notebook, pattern in HUNG:
        for run in (r for r in runs if r["notebook"].startswith(notebook)):
            of_run = [v for v in run["verdicts"] if re.match(pattern, v["claim"])]
            if of_run:
                claim = re.sub(r"\s*\[[^\]]*\]$", "", of_run[0]["claim"])
                said.append({"run": run["run"], "verdict": of_run[0]["verdict"], "claim": claim})
                break
    return said


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
