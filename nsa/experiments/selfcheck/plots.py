"""The figures of the selfcheck, in the looks of all others."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from nsa.experiments.selfcheck import table
from nsa.experiments.selfcheck.judged import Judged
from nsa.workbook import looks
from nsa.workbook.looks import GREY, RED

COLOURS = {
    "PASS": "#009E73", "FAIL": "#CC79A7", "SLOW": "#E69F00", "HANG": "#D55E00", "OOM": "#8C564B",
    "CRASH": "#0072B2", "FLAKY": "#9467BD", "INVALID": "#000000", "INCONCLUSIVE": "#7f7f7f",
}  # fmt: skip


def confusion(rows: Sequence[Judged]):
    """What was planted against what was found: counts, in a red frame where they should not be."""
    from matplotlib.patches import Rectangle

    counts = table.confusion(rows)
    if counts.empty:
        return looks.nothing("nothing was run")
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.42 * len(counts) + 1.6)
        shares = counts.to_numpy() / counts.to_numpy().sum(axis=1, keepdims=True)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        axes.grid(False)
        for (y, x), count in np.ndenumerate(counts.to_numpy()):
            if not count:
                continue
            due = counts.index[y].removeprefix("control ").split(" or ")
            wrong = counts.columns[x] not in due
            colour = RED if wrong else "black"
            axes.text(x, y, str(count), ha="center", va="center", color=colour)
            if wrong:
                frame = Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, ec=RED, lw=2)
                axes.add_patch(frame)
        slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(counts.columns)), counts.columns, **slanted)
        axes.set_yticks(range(len(counts.index)), counts.index)
        axes.set(xlabel="found", ylabel="planted")
        looks.title(axes, "Verdicts on what was planted (trials)")
    return fig


def time_to_verdict(rows: Sequence[Judged]):
    """Seconds from a trial's start to its verdict, a line a fault, a mark a round."""
    run = [row for row in rows if not row.skipped]
    if not run:
        return looks.nothing("nothing was run")
    latest: dict[str, float] = {}
    for row in run:
        latest[row.name] = max(row.seconds, latest.get(row.name, 0.0))
    names = sorted(latest, key=latest.__getitem__)
    controls = {row.name for row in run if row.control}
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.19 * len(names) + 0.7)

        def draw(mine: list[Judged], **style) -> None:
            places = [names.index(row.name) for row in mine]
            axes.plot([row.seconds for row in mine], places, "o", **style)

        for kind in dict.fromkeys(row.found for row in run):
            mine = [row for row in run if row.found == kind]
            draw(mine, ms=4.5, color=COLOURS.get(kind, GREY), label=kind)
        if wrong := [row for row in run if row.missed]:
            draw(wrong, ms=10, mfc="none", mec=RED, label="not what was planted")
        labels = [name + " (control)" * (name in controls) for name in names]
        axes.set_yticks(range(len(names)), labels, fontsize=7.5)
        axes.set_ylim(-0.8, len(names) - 0.2)
        axes.set_xlim(0, 1.04 * max(latest.values()) or 1)
        axes.set(xlabel="s from start to verdict")
        looks.title(axes, "Time to the verdict")
        looks.legend(fig, [axes])
    return fig


def progress(rows: Sequence[Judged], names: Sequence[str]):
    """Progress as it was seen from outside: share of the steps done against seconds of them."""
    shown = [row for row in rows if row.name in names and row.round == 1 and len(row.track) > 1]
    if not shown:
        return looks.nothing("no progress was seen of those")
    latest = max(row.track[-1][0] for row in shown)
    heights = _apart([100 * row.track[-1][1] for row in shown], gap=7.0, top=103.0)
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.4)
        fig.set_figwidth(8.5)
        for number, (row, height) in enumerate(zip(shown, heights, strict=True)):
            t, share = np.array(row.track).T
            colour, marker = looks.series(number)
            axes.plot(t, 100 * share, "--" if row.control else "-", color=colour, alpha=0.9)
            end = (t[-1], 100 * share[-1])
            axes.plot(*end, marker, color=colour)
            arrow = {"arrowstyle": "-", "color": colour, "lw": 0.6, "alpha": 0.5}
            label = {"xytext": (1.08 * latest, height), "va": "center", "arrowprops": arrow}
            axes.annotate(f"{row.name}: {row.label}", end, fontsize=7.5, color=colour, **label)
        axes.set_xlim(0, 1.75 * latest)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.02 * latest])
        axes.set_ylim(-3, 108)
        axes.set(xlabel="s since the first step began", ylabel="steps done, %")
        looks.title(axes, "Progress, as seen from outside (dashed: controls)")
    return fig


def _apart(heights: list[float], gap: float, top: float) -> list[float]:
    """The heights of labels, moved so that no two are closer than `gap`, none above `top`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    placed[order[-1]] = min(placed[order[-1]], top)
    for above, below in pairwise(reversed(order)):
        placed[below] = min(placed[below], placed[above] - gap)
    return placed
