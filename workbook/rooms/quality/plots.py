"""Figures of the comparison, in the common style."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbook.rooms.quality import table
from workbook.rooms.quality.cells import BASE, VARIANTS
from workbook.rooms.quality.planted import KINDS
from workbook.runs import looks

Rows = Sequence[dict[str, Any]]
NOTHING = "no cell ended well"
MIB, SEEN = 2.0**20, "MiB of text seen"


def _style(number: int) -> str:
    """Line of the n-th series: colours come again, dashed."""
    return ("-", "--")[number // len(looks.PALETTE) % 2]


def _band(axes, curves: Sequence[dict[float, float]], number: int, name: str, style="") -> None:
    """Draw the mean of curves {x: y} over seeds as a line and their range as a band."""
    common = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[x] for curve in curves] for x in common]
    colour, marker = looks.series(number)
    middle = [sum(column) / len(column) for column in columns]
    axes.plot(
        common, middle, style or _style(number), color=colour, marker=marker, label=name, ms=4
    )
    low, high = zip(*((min(column), max(column)) for column in columns), strict=True)
    axes.fill_between(common, low, high, color=colour, alpha=0.2, lw=0)


def _numbered(rows: Rows) -> list[tuple[int, str]]:
    """Variants with the number of their colour, the same in every figure."""
    return [(list(VARIANTS).index(variant), variant) for variant in table.variants(rows)]


def by_position(rows: Rows, note: str):
    """Plot bits a byte against the position in a held-out row, a panel for each trained length."""
    lengths = [
        n for n in table.lengths(rows) if any(table.of(rows, a, n) for a in table.variants(rows))
    ]
    if not lengths:
        return looks.nothing(NOTHING)
    with looks.figure(len(lengths), 3.4) as (fig, panels):
        for axes, tokens in zip(panels, lengths, strict=True):
            for number, variant in _numbered(rows):
                mine = table.of(rows, variant, tokens).values()
                curves = [
                    {int(end): value for end, value in row["by_position"][str(tokens)].items()}
                    for row in mine
                ]
                if curves:
                    _band(axes, curves, number, variant)
            axes.set_xscale("log", base=2)
            looks.plain_ticks(axes, {64, 512, 2048, 8192, tokens})
            axes.set(xlabel="position, end of its bucket", ylabel="bits a byte")
            looks.title(axes, f"held-out text, trained at {looks.length(tokens)}", note)
    return fig


def while_training(rows: Rows, note: str, on_gpu: bool):
    """Plot bits a byte on held-out text against bytes seen and, on a GPU, against seconds."""
    lengths, axis = table.lengths(rows), (SEEN, "seconds of training")
    shown = [(n, column) for n in lengths for column in range(1 + on_gpu)]
    if not any(row["outcome"] == "ok" for row in rows):
        return looks.nothing(NOTHING)
    with looks.figure(len(shown), 3.0) as (fig, panels):
        for axes, (tokens, column) in zip(panels, shown, strict=True):
            for number, variant in _numbered(rows):
                colour, _ = looks.series(number)
                for row in table.of(rows, variant, tokens).values():
                    scale = 1.0 if column else MIB
                    curve = [[point[column] / scale, point[2]] for point in row["curve"]]
                    look = {"color": colour, "ls": _style(number), "label": variant, "lw": 1.2}
                    axes.plot(*zip(*curve, strict=True), **look)
            axes.set(xlabel=axis[column], ylabel="bits a byte")
            looks.title(axes, f"trained at {looks.length(tokens)}, a line a seed", note)
    return fig


def tasks(rows: Rows, note: str):
    """Plot accuracy of each task against the length at which it is asked."""
    if not any(row["outcome"] == "ok" for row in rows):
        return looks.nothing(NOTHING)
    with looks.figure(len(KINDS), 2.8) as (fig, panels):
        for axes, kind in zip(panels, KINDS, strict=True):
            for line, tokens in enumerate(table.lengths(rows)):
                for number, variant in _numbered(rows):
                    mine = table.of(rows, variant, tokens).values()
                    curves = [
                        {int(at): found[0] for at, found in row["tasks"][kind].items()}
                        for row in mine
                    ]
                    if curves:
                        name = f"{variant}, trained at {looks.length(tokens)}"
                        _band(axes, curves, number, name, ("-", "--", ":")[line % 3])
            axes.set_xscale("log", base=2)
            asked = {int(at) for row in rows for at in row.get("tasks", {}).get(kind, ())}
            looks.plain_ticks(axes, asked)
            axes.set(xlabel="length of the row", ylabel="share of bytes", ylim=(-0.03, 1.03))
            looks.title(axes, kind, note)
    return fig


def selection_while_training(rows: Rows, note: str):
    """Plot NSA's gates, as shares of their sum and as each layer's sum, and how many blocks 64
    neighbours select together, against bytes seen, a line a seed and length. Shares and blocks are
    means over layers."""
    mine = [row for row in rows if row["outcome"] == "ok" and row["cell"]["variant"] == BASE]
    mine = [row for row in mine if row.get("selected")]
    if not mine:
        return looks.nothing(NOTHING)
    with looks.figure(3, 2.8, names="at ends") as (fig, (shares, sums, united)):
        for row in mine:
            seen = [look["bytes"] / MIB for look in row["selected"]]
            gates = np.array([[x["gates"] for x in look["layers"]] for look in row["selected"]])
            for layer, line in enumerate(gates.sum(-1).T):
                look = {"color": looks.series(layer)[0], "ls": _style(layer)}
                sums.plot(seen, line, label=f"layer {layer}", **look)
            gates = (gates / gates.sum(-1, keepdims=True)).mean(1)
            for number, name in enumerate(("compressed", "selected", "window")):
                shares.plot(seen, gates[:, number], color=looks.series(number)[0], label=name)
            unions = [[x["union_mean"]["64"] for x in look["layers"]] for look in row["selected"]]
            line, at = table.lengths(mine).index(row["cell"]["tokens"]), row["cell"]["tokens"]
            look = {"color": looks.series(3 + line)[0], "label": f"text of {looks.length(at)}"}
            united.plot(seen, np.mean(unions, 1), **look)
        shares.set(xlabel=SEEN, ylabel="share of the gates", ylim=(0, 1))
        sums.set(xlabel=SEEN, ylabel="sum of the three gates", ylim=(-0.03, None))
        united.set(xlabel=SEEN, ylabel="distinct blocks")
        looks.title(shares, "gates", note)
        looks.title(sums, "how far gates are open", note)
        looks.title(united, "64 neighbours", note)
    return fig


def unions(rows: Rows, note: str):
    """Plot how many distinct blocks neighbours select together, over layers and seeds of NSA."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for row in rows:
        if row["outcome"] == "ok" and row["cell"]["variant"] == BASE:
            for at, layers in row["selections"].items():
                for layer in layers:
                    for n, found in layer["union"].items():
                        into = counts.setdefault((n, at), Counter())
                        into.update({int(k): v for k, v in found.items()})
    if not counts:
        return looks.nothing("no variant selects blocks")
    neighbours = list(dict.fromkeys(n for n, _ in counts))
    with looks.figure(len(neighbours), 2.6) as (fig, panels):
        for axes, n in zip(panels, neighbours, strict=True):
            for number, at in enumerate(dict.fromkeys(a for m, a in counts if m == n)):
                found = counts[n, at]
                total, xs = sum(found.values()), sorted(found)
                colour, _ = looks.series(number)
                shares = [found[x] / total for x in xs]
                name = f"text of {looks.length(int(at))}"
                axes.step(xs, shares, where="mid", color=colour, label=name)
            axes.set(xlabel="distinct blocks", ylabel="share of tiles")
            looks.title(axes, f"{n} neighbours", note)
    return fig
