"""Figures of distributed tracing, in the common style.

Without a completed trace, a message replaces the figure: a verdict is still due.
"""

import numpy as np

from workbook.rooms.tracing import table
from workbook.rooms.tracing.trials import STEPS, Traced
from workbook.runs import looks
from workbook.runs.looks import PALETTE, RED

RANK_LOOKS = (("#0072B2", "o"), ("#D55E00", "x"), ("#009E73", "+"), ("#CC79A7", "1"))
HATCHES = ("", "///", "...", "xxx")
NOT_ENDED = ": not traced to its end"


def arrival_order(traced: Traced, trials: list[str]):
    """Plot the arrival order of gradients in step 1 against the parameter's place in the model, a
    panel per trial, a marker per rank. Missing ones are red at the left edge; those that arrive as
    zero keep their place, in a red square."""
    rows = table.frame(traced, "arrivals", step=1)
    shown = [name for name in trials if (rows["trial"] == name).any()]
    if not shown:
        return looks.nothing(f"no arrivals of {', '.join(trials) or 'any trial'}{NOT_ENDED}")
    one = rows[rows["rank"] == 0]
    fullest = (one["state"] != "missing").groupby(one["trial"], sort=False).sum().idxmax()
    arrived = list(one[one["trial"] == fullest]["parameter"])
    place = {name: number for number, name in enumerate(_in_model_order(arrived))}
    with looks.figure(len(shown), 2.8) as (fig, panels):
        for axes, name in zip(panels, shown, strict=True):
            for rank, mine in rows[rows["trial"] == name].groupby("rank"):
                _arrivals(axes, mine, place, rank)
            axes.set(xlabel="order of arrival", ylabel="parameter's place in the model")
            looks.title(axes, f"{name}: gradients of step 1")
            axes.set_xlim(-0.09 * len(place), 1.02 * len(place))
            axes.invert_yaxis()
    return fig


def buckets(traced: Traced, trials: list[str]):
    """Plot DDP's buckets by elements, stacked in order: bars by step and rank, panels by trial."""
    found = {name: steps for name in trials if (steps := table.layouts(traced, name))}
    if not found:
        return looks.nothing(f"no buckets of {', '.join(trials)}{NOT_ENDED}")
    with looks.figure(len(found), 2.4) as (fig, panels):
        for axes, (name, steps) in zip(panels, found.items(), strict=True):
            ticks, labels = [], []
            for step, by_rank in steps.items():
                width = 0.8 / len(by_rank)
                for rank, elements in by_rank.items():
                    ticks.append(step - 0.4 + width * (rank + 0.5))
                    labels.append(f"step {step}\nrank {rank}" if len(by_rank) < 3 else str(rank))
                    _stack(axes, ticks[-1], 0.9 * width, elements)
            axes.set_xticks(ticks, labels, fontsize=8)
            axes.grid(False, axis="x")
            axes.set(ylabel="elements (million)")
            looks.title(axes, f"{name}: DDP's buckets")
            looks.from_zero(axes)
    return fig


def module_timeline(traced: Traced, trial: str):
    """Plot when each module's backward begins on each rank, in ms since the first; the time before
    it, and a pause of more than half of the rest, are cut out and given as text.

    Shows the last step, as kernels are compiled in the first, and modules at most three names deep.
    """
    times = table.modules(traced, trial, STEPS)
    times = times[[name.count(".") < 3 for name in times.index]]
    if not len(times):
        return looks.nothing(f"no module backwards of {trial}{NOT_ENDED}")
    first = float(np.nanmin(times))
    times, (begins, pause) = _without_pause(times - first)
    with looks.figure(1, max(2.2, 0.16 * len(times))) as (fig, (axes,)):
        levels = np.arange(len(times))
        for rank, column in enumerate(times.columns):
            colour, marker = RANK_LOOKS[rank % len(RANK_LOOKS)]
            axes.plot(times[column], levels, color=colour, lw=0.8, alpha=0.5)
            axes.plot(times[column], levels, marker, color=colour, ms=5,
                      label=column.removesuffix(", ms"))  # fmt: skip
        if pause:
            axes.axvline(begins, color=RED, ls="--", lw=1.2)
            axes.annotate(
                f" {pause / 1e3:.3g} s are left out here", (begins, 0.99), color=RED, va="top",
                xycoords=("data", "axes fraction"), fontsize=8,
            )  # fmt: skip
        axes.set_yticks(levels, times.index, fontsize=7.5)
        axes.invert_yaxis()
        axes.set(xlabel="time on the host since the first module's backward began (ms)")
        looks.title(axes, f"{trial}, step {STEPS}: backward by module",
                    f"the first began {first:.3g} ms after the backward")  # fmt: skip
    return fig


def _without_pause(times):
    """Cut the longest stretch in which no module begins on any rank, if it is more than half of the
    total; also return its start and length, (0, 0) if nothing was cut."""
    values = np.unique(times.to_numpy()[~np.isnan(times.to_numpy())])
    waits = np.diff(values)
    if len(waits) < 3 or waits.max() <= values[-1] / 2:
        return times, (0.0, 0.0)
    begins, wait = values[waits.argmax()], waits.max()
    left = 0.1 * (values[-1] - wait)  # a visible gap
    return times.where(times <= begins, times - wait + left), (begins + left / 2, wait - left)


def _arrivals(axes, rows, place: dict[str, int], rank: int) -> None:
    """Draw one rank's arrivals, and its missing or zero gradients."""
    colour, marker = RANK_LOOKS[rank % len(RANK_LOOKS)]
    edge = -0.05 * len(place)

    def draw(mine, shape, label, **style):
        x = mine["order"].astype("Float64").fillna(edge).to_numpy(float)
        y = [place[name] for name in mine["parameter"]]
        axes.plot(x, y, shape, mfc="none", label=label, **style)

    missing, expected = rows["state"] == "missing", rows["expected"] == rows["state"]
    draw(rows[~missing], marker, f"rank {rank}", color=colour, ms=5, mew=1.1)
    for mine, shape, label, style in (
        (missing & ~expected, marker, f"missing on rank {rank}", {"color": RED, "ms": 8}),
        ((rows["state"] == "zero") & ~expected, "s", "arrives as zero", {"color": RED, "ms": 13}),
        (missing & expected, ".", "rightly none", {"color": "#9a9a9a", "ms": 4}),
    ):
        if mine.any():
            draw(rows[mine], shape, label, mew=1.6, **style)


def _stack(axes, at: float, width: float, elements: list[int]) -> None:
    for index, count in enumerate(elements):
        axes.bar(
            at, count / 1e6, width, bottom=sum(elements[:index]) / 1e6, color=PALETTE[index % 7],
            edgecolor="white", lw=0.6, hatch=HATCHES[index // 7 % len(HATCHES)],
            label=f"bucket {index}",
        )  # fmt: skip


def _in_model_order(arrived: list[str]) -> list[str]:
    """Sort as embedding, blocks, final norm, head; within each, the last to arrive comes first."""
    ends = {"embed_tokens": -1, "embed": -1, "norm": 10**6, "head": 10**6 + 1}

    def place(item: tuple[int, str]) -> tuple[int, int]:
        order, name = item
        top, layer = (name + "..").split(".")[:2]
        return (int(layer) if top == "blocks" else ends.get(top, 10**5)), -order

    return [name for _, name in sorted(enumerate(arrived), key=place)]
