"""The figures of distributed tracing, in the looks of all others. `plots.save` writes them.

What was not traced, or did not get so far, is said in the figure's place: a verdict is still due.
"""

import numpy as np

from nsa.experiments.tracing import table as tracing_table
from nsa.experiments.tracing.trials import STEPS, Traced
from nsa.workbook import looks

RANK_LOOKS = (("#0072B2", "o"), ("#D55E00", "x"), ("#009E73", "+"), ("#CC79A7", "1"))
BUCKETS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


def arrival_order(traced: Traced, trials: list[str], step: int = 1):
    """When each gradient arrives, against the parameter's place in the model; a panel a trial.

    A rank is a marker. What is missing stands at the left edge in red, what arrives as zero keeps
    its place, ringed in red.
    """
    table = tracing_table.frame(traced, "arrivals")
    table = table[table["step"] == step]
    shown = [name for name in trials if (table["trial"] == name).any()]
    if not shown:
        return _nothing(f"no arrivals of {', '.join(trials) or 'any trial'}")
    one = table[table["rank"] == 0]
    fullest = (one["state"] != "missing").groupby(one["trial"], sort=False).sum().idxmax()
    arrived = list(one[one["trial"] == fullest]["parameter"])
    place = {name: number for number, name in enumerate(_in_model_order(arrived))}
    with looks.style():
        fig, panels = looks.panels(len(shown), 2.8)
        for axes, name in zip(panels, shown, strict=True):
            mine = table[table["trial"] == name]
            for rank, rows in mine.groupby("rank"):
                _arrivals(axes, rows, place, rank)
            axes.set(title=name, xlabel="order of arrival", ylabel="place in the model")
            axes.set_xlim(-0.09 * len(place), len(place))
            axes.invert_yaxis()
        looks.legend(fig, panels)
    return fig


def buckets(traced: Traced, trials: list[str]):
    """DDP's buckets by elements, stacked in their order: a bar a step and rank, a panel a trial."""
    found = {name: tracing_table.layouts(traced, name) for name in trials}
    found = {name: steps for name, steps in found.items() if steps}
    if not found:
        return _nothing(f"no buckets of {', '.join(trials)}")
    with looks.style():
        fig, panels = looks.panels(len(found), 2.4)
        for axes, (name, steps) in zip(panels, found.items(), strict=True):
            ticks, labels = [], []
            for step, by_rank in steps.items():
                width = 0.8 / len(by_rank)
                for rank, elements in by_rank.items():
                    at = step - 0.4 + width * (rank + 0.5)
                    _stack(axes, at, 0.9 * width, elements)
                    ticks.append(at)
                    labels.append(f"step {step}\nrank {rank}" if len(by_rank) < 3 else str(rank))
            axes.set_xticks(ticks, labels, fontsize=8)
            axes.grid(False, axis="x")
            axes.set(title=name, ylabel="elements (million)")
        looks.legend(fig, panels)
    return fig


def module_timeline(traced: Traced, trial: str, step: int = STEPS, depth: int = 3):
    """When each module's backward begins on each rank, ms since the backward began.

    By default in the last step: in the first, kernels are compiled. Modules more than `depth` names
    deep are left out.
    """
    table = tracing_table.modules(traced, trial, step)
    table = table[[name.count(".") < depth for name in table.index]]
    if not len(table):
        return _nothing(f"no module backwards of {trial}")
    height = max(2.2, 0.16 * len(table))
    with looks.style():
        fig, (axes,) = looks.panels(1, height)
        levels = np.arange(len(table))
        for rank, column in enumerate(table.columns):
            colour, marker = _look(rank)
            label = column.removesuffix(", ms")
            axes.plot(table[column], levels, color=colour, lw=0.8, alpha=0.5)
            axes.plot(table[column], levels, marker, color=colour, ms=5, label=label)
        axes.set_yticks(levels, table.index, fontsize=7.5)
        axes.invert_yaxis()
        axes.set(title=f"{trial}, step {step}", xlabel="ms since the backward began (host)")
        looks.legend(fig, [axes])
    return fig


def _nothing(text: str):
    with looks.style():
        fig, (axes,) = looks.panels(1, 0.8)
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{text}: not traced to its end", ha="center", va="center")
    return fig


def _arrivals(axes, rows, place: dict[str, int], rank: int) -> None:
    colour, marker = _look(rank)
    there = rows[rows["state"] != "missing"]
    heights = [place[name] for name in there["parameter"]]
    axes.plot(
        there["order"].astype(int), heights, marker, color=colour, ms=5, mfc="none", mew=1.1,
        label=f"rank {rank}",
    )  # fmt: skip
    for state, at in (("missing", -0.05 * len(place)), ("zero", None)):
        wrong = rows[(rows["state"] == state) & (rows["expected"] != state)]
        if not len(wrong):
            continue
        x = wrong["order"].astype(int) if at is None else np.full(len(wrong), at)
        heights = [place[name] for name in wrong["parameter"]]
        size, shape = (13, "o") if at is None else (8, marker)
        axes.plot(
            x, heights, shape, color="#c00000", ms=size, mfc="none", mew=1.6,
            label="arrives as zero" if at is None else f"missing on rank {rank}",
        )  # fmt: skip
    rightly = rows[(rows["state"] == "missing") & (rows["expected"] == "missing")]
    if len(rightly):
        heights = [place[name] for name in rightly["parameter"]]
        axes.plot(
            np.full(len(rightly), -0.05 * len(place)), heights, ".", color="#9a9a9a", ms=4,
            label="rightly none",
        )  # fmt: skip


def _stack(axes, at: float, width: float, elements: list[int]) -> None:
    below = 0.0
    for index, count in enumerate(elements):
        colour = BUCKETS[index % len(BUCKETS)]
        label = f"bucket {index}" if index < len(BUCKETS) else None
        axes.bar(at, count / 1e6, width, bottom=below, color=colour, edgecolor="white", lw=0.6,
                 label=label)  # fmt: skip
        below += count / 1e6


def _look(rank: int) -> tuple[str, str]:
    return RANK_LOOKS[rank % len(RANK_LOOKS)]


def _in_model_order(arrived: list[str]) -> list[str]:
    """Embedding, blocks, final norm, head; within each the last to arrive comes first."""
    ends = {"embed": -1, "norm": 10**6, "head": 10**6 + 1}

    def place(item: tuple[int, str]) -> tuple[int, int]:
        order, name = item
        top, layer = (name + "..").split(".")[:2]
        return (int(layer) if top == "blocks" else ends.get(top, 10**5)), -order

    return [name for _, name in sorted(enumerate(arrived), key=place)]
