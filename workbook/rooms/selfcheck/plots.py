"""Figures of the selfcheck, in the common style."""

from collections.abc import Sequence

import numpy as np

from workbook.rooms.selfcheck import table
from workbook.rooms.selfcheck.judged import Judged
from workbook.runs import looks
from workbook.runs.looks import GREY, RED


def matrices(rows: Sequence[Judged]):
    """Plot programs against their labels, wrong ones in a red frame."""
    counts = table.confusion(rows)
    if counts.empty:
        return looks.nothing("nothing was run")
    with looks.figure(1, 0.42 * len(counts) + 1.6) as (fig, (axes,)):
        _matrix(axes, counts, table.confusion([row for row in rows if row.missed]))
    return fig


def _matrix(axes, counts, wrong) -> None:
    from matplotlib.patches import Rectangle

    shares = counts.to_numpy() / counts.to_numpy().sum(axis=1, keepdims=True)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    axes.grid(False)
    bad = wrong.reindex(index=counts.index, columns=counts.columns, fill_value=0).to_numpy()
    for (y, x), count in np.ndenumerate(counts.to_numpy()):
        if not count:
            continue
        colour = RED if bad[y, x] else "black"
        axes.text(x, y, str(count), ha="center", va="center", color=colour)
        if bad[y, x]:
            frame = Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, ec=RED, lw=2)
            axes.add_patch(frame)
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(counts.columns)), counts.columns, **slanted)
    axes.set_yticks(range(len(counts.index)), counts.index)
    axes.set(xlabel="found")


def latency(rows: Sequence[Judged]):
    """Plot the percentage of certifiable hangs that is certified, against their time at rest."""
    run = [row for row in rows if row.group == "hang" and row.certifiable and not row.skipped]
    if not any(row.found == "HANG" for row in run):
        return looks.nothing("no hang was certified")
    with looks.figure(1, 3.2) as (fig, (axes,)):
        for number, load in enumerate(sorted({row.load for row in run})):
            mine = [row for row in run if row.load == load]
            rested = sorted(row.named_s or 0.0 for row in mine if row.found == "HANG")
            share = 100 * np.arange(1, len(rested) + 1) / len(mine)
            colour, marker = looks.series(number)
            style = {"color": colour, "marker": marker, "ms": 4, "where": "post"}
            axes.step(rested, share, **style, label=f"load {load}: {len(rested)} of {len(mine)}")
            limit = table.certified_within_s(load)
            axes.axvline(limit, color=GREY, ls=":", lw=1)
        axes.axhline(90, color=GREY, ls=":", lw=1)
        axes.set(xlim=(0, None), ylim=(0, 105))
        axes.set(xlabel="time since the last progress (s)", ylabel="certified (%)")
        looks.title(axes, "How soon a hang has its certificate", "dotted: the aims")
    return fig
