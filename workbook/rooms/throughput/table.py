"""Rows of metrics.csv from training cells, and tables that summarize them."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas

from nsa.model.flops import StepFlops, step_flops
from workbook.rooms.case_study import figures as case_study
from workbook.rooms.throughput.trials import LEAST_WARMUP, TrainCell
from workbook.runs import metrics
from workbook.runs.looks import by_tokens
from workbook.runs.metrics import model_name
from workbook.runs.scaling import crossing, robust_slope

OPERATION = "training"
PHASES = ("data", "forward", "backward", "optimizer", "graph", "communication")
POINTS = 50  # of a series over steps
PLAIN = ""  # the variant of an unmodified cell
POINT = ["model", "backend", "variant", "x_value"]
_CELL = tuple(TrainCell.__dataclass_fields__)
_ENDED = ("outcome", "message", "timing", "parameters", "device_name", "threads")
_LABELS = {
    "variant": PLAIN, "outcome": "ok", "ranks": 1, "parallel": "none", "seed": 0, "message": "",
    "batch": 1, "steps": 0, "tokens": 0,
}  # fmt: skip


def rows_to_metrics(rows: Sequence[dict]) -> list[dict]:
    """Convert rows to metrics; failed values are NaN. `config` holds the cell and its outcome.

    Over tokens: "tokens_per_second" (modes "step" and "recount", by the wall clock), "step_time",
    "phase_time" by phase ("backward" includes hidden communication, "communication" is what is not
    hidden), "observing" for cells with `observe` (a step with all observers over one with
    none), "peak_memory", "memory_growth" per step of "device" and "host" (median: Theil-Sen
    slope, q20 and q80: its 95 % interval), "utilisation" of the "measured" and "nominal"
    ceiling, "recompilations", "syncs", "loader_wait". Over steps: "memory" of "device" and "host".
    """
    return [metric for row in rows for metric in _metrics(row)]


def curves_to_metrics(curves: Sequence[dict]) -> list[dict]:
    """Rows of "loss" over steps: the mean of each of at most 50 windows, a row per window and seed.
    Also "memory" and "memory_growth" as in `rows_to_metrics`."""
    found = []
    for curve in curves:
        for seed, losses in curve["losses"].items():
            for step, loss in windows(losses):
                found.append(_row(curve, "step", "loss", "nats", loss, step=step, seed=int(seed)))
        if not curve["losses"]:
            found.append(_row(curve, "step", "loss", "nats", math.nan, step=0))
        found += _memory(curve, skip=LEAST_WARMUP)  # the optimizer's state is made there
    return found


def windows(series: Sequence[float]) -> list[tuple[float, float]]:
    """Return (middle step, mean) of at most POINTS equal parts of a series."""
    parts = np.array_split(np.arange(len(series)), min(POINTS, len(series)) or 1)
    values = np.asarray(series, float)
    return [(float(p.mean()), float(values[p].mean())) for p in parts if len(p)]


def flops_of(row: dict) -> StepFlops:
    """Model FLOPs of one step of a row's cell."""
    cell = _cell(row)
    return step_flops(cell.config(), cell.tokens, cell.batch)


def labelled(df: pandas.DataFrame) -> pandas.DataFrame:
    """Training rows, with `model` ("production, 12 layers, bf16"), `variant`, `outcome`,
    `ranks`, `parallel` and `seed`; for a point measured twice, the last."""
    rows = df[df["operation"] == OPERATION]
    configs = metrics.configs(rows)
    models = [f"{model_name(c)}, {c.get('precision', '')}".strip(", ") for c in configs]
    labels = {name: [c.get(name, other) for c in configs] for name, other in _LABELS.items()}
    rows = rows.assign(model=models, **labels).astype({"median": float, "x_value": float})
    return rows.drop_duplicates([*POINT, "mode", "metric", "x_name", "seed"], keep="last")


def over_tokens(
    df: pandas.DataFrame, metric: str, mode: str = "step", variant: str | None = PLAIN
) -> pandas.DataFrame:
    """Labelled rows of one metric over T, an integer; variant None: of all variants."""
    rows = labelled(df)
    rows = rows[(rows["x_name"] == "tokens") & (rows["metric"] == metric) & (rows["mode"] == mode)]
    if variant is not None:
        rows = rows[rows["variant"] == variant]
    return rows.astype({"x_value": int})


def at_points(df: pandas.DataFrame, metric: str, mode: str = "step") -> pandas.Series:
    """Values of one metric over T, of all variants, by POINT."""
    return over_tokens(df, metric, mode, None).set_index(POINT)["median"]


def speed(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of tokens/s; a failure shows its outcome."""
    return _shown(over_tokens(df, "tokens_per_second"), "{0.median:,.0f}")


def step_times(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of ms per step, "median [20 %, 80 %]"; a failure shows its outcome."""
    return _shown(over_tokens(df, "step_time"), "{0.median:.4g} [{0.q20:.4g}, {0.q80:.4g}]")


def meters(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table with a row per cell that ran: utilisation, peak, waits, syncs and recompilations."""
    columns = {
        "of measured ceiling": ("utilisation", "measured"),
        "of nominal ceiling": ("utilisation", "nominal"),
        "peak MiB": ("peak_memory", "step"),
        "loader wait ms": ("loader_wait", "step"),
        "syncs": ("syncs", "step"),
        "compiled after step 2": ("recompilations", "step"),
    }
    return named(_columns(df, columns).dropna(how="all").round(4), df)


def phases(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of ms per phase and step, a row per cell; communication is the part not hidden."""
    table = _columns(df, {phase: ("phase_time", phase) for phase in PHASES})
    return named(table.dropna(how="all").dropna(axis=1, how="all").round(3), df)


def memory_over_steps(df: pandas.DataFrame) -> pandas.DataFrame:
    """Labelled rows of memory held after each step, in MiB; modes "device" and "host"."""
    rows = labelled(df)
    return rows[(rows["metric"] == "memory") & (rows["x_name"] == "step")]


def variants(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of every variant on one rank relative to the plain cell of the same backend and T."""
    columns = {
        "tokens/s": ("tokens_per_second", "step"),
        "step ms": ("step_time", "step"),
        "peak MiB": ("peak_memory", "step"),
        "observed, times not": ("observing", "step"),
    }
    table = _columns(df[[c.get("ranks", 1) == 1 for c in metrics.configs(df)]], columns)
    keys = ["model", "backend", "T"]
    changed = table.reset_index().loc[lambda t: t["variant"] != PLAIN, keys].drop_duplicates()
    table = table.reset_index().merge(changed, on=keys).set_index(table.index.names)
    plain = table.xs(PLAIN, level="variant") if len(table) else table
    for column in ("tokens/s", "peak MiB"):
        base = [plain[column].get((m, b, t), np.nan) for m, b, _, t in table.index]
        table[f"{column}, times plain"] = table[column] / base
    return named(table.dropna(axis=1, how="all").round(3), df)


def scaling(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of tokens/s by ranks, relative to one rank with the same backend, T and options. `how`
    holds other changes of the variant: "compile" is compared with one compiled rank."""
    rows = over_tokens(df, "tokens_per_second", variant=None)
    # without ranks, parallel and batch; older records have a colon
    how = rows["variant"].str.replace(r"\b(ranks|parallel|batch)[=:]\S+ ?", "", regex=True)
    rows = rows.assign(how=how.str.strip(), T=rows["x_value"])
    group = ["model", "backend", "how", "T"]
    one, points = (pandas.MultiIndex.from_frame(rows[names]) for names in (group, POINT))
    numbers = {
        "tokens/s": rows["median"],
        "times one rank": rows["median"] / rows.set_index(POINT)["median"].reindex(one).array,
        "communication ms": at_points(df, "phase_time", "communication").reindex(points).array,
        "peak MiB a rank": at_points(df, "peak_memory").reindex(points).array,
    }
    rows, many = rows.assign(**numbers), rows["parallel"] != "none"
    shown = pandas.concat([rows[~many & (rows["variant"] == rows["how"])], rows[many]])
    table = rows.loc[many, group].drop_duplicates().merge(shown, on=group)
    keys = ["model", "backend", "T", "how", "parallel", "ranks"]
    table = table.drop_duplicates(keys).set_index(keys)[[*numbers, "outcome"]]
    return named(table.round(3), df)


def break_even(df: pandas.DataFrame) -> pandas.DataFrame:
    """Break-even T beyond which a training step beats the dense baseline's, a row per backend.

    Interpolated between measured T, linear in log-log; "below T" if it wins at every T, "beyond T"
    if it does not win up to the last. `dense / NSA` is at the longest T of both.
    """
    cost = 1 / by_tokens(over_tokens(df, "tokens_per_second"), "median").astype(float)
    found = {}
    for model, backend in cost.index:
        if backend == "dense" or (model, "dense") not in cost.index:
            continue
        both = cost.loc[[(model, "dense"), (model, backend)]].dropna(axis=1)
        if both.shape[1]:
            dense, ours = (list(line) for line in both.to_numpy())
            found[model, backend] = {
                "break-even T": crossing(list(both.columns), ours, dense),
                "longest T of both": both.columns[-1],
                "dense / NSA": round(dense[-1] / ours[-1], 3),
            }
    index = pandas.MultiIndex.from_tuples(found, names=["model", "backend"])
    return named(pandas.DataFrame(list(found.values()), index=index), df)


def beside_the_case_study(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of the case study's reported tokens/s, and below them ours."""
    reported = [("case study", t, f"{speed:,.0f}", what)
                for t, speed, what in case_study.TOKENS_PER_S]  # fmt: skip
    ours = [
        (f"{row.model}, {row.backend}", row.x_value, f"{row.median:,.0f}", str(row.device))
        for row in over_tokens(df, "tokens_per_second").dropna(subset="median").itertuples()
    ]
    columns = ["who", "T", "tokens/s", "what"]
    return pandas.DataFrame([*reported, *ours], columns=columns).set_index("who")


def cells(df: pandas.DataFrame) -> pandas.DataFrame:
    """Labelled rows, one per cell, curves included; `x_value` is its T."""
    rows = labelled(df)
    rows = rows[rows["metric"].isin(["step_time", "loss"])]
    return rows.assign(x_value=rows["tokens"]).drop_duplicates(POINT)


def notes(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of the cells that did not run, and why."""
    rows = cells(df)
    rows = rows[rows["outcome"] != "ok"].rename(columns={"x_value": "T", "message": "why"})
    return rows.set_index("backend")[["T", "variant", "outcome", "why"]]


def losses(df: pandas.DataFrame) -> pandas.DataFrame:
    """Loss curves: one row per backend and seed, one column per window of steps."""
    rows = labelled(df)
    rows = rows[(rows["metric"] == "loss") & rows["median"].notna()]
    table = rows.pivot_table(index=["backend", "seed"], columns="x_value", values="median",
                             aggfunc="last", sort=False)  # fmt: skip
    return table[sorted(table.columns)].rename_axis(columns="step")


def final_losses(df: pandas.DataFrame) -> pandas.DataFrame:
    """Mean of the last tenth of each curve, one row per backend, one column per seed."""
    table = losses(df)
    last = table.iloc[:, -max(1, table.shape[1] // 10) :].mean(axis=1)
    return last.unstack("seed").loc[lambda t: list(dict.fromkeys(table.index.unique("backend")))]


def on_cpu(df: pandas.DataFrame) -> bool:
    return bool(len(df)) and not metrics.on_gpu(df)


def named(table: pandas.DataFrame, df: pandas.DataFrame) -> pandas.DataFrame:
    """Add a warning above the columns if the times are from a CPU."""
    if not on_cpu(df):
        return table
    name = f"{table.columns.name or ''} (a CPU: only ratios mean anything)".strip()
    return table.rename_axis(columns=name)


def _shown(rows: pandas.DataFrame, form: str) -> pandas.DataFrame:
    """Pivot: a row per model and backend, a column per T; values by `form`, failures by name."""
    texts = [form.format(row) if np.isfinite(row.median) else row.outcome
             for row in rows[["median", "q20", "q80", "outcome"]].itertuples()]  # fmt: skip
    return named(by_tokens(rows.assign(text=texts), "text").fillna(""), rows)


def _columns(df, wanted: dict[str, tuple[str, str]]) -> pandas.DataFrame:
    """Pivot: a row per cell, a column per (metric, mode)."""
    parts = {column: at_points(df, *what) for column, what in wanted.items()}
    table = pandas.DataFrame(parts).reindex(at_points(df, "step_time").index)
    return table.rename_axis(index={"x_value": "T"})


def _metrics(row: dict) -> Iterator[dict]:
    at = partial(_row, row)
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
    yield at("step", "syncs", "1", row["syncs"])
    yield at("step", "loader_wait", "ms", row["loader_wait_ms"])
    if row["outcome"] != "ok":
        return
    flops = flops_of(row)
    for mode, ceiling in (("measured", "matmul_tflops"), ("nominal", "nominal_tflops")):
        share = flops.utilisation(row["step_ms"] / 1e3, row[ceiling], row["ranks"])
        yield at(mode, "utilisation", "1", share)
    yield from _memory(row)


def _memory(row: dict, skip: int = 0) -> Iterator[dict]:
    for mode in ("device", "host"):
        if series := row[f"{mode}_mib"][skip:]:
            slope = robust_slope(range(len(series)), series)
            yield _row(row, mode, "memory_growth", "MiB/step", slope.value, slope.low, slope.high)
            for step, mib in windows(series):
                yield _row(row, mode, "memory", "MiB", mib, step=step)


def _cell(row: dict) -> TrainCell:
    """Cell of a row; a row without one of its fields, as cp, has the default."""
    return TrainCell(**{name: row[name] for name in _CELL if name in row})


def _row(
    row: dict, mode: str, metric: str, unit: str, *values: float | None, step=None, **more
) -> dict:
    """Make a row of metrics.csv over T or steps; values: the median, or it and both quantiles.
    `config` holds the cell, its outcome, and `more`."""
    x = ("tokens", row["tokens"]) if step is None else ("step", step)
    values = values if len(values) == 3 else values * 3
    config = {name: row[name] for name in (*_CELL, *_ENDED) if name in row}
    config["layers"] = _cell(row).config().layers
    # A cell on the CPU did not use this machine's GPU.
    device = "cpu" if row["device"] == "cpu" else None
    found = (OPERATION, row["name"], mode, metric, unit, *x, *values, config | more, device)
    return dict(zip(metrics.COLUMNS, found, strict=False))


def facts(rows: Sequence[dict]) -> list[str]:
    """Machine-independent lines: outcomes of cells, operations by shapes, paths."""
    ended, work, paths = [], {}, {}
    for row in rows:
        size = f"{row['name']} T {row['tokens']} batch {row['batch']}"
        ended.append(
            f"{size}, {row['ranks']} rank(s) {row['variant'] or 'plain'}: {row['outcome']}"
        )
        flops = flops_of(row)
        told = f"{flops.weights:,} with weights, {flops.attention:,} of attention"
        work[size] = f"operations a step {told}"
        served = [f"{branch} {', '.join(path)}" for branch, path in row["paths"].items()]
        paths[row["name"]] = ", ".join(served)
    return ended + [f"{name}: {told}" for name, told in (*work.items(), *paths.items())]
