"""Figures of the memory notebook, in the common style."""

from collections.abc import Mapping, Sequence

import numpy as np

from workbook.lab.estimate.gpus import gpu_named
from workbook.runs import looks, metrics, timeline
from workbook.runs.looks import GREY
from workbook.runs.scaling import local_exponents

MIB_PER_GIB = 1024
BESIDE = "Beside the case study"
CARDS = {"H100": "an H100 of 80 GB", "H200": "an H200 of 141 GB"}
Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # tokens and MiB of each label


def scaling(df, prediction: Mapping[str, Curves] | None = None, case_study: Curves | None = None):
    """Plot peak memory of a step against tokens, log-log: a panel per model, a line per backend.

    df: rows of metrics.csv with x_name tokens, metric peak_memory, unit MiB. A failed point (no
    median) is a cross at the top, its outcome beside it. `prediction`, by panel (`repro, 5 layers`)
    and backend, is dashed in the backend's colour; `case_study` is dotted grey in every panel, or
    in a separate one if it would squeeze the others. ValueError without rows.
    """
    unit, scale = _unit(df)
    reported, wanted = case_study or {}, []  # (title, rows, predicted, reported) of each panel
    for model, frame in looks.models(looks.peaks(df, "step")).items():
        squeezed = reported and _squeezed(frame, reported)
        predicted = (prediction or {}).get(model, {})
        wanted.append((f"Peak memory: {model}", frame, predicted, {} if squeezed else reported))
        if squeezed:
            wanted.append((BESIDE, frame, {}, reported))
    alike = not any(title == BESIDE for title, *_ in wanted)
    with looks.figure(len(wanted), 3.9, same_y=alike, names="at ends") as (fig, panels):
        for axes, (title, frame, predicted, beside) in zip(panels, wanted, strict=True):
            for backend, good in _finished(frame):
                axes.plot(good["x_value"], good["median"] / scale, **looks.line(backend), zorder=3)
            for label, (tokens, mib) in predicted.items():
                look = {"color": looks.look(label)[0], "label": f"predicted: {label}", "lw": 1.1}
                axes.plot(tokens, np.asarray(mib, float) / scale, "--", **look)
            for label, (tokens, mib) in beside.items():
                look = {"color": "#9a9a9a", "label": label, "lw": 1.2, "marker": "1"}
                axes.plot(tokens, np.asarray(mib, float) / scale, ":", **look)
            ticks = [t for tokens, _ in beside.values() for t in tokens]
            _over_tokens(axes, frame, f"peak memory ({unit})", ticks)
            looks.title(axes, title)
    return fig


def headline(df, *, note: str = ""):
    """Plot the peak of a training step against T in one panel, for a talk.

    The model with the most lengths; each line has its name and value at its end, a failure is a
    cross, and dashed lines are what 80 GB and 141 GB cards have. Raises ValueError without rows.
    """
    models = looks.models(looks.peaks(df, "step"))
    model = max(models, key=lambda name: models[name]["x_value"].nunique())
    frame = models[model]
    frame = frame.assign(median=frame["median"] / MIB_PER_GIB)
    with looks.figure(1, 4.2, names="at ends") as (fig, (axes,)):
        fig.set_figwidth(8.4)
        for name in CARDS:
            gib = gpu_named(name).total / 2**30
            axes.axhline(gib, color="#9a9a9a", lw=1.0, ls="--", zorder=0)
            said = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "color": GREY}
            # Between the lines that end early on the left and those that reach it on the right.
            said |= {"ha": "center", "va": "bottom"}
            axes.annotate(f"{CARDS[name]}: {gib:.0f} GiB", (0.45, gib), **said)
        for backend, good in _finished(frame):
            style = looks.line(backend) | {"zorder": 3}
            style["label"] += f": {good['median'].iloc[-1]:.3g} GiB"
            axes.plot(good["x_value"], good["median"], **style)
        _over_tokens(axes, frame, "peak memory of a step (GiB)")
        looks.title(axes, f"A training step, {model}, one sequence", note)
    return fig


def exponents(df):
    """Plot the exponent between neighbouring T: 1 is linear, 2 is quadratic."""
    models = looks.models(looks.peaks(df, "step"))
    with looks.figure(len(models), 3.2, same_y=True, names="at ends") as (fig, panels):
        for axes, (model, frame) in zip(panels, models.items(), strict=True):
            for backend, good in _finished(frame, least=2):
                tokens = good["x_value"].to_numpy()
                found = local_exponents(tokens, good["median"])
                middle = np.sqrt(tokens[1:] * tokens[:-1])
                axes.plot(middle, found, **looks.line(backend))
            for level, name in ((1, "linear"), (2, "quadratic")):
                axes.axhline(level, color="#9a9a9a", lw=0.9, ls="--", zorder=0)
                look = {"ha": "right", "va": "bottom", "fontsize": 8, "color": GREY}
                axes.annotate(name, (1, level), xycoords=("axes fraction", "data"), **look)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="T (tokens)", ylabel="local exponent of peak memory")
            looks.title(axes, f"Growth: {model}")
            axes.set_ylim(min(-0.1, axes.get_ylim()[0]), max(2.3, axes.get_ylim()[1]))
            looks.plain_ticks(axes, frame["x_value"])
    return fig


def categories(df, tokens: int | None = None):
    """Plot the peak by category, stacked bars by backend, a panel per model, at `tokens` (default:
    the largest T that every backend finished). df: rows whose metric is `memory_<category>`."""
    rows = looks.over_tokens(df)
    rows = rows[rows["metric"].str.startswith("memory_")]
    rows = rows[(rows["mode"] == "step") & rows["median"].notna()]
    if not len(rows):
        raise ValueError("no rows of mode 'step' whose metric is memory_<category>")
    rows = rows.assign(category=rows["metric"].str.removeprefix("memory_"))
    models = looks.models(rows)
    unit, scale = _unit(df)
    with looks.figure(len(models), 3.4, same_y=True) as (fig, panels):
        for axes, (model, frame) in zip(panels, models.items(), strict=True):
            at = tokens if tokens is not None else looks.largest_common(frame)
            frame = frame[frame["x_value"] == at]
            if not len(frame):
                there = sorted(set(rows.x_value))
                raise ValueError(f"no categories at T = {at}; there are {there}")
            table = frame.pivot_table(
                index="backend", columns="category", values="median", aggfunc="last", sort=False
            ).fillna(0.0)
            table = table.loc[[backend for backend, _ in looks.backends(frame)]] / scale
            below = np.zeros(len(table))
            for category, held in table.items():
                colour, label = timeline.COLOURS.get(category), category.replace("_", " ")
                look = {"color": colour, "label": label}
                axes.bar(table.index, held, bottom=below, **look)
                below += held.to_numpy()
            for place, total in enumerate(below):
                said = f"{total:.0f}" if total >= 10 else f"{total:.2g}"
                axes.text(place, total, said, ha="center", va="bottom", fontsize=8)
            axes.set(ylabel=f"held at the peak ({unit})", ylim=(0, 1.08 * below.max() or 1))
            looks.title(axes, f"Peak by category: {model}, T {looks.length(at)}")
            axes.grid(False, axis="x")
    return fig


def through_a_step(rows: Sequence[Mapping]):
    """Plot memory from a step's first allocation to its last, one panel per backend, by `rows` of
    memory trials: the last model, at the largest T that all its backends finished, and the first
    four of them."""
    good = [row for row in rows if row.get("timeline")]
    if not good:
        return looks.nothing("No trial recorded the events of its step.")
    model = good[-1]["preset"], good[-1]["layers"]
    lines: dict[str, dict[int, Mapping]] = {}
    for row in good:
        if (row["preset"], row["layers"]) == model:
            lines.setdefault(row["backend"], {})[row["tokens"]] = row["timeline"]
    shared = set.intersection(*map(set, lines.values()))
    names = [name for name in looks.LOOKS if name in lines][:4] if shared else list(lines)[-1:]
    at = max(shared or lines[names[0]])
    return timeline.timeline({f"{name}, T = {at}": lines[name][at] for name in names})


def _unit(df) -> tuple[str, float]:
    """Common unit of all panels: GiB if the highest peak is at least 2 GiB, else MiB."""
    highest = df.loc[df["metric"] == "peak_memory", "median"].astype(float).max()
    return ("GiB", MIB_PER_GIB) if highest >= 2 * MIB_PER_GIB else ("MiB", 1.0)


def _finished(frame, least: int = 1) -> list[tuple]:
    """List (backend, its rows with a value) of the backends that have at least so many."""
    found = [(name, rows[rows["median"].notna()]) for name, rows in looks.backends(frame)]
    return [(name, rows) for name, rows in found if len(rows) >= least]


def _squeezed(frame, curves: Curves) -> bool:
    """Return True if these curves would leave our points less than two thirds of a log axis."""
    ours = frame["median"].dropna().to_numpy(float)
    theirs = np.concatenate([np.asarray(mib, float) for _, mib in curves.values()])
    return len(ours) and np.ptp(np.log([*ours, *theirs])) > 1.5 * np.ptp(np.log(ours))


def _over_tokens(axes, frame, ylabel: str, ticks: Sequence[float] = ()) -> None:
    """Make both axes logarithmic, with a tick at each T and at `ticks`. Along the top edge are
    crosses of what failed, one row per backend, with its outcomes."""
    axes.set_xscale("log", base=2)
    looks.log_axis(axes.yaxis)
    axes.set(xlabel="T (tokens)", ylabel=ylabel)
    failed = frame[frame["median"].isna()]
    failing = [
        (name, rows["x_value"], [c.get("outcome", "failed") for c in metrics.configs(rows)])
        for name, rows in looks.backends(failed)
    ]
    looks.crosses(axes, failing, frame["x_value"])
    if failing and frame["median"].notna().any():
        # room for the crosses above the highest curve
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (0.08 + 0.07 * len(failing)))
    looks.plain_ticks(axes, [*frame["x_value"], *ticks])
