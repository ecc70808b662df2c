"""Figures of the throughput notebook, in the common style."""

import textwrap

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from workbook.rooms.case_study import figures as case_study
from workbook.rooms.throughput import table
from workbook.runs import looks
from workbook.runs.looks import GREY, backends

PHASE_COLOURS = {
    "data": "#56B4E9", "forward": "#0072B2", "backward": "#E69F00", "optimizer": "#009E73",
    "graph": "#CC79A7", "communication": "#D55E00",
}  # fmt: skip


def speed(df, *, note: str = ""):
    """Plot tokens/s against T, log-log: NSA solid, the dense baseline dotted.

    There are two panels per model: the measurements, and the same beside the case study's reported
    figures, grey crosses decades below. Failures are crosses at the bottom. `note` appears in a
    corner. Raises ValueError without rows.
    """
    models = [(*model, beside) for model in _by_model(df, "tokens_per_second")
              for beside in (False, True)]  # fmt: skip
    with looks.figure(len(models), 3.6, names="at ends") as (fig, panels):
        for axes, (model, frame, beside) in zip(panels, models, strict=True):
            _lines(axes, frame, bands=not table.on_cpu(df))
            tokens = _reported(axes) if beside else []
            axes.set(ylabel="tokens a second")
            looks.log_axis(axes.yaxis)
            _failures(axes, frame, tokens)
            title = "Beside the case study" if beside else f"Training speed: {model}"
            looks.title(axes, title, note * beside)
    return fig


def memory(df, *, note: str = ""):
    """Plot peak memory of a step against T, one panel per model."""
    models = _by_model(df, "peak_memory")
    large = any((frame["median"] >= 2048).any() for _, frame in models)
    unit, scale = ("GiB", 1024) if large else ("MiB", 1)
    with looks.figure(len(models), 2.7, same_y=True, names="at ends") as (fig, panels):
        for axes, (model, frame) in zip(panels, models, strict=True):
            _lines(axes, frame.assign(median=frame["median"] / scale), bands=False)
            looks.title(axes, f"Peak memory: {model}", note)
            axes.set(ylabel=f"peak of a step ({unit})")
            looks.from_zero(axes)
            _failures(axes, frame)
    return fig


def phases(df, *, note: str = ""):
    """Plot ms per step by phase, stacked, one bar per cell; the hatched end is exposed
    communication, subtracted from backward. None without any."""
    if (found := table.phases(df).fillna(0.0)).empty:
        return None
    names = [f"{backend}, T {looks.length(tokens)}" + f"\n{_words(variant)}" * bool(variant)
             for _, backend, variant, tokens in found.index]  # fmt: skip
    if "communication" in found:
        shown = found["communication"].clip(lower=0.0)
        found["communication"] = np.minimum(shown, found["backward"])
        found["backward"] -= found["communication"]
    with looks.figure(1, 0.9 + 0.4 * len(found)) as (fig, (axes,)):
        fig.set_figwidth(8.5)
        left = np.zeros(len(found))
        for phase in found:
            axes.barh(
                names, found[phase], left=left, label=phase, color=PHASE_COLOURS[phase],
                hatch="//" if phase == "communication" else None, height=0.7,
            )  # fmt: skip
            left += found[phase].to_numpy()
        for place, total in enumerate(left):
            axes.text(total, place, f" {total:.0f}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="time of a step (ms)", xlim=(0, 1.08 * left.max() or 1))
        axes.grid(False, axis="y")
        looks.title(axes, "Where a step's time goes", note)
    return fig


def scaling(df, *, note: str = ""):
    """Plot tokens/s of several ranks in times of one, a bar each, or None."""
    if (found := table.scaling(df)).empty:
        return None
    found = found.reset_index()
    many = found[found["parallel"] != "none"]
    lines = list(many.groupby(["model", "backend", "T", "how", "parallel"], sort=False))
    models = many["model"].unique()
    with looks.figure(1, 0.8 + 0.34 * len(lines)) as (fig, (axes,)):
        fig.set_figwidth(8.5)
        far, names = max(found["ranks"].max(), many["times one rank"].max()), []
        for (model, backend, tokens, how, parallel), line in lines:
            line = line[line["ranks"] > 1].sort_values("ranks")
            colour, _ = looks.series(list(many["parallel"].unique()).index(parallel))
            for ranks, times in zip(line["ranks"], line["times one rank"], strict=True):
                axes.barh(len(names), times, color=colour, height=0.7)
                label = axes.text(times, len(names), f" {times:.2f}", va="center", fontsize=8)
                label.set_path_effects([withStroke(linewidth=3, foreground="white")])
                of = [f"{parallel} on {ranks}", backend, _words(how), f"T {looks.length(tokens)}"]
                names.append(", ".join(filter(None, [*of, model * (len(models) > 1)])))
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        for ranks in sorted(set(many["ranks"]) - {1}):
            axes.axvline(ranks, color=GREY, ls="--", lw=1.1)
        axes.set(xlabel="tokens a second, times one rank (dashed: perfect)", xlim=(0, 1.08 * far))
        looks.title(
            axes, f"Several ranks: {models[0]}" if len(models) == 1 else "Several ranks", note
        )
    return fig


def losses(df):
    """Plot loss against step: left, the mean over all backends of NSA and their seeds, and that of
    the dense baseline, with their range as a band; right, each one's distance from the mean of
    NSA, which is invisible on the left. None without any."""
    if (found := table.losses(df)).empty:
        return None
    names = list(dict.fromkeys(found.index.get_level_values("backend")))
    nsa = [name for name in names if not name.startswith("dense")] or names
    both = {name: [name] for name in names if name not in nsa} | {f"NSA ({', '.join(nsa)})": nsa}
    left = (0.0, both, "Loss, mean over seeds", "loss")
    each = {name: [name] for name in names}
    right = (found.loc[nsa].mean(), each, "Distance from the mean of NSA", "loss less the mean")
    with looks.figure(2, 3.0) as (fig, panels):
        for axes, (base, drawn, title, what) in zip(panels, (left, right), strict=True):
            for name, of in drawn.items():
                lines = found.loc[of] - base
                style = _style(name) | {"markevery": max(1, found.shape[1] // 10)}
                style |= {} if name in names else {"color": looks.GREY, "marker": "", "lw": 2.5}
                axes.plot(found.columns, lines.mean(), **style)
                axes.fill_between(
                    found.columns, lines.min(), lines.max(), color=style["color"], alpha=0.18, lw=0
                )
            axes.set(xlabel="step", ylabel=f"{what} (nats a byte)")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            looks.title(axes, title)
    return fig


def memory_over_steps(df):
    """Plot memory after each step minus that after the first, device and host, a line per cell.
    Cells of fewer than ten steps are left out, unless there are no others."""
    if (rows := table.memory_over_steps(df)).empty:
        return None
    modes = [mode for mode in ("device", "host") if (rows["mode"] == mode).any()]
    keys = ["model", "backend", "variant", "tokens"]
    cells = list(rows.groupby(keys, sort=False).groups)
    models = rows["model"].nunique()
    with looks.figure(len(modes), 2.6 + 0.1 * len(cells)) as (fig, panels):
        for axes, mode in zip(panels, modes, strict=True):
            frame = rows[rows["mode"] == mode]
            longest = frame.groupby(keys).size().max()
            for cell, line in frame.groupby(keys, sort=False):
                line = line.sort_values("x_value")
                if len(line) < min(10, longest):
                    continue
                colour, marker = looks.series(cells.index(cell))
                model, backend, variant, tokens = cell
                told = [backend, _words(variant), f"T {looks.length(tokens)}"]
                name = ", ".join(filter(None, [*told, model * (models > 1)]))
                axes.plot(
                    line["x_value"], line["median"] - line["median"].iloc[0],
                    ":" if backend.startswith("dense") else "-", color=colour, marker=marker,
                    markevery=max(1, len(line) // 6), ms=4.5, label=name,
                )  # fmt: skip
            axes.set(xlabel="step after the warm-up", ylabel="memory since the first step (MiB)")
            looks.title(axes, f"Memory held, {mode}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -1.0), max(high, 1.0))
    return fig


def kernels(profile: dict, title: str):
    """Plot the most expensive kernels, or operators on a CPU, of one profiled step as bars."""
    rows = profile["kernels"]
    with looks.figure(1, 0.6 + 0.26 * len(rows)) as (fig, (axes,)):
        fig.set_figwidth(8.5)
        names = [f"{row['name'][:56]} ({row['calls']})" for row in rows]
        axes.barh(range(len(rows)), [row["ms"] for row in rows], color="#0072B2", height=0.7)
        axes.set_yticks(range(len(rows)), names, fontsize=7.5)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set(xlabel="time in one step (ms)", title=f"{title}: kernels (calls)")
    return fig


def _words(variant: str) -> str:
    """Words of a variant as a reader knows them."""
    return variant.replace("cuda_graph", "CUDA graph").replace("observe", "observed")


def _style(backend: str) -> dict:
    """Line style; the dense baseline is dotted, whatever serves it."""
    if backend.startswith("dense"):
        return looks.line("dense") | {"label": f"{backend} twin"}
    return looks.line(backend)


def _by_model(df, metric: str) -> list[tuple]:
    """List (model, its rows of the metric over T); ValueError without any."""
    if not len(rows := table.over_tokens(df, metric)):
        raise ValueError(f"no training rows of {metric}")
    return list(rows.groupby("model", sort=False))


def _lines(axes, frame, *, bands: bool) -> None:
    axes.set(xlabel="T (tokens)")
    axes.set_xscale("log", base=2)
    for backend, line in backends(frame):
        good = line[line["median"].notna()].sort_values("x_value")
        if not len(good):
            continue
        style = _style(backend)
        axes.plot(good["x_value"], good["median"], zorder=3, **style)
        if bands:
            low, high = good["q20"].astype(float), good["q80"].astype(float)
            axes.fill_between(good["x_value"], low, high, color=style["color"], alpha=0.18, lw=0)


def _failures(axes, frame, tokens=()) -> None:
    """Draw a cross at the bottom for each failed cell, its outcome beside it; ticks at each T."""
    failed = frame[frame["median"].isna() & (frame["outcome"] != "not run")]  # for want of time
    failing = [(name, line["x_value"], line["outcome"]) for name, line in backends(failed)]
    looks.crosses(
        axes, failing, frame["x_value"], top=False, colour=lambda name: _style(name)["color"]
    )
    looks.plain_ticks(axes, [*frame["x_value"], *tokens])


def _reported(axes) -> list[int]:
    tokens, speeds, texts = zip(*case_study.TOKENS_PER_S, strict=True)
    axes.plot(tokens, speeds, "x", color=GREY, ms=7, mew=1.6, label="case study, as reported")
    for x, y, text in zip(tokens, speeds, texts, strict=True):
        left = x >= 1024
        axes.annotate(
            textwrap.fill(f"{y:g}: {text}", 24), (x, y),
            xytext=(-7 if left else 7, 0), textcoords="offset points",
            ha="right" if left else "left", va="center", fontsize=7, color=GREY,
        )  # fmt: skip
    axes.axhspan(*case_study.TARGET_TOKENS_PER_S, color="#999999", alpha=0.15, lw=0, zorder=0,
                 label="its target")  # fmt: skip
    return list(tokens)
