"""Questions put to the training rows of a metrics table, answered as tables. Draws nothing."""

from collections.abc import Sequence

import numpy as np
import pandas

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.throughput.rows import OPERATION, PHASES, flops_of
from nsa.workbook import metrics
from nsa.workbook.metrics import model_name
from nsa.workbook.panel_rows import by_tokens
from nsa.workbook.scaling import crossing

PLAIN = ""  # the variant of a cell that is not one
POINT = ["model", "backend", "variant", "x_value"]


def labelled(df: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of training, with `model` ("production, 12 layers, bf16"), `variant`, `outcome`,
    `ranks`, `parallel` and `seed`; of a point measured twice the last."""
    rows = df[df["operation"] == OPERATION].copy()
    configs = metrics.configs(rows)
    rows["model"] = [_model(config) for config in configs]
    for name, default in (
        ("variant", PLAIN), ("outcome", "ok"), ("ranks", 1), ("parallel", "none"), ("seed", 0),
        ("message", ""), ("batch", 1), ("steps", 0), ("tokens", 0),
    ):  # fmt: skip
        rows[name] = [config.get(name, default) for config in configs]
    rows["median"] = rows["median"].astype(float)
    rows["x_value"] = rows["x_value"].astype(float)
    point = [*POINT, "mode", "metric", "x_name", "seed"]
    return rows.drop_duplicates(point, keep="last")


def over_tokens(
    df: pandas.DataFrame, metric: str, mode: str = "step", variant: str | None = PLAIN
) -> pandas.DataFrame:
    """The labelled rows of one metric over T, as whole numbers; variant None: of all variants."""
    rows = labelled(df)
    rows = rows[(rows["x_name"] == "tokens") & (rows["metric"] == metric) & (rows["mode"] == mode)]
    if variant is not None:
        rows = rows[rows["variant"] == variant]
    return rows.assign(x_value=rows["x_value"].astype(int))


def wide(df: pandas.DataFrame, metric: str, mode: str = "step") -> pandas.DataFrame:
    """One row a model and backend, one column a T; NaN where it failed."""
    return by_tokens(over_tokens(df, metric, mode), "median").astype(float)


def speed(df: pandas.DataFrame) -> pandas.DataFrame:
    """Tokens a second, a failure by its name."""
    return _shown(over_tokens(df, "tokens_per_second"), "{:,.0f}")


def step_times(df: pandas.DataFrame) -> pandas.DataFrame:
    """ms a step, "median [20 %, 80 %]", a failure by its name."""
    rows = over_tokens(df, "step_time")
    rows = rows.assign(text=[
        f"{row.median:.4g} [{row.q20:.4g}, {row.q80:.4g}]" if np.isfinite(row.median)
        else row.outcome
        for row in rows[["median", "q20", "q80", "outcome"]].itertuples(index=False)
    ])  # fmt: skip
    return named(by_tokens(rows, "text").fillna(""), df)


def meters(df: pandas.DataFrame) -> pandas.DataFrame:
    """A line a cell that ran: utilisation, peak, waits, syncs and recompilations."""
    columns = {
        "of measured ceiling": ("utilisation", "measured"),
        "of nominal ceiling": ("utilisation", "nominal"),
        "peak MiB": ("peak_memory", "step"),
        "loader wait ms": ("loader_wait", "step"),
        "syncs": ("syncs", "step"),
        "compiled after step 2": ("recompilations", "step"),
    }
    return named(_columns(df, columns).round(4), df)


def phases(df: pandas.DataFrame) -> pandas.DataFrame:
    """ms a phase and step, a line a cell; communication is what is not hidden behind backward."""
    columns = {phase: ("phase_time", phase) for phase in PHASES}
    return named(_columns(df, columns).dropna(axis=1, how="all").round(3), df)


def memory_over_steps(df: pandas.DataFrame) -> pandas.DataFrame:
    """The labelled rows of memory held after each step, in MiB; modes "device" and "host"."""
    rows = labelled(df)
    return rows[(rows["metric"] == "memory") & (rows["x_name"] == "step")]


def variants(df: pandas.DataFrame) -> pandas.DataFrame:
    """Every variant on one rank beside the plain cell of the same backend and T, which is 1."""
    columns = {
        "tokens/s": ("tokens_per_second", "step"),
        "step ms": ("step_time", "step"),
        "peak MiB": ("peak_memory", "step"),
        "observed, times not": ("observing", "step"),
    }
    table = _columns(df[[c.get("ranks", 1) == 1 for c in metrics.configs(df)]], columns, True)
    keys = ["model", "backend", "T"]
    changed = table.reset_index().loc[lambda t: t["variant"] != PLAIN, keys].drop_duplicates()
    table = table.reset_index().merge(changed, on=keys).set_index(table.index.names)
    plain = table.xs(PLAIN, level="variant") if len(table) else table
    for column in ("tokens/s", "peak MiB"):
        base = [plain[column].get((m, b, t), np.nan) for m, b, _, t in table.index]
        table[f"{column}, times plain"] = table[column] / base
    return named(table.dropna(axis=1, how="all").round(3), df)


def scaling(df: pandas.DataFrame) -> pandas.DataFrame:
    """Tokens a second by ranks, in times of one rank of the same backend and T, run the same way.

    `how` holds what else the variant changes: "compile" is held against one rank compiled.
    """
    rows = over_tokens(df, "tokens_per_second", variant=None)
    rows = rows.assign(how=[_how(text) for text in rows["variant"]])
    many = rows[rows["parallel"] != "none"]
    waits = over_tokens(df, "phase_time", "communication", variant=None)
    waits = waits.set_index([*POINT])["median"]
    peaks = over_tokens(df, "peak_memory", variant=None).set_index([*POINT])["median"]
    found = []
    for key, group in many.groupby(["model", "backend", "how", "x_value"], sort=False):
        model, backend, how, tokens = key
        one = rows[(rows["variant"] == how) & (rows["model"] == model)]
        one = one[(one["backend"] == backend) & (one["x_value"] == tokens)]
        lines = [*one.itertuples(), *group.itertuples()]
        base = float(one["median"].iloc[0]) if len(one) else np.nan
        for line in lines:
            point = (model, backend, line.variant, tokens)
            found.append({
                "model": model, "backend": backend, "T": tokens, "how": how,
                "parallel": line.parallel, "ranks": line.ranks,
                "tokens/s": line.median, "times one rank": line.median / base,
                "communication ms": waits.get(point, np.nan), "peak MiB a rank": peaks.get(point),
                "outcome": line.outcome,
            })  # fmt: skip
    columns = ["tokens/s", "times one rank", "communication ms", "peak MiB a rank", "outcome"]
    keys = ["model", "backend", "T", "how", "parallel", "ranks"]
    table = pandas.DataFrame(found, columns=[*keys, *columns])
    return named(table.drop_duplicates(keys).set_index(keys).round(3), df)


def _how(variant: str) -> str:
    """What a variant changes besides its ranks and the batch that they share."""
    spread = ("ranks:", "parallel:", "batch:")
    return " ".join(word for word in variant.split() if not word.startswith(spread))


def break_even(df: pandas.DataFrame) -> pandas.DataFrame:
    """The T from which a training step is faster than the dense twin's, a row a backend.

    Interpolated between measured T, straight in log-log; "below T" where it wins from the first T
    on, "beyond T" where it does not win up to the last. `dense / NSA` is at the longest T of both.
    """
    table = wide(df, "tokens_per_second")
    found = {}
    for model in table.index.unique("model"):
        lines = table.loc[model]
        if "dense" not in lines.index:
            continue
        for backend in lines.index.drop("dense"):
            both = lines.loc[["dense", backend]].dropna(axis=1)
            if both.shape[1]:
                ours, dense = 1 / both.loc[backend], 1 / both.loc["dense"]
                found[model, backend] = {
                    "break-even T": crossing(list(both.columns), list(ours), list(dense)),
                    "longest T of both": both.columns[-1],
                    "dense / NSA": round(float(dense.iloc[-1] / ours.iloc[-1]), 3),
                }
    index = pandas.MultiIndex.from_tuples(found, names=["model", "backend"])
    return named(pandas.DataFrame(list(found.values()), index=index), df)


def beside_the_case_study(df: pandas.DataFrame) -> pandas.DataFrame:
    """The case study's reported tokens a second, and under them ours."""
    columns = ["who", "T", "tokens/s", "what"]
    reported = [("case study", t, f"{speed:,.0f}", what) for t, speed, what
                in case_study.TOKENS_PER_S]  # fmt: skip
    ours = [
        (f"{row.model}, {row.backend}", row.x_value, f"{row.median:,.0f}", str(row.gpu))
        for row in over_tokens(df, "tokens_per_second").dropna(subset="median").itertuples()
    ]
    return pandas.DataFrame([*reported, *ours], columns=columns).set_index("who")


def cells(df: pandas.DataFrame) -> pandas.DataFrame:
    """One labelled row a cell, curves included; `x_value` is its T."""
    rows = labelled(df)
    rows = rows[rows["metric"].isin(["step_time", "loss"])]
    return rows.assign(x_value=rows["tokens"]).drop_duplicates(POINT)


def notes(df: pandas.DataFrame) -> pandas.DataFrame:
    """What did not run and why, one row a cell."""
    rows = cells(df)
    rows = rows[rows["outcome"] != "ok"].rename(columns={"x_value": "T", "message": "why"})
    return rows.set_index("backend")[["T", "variant", "outcome", "why"]]


def losses(df: pandas.DataFrame) -> pandas.DataFrame:
    """Curves: one row a backend and seed, one column a window of steps."""
    rows = labelled(df)
    rows = rows[(rows["metric"] == "loss") & rows["median"].notna()]
    table = rows.pivot_table(index=["backend", "seed"], columns="x_value", values="median",
                             aggfunc="last", sort=False)  # fmt: skip
    return table[sorted(table.columns)].rename_axis(columns="step")


def final_losses(df: pandas.DataFrame) -> pandas.DataFrame:
    """The last tenth of each curve's mean, one row a backend, one column a seed."""
    table = losses(df)
    last = table.iloc[:, -max(1, table.shape[1] // 10) :].mean(axis=1)
    return last.unstack("seed").loc[lambda t: list(dict.fromkeys(table.index.unique("backend")))]


def work(rows: Sequence[dict]) -> dict[str, tuple[int, int]]:
    """{cell: (operations with weights, operations of attention)} of a step, by shapes alone."""
    found = {}
    for row in rows:
        flops = flops_of(row)
        name = f"{row['name']} T {row['tokens']} batch {row['batch']}"
        found[name] = flops.weights, flops.attention
    return found


def named(table: pandas.DataFrame, df: pandas.DataFrame) -> pandas.DataFrame:
    """With a warning over the columns where the times are a CPU's."""
    cpu = len(df) and df["gpu"].isin(["", "cpu"]).any()
    name = table.columns.name
    return table.rename_axis(columns=f"{name or ''} (a CPU: only ratios mean anything)".strip()
                             if cpu else name)  # fmt: skip


def _model(config: dict) -> str:
    return f"{model_name(config)}, {config.get('precision', '')}".strip(", ")


def _shown(rows: pandas.DataFrame, form: str) -> pandas.DataFrame:
    texts = [
        form.format(value) if np.isfinite(value) else outcome
        for value, outcome in zip(rows["median"], rows["outcome"], strict=True)
    ]
    return named(by_tokens(rows.assign(text=texts), "text").fillna(""), rows)


def _columns(df, wanted: dict[str, tuple[str, str]], failures: bool = False) -> pandas.DataFrame:
    """One row a cell, one column each (metric, mode)."""
    parts = {}
    for column, (metric, mode) in wanted.items():
        rows = over_tokens(df, metric, mode, variant=None)
        parts[column] = rows.set_index(POINT)["median"]
    order = over_tokens(df, "step_time", variant=None).set_index(POINT).index
    table = pandas.DataFrame(parts).reindex(order)
    table = table.rename_axis(index={"x_value": "T"})
    return table if failures else table.dropna(how="all")
