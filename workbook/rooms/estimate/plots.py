"""Figures of the notebook on estimates, in the common style."""

from collections.abc import Sequence

import numpy as np

from workbook.rooms.estimate import table
from workbook.rooms.estimate.claims import ALLOCATED, RESERVED
from workbook.runs import looks, metrics
from workbook.runs.looks import GREY, RED

WHAT = {"step": "peak allocated", "reserved": "peak reserved"}


def against(df, *, note: str = ""):
    """Plot estimated against measured MiB on log axes, a dot per cell in its backend's colour, with
    the band of the aim. Cells without a measurement are red at the right edge: estimated, but not
    run to the end. One panel is for allocated and one for reserved memory, if any."""
    both = table.compared(df)
    shown = [what for what in WHAT if both.loc[both["what"] == what, "foretold"].notna().any()]
    if not shown:
        return looks.nothing("no cell was estimated")
    with looks.figure(len(shown), 4.2) as (fig, panels):
        for axes, what in zip(panels, shown, strict=True):
            rows = both[both["what"] == what]
            good = rows[rows["error"].notna()]
            for backend, line in looks.backends(good):
                colour, marker = looks.look(backend)
                style = {"color": colour, "marker": marker, "label": backend, "ls": ""}
                axes.plot(line["measured"], line["foretold"], **style, alpha=0.8, zorder=3)
            known = rows[["foretold", "measured"]].to_numpy(float)
            ends = np.array([np.nanmin(known) / 1.5, np.nanmax(known) * 1.5])
            aim = ALLOCATED[metrics.on_gpu(both)] if what == "step" else RESERVED
            axes.plot(ends, ends, color=GREY, lw=0.9, zorder=1)
            band = {"color": GREY, "alpha": 0.25, "lw": 0, "label": f"to {aim:.0%}"}
            axes.fill_between(ends, ends * (1 - aim), ends * (1 + aim), **band, zorder=0)
            axes.set(xlim=ends, ylim=ends)
            looks.log_axis(axes.xaxis)
            looks.log_axis(axes.yaxis)
            _not_measured(axes, rows)
            axes.set(xlabel="measured (MiB)", ylabel="estimated (MiB)")
            looks.title(axes, f"{WHAT[what].capitalize()} of a step", note)
    return fig


def _not_measured(axes, rows) -> None:
    """Draw crosses at the right edge, at the estimate, labelling each outcome once."""
    lost = rows[rows["measured"].isna() & rows["foretold"].notna()]
    if not len(lost):
        return
    where = axes.get_yaxis_transform()
    style = {"color": RED, "transform": where, "clip_on": False, "zorder": 4}
    axes.plot([0.985] * len(lost), lost["foretold"], "x", ms=7, mew=1.6, **style)
    for outcome, same in lost.groupby("outcome", sort=False):
        place, small = (0.96, same["foretold"].max()), {"fontsize": 7.5, "color": RED}
        axes.annotate(outcome, place, xycoords=where, ha="right", va="center", **small)


def errors(df, *, note: str = ""):
    """Plot the signed error of each cell against T, a panel per backend, coloured by number of
    layers, with open markers for checkpointing; the band is the aim."""
    both = table.compared(df)
    rows = both[(both["what"] == "step") & both["error"].notna()]
    if not len(rows):
        return looks.nothing("no cell was both estimated and measured")
    aim = ALLOCATED[metrics.on_gpu(both)]
    depths = sorted({layers or 0 for layers in rows["layers"]})
    most = 1.15 * 100 * max(aim, rows["error"].abs().max())
    backends = looks.backends(rows)
    with looks.figure(len(backends), 2.2) as (fig, panels):
        for axes, (backend, line) in zip(panels, backends, strict=True):
            axes.axhspan(-100 * aim, 100 * aim, color=GREY, alpha=0.2, lw=0)
            axes.axhline(0, color=GREY, lw=0.9)
            for cell in line.itertuples():
                number = depths.index(cell.layers or 0)
                colour, marker = looks.series(number)
                face = "none" if cell.checkpoint else colour
                label = _layers(cell.layers)
                style = {"marker": marker, "mec": colour, "mfc": face, "ls": "", "label": label}
                axes.plot(cell.tokens, 100 * cell.error, **style, color=colour, alpha=0.85)
            axes.set_xscale("log", base=2)
            looks.plain_ticks(axes, rows["tokens"])
            ends = rows["tokens"].min() / 1.2, rows["tokens"].max() * 1.2
            axes.set(xlabel="T (tokens)", ylabel="error (%)", xlim=ends, ylim=(-most, most))
            looks.title(axes, backend, note if axes is panels[0] else "")
    return fig


def _layers(number: int | None) -> str:
    return f"{number} layer{'s' * (number != 1)}" if number else "the preset's layers"


def boundaries(rows: Sequence[dict], *, note: str = ""):
    """Plot each boundary relative to its estimate: the real bracket as a bar, the values that
    fitted and that did not as markers, the estimate as a line, the aim as a band."""
    found = [row for row in rows if row.get("tried")]
    if not found:
        said = (row["message"] for row in rows if row.get("message"))
        why = next(said, "this run was not to look for one")
        return looks.nothing(f"no boundary was looked for with real steps: {why}")
    with looks.figure(1, 1.0 + 0.5 * len(found)) as (fig, (axes,)):
        fig.set_figwidth(9.0)
        axes.axvspan(-5, 5, color=GREY, alpha=0.2, lw=0, label="to 5 %")
        axes.axvline(0, color=GREY, lw=1.2, label="estimated")
        for height, row in enumerate(found):

            def at(value: float, ours: float = row["foretold"]) -> float:
                return 100 * (value / ours - 1)

            for out, colour, marker, label in (
                (False, "#0072B2", "o", "fitted"),
                (True, RED, "x", "out of memory"),
            ):
                tried = [at(value) for value, answer in row["tried"] if answer is out]
                style = {"color": colour, "marker": marker, "ls": "", "label": label}
                axes.plot(tried, [height] * len(tried), **style)
            if row["fits"] is not None and row["does_not"] is not None:
                ends = at(row["fits"]), at(row["does_not"])
                axes.plot(ends, [height] * 2, color="black", lw=4, alpha=0.6, label="the boundary")
        axes.set_yticks(range(len(found)), [row["boundary"] for row in found], fontsize=7.5)
        axes.set(xlabel="beyond the estimated one (%)", ylim=(-0.6, len(found) - 0.4))
        looks.title(axes, "The largest that fits, estimated and found", note)
    return fig
