"""Answers on the front page, from stored rows: which backend at a T, what fits, who hangs."""

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from workbook.runs import metrics
from workbook.runs.claim import LACKS
from workbook.runs.looks import length
from workbook.runs.site.data import NUMBERS, rows_of

Run = dict[str, Any]
FRONT = 32768
MODES = ("forward", "backward")
HUNG = (("07", r"healthy ones called HANG"), ("07", r"healthy ones that stay STALLED"),
        ("03", r"of \d+ trials that the old rule calls HANG"))  # fmt: skip
NOT_A_BACKEND = re.compile(r"limit$")  # a limit of physics is no implementation


def speed(runs: Iterable[Run]) -> list[dict]:
    """Tables of attention's forward and backward on GPUs, one a GPU and setting of a call; those
    with the most T first. `runs`, newest first: the newest value of a point is used."""
    found: dict[tuple, dict[float, dict]] = {}
    for run in runs:
        here: dict[tuple, dict[str, dict]] = {}
        for row in rows_of(run, "latency", _is_time):
            point = (row["device"], _settings(row), row["x_value"])
            kind = "nsa" if row["operation"] == "nsa_attention" else "dense"
            here.setdefault((point, kind, row["backend"]), {})[row["mode"]] = row["median"]
        for (point, kind, backend), times in here.items():
            if set(times) == set(MODES):
                *table, tokens = point
                kinds = found.setdefault(tuple(table), {}).setdefault(tokens, {})
                value = _of(run) | {"total": sum(times.values()), "backend": backend}
                value["text"] = " + ".join(_short(times[mode]) for mode in MODES)
                kinds.setdefault(kind, {}).setdefault(backend, value)

    def title(device: str, settings: dict) -> str:
        words = [
            f"{letter} {settings[n]}".strip() for n, letter in SHAPE.items() if settings.get(n)
        ]
        queries = settings.get("queries")
        return ", ".join([device, *words, *([f"{queries} queries"] if queries else [])])

    return _tables(found, title, {*SHAPE, "queries"})


HOW = {"compile": "compiled", "cuda_graph": "CUDA graph"}
SHAPE = {"heads": "HQ", "kv_heads": "HKV", "dim": "D", "dtype": ""}
# Columns of a row that are no settings of what was measured: how often and how long it was, its
# labels, and the axes of the tables.
NO_SETTINGS = {"operation", "backend", "mode", "metric", "unit", "x_name", "device", "seed", "data",
               "tokens", "steps", "warmup", "threads", "variant", "arm", *NUMBERS}  # fmt: skip


def _settings(row: dict, also: Collection[str] = ()) -> tuple[tuple[str, Any], ...]:
    """Settings that the row was measured with, but for those named in `also`."""
    left_out = NO_SETTINGS | set(also)
    left_out |= {"value_dim"} if row.get("value_dim") == row.get("dim") else set()
    return tuple(sorted((n, v) for n, v in row.items() if n not in left_out and v is not None))


def _of(run: Run) -> dict[str, str]:
    return {"run": run["run"], "date": str(run.get("started") or run["run"])[:10]}


def _tables(
    found: dict[tuple, dict[float, dict]], title: Callable[[str, dict], str], told: Collection[str]
) -> list[dict]:
    """Tables of `found`, by (device, settings), T and kind. A title also has the settings that it
    does not tell and in which tables differ."""
    settings = [dict(given) for _, given in found]
    names = {name for given in settings for name in given} - set(told)
    differ = sorted(n for n in names if len({given.get(n) for given in settings}) > 1)
    tables = []
    for (device, given), points in found.items():
        own = dict(given)
        more = [f"{n} {own[n]}" for n in differ if own.get(n) not in (None, "", False)]
        rows = [_fastest(tokens, points[tokens]) for tokens in sorted(points)]
        tables.append({"title": ", ".join([title(device, own), *more]), "device": device,
                       "rows": rows})  # fmt: skip
    return sorted(tables, key=lambda t: (-len(t["rows"]), t["title"]))


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
    row["dates"] = {one["run"]: one["date"] for one in (nsa, dense) if one}
    row["said"] = f"T {length(tokens)}: "
    if nsa:
        row["said"] += f"{nsa['backend']}, {nsa['text']} ms"
    if nsa and dense:
        row["times"] = dense["total"] / nsa["total"]
        row["ratio"] = _ratio(row["times"], nsa["run"] != dense["run"])
        row["said"] += f"; {row['ratio']} than {dense['backend']} ({dense['text']} ms)"
    return row


def _ratio(times: float, two_runs: bool) -> str:
    word = f"{times:.1f}x faster" if times >= 1 else f"{1 / times:.1f}x slower"
    return word + (" (of two runs)" if two_runs else "")


def training(runs: Iterable[Run]) -> list[dict]:
    """Tables of tokens a second of one rank, by GPU, model and setting, rows as in `speed`: the
    newest value of each way to train, with the batch that was fastest."""
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
            name = "dense twin" if kind == "dense" else row["backend"]
            name = ", ".join([name, *(word for key, word in HOW.items() if settled.get(key))])
            value = _of(run) | {"backend": name, "total": 1 / row["median"]}
            value["text"] = f"{row['median']:,.0f}"
            value["batch"] = settled.get("batch")
            settings = _settings(
                settled, ("attention", "batch", "ranks", "parallel", "observe", *HOW)
            )
            point = ((row["device"], settings), row["x_value"], kind, name)
            if point not in best or value["total"] < best[point]["total"]:  # the better of two
                best[point] = value
        for (table, tokens, kind, name), value in best.items():
            kinds = found.setdefault(table, {}).setdefault(tokens, {})
            kinds.setdefault(kind, {}).setdefault(name, value)

    def title(device: str, settings: dict) -> str:
        precision = settings.get("precision") or ""
        words = [metrics.model_name(settings), precision, f"one {device}"]
        return ", ".join(filter(None, words))

    return _tables(found, title, {"preset", "model", "layers", "precision"})


def front(tables: list[dict], device: str = "") -> dict[str, Any] | None:
    """Row nearest to T FRONT of the first table that compares NSA with dense attention, of `device`
    if there is one, else of the first that has NSA. `title` and `device` are its table's, `wins` is
    the shortest T from which on NSA is faster, or None. None if there is no such row."""
    tables = sorted(tables, key=lambda table: table["device"] != device)
    for wanted in ("ratio", "nsa"):
        for table in tables:
            if rows := [row for row in table["rows"] if row[wanted]]:
                best = min(rows, key=lambda row: abs(math.log(row["tokens"] / FRONT)))
                slower = max((r["tokens"] for r in rows if r.get("times", 1) < 1), default=0)
                wins = next(
                    (r["tokens"] for r in rows if "times" in r and r["tokens"] > slower), None
                )
                return best | {name: table[name] for name in ("title", "device")} | {"wins": wins}
    return None


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
    "observe": (False, "observed"), "allocator": ("", "{}"), "anomaly": (False, "anomaly mode"),
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
    """Sentences on reported hangs: of the newest run that decides each, or, if that passes, of the
    one that counted most."""
    runs, said = list(runs), []
    for notebook, pattern in HUNG:
        found = []
        for run in (r for r in runs if r["notebook"].startswith(notebook)):
            for verdict in (v for v in run["verdicts"] if re.match(pattern, v["claim"])):
                claim = re.sub(r"\s*\[[^\]]*\]$", "", verdict["claim"])
                where = ", ".join(run.get("device") or ["an unknown device"])
                about = {"verdict": verdict["verdict"], "claim": claim, "device": where}
                about["short"], _, lacks = claim.partition(LACKS)
                about["lacks"] = "some cases were not measured" if lacks else ""
                found.append(_of(run) | about)
        if found and found[0]["verdict"] == "PASS":
            found = [max(found, key=lambda one: int(re.findall(r"of (\d+)", one["claim"])[0]))]
        said += found[:1]
    return said


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
