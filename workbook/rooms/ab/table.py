"""Tables of variants and of predictions beside findings, and rows of metrics.csv."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas

from workbook.rooms.ab.claims import Judged
from workbook.rooms.ab.rules import COUNTED, METRICS, TIMED, UNITS
from workbook.rooms.ab.trials import Results
from workbook.runs import metrics
from workbook.runs.scaling import paired_ratio

# Metric, mode and unit in metrics.csv, and the factor that converts to that unit.
ROWS = {
    "seconds": ("step_time", "step", "ms", 1e3),
    "processor": ("processor_time", "step", "ms", 1e3),
    "forward": ("step_time", "forward", "ms", 1e3),
    "backward": ("step_time", "backward", "ms", 1e3),
    "optimizer": ("step_time", "optimizer", "ms", 1e3),
    "startup": ("startup", "", "s", 1.0),
    "allocated": ("peak_memory", "step", "MiB", 1.0),
    "reserved": ("peak_reserved", "step", "MiB", 1.0),
    "fragmentation": ("fragmentation", "step", "MiB", 1.0),
    "growing": ("memory_growing", "step", "MiB", 1.0),
    "operations": ("operations", "step", "", 1.0),
    "nodes": ("autograd_nodes", "step", "", 1.0),
}


def variants(results: Results, *, on_cpu: bool) -> pandas.DataFrame:
    """One row per variant, medians over repeats; on a CPU, times relative to the first variant."""
    lines, base = [], results.plan.listed[0]
    for variant in results.plan.listed:
        ended = Counter(trial.done.verdict.label for trial in results.of(variant))
        line = {"verdict": ", ".join(f"{n} x {kind}" for kind, n in ended.items()) or "not run"}
        for of in METRICS:
            value = results.middle(variant, of)
            if of in TIMED and of != "startup" and on_cpu:
                line[f"{of} / first"] = _ratio(
                    results.values(base, of), results.values(variant, of)
                )
            else:
                unit = UNITS.get(of, "MiB")
                line[f"{of}, {unit}" if unit else of] = _number(value, of)
        losses = [trial.losses[-1] for trial in results.of(variant) if trial.losses]
        line["last loss"] = f"{np.mean(losses):.4f}" if losses else ""
        lines.append(line)
    names = [variant.name for variant in results.plan.listed]
    table = pandas.DataFrame(lines, index=pandas.Index(names, name="variant"))
    return table.loc[:, (table != "").any()]


def _ratio(base: Sequence[float], other: Sequence[float]) -> str:
    pairs = [(a, b) for a, b in zip(base, other, strict=True) if a > 0 and b > 0]
    return f"{paired_ratio(*zip(*pairs, strict=True)).value:.2f}" if pairs else ""


def _number(value: float, of: str) -> str:
    if math.isnan(value):
        return ""
    if of in COUNTED:
        return f"{value:,.0f}"
    return f"{value:.4g}" if of in TIMED else f"{value:,.2f}"


def expectations(judged: Sequence[Judged]) -> pandas.DataFrame:
    """Table of each prediction, what was found, and the verdict of its rule."""
    lines = [
        {"predicted": one.says, "found": one.found, "verdict": one.verdict or "none predicted"}
        for one in judged
    ]
    return pandas.DataFrame(lines, columns=["predicted", "found", "verdict"])


def failures(results: Results) -> pandas.DataFrame:
    """Table of the trials that did not pass, with ids for `nsa explain`."""
    lines = [
        {"variant": t.variant.name, "trial": t.id, "verdict": t.done.verdict.label,
         "because": "; ".join(t.done.verdict.because[:2])}
        for t in results.trials if t.done.verdict.kind != "PASS"
    ]  # fmt: skip
    return pandas.DataFrame(lines, columns=["variant", "trial", "verdict", "because"])


def to_metrics(results: Results) -> list[dict]:
    """Rows for metrics.csv, one per variant and metric; without a value, a row has the outcome."""
    found = []
    for variant in results.plan.listed:
        trials = results.of(variant)
        if not trials:
            continue
        spec = trials[0].done.evidence.spec
        tokens = spec.get("settings", {}).get("tokens")
        kinds = sorted({trial.done.verdict.label for trial in trials})
        same = {
            "operation": "training_step",
            "backend": spec.get("settings", {}).get("backend", ""),
            "x_name": "tokens" if tokens is not None else "",
            "x_value": tokens,
            "device": spec.get("settings", {}).get("device"),  # default: that of the run's cells
            "config": {
                "arm": variant.name,  # the column of committed records
                **variant.trial,
                "trials": [trial.id for trial in trials],
            }
            | ({} if kinds == ["PASS"] else {"outcome": ", ".join(kinds)}),
        }
        for of, (metric, mode, unit, scale) in ROWS.items():
            values = [v * scale for v in results.values(variant, of) if math.isfinite(v)]
            if values or (of == "seconds" and kinds != ["PASS"]):
                three = np.quantile(values, [0.5, 0.2, 0.8]) if values else [None]
                found.append(same | metrics.values(metric, unit, *three, mode=mode))
    return found
