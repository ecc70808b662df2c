"""Figures of the soak notebook, in the common style."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from workbook.rooms.soak import table
from workbook.rooms.soak.trials import Estimated, Part, Setting, Soak, told
from workbook.runs import looks
from workbook.runs.looks import GREY, PALETTE, RED
from workbook.runs.scaling import Slope

SHORT = {"tensors": "tensors", "reserved": "reserved", "host": "process, RAM"}


def over_steps(soak: Soak, note: str):
    """Plot memory above its level at the start of each process, and tokens/s, over steps."""
    with looks.figure(2, 3.4) as (fig, (left, right)):
        spans = [_memory(left, soak, name, PALETTE[n]) for n, name in enumerate(table.SERIES)]
        reach = 1.5 * max(1.0, *spans)  # range of settled steps: a warm-up may lie below
        left.set(xlabel="step", ylabel="MiB above the first settled steps", ylim=(-reach, reach))
        looks.title(left, "Memory after each step")
        x, y = table.tokens_s(soak)
        drift = table.speed(soak)
        unit = "tokens/s"
        if len(y) and not soak.on_gpu:
            y, unit = y / y[: max(1, len(y) // 10)].mean(), "tokens/s, the start = 1"
        right.plot(x, y, ".", color=PALETTE[4], label=f"tokens/s, {table.BLOCK} steps each")
        if drift is not None:
            scale = 1.0 if soak.on_gpu else 1 / drift.level
            _fan(right, x, y, drift.slope, scale, PALETTE[4])
        middle = float(np.median(y)) if len(y) else 1.0
        wide = max(0.05 * middle, 1.2 * float(np.abs(y - middle).max(initial=0.0)))
        right.set(xlabel="step", ylabel=unit, ylim=(middle - wide, middle + wide))
        looks.title(right, "Speed", note)
        for axes in (left, right):
            axes.set_xlim(0, soak.steps)
            axes.axvline(soak.half, color=GREY, ls=":", label="restart")
    return fig


def _memory(axes, soak: Soak, name: str, colour: str) -> float:
    """Plot a memory series; return the largest deviation of settled values from its start."""
    column, furthest = table.SERIES[name][0], 0.0
    for number, (rows, drift) in enumerate(
        zip(soak.rows(), table.memory(soak, name), strict=False)
    ):
        kept = table.settled(rows)
        look = {"ms": 2.5, "color": colour, "label": SHORT[name] if not number else None}
        axes.plot(rows["step"], rows[column] - drift.level, ".", **look)
        above = (kept[column] - drift.level).to_numpy()
        _fan(axes, kept["step"].to_numpy(), above, drift.slope, 1.0, colour)
        furthest = max(furthest, float(np.nanmax(np.abs(above))))
    return furthest


def _fan(axes, x, y, slope: Slope, scale: float, colour: str) -> None:
    """Draw the line through the medians, and the band between the interval's slopes."""
    if len(x) < 2 or not np.isfinite(slope.value):
        return
    at, level = np.median(x), np.median(y)
    ends = np.array([x[0], x[-1]])
    axes.plot(ends, level + scale * slope.value * (ends - at), color=colour, lw=1.4)
    fan = [level + scale * value * (ends - at) for value in (slope.low, slope.high)]
    axes.fill_between(ends, *fan, color=colour, alpha=0.2, lw=0)


def restart_and_limits(soak: Soak, planted: Part):
    """Plot losses around the restart, and the memory of a training that grows to its limits."""
    with looks.figure(2, 3.2) as (fig, (left, right)):
        shown = range(max(0, soak.half - 2 * soak.overlap), soak.half + 2 * soak.overlap)
        names = ("without a restart", "after the restart")
        look = ({"marker": "o", "ms": 7, "mfc": "none"}, {"marker": ".", "ms": 6})
        for number, part in enumerate(soak.parts):
            rows = part.rows[part.rows["step"].isin(shown)]
            style = {"color": PALETTE[number], "label": names[number], "lw": 1.0}
            left.plot(rows["step"], rows["loss"], **style, **look[number])
        left.axvline(soak.half - 0.5, color=GREY, ls=":", label="restart")
        left.set(xlabel="step", ylabel="loss (nats)")
        looks.title(left, "Losses around the restart")
        rows = planted.rows
        held = rows["peak_mib"].fillna(rows["host_mib"])
        right.plot(rows["step"], held, ".-", color=PALETTE[0], label="held")
        for limit, colour, name in zip(
            table.crossings(planted) or (), (PALETTE[1], RED), ("warn", "stop"), strict=False
        ):
            right.axhline(limit.limit_mib, color=colour, ls="--", label=f"limit: {name}")
            if limit.told is not None:
                right.axvline(limit.told, color=colour, lw=0.9)
                text = {"warn": "warned", "stop": "stopped"}[name]
                place = {"rotation": 90, "va": "bottom", "ha": "right", "fontsize": 8}
                where = (limit.told, 0.03)
                across = right.get_xaxis_transform()
                right.annotate(text, where, xycoords=across, color=colour, **place)
        right.set(xlabel="step", ylabel="MiB")
        looks.title(right, "A training that grows by a planted leak")
    return fig


def settings(trials: Sequence[Setting], note: str, estimated: Sequence[Estimated] = ()):
    """Plot reserved, allocated and the difference, a group of bars per setting, and a step's time
    relative to the usual setting; without trials, the estimates."""
    if not any(trial.steps("reserved") for trial in trials):
        if not any(np.isfinite(one.reserved) for one in estimated):
            return looks.nothing("An allocator's settings act on a GPU alone; none is here.")
        held = {"reserved": [f.reserved for f in estimated]}
        held["allocated"] = [f.allocated for f in estimated]
        held["fragmentation"] = list(np.subtract(held["reserved"], held["allocated"]))
        with looks.figure(1, 3.6) as (fig, (axes,)):
            _bars(axes, [one.name for one in estimated], held)
            looks.title(axes, "Estimated by allocator setting", "nothing was measured")
        return fig
    names = list(dict.fromkeys(trial.name for trial in trials))
    with looks.figure(2, 3.6) as (fig, (left, right)):
        kinds = ("reserved", "allocated", "fragmentation", "inactive_split")
        places = _bars(
            left, names, {of: [table.middle(trials, n, of) for n in names] for of in kinds}
        )
        for trial, of in product(trials, kinds):
            if values := trial.steps(of):
                left.plot(places[of][names.index(trial.name)], max(values), "k.", ms=3)
        said = {one.name: one.reserved for one in estimated}
        if any(map(np.isfinite, said.values())):
            at = [said.get(name, np.nan) for name in names]
            left.plot(
                places["reserved"], at, "_", ms=12, mew=2, color=RED, label="estimated reserved"
            )
        looks.title(left, "Memory by allocator setting", note)
        for place, name in enumerate(names):
            ratio = table.times_usual(trials, name)
            if ratio is not None:
                ends = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
                bars = None if np.isnan(ends).any() else ends
                right.errorbar(place, ratio.value, yerr=bars, fmt="o", color=PALETTE[0], capsize=4)
        right.axhline(1.0, color=GREY, lw=0.9, ls="--")
        right.set(ylabel="a step, times the usual setting's")
        _named(right, names)
        looks.title(right, "Time by allocator setting", note)
    return fig


def _bars(axes, names: Sequence[str], mib: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Draw bars of each kind; return their positions."""
    width, places = 0.8 / len(mib), {}
    for number, (of, values) in enumerate(mib.items()):
        places[of] = np.arange(len(names)) + (number - (len(mib) - 1) / 2) * width
        axes.bar(places[of], values, width, color=PALETTE[number], label=of.replace("_", " "))
    axes.set(ylabel="MiB at the highest step")
    _named(axes, names)
    return places


def _named(axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [told(name).replace(":", ":\n") for name in names])
    axes.tick_params(axis="x", labelsize=7, rotation=20)
    axes.grid(False, axis="x")
