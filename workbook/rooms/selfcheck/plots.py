"""Figures of the selfcheck and of the hang benchmark, in the common style."""

from collections.abc import Sequence

import numpy as np

from workbook.rooms.selfcheck import table
from workbook.rooms.selfcheck.judged import Judged
from workbook.runs import looks
from workbook.runs.looks import RED


def matrices(rows: Sequence[Judged]):
    """Plot programs against their labels: right ones blue, wrong ones orange in a red frame."""
    counts = table.confusion(rows)
    if counts.empty:
        return looks.nothing("nothing was run")
    with looks.figure(1, 0.42 * len(counts) + 1.6) as (fig, (axes,)):
        _matrix(axes, counts, table.confusion([row for row in rows if row.missed]))
    return fig


def _matrix(axes, counts, wrong) -> None:
    from matplotlib.patches import Rectangle

    shares = counts.to_numpy() / counts.to_numpy().sum(axis=1, keepdims=True)
    bad = wrong.reindex(index=counts.index, columns=counts.columns, fill_value=0).to_numpy()
    axes.imshow(np.where(bad, np.nan, shares), cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    axes.imshow(np.where(bad, 0.4, np.nan), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    for (y, x), count in np.ndenumerate(counts.to_numpy()):
        if not count:
            continue
        axes.text(x, y, str(count), ha="center", va="center")
        if bad[y, x]:
            frame = Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, ec=RED, lw=2)
            axes.add_patch(frame)
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(counts.columns)), counts.columns, **slanted)
    # what is planted to be called one word, and the groups of many programs
    names = [f"planted: {name}" if name.isupper() else f"programs: {name}" for name in counts.index]
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="called")


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
            axes.axvline(limit, color=colour, ls=":", lw=1)
            axes.plot(limit, 90, "D", color=colour, mfc="white", zorder=4)
            said = f" aim at load {load}: 90 % in {limit:g} s"
            where = {"rotation": 90, "ha": "right", "va": "bottom"}
            axes.text(limit, 0, said, fontsize=8, color=colour, **where)
        axes.set(xlim=(0, None), ylim=(0, 105))
        axes.set(xlabel="time since the last progress (s)", ylabel="certified (%)")
        looks.title(axes, "How soon a hang has its certificate")
    return fig


def benchmark(records: Sequence[dict]):
    """Plot records of the hang benchmark: hangs reported over time, and what was right of them.

    Solid are the programs that the rules were made with, dashed those written afterwards. Runs by
    `whyhung watch` count; a record without a hang counts with its healthy runs alone.
    """
    found: dict[str, list[dict]] = {}
    for record in records:
        rows = [row for row in record["rows"] if row["tool"] == "nsa" and row["valid"]]
        found.setdefault(_place(record["device"]), []).extend(rows)
    with looks.figure(2, 3.2) as (fig, (left, right)):
        for number, (place, rows) in enumerate(found.items()):
            colour, _ = looks.series(number)
            for which, dashes in (("first", "-"), ("late", "--")):
                hangs = [r for r in rows if not r["healthy"] and r["set"] == which]
                after = sorted(row["seconds"] for row in hangs if row["told"])
                if not hangs:
                    continue
                share = [100 * n / len(hangs) for n in range(len(after) + 1)]
                name = (
                    f"{place}: {len(after)} of {len(hangs)}{', written late' * (which == 'late')}"
                )
                left.step([0, *after], share, dashes, where="post", color=colour, label=name)
            _counts(right, number, len(found), place, rows, colour)
        left.set(xlabel="seconds since the hang began", ylabel="hangs reported (%)", ylim=(0, 105))
        left.set_xlim(0, None)
        looks.title(left, "Hangs reported")
        looks.title(right, "Of all hangs, and of healthy runs")
        right.set(xlim=(0, 100), xlabel="%", ylim=(3.6, -0.6))
        right.set_yticks(range(4), ["in time", "right kind", "function named", "healthy accused"])
    return fig


def _counts(axes, number: int, of: int, place: str, rows: Sequence[dict], colour: str) -> None:
    """Draw a place's bars: each a part of its hangs, the last of its healthy runs."""
    hangs = [row for row in rows if not row["healthy"]]
    healthy = [row for row in rows if row["healthy"]]
    timely = [row for row in hangs if row["told"] and row["seconds"] <= row["within"]]
    told = [row for row in hangs if row["told"]]
    bars = [(timely, hangs), ([row for row in told if row["right"]], hangs),
            ([row for row in told if row["line"]], hangs),
            ([row for row in healthy if row["told"]], healthy)]  # fmt: skip
    height = 0.8 / of
    for level, (some, every) in enumerate(bars):
        where, share = level + (number - (of - 1) / 2) * height, len(some) / max(1, len(every))
        axes.barh(where, 100 * share, height, color=colour)
        inside = share > 0.5
        axes.text(
            100 * share + (-1.5 if inside else 1.5), where, f"{len(some)} of {len(every)}",
            ha="right" if inside else "left", va="center", fontsize=7,
            color="white" if inside else "black",
        )  # fmt: skip


def _place(device: str) -> str:
    """Device of a record in a few words: "two H100", "CPU"."""
    if "NVIDIA" not in device:
        return "CPU"
    count, _, model = device.partition(",")[0].partition(" NVIDIA ")
    return f"{count} {model.split()[0]}"
