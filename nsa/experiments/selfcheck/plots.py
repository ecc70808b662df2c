"""The figures of the selfcheck, in the looks of all others. `plots.save` writes them."""

from collections.abc import Sequence

import numpy as np

from nsa.experiments.selfcheck import table as selfcheck_table
from nsa.experiments.selfcheck.faults.judged import Judged
from nsa.workbook import looks

COLOURS = {
    "PASS": "#009E73", "FAIL": "#CC79A7", "SLOW": "#E69F00", "HANG": "#D55E00", "OOM": "#8C564B",
    "CRASH": "#0072B2", "FLAKY": "#9467BD", "INVALID": "#7f7f7f", "INCONCLUSIVE": "#7f7f7f",
}  # fmt: skip


def confusion(rows: Sequence[Judged]):
    """What was planted against what was found: counts, in a red frame where they should not be."""
    table = selfcheck_table.confusion(rows)
    if table.empty:
        return _nothing("nothing was run")
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.42 * len(table) + 1.3)
        shares = table.to_numpy() / table.to_numpy().sum(axis=1, keepdims=True)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        axes.grid(False)
        for y, planted in enumerate(table.index):
            due = planted.removeprefix("control ").split(" or ")
            for x, kind in enumerate(table.columns):
                count = table.iloc[y, x]
                if count:
                    wrong = kind not in due
                    axes.text(x, y, str(count), ha="center", va="center",
                              color="#c00000" if wrong else "black")  # fmt: skip
                    if wrong:
                        axes.add_patch(_frame(x, y))
        slanted = {"rotation": 30, "ha": "left", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(table.columns)), table.columns, **slanted)
        axes.set_yticks(range(len(table.index)), table.index)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set(xlabel="found", ylabel="planted")
    return fig


def time_to_verdict(rows: Sequence[Judged]):
    """Seconds from a trial's start to its verdict, a line a fault, a mark a round."""
    run = [row for row in rows if not row.skipped]
    if not run:
        return _nothing("nothing was run")
    names = sorted(
        {row.name for row in run}, key=lambda n: max(r.seconds for r in run if r.name == n)
    )
    place = {name: number for number, name in enumerate(names)}
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.19 * len(names) + 0.7)
        for kind in dict.fromkeys(row.found for row in run):
            mine = [row for row in run if row.found == kind]
            axes.plot(
                [row.seconds for row in mine], [place[row.name] for row in mine], "o", ms=4.5,
                color=COLOURS.get(kind, "#7f7f7f"), label=kind,
            )  # fmt: skip
        wrong = [row for row in run if row.missed]
        if wrong:
            axes.plot(
                [row.seconds for row in wrong], [place[row.name] for row in wrong], "o", ms=10,
                mfc="none", mec="#c00000", label="not what was planted",
            )  # fmt: skip
        controls = {row.name for row in run if row.control}
        shown = [f"{name} (control)" if name in controls else name for name in names]
        axes.set_yticks(range(len(names)), shown, fontsize=7.5)
        axes.set_ylim(-0.8, len(names) - 0.2)
        axes.set_xlim(left=0)
        axes.set(xlabel="seconds from start to verdict")
        looks.legend(fig, [axes])
    return fig


def progress(rows: Sequence[Judged], names: Sequence[str]):
    """Progress as it was seen from outside: share of the steps done against seconds of them."""
    shown = [row for row in rows if row.name in names and row.round == 1 and len(row.track) > 1]
    if not shown:
        return _nothing("no progress was seen of those")
    with looks.style():
        fig, (axes,) = looks.panels(1, 3.0)
        for row in shown:
            t, share = np.array(row.track).T
            colour = COLOURS.get(row.found, "#7f7f7f")
            dashed = "--" if row.control else "-"
            axes.plot(t, 100 * share, dashed, color=colour, alpha=0.9)
            end = f" {row.name}: {row.label}"
            axes.annotate(end, (t[-1], 100 * share[-1]), fontsize=7.5, va="center", color=colour)
        latest = max(row.track[-1][0] for row in shown)
        axes.set_xlim(0, 1.6 * latest)
        axes.set_ylim(-3, 106)
        axes.set(xlabel="seconds since the first step began", ylabel="steps done, %")
    return fig


def _frame(x: int, y: int):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, ec="#c00000", lw=2)


def _nothing(text: str):
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.8)
        axes.set_axis_off()
        axes.text(0.5, 0.5, text, ha="center", va="center")
    return fig
