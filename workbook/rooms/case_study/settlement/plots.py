"""Figures of the settlement: two tables re-read, and an overview of the verdicts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbook.rooms.case_study import figures as case_study
from workbook.rooms.case_study.figures import ALL_TIMINGS, OFF
from workbook.rooms.case_study.loop.design import held, peak_mib, production
from workbook.rooms.case_study.settlement.claims import CONTRADICTED, KINDS, Settled
from workbook.runs import looks

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
COLOURS = {
    "REFUTED": ORANGE,
    "CONFIRMED": GREEN,
    "EXPLAINED": BLUE,
    "VOID": "#9E4F86",
    "INCONCLUSIVE": "#6E6E6E",
    CONTRADICTED: "#000000",
}
PARTS = (
    ("window", "window's copies", "#56B4E9"),
    ("selected", "selected copies", "#CC79A7"),
    ("compressed", "compressed copies", "#E69F00"),
    ("rest", "all else", "#BBBBBB"),
)
GIB = 2**30


def memory():
    """Plot reported peaks, the copies that explain them with their parts, its estimator, and the
    copies of a right window."""
    tokens = np.array(sorted(case_study.MEMORY_MIB))
    fine = np.unique(np.geomspace(tokens[0], 2 * tokens[-1], 25).astype(int))
    found = [held(production(5), int(t)) for t in fine]
    right = [peak_mib(5, int(t), right_window=True) / 1024 for t in fine]
    estimate = case_study.estimate_mib(fine) / 1024
    reported = [case_study.MEMORY_MIB[int(t)] / 1024 for t in tokens]
    with looks.figure(1, 3.9) as (fig, (axes,)):
        for name, label, colour in PARTS:
            sizes = [getattr(one, name) / GIB for one in found]
            axes.plot(fine, sizes, lw=1, color=colour, label=label)
        copies = [one.total / GIB for one in found]
        axes.plot(fine, copies, "--", color=BLUE, label="predicted, all of these: a copy a token")
        axes.plot(fine, right, ":", color=GREEN, label="with a window that sees its w keys")
        axes.plot(fine, estimate, "-.", color=GREY, lw=1.1, label="its estimator, a + b T²")
        axes.plot(tokens, reported, "o", color=ORANGE, ms=7, label="reported, 5 layers")
        axes.set(xscale="log", yscale="log", xlabel="T (tokens)", ylabel="peak memory (GiB)")
        axes.set_ylim(0.02, None)
        looks.plain_ticks(axes, [*tokens, 4096])
        axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(False, which="minor")
        looks.title(axes, "A step's peak: copies explain it, T² does not", "fp32, batch 1")
    return fig


def microseconds(here: Sequence[Mapping[str, Any]] = ()):
    """Plot seconds of every known step against its operations, with their common constant.

    here: rows of loop.measure.operations, of which the first is drawn as the rebuilt loop.
    """
    counts = [t.operations for t in ALL_TIMINGS]
    each = [t.microseconds for t in ALL_TIMINGS]
    ends = np.array([min(counts) / 1.6, max(counts) * 1.6])
    constant = float(np.exp(np.mean(np.log(each))))
    near = sum(abs(error) <= 0.25 for error in OFF.values())
    line = ends * constant / 1e6
    with looks.figure(1, 3.6) as (fig, (axes,)):
        axes.plot(ends, line, color=GREY, lw=1, label=f"{constant:.1f} µs an operation")
        band = {"alpha": 0.18, "color": BLUE, "lw": 0, "label": "predicted to 25 %"}
        axes.fill_between(ends, line / 1.25, line / 0.75, **band)
        looks_of = {"A100": ("o", BLUE), "RTX 3090": ("s", ORANGE), "2 CPU cores": ("^", GREEN)}
        for gpu, (marker, colour) in looks_of.items():
            mine = [(t.operations, t.seconds) for t in ALL_TIMINGS if t.gpu == gpu]
            axes.plot(*zip(*mine, strict=True), marker, ms=7, color=colour, label=gpu)
        for row in here[:1]:
            look = {"ms": 12, "color": "#E69F00", "mec": "black", "mew": 0.5}
            label = "the rebuilt loop, here"
            axes.plot(row["operations"], row["seconds"], "*", label=label, **look)
        for limit, name in ((30, "30 s limit"), (60, "60 s limit"), (180, "watchdog, 180 s")):
            axes.axhline(limit, color=GREY, lw=0.8, ls="--")
            axes.annotate(name, (ends[0], limit), va="bottom", fontsize=7.5, color="#555555")
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="operations of a step", ylabel="time of a step (s)")
        axes.set_yticks([1, 10, 100], ["1", "10", "100"])
        axes.grid(False, which="minor")
        looks.title(axes, f"One time an operation predicts {near} of {len(each)} steps to 25 %")
    return fig


def verdicts(settled: Sequence[Settled]):
    """Draw a box for each row, in the colour of its verdict."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    columns, at = 14, 0
    middle = {"ha": "center", "va": "center", "color": "white", "fontsize": 9, "weight": "bold"}
    with looks.style():
        fig, axes = plt.subplots(figsize=(9.5, 4.2))
        for kind in KINDS:
            group = [one for one in settled if one.row.id.startswith(kind)]
            for number, one in enumerate(group):
                x, y = number % columns, at + number // columns
                box = {"lw": 0, "facecolor": COLOURS[one.verdict]}
                axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, **box))
                axes.text(x + 0.5, y + 0.5, one.row.id, **middle)
            at += -(-len(group) // columns) + 0.35 if group else 0
        axes.set(xlim=(0, columns), ylim=(at - 0.3, 0))
        axes.set_axis_off()
        looks.title(axes, "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()))
        counts = Counter(one.verdict for one in settled)
        handles = [Patch(color=COLOURS[v], label=f"{v} ({n})") for v, n in counts.items()]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5)
    return fig
