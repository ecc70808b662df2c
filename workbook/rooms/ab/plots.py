"""Figures of an A/B, in the common style."""

import math

import numpy as np

from workbook.lab.search.candidates import ordered, word
from workbook.rooms.ab.rules import TIMED, UNITS
from workbook.rooms.ab.trials import Results
from workbook.runs import looks

TIMES = {"seconds": "time", "processor": "processor time"}
LEAST_LOSSES = 10  # fewest steps for which a curve is drawn


def variants(results: Results, *, note: str = "", on_cpu: bool = True):
    """Plot step time and MiB of every repeat of every variant. On a CPU, time is processor time in
    units of the first variant."""
    plan = results.plan
    memory = [of for of in ("allocated", "reserved") if _any(results, of)]
    clock = _clock(results, on_cpu)
    # Values alone: the axis has the factors' names.
    variants = [", ".join(map(word, variant.cell.values())) for variant in plan.listed]
    shown = [[clock]] * _any(results, clock) + [memory] * bool(memory)
    if not shown:
        return looks.nothing("no trial passed, so nothing was measured")
    with looks.figure(len(shown), max(1.6, 0.4 + 0.3 * len(plan.listed))) as (fig, panels):
        for axes, names in zip(panels, shown, strict=True):
            for number, of in enumerate(names):
                _dots(axes, results, of, number, len(names) > 1, on_cpu)
            axes.set_yticks(range(len(variants)), variants)
            axes.set_ylim(len(plan.listed) - 0.5, -0.5)
            axes.grid(False, axis="y")
            timed = names[0] in TIMED
            unit = "times the first's" if timed and on_cpu else UNITS.get(names[0], "MiB")
            axes.set_xlabel(
                f"{TIMES[names[0]]} a step ({unit})" if timed else f"at a step's peak ({unit})"
            )
            axes.set_xlim(0, axes.dataLim.x1 * 1.06)
            looks.title(
                axes, "Time of a step" if timed else "Memory of a step", note if timed else ""
            )
        panels[0].set_ylabel(",\n".join(plan.varied))
        for axes in panels[1:]:
            axes.set_yticklabels([])
    return fig


def _dots(axes, results: Results, of: str, number: int, several: bool, on_cpu: bool) -> None:
    colour, marker = looks.series(number)
    base = np.asarray(results.values(results.plan.listed[0], of))
    for row, variant in enumerate(results.plan.listed):
        values = np.asarray(results.values(variant, of))
        if of in TIMED and on_cpu:
            values = values / base
        label = {"label": of if several else "one turn"} if not row else {}
        axes.plot(values, [row] * len(values), marker, color=colour, alpha=0.55, **label)
        if np.isfinite(values).any():
            label = {"label": "median"} if not row and not number else {}
            look = {"color": "#000000", "ms": 13, "mew": 1.4, "zorder": 4}
            axes.plot([np.nanmedian(values)], [row], "|", **look, **label)


def _clock(results: Results, on_cpu: bool) -> str:
    return "processor" if on_cpu and _any(results, "processor") else "seconds"


def over(results: Results, *, note: str = "", on_cpu: bool = True):
    """Plot time and memory against the plan's numeric factor; None if it varies no number.

    Logarithmic if the plan has an `exponent_in` rule, else with a least-squares line.
    """
    plan = results.plan
    numbers = [n for n, values in plan.varied.items() if len(values) > 2 and ordered(values)]
    if not numbers:
        return None
    factor = numbers[0]
    power = any(rule.name == "exponent_in" for rule in plan.rules)
    shown = [_clock(results, on_cpu), "growing" if power else "allocated"]
    shown = [of for of in shown if _any(results, of)]
    if not shown:
        return looks.nothing("no trial passed, so nothing was measured")
    groups: dict[str, list] = {}
    for variant in plan.listed:
        rest = ", ".join(f"{n}={word(v)}" for n, v in variant.cell.items() if n != factor)
        groups.setdefault(rest, []).append(variant)
    with looks.figure(len(shown), 3.2) as (fig, panels):
        for axes, of in zip(panels, shown, strict=True):
            for number, (rest, group) in enumerate(groups.items()):
                colour, marker = looks.series(number)
                group = sorted(group, key=lambda variant: variant.cell[factor])
                x = np.array([variant.cell[factor] for variant in group], float)
                y = np.array([results.middle(variant, of) for variant in group])
                turns = [(at, v) for at, variant in zip(x, group, strict=True)
                         for v in results.values(variant, of)]  # fmt: skip
                axes.plot(*zip(*turns, strict=True), marker, color=colour, alpha=0.35, ms=4)
                line = "-" if power else ""
                axes.plot(x, y, marker + line, color=colour, label=rest or "median")
                good = np.isfinite(y)
                if not power and good.sum() > 1:
                    slope, start = np.polyfit(x[good], y[good], 1)
                    axes.plot(x, start + slope * x, "--", lw=1.1, color=colour,
                              label="" if rest else "least squares")  # fmt: skip
            unit = UNITS.get(of, "MiB")
            axes.set(xlabel=factor, ylabel=f"{TIMES.get(of, of)} ({unit})")
            looks.title(axes, "Time of a step" if of in TIMED else "Memory of a step",
                        note if of in TIMED else "")  # fmt: skip
            if power:
                axes.set_xscale("log", base=2)
                looks.log_axis(axes.yaxis)
            else:
                looks.from_zero(axes)
            looks.plain_ticks(axes, plan.varied[factor])
    return fig


def losses(results: Results):
    """Plot loss against step, one line per trial; None for a plan of few steps."""
    plan = results.plan
    if plan.steps < LEAST_LOSSES or not any(trial.losses for trial in results.trials):
        return None
    with looks.figure(1, 3.0) as (fig, (axes,)):
        for number, variant in enumerate(plan.listed):
            colour, _ = looks.series(number)
            for turn, trial in enumerate(results.of(variant)):
                label = {"label": variant.name} if not turn else {}
                axes.plot(trial.losses, color=colour, lw=1.2, alpha=0.8, **label)
        axes.set(xlabel="step", ylabel="loss (nats)")
        looks.title(axes, "Loss of every trial")
    return fig


def _any(results: Results, of: str) -> bool:
    return any(
        math.isfinite(v) for variant in results.plan.listed for v in results.values(variant, of)
    )
