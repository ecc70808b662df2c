"""Figures of shared sequences, in the common style."""

from collections.abc import Sequence
from typing import Any

from workbook.rooms.long_context import table
from workbook.runs import looks

Rows = Sequence[dict[str, Any]]
NOTHING = "no cell ended well"
GIB = 1024.0  # MiB
TALL = 0.26  # inches of one bar


def _lines(frame) -> list[tuple[str, Any, tuple[str, str]]]:
    """(name, rows by T, (colour, marker)) of each number of ranks and method."""
    found = []
    for (ranks, method), rows in frame.groupby(level=["ranks", "method"], sort=True):
        name = method if ranks == 1 else f"{ranks} ranks, {method}"
        found.append((name, rows.droplevel(["ranks", "method"]), looks.series(len(found))))
    return found


def _over_tokens(axes, tokens: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(tokens)), [table.length(t) for t in sorted(set(tokens))])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("T, tokens of the sequence")


def efficiency(rows: Rows, note: str):
    """Plot time on one rank over P times that on P against T, a line a number of ranks and
    method; 1 dotted."""
    frame = table.frame(rows)
    frame = frame[frame.index.get_level_values("ranks") > 1].dropna(subset="efficiency")
    if frame.empty:
        return looks.nothing("no cell has one rank's time at the same T")
    with looks.figure(1, 3.2) as (fig, (axes,)):
        for name, mine, (colour, marker) in _lines(frame):
            axes.plot(mine.index, mine["efficiency"], color=colour, marker=marker, label=name)
        axes.axhline(1.0, color=looks.GREY, ls=":", lw=1)
        _over_tokens(axes, frame.index.get_level_values("T"))
        top = 1.05 * max(1.0, frame["efficiency"].max())
        axes.set(ylabel="time on one / (P x time on P)", ylim=(0, top))
        looks.title(axes, "efficiency of both passes", note)
    return fig


def memory(rows: Rows, note: str):
    """Plot a rank's peak beyond inputs and outputs against T, a panel a pass, a line a number of
    ranks and method; what was estimated is dashed."""
    frame = table.frame(rows).dropna(subset="both")
    if frame.empty:
        return looks.nothing(NOTHING)
    with looks.figure(2, 3.2) as (fig, panels):
        for axes, side in zip(panels, ("forward", "backward"), strict=True):
            column = f"{side} MiB"
            for name, mine, (colour, marker) in _lines(frame):
                held = mine[column] / GIB
                axes.plot(mine.index, held, color=colour, marker=marker, label=name, lw=0.8)
                foretold = (mine[f"{column}, estimated"] / GIB).dropna()
                style = {"color": colour, "lw": 2.2, "zorder": 1, "alpha": 0.6}
                axes.plot(foretold.index, foretold, "--", **style)
            looks.log_axis(axes.yaxis)
            _over_tokens(axes, frame.index.get_level_values("T"))
            axes.set_ylabel("GiB of one rank")
            looks.title(axes, side, note)
    return fig


def split(rows: Rows, note: str):
    """Plot time of all ranks together for 1,000 tokens, forward and backward, a bar a cell; below
    it, on a GPU, that of its collectives while nothing else ran."""
    frame = table.frame(rows).dropna(subset="both")
    if frame.empty:
        return looks.nothing(NOTHING)
    with looks.figure(1, 1.0 + TALL * len(frame)) as (fig, (axes,)):
        names, at, last = [], 0.0, None
        for (tokens, ranks, method), row in frame.iterrows():
            at += 0.4 * (last not in (None, tokens))
            last, share = tokens, ranks * 1000 / tokens
            bars = {"height": 0.55, "label": "forward", "color": looks.series(0)[0]}
            axes.barh(at, row["forward"] * share, **bars)
            bars |= {"label": "backward", "color": looks.series(1)[0]}
            axes.barh(at, row["backward"] * share, left=row["forward"] * share, **bars)
            if row["alone"] > 0:
                bars |= {"height": 0.2, "label": "sending, nothing else", "color": looks.RED}
                axes.barh(at + 0.38, row["alone"] * share, **bars)
            way = method if ranks == 1 else f"{ranks} {method}"
            names.append((at, f"{table.length(tokens)}, {way}"))
            at += 1.0
        axes.set_yticks(*zip(*names, strict=True), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms of all ranks together for 1,000 tokens")
        looks.title(axes, "both passes", note)
    return fig
