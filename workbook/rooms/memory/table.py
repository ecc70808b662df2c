"""Tables that summarize the memory rows of a metrics table. Draws nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pandas

from nsa.model.presets import preset
from workbook.lab.measure.activation_model import predicted_peak
from workbook.lab.measure.steps import CONSTANT
from workbook.lab.training import TrainingSpec
from workbook.rooms.case_study import figures as case_study
from workbook.runs import metrics
from workbook.runs.looks import by_tokens
from workbook.runs.metrics import model_name
from workbook.runs.scaling import Fit, fit_exponent, local_exponents

# Backends that never make a T x T tensor.
LINEAR = ("gather", "packed", "flex", "triton")
STUDY = "case study, 5 layers"


def labelled(df: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of training steps over T, mode "step", with columns `model` ("repro, 5 layers") and
    `outcome`."""
    rows = df[(df["operation"] == "training_step") & (df["x_name"] == "tokens")].copy()
    configs = metrics.configs(rows)
    rows["model"] = [model_name(config) for config in configs]
    rows["outcome"] = [config.get("outcome", "ok") for config in configs]
    rows["x_value"] = rows["x_value"].astype(int)
    return rows[rows["mode"] == "step"]


def peaks(df: pandas.DataFrame) -> pandas.DataFrame:
    """Peak MiB of a step, one row per model and backend, one column per T; failures by name."""
    rows = labelled(df)
    rows = rows[rows["metric"] == "peak_memory"]
    shown = [
        f"{mib:,.1f}" if np.isfinite(mib) else outcome
        for mib, outcome in zip(rows["median"].astype(float), rows["outcome"], strict=True)
    ]
    return by_tokens(rows.assign(shown=shown), "shown").fillna("")


def growing(df: pandas.DataFrame) -> pandas.DataFrame:
    """MiB at the peak that are neither weights, gradients nor optimizer state; NaN if it failed.

    One row per model and backend, one column per T; for a cell measured twice, the last counts. In
    a total, the constant part would hide the growth.
    """
    rows = labelled(df)
    rows = rows[rows["metric"].str.startswith("memory_")]
    rows = rows[~rows["metric"].str.removeprefix("memory_").isin(CONSTANT)]
    keys = ["model", "backend", "x_value"]
    rows = rows.drop_duplicates([*keys, "metric"], keep="last")
    total = rows.groupby(keys, sort=False)["median"].sum(min_count=1).reset_index()
    return by_tokens(total, "median").astype(float)


def dense_up_to(df: pandas.DataFrame) -> dict[str, int]:
    """Return {model: n l'}, the T up to which a query sees every key; 0 if it is not a preset."""
    found = {}
    for config in metrics.configs(labelled(df)):
        try:
            sizes = preset(config.get("preset"), **(config.get("changes") or {})).nsa
            found[model_name(config)] = sizes.select_count * sizes.select_block
        except ValueError:
            found[model_name(config)] = 0
    return found


def exponents(table: pandas.DataFrame) -> pandas.DataFrame:
    """Local exponents of a `growing` table, one column per pair of neighbouring T, and the fit."""
    tokens = list(table.columns)
    found = []
    for _, line in table.iterrows():
        local = local_exponents(tokens, line.to_numpy())
        texts = [f"{p:.2f}" if np.isfinite(p) else "" for p in local]
        found.append([*texts, str(exponent_fit(line))])
    pairs = [f"{a}-{b}" for a, b in pairwise(tokens)]
    return pandas.DataFrame(found, index=table.index, columns=[*pairs, "fit [95 %]"])


def exponent_fit(line: pandas.Series, first: int = 0) -> Fit:
    """Fit the exponent of one row of a `growing` table over T >= `first`."""
    line = line[[t >= first for t in line.index]].dropna()
    return fit_exponent(list(line.index), line.to_numpy())


def paths(rows: Sequence[dict]) -> pandas.DataFrame:
    """Implementation that served each branch, from the witnesses of measured rows, by backend."""
    found = {}
    for row in rows:
        if row["witness"]:
            served = row["witness"]["paths"]
            found[row["backend"]] = {b: ", ".join(sorted(served[b])) for b in served}
    return pandas.DataFrame.from_dict(found, orient="index").fillna("-")


def predicted(cells: Sequence[TrainingSpec]) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """Predict each cell's peak from shapes alone: {model: {backend: (T, MiB)}}."""
    curves: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for c in cells:
        if c.backend != "auto":
            lines = curves.setdefault(model_name(asdict(c)), {})
            tokens, mib = lines.setdefault(c.backend, ([], []))
            tokens.append(c.tokens)
            held = predicted_peak(c.config(), c.tokens, c.batch, c.precision, c.backend)
            mib.append(held / 2**20)
    return curves


def case_study_curve() -> dict[str, tuple[list[int], list[float]]]:
    """Curve of the case study's own table: {label: (T, MiB)}."""
    return {STUDY: (list(case_study.MEMORY_MIB), list(case_study.MEMORY_MIB.values()))}


def beside_the_case_study(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of the case study with its exponents, and below it our backends' peaks in MiB."""
    tokens, mib = case_study_curve()[STUDY]
    local = [f"{p:.2f}" for p in local_exponents(tokens, mib)]
    lines = [[f"{m:,.1f}" for m in mib], ["", *local]]
    names = [(STUDY, "reported"), (STUDY, "exponent from the left")]
    index = pandas.MultiIndex.from_tuples(names, names=["model", "backend"])
    both = pandas.concat([pandas.DataFrame(lines, index, tokens), peaks(df)])
    return both[sorted(both.columns)].fillna("").rename_axis(columns="T")


def failed(rows: Sequence[dict]) -> pandas.DataFrame:
    """Table of the cells that failed, and why."""
    names = ["preset", "layers", "backend", "tokens", "outcome", "message"]
    return pandas.DataFrame([{n: r[n] for n in names} for r in rows if r["outcome"] != "ok"])


def facts(df: pandas.DataFrame, rows: Sequence[dict]) -> list[str]:
    """Machine-independent lines: outcomes of cells, parameters, exponents, paths."""
    counts = Counter(f"{row['backend']}: {row['outcome']}" for row in rows)
    models = sorted({(r["preset"], r["layers"], r["parameters"]) for r in rows if r["witness"]})
    ended = ", ".join(f"{name} x{count}" for name, count in counts.items())
    lines = [ended, f"parameters: {models}"]
    for (model, backend), line in growing(df).iterrows():
        last = exponent_fit(line.dropna()[-2:]).exponent
        lines.append(f"{model}: {backend} ends at T^{last:.1f}")
    return [*lines, *paths(rows).to_string().splitlines()]
