"""The figures of the throughput notebook, in the looks of all others. `plots.save` writes them."""

import numpy as np

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.throughput import table as throughput_table
from nsa.experiments.throughput.rows import PHASES
from nsa.workbook import looks
from nsa.workbook.panel_rows import backends

GREY = "#777777"
PHASE_COLOURS = {
    "data": "#56B4E9", "forward": "#0072B2", "backward": "#E69F00", "optimizer": "#009E73",
    "graph": "#CC79A7", "communication": "#D55E00",
}  # fmt: skip
TWIN = ("#8C564B", "<")


def speed(df, *, note: str = "", reported: bool = True):
    """Tokens a second against T, log-log, a panel a model: NSA solid, the dense twin dotted.

    `reported` draws the case study's figures, as it reported them, as grey crosses. Failures are
    crosses at the foot. `note` stands in every panel's corner. ValueError without rows.
    """
    rows = _needed(throughput_table.over_tokens(df, "tokens_per_second"), "tokens_per_second")
    with looks.style():
        fig, panels = looks.panels(rows["model"].nunique(), 4.2)
        for axes, (model, frame) in zip(panels, rows.groupby("model", sort=False), strict=True):
            _lines(axes, frame, bands=not _on_cpu(df))
            tokens = list(frame["x_value"])
            if reported:
                tokens += _reported(axes)
            _title(axes, model, note)
            axes.set(xlabel="T (tokens)", ylabel="tokens / s")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            _failures(axes, frame)
            looks.plain_ticks(axes, tokens)
        looks.legend(fig, panels)
    return fig


def memory(df, *, note: str = ""):
    """Peak memory of a step against T, a panel a model."""
    rows = _needed(throughput_table.over_tokens(df, "peak_memory"), "peak_memory")
    with looks.style():
        fig, panels = looks.panels(rows["model"].nunique(), 2.7)
        for axes, (model, frame) in zip(panels, rows.groupby("model", sort=False), strict=True):
            _lines(axes, frame, bands=False)
            _title(axes, model, note)
            axes.set(xlabel="T (tokens)", ylabel="peak of a step (MiB)")
            looks.from_zero(axes)
            axes.set_xscale("log", base=2)
            _failures(axes, frame)
            looks.plain_ticks(axes, frame["x_value"])
        looks.legend(fig, panels)
    return fig


def phases(df, *, note: str = ""):
    """Milliseconds a step by phase, stacked, a bar a cell; the hatched end is communication that
    is not hidden, taken out of backward."""
    table = _needed(throughput_table.phases(df), "phase_time").fillna(0.0)
    table = table.reindex(columns=[phase for phase in PHASES if phase in table])
    names = [_bar_name(*key) for key in table.index]
    if "communication" in table:
        shown = table["communication"].clip(lower=0.0)
        table["communication"] = np.minimum(shown, table["backward"])
        table["backward"] -= table["communication"]
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.9 + 0.4 * len(table))
        fig.set_figwidth(8.5)
        left = np.zeros(len(table))
        for phase in table:
            axes.barh(
                names, table[phase], left=left, label=phase, color=PHASE_COLOURS[phase],
                hatch="//" if phase == "communication" else None, height=0.7,
            )  # fmt: skip
            left += table[phase].to_numpy()
        axes.invert_yaxis()
        axes.set(xlabel="ms a step")
        axes.grid(False, axis="y")
        _title(axes, "", note)
        looks.legend(fig, [axes])
    return fig


def scaling(df, *, note: str = ""):
    """Tokens a second by ranks in times of one rank; dashed is what perfect scaling gives."""
    table = _needed(throughput_table.scaling(df), "more than one rank").reset_index()
    many = table[table["parallel"] != "none"]
    lines = list(many.groupby(["model", "backend", "T", "how", "parallel"], sort=False))
    with looks.style():
        fig, (axes,) = looks.panels(1, 2.2 + 0.4 * (len(lines) // 2 + 1))  # the legend's rows
        most = int(table["ranks"].max())
        axes.plot([1, most], [1, most], "--", color=GREY, lw=1.1, label="perfect")
        for number, ((model, backend, tokens, how, parallel), line) in enumerate(lines):
            line = line[line["ranks"] > 1].sort_values("ranks")
            colour, marker = _look(backend)
            label = f"{' '.join([backend, how]).strip()}, {parallel}, T {tokens}\n{model}"
            axes.plot(
                [1, *line["ranks"]], [1.0, *line["times one rank"]], ["-", "-.", ":"][number % 3],
                color=colour, marker=marker, label=label,
                alpha=0.6 if how else 1.0,
            )  # fmt: skip
        top = 1.08 * max(most, table["times one rank"].max())
        axes.set(xlabel="ranks", ylabel="tokens / s, times one rank", ylim=(0, top))
        axes.set_xticks(range(1, most + 1))
        _title(axes, "", note)
        looks.legend(fig, [axes])
    return fig


def losses(df):
    """Loss against step: left each backend's mean over its seeds with the seeds' range as a band,
    right its distance from the mean over all NSA backends, which the eye cannot see on the left."""
    table = _needed(throughput_table.losses(df), "loss")
    names = list(dict.fromkeys(table.index.get_level_values("backend")))
    nsa = [name for name in names if not name.startswith("dense")] or names
    middle = table.loc[nsa].mean()
    with looks.style():
        fig, panels = looks.panels(2, 3.0)
        for name in names:
            colour, marker = _look(name)
            lines, every = table.loc[name], max(1, table.shape[1] // 10)
            style = {"color": colour, "marker": marker, "markevery": every, "label": name}
            style["ls"] = ":" if name.startswith("dense") else "-"
            for axes, base in ((panels[0], 0.0), (panels[1], middle)):
                axes.plot(table.columns, lines.mean() - base, **style)
                axes.fill_between(
                    table.columns, lines.min() - base, lines.max() - base, color=colour, alpha=0.18,
                    lw=0,
                )  # fmt: skip
        panels[0].set(xlabel="step", ylabel="loss (nats a byte)", title="mean over seeds")
        panels[1].set(xlabel="step", ylabel="nats", title="distance from the mean of NSA")
        looks.legend(fig, panels)
    return fig


def memory_over_steps(df):
    """Memory after each step less that after the first, device and host, a line a cell.

    Cells of fewer than ten steps are left out, unless there are no others.
    """
    rows = _needed(throughput_table.memory_over_steps(df), "memory")
    modes = [mode for mode in ("device", "host") if (rows["mode"] == mode).any()]
    with looks.style():
        fig, panels = looks.panels(len(modes), 2.6)
        for axes, mode in zip(panels, modes, strict=True):
            frame = rows[rows["mode"] == mode]
            configs = ["model", "backend", "variant", "tokens"]
            longest = frame.groupby(configs).size().max()
            for (_, backend, variant, _), line in frame.groupby(configs, sort=False):
                line = line.sort_values("x_value")
                if len(line) < min(10, longest):
                    continue
                axes.plot(
                    line["x_value"], line["median"] - line["median"].iloc[0],
                    ":" if backend.startswith("dense") else "-", color=_look(backend)[0],
                    alpha=1.0 if variant == "" else 0.5, label=backend,
                )  # fmt: skip
            axes.set(xlabel="step after the warm-up", ylabel="MiB since the first", title=mode)
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -1.0), max(high, 1.0))
        looks.legend(fig, panels)
    return fig


def kernels(profile: dict, title: str):
    """The profile of one step: its most expensive kernels, or operators on a CPU, as bars."""
    rows = profile["kernels"]
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.6 + 0.26 * len(rows))
        fig.set_figwidth(8.5)
        names = [f"{row['name'][:56]} ({row['calls']})" for row in rows]
        axes.barh(range(len(rows)), [row["ms"] for row in rows], color="#0072B2", height=0.7)
        axes.set_yticks(range(len(rows)), names, fontsize=7.5)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set(xlabel="ms in one step (calls)", title=title)
    return fig


def _lines(axes, frame, *, bands: bool) -> None:
    for backend, line in backends(frame):
        good = line[line["median"].notna()].sort_values("x_value")
        if not len(good):
            continue
        colour, marker = _look(backend)
        style = ":" if backend.startswith("dense") else "-"
        axes.plot(
            good["x_value"], good["median"], style, color=colour, marker=marker, zorder=3,
            label=f"{backend} twin" if backend.startswith("dense") else backend,
        )  # fmt: skip
        if bands:
            low, high = good["q20"].astype(float), good["q80"].astype(float)
            axes.fill_between(good["x_value"], low, high, color=colour, alpha=0.18, lw=0)


def _reported(axes) -> list[int]:
    tokens, speeds, texts = zip(*case_study.TOKENS_PER_S, strict=True)
    axes.plot(tokens, speeds, "x", color=GREY, ms=7, mew=1.6, label="case study, as reported")
    for x, y, text in zip(tokens, speeds, texts, strict=True):
        left = x >= 1024
        axes.annotate(
            f"{y:g}: {text}", (x, y), xytext=(-7 if left else 7, 0), textcoords="offset points",
            ha="right" if left else "left", va="center", fontsize=7, color=GREY,
        )  # fmt: skip
    axes.axhspan(*case_study.TARGET_TOKENS_PER_S, color="#999999", alpha=0.15, lw=0, zorder=0,
                 label="its target")  # fmt: skip
    return list(tokens)


def _failures(axes, frame) -> None:
    """A cross at the foot for each cell that failed, its outcome beside it."""
    failed = frame[frame["median"].isna() & (frame["outcome"] != "not run")]  # for want of time
    failing = [(name, line["x_value"], line["outcome"]) for name, line in backends(failed)]
    looks.crosses(axes, failing, frame["x_value"], top=False, colour=lambda name: _look(name)[0])


def _look(backend: str) -> tuple[str, str]:
    return TWIN if backend.startswith("dense") else looks.look(backend)


def _title(axes, title: str, note: str) -> None:
    """The note stands at the right, where no curve can run through it."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_title(note, loc="right", fontsize=8, color=GREY)


def _bar_name(model: str, backend: str, variant: str, tokens: int) -> str:
    return f"{backend}, T {tokens}" + (f"\n{variant}" if variant else "")


def _on_cpu(df) -> bool:
    return bool(df["gpu"].isin(["", "cpu"]).any())


def _needed(rows, what: str):
    if not len(rows):
        raise ValueError(f"no training rows of {what}")
    return rows
