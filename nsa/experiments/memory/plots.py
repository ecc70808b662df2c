"""The figures of the memory notebook, in the looks of all others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nsa.workbook import looks, metrics, panel_rows
from nsa.workbook.scaling import local_exponents

MIB_PER_GIB = 1024
Line = tuple[Sequence[float], Sequence[float]]  # tokens, MiB
Curves = Mapping[str, Line | Mapping[str, Line]]


def scaling(
    df,
    prediction: Curves | None = None,
    case_study: Curves | None = None,
    *,
    mode: str = "step",
):
    """Peak memory against tokens, log-log: one panel a model, one line a backend.

    df: rows of metrics.csv with x_name tokens, metric peak_memory, unit MiB. A failed point (no
    median) is a cross at the top, its outcome beside it. `prediction` (dashed, in the colour of
    the backend it names) and `case_study` (dotted grey) map a label to (tokens, MiB), or a panel's
    title (`repro, 5 layers`) to such a mapping. Returns the figure; ValueError without rows.
    """
    models = panel_rows.models(panel_rows.peaks(df, mode))
    with looks.style():
        fig, panels = looks.panels(len(models), 3.9)
        unit, scale = _unit(df, "peak_memory")
        for axes, (model, frame) in zip(panels, models.items(), strict=True):
            for backend, line in panel_rows.backends(frame):
                colour, marker = looks.look(backend)
                good = line[line["median"].notna()]
                values = good["median"] / scale
                axes.plot(
                    good["x_value"], values, color=colour, marker=marker, label=backend, zorder=3
                )
                _band(axes, good, scale, colour)
            for label, (tokens, mib) in _curves(prediction, model):
                axes.plot(
                    tokens,
                    np.asarray(mib, float) / scale,
                    "--",
                    color=looks.look(label)[0],
                    lw=1.1,
                    label=f"predicted: {label}",
                )
            for number, (label, (tokens, mib)) in enumerate(_curves(case_study, model)):
                axes.plot(
                    tokens,
                    np.asarray(mib, float) / scale,
                    ":",
                    color="#9a9a9a",
                    lw=1.2,
                    marker="1234+x"[number % 6],
                    label=label,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            _mark_failures(axes, frame)
            axes.set(title=model, xlabel="T (tokens)", ylabel=f"peak memory ({unit})")
            looks.plain_ticks(axes, frame["x_value"])
        looks.legend(fig, panels)
    return fig


def exponents(df, *, mode: str = "step"):
    """The exponent between neighbouring T, drawn between them: 1 is linear, 2 is quadratic."""
    models = panel_rows.models(panel_rows.peaks(df, mode))
    with looks.style():
        fig, panels = looks.panels(len(models), 3.2)
        for axes, (model, frame) in zip(panels, models.items(), strict=True):
            for backend, line in panel_rows.backends(frame):
                line = line[line["median"].notna()]
                if len(line) < 2:
                    continue
                tokens = line["x_value"].to_numpy()
                found = local_exponents(tokens, line["median"])
                colour, marker = looks.look(backend)
                middle = np.sqrt(tokens[1:] * tokens[:-1])
                axes.plot(middle, found, color=colour, marker=marker, label=backend)
            for level, name in ((1, "linear"), (2, "quadratic")):
                axes.axhline(level, color="#9a9a9a", lw=0.9, ls="--", zorder=0)
                axes.annotate(
                    name,
                    (1, level),
                    xycoords=("axes fraction", "data"),
                    ha="right",
                    va="bottom",
                    fontsize=8,
                    color="#777777",
                )
            axes.set_xscale("log", base=2)
            axes.set(title=model, xlabel="T (tokens)", ylabel="local exponent of peak memory")
            axes.set_ylim(min(-0.1, axes.get_ylim()[0]), max(2.3, axes.get_ylim()[1]))
            looks.plain_ticks(axes, frame["x_value"])
        looks.legend(fig, panels)
    return fig


def categories(df, tokens: int | None = None, *, mode: str = "step"):
    """What the peak holds, stacked a backend, one panel a model, at `tokens` (default: the largest
    T that every backend finished). df: rows whose metric is `memory_<category>`."""
    rows = panel_rows.over_tokens(df)
    rows = rows[rows["metric"].str.startswith("memory_")]
    rows = rows[(rows["mode"] == mode) & rows["median"].notna()]
    if not len(rows):
        raise ValueError(f"no rows of mode {mode!r} whose metric is memory_<category>")
    rows = rows.assign(category=rows["metric"].str.removeprefix("memory_"))
    models = panel_rows.models(rows)
    with looks.style():
        fig, panels = looks.panels(len(models), 3.4)
        unit, scale = _unit(df, "peak_memory")
        colours: dict[str, Any] = {}
        palette = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999"]
        for axes, (model, frame) in zip(panels, models.items(), strict=True):
            at = tokens if tokens is not None else panel_rows.largest_common(frame)
            frame = frame[frame["x_value"] == at]
            if not len(frame):
                raise ValueError(
                    f"no categories at T = {at}; there are {sorted(set(rows.x_value))}"
                )
            table = frame.pivot_table(
                index="backend", columns="category", values="median", aggfunc="last", sort=False
            ).fillna(0.0)
            table = table.loc[[backend for backend, _ in panel_rows.backends(frame)]] / scale
            below = np.zeros(len(table))
            for category in table.columns:
                colour = colours.setdefault(category, palette[len(colours) % len(palette)])
                axes.bar(
                    table.index,
                    table[category],
                    bottom=below,
                    color=colour,
                    label=category.replace("_", " "),
                )
                below += table[category].to_numpy()
            axes.set(title=f"{model}, T = {at:.0f}".strip(", "), ylabel=f"at the peak ({unit})")
            axes.grid(False, axis="x")
            axes.tick_params(axis="x", rotation=20)
        looks.legend(fig, panels)
    return fig


def _unit(df, metric: str) -> tuple[str, float]:
    """One unit for all panels: GiB as soon as a peak has several."""
    highest = df.loc[df["metric"] == metric, "median"].astype(float).max()
    return ("GiB", MIB_PER_GIB) if highest >= 2 * MIB_PER_GIB else ("MiB", 1.0)


def _curves(curves: Mapping | None, model: str) -> list:
    """Those for every panel, and those given under this panel's title."""
    found = []
    for name, curve in (curves or {}).items():
        if not isinstance(curve, Mapping):
            found.append((name, curve))
        elif name == model:
            found += curve.items()
    return found


def _band(axes, good, scale: float, colour: str) -> None:
    low, high = good["q20"].astype(float), good["q80"].astype(float)
    if low.notna().all() and high.notna().all():
        axes.fill_between(
            good["x_value"], low / scale, high / scale, color=colour, alpha=0.18, lw=0
        )


def _mark_failures(axes, frame) -> None:
    """Crosses along the top edge, one row a backend, its outcomes beside them."""
    failed = frame[frame["median"].isna()]
    if not len(failed):
        return
    failing = [
        (name, line["x_value"], [c.get("outcome", "failed") for c in metrics.configs(line)])
        for name, line in panel_rows.backends(failed)
    ]
    looks.crosses(axes, failing, frame["x_value"])
    if frame["median"].notna().any():
        # room for the crosses above the highest curve
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (0.08 + 0.07 * len(failing)))
