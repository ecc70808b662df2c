"""Rows of this package's trials and loss curves in the long format of metrics.csv."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from nsa.experiments.throughput.cell import LEAST_WARMUP, TrainCell
from nsa.lab.measure.flops import StepFlops, step_flops

OPERATION = "training"
PHASES = ("data", "forward", "backward", "optimizer", "graph", "communication")
POINTS = 50  # of a series over steps
_MORE = ("outcome", "message", "timing", "parameters", "device_name", "threads")


def rows_to_metrics(rows: Sequence[dict]) -> list[dict]:
    """Values of what failed are NaN. `config` holds the cell and how it ended.

    Over tokens: "tokens_per_second" (modes "step" and "recount", by the wall clock), "step_time",
    "phase_time" by phase ("backward" with the communication that it hides, "communication" what is
    not hidden), "observing" of cells that ask for it (a step with all observers over one with
    none), "peak_memory", "memory_growth" a step of "device" and "host" (median: Theil and
    Sen's slope, q20 and q80: its 95 % interval), "utilisation" of the "measured" and "nominal"
    ceiling, "recompilations", "syncs", "loader_wait". Over steps: "memory" of "device" and "host".
    """
    return [metric for row in rows for metric in _metrics(row)]


def curves_to_metrics(curves: Sequence[dict]) -> list[dict]:
    """Rows of "loss" over steps: the mean of each of at most 50 windows, a row a window and seed.

    And "memory" and "memory_growth" as in `rows_to_metrics`.
    """
    found = []
    for curve in curves:
        for seed, losses in curve["losses"].items():
            config = _config(curve) | {"seed": int(seed)}
            for step, loss in windows(losses):
                found.append(_row(curve, "step", "loss", "nats", "step", step, (loss,), config))
        if not curve["losses"]:
            found.append(_row(curve, "step", "loss", "nats", "step", 0, (math.nan,)))
        found += _memory(curve, skip=LEAST_WARMUP)  # the optimizer's state is made there
    return found


def windows(series: Sequence[float]) -> list[tuple[float, float]]:
    """(the step in its middle, mean) of at most POINTS equal parts of a series."""
    parts = np.array_split(np.arange(len(series)), min(POINTS, len(series)) or 1)
    values = np.asarray(series, float)
    return [(float(p.mean()), float(values[p].mean())) for p in parts if len(p)]


def growth(series: Sequence[float]) -> tuple[float, float, float]:
    """Theil and Sen's slope a step, and its 95 % interval; NaN below three values."""
    from scipy.stats import theilslopes

    if len(series) < 3:
        return (math.nan,) * 3
    found = theilslopes(np.asarray(series, float), alpha=0.95)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def cell_of(row: dict) -> TrainCell:
    """The cell that a row is about."""
    names = TrainCell.__dataclass_fields__
    return TrainCell.from_dict({name: row[name] for name in names if name in row})


def flops_of(row: dict) -> StepFlops:
    """The model FLOPs of one step of a row's cell."""
    cell = cell_of(row)
    return step_flops(cell.config(), cell.tokens, cell.batch)


def _metrics(row: dict) -> Iterator[dict]:
    def at(mode: str, metric: str, unit: str, *values: float) -> dict:
        return _row(row, mode, metric, unit, "tokens", row["tokens"], values)

    times = [row[name] for name in ("step_ms", "step_ms_q20", "step_ms_q80")]
    per_step = 1e3 * row["batch"] * row["tokens"]
    low, high = per_step / times[2], per_step / times[1]
    yield at("step", "tokens_per_second", "tokens/s", row["tokens_s"], low, high)
    yield at("recount", "tokens_per_second", "tokens/s", row["recount_tokens_s"])
    yield at("step", "step_time", "ms", *times)
    ms = row["phase_ms"] | {"communication": row["communication_ms"]}
    for phase in PHASES:
        if phase in ms:
            yield at(phase, "phase_time", "ms", ms[phase])
    if row["observe"]:
        yield at("step", "observing", "1", row["watched_times"])
    yield at("step", "peak_memory", "MiB", row["peak_mib"])
    yield at("step", "recompilations", "1", row["recompilations"])
    yield at("step", "syncs", "1", math.nan if row["syncs"] is None else row["syncs"])
    yield at("step", "loader_wait", "ms", row["loader_wait_ms"])
    if row["outcome"] != "ok":
        return
    flops = flops_of(row)
    for mode in ("measured", "nominal"):
        ceiling = row["matmul_tflops" if mode == "measured" else "nominal_tflops"]
        share = flops.utilisation(row["step_ms"] / 1e3, ceiling, row["ranks"])
        yield at(mode, "utilisation", "1", share)
    yield from _memory(row)


def _memory(row: dict, skip: int = 0) -> Iterator[dict]:
    for mode in ("device", "host"):
        series = row[f"{mode}_mib"][skip:]
        if series:
            slope = growth(series)
            yield _row(row, mode, "memory_growth", "MiB/step", "tokens", row["tokens"], slope)
            for step, mib in windows(series):
                yield _row(row, mode, "memory", "MiB", "step", step, (mib,))


def _config(row: dict) -> dict:
    names = (*TrainCell.__dataclass_fields__, *_MORE)
    found = {name: _plain(row[name]) for name in names if name in row}
    return found | {"layers": cell_of(row).config().layers}


def _plain(value):
    """NaN as null: strict readers of JSON refuse it."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _row(row, mode, metric, unit, x_name, x, values, config=None) -> dict:
    median, low, high = values if len(values) == 3 else (values[0],) * 3
    return {
        "operation": OPERATION,
        "backend": row["name"],
        "mode": mode,
        "metric": metric,
        "unit": unit,
        "x_name": x_name,
        "x_value": x,
        "median": median,
        "q20": low,
        "q80": high,
        "config": _config(row) if config is None else config,
        # A GPU that this machine has is none that a cell on the CPU used.
        "gpu": "cpu" if row["device"] == "cpu" else None,
    }
