"""The figures of the backend comparison, in the looks of all others."""

from nsa.experiments.comparison import table as comparison_table
from nsa.experiments.comparison.table import LIMITS
from nsa.workbook import looks
from nsa.workbook.looks import backends

MODES = ("forward", "backward")
NO_TIME = ("not run", "ok")  # of what has no value: no failure
LIMIT_LOOKS = {"limit": ("#000000", "limit of NSA"), "dense limit": ("#9a9a9a", "limit of dense")}


def latency(df, *, note: str = ""):
    """Time against T, log-log: a panel for each shape, kind of queries, and forward or backward.

    NSA is drawn solid, dense attention dotted, the physical limits dashed, a failure as a cross at
    the top. A shape that the run had no time for is named above and gets no panel. Nor does a shape
    with a single T where others have more: the tables have it. `note` stands in every panel's
    corner. ValueError without rows of latency.
    """
    return _over_tokens(df, "latency", "ms", note, with_limits=True)


def memory(df, *, note: str = ""):
    """Memory beyond inputs and outputs at the peak against T, panels as in `latency`."""
    return _over_tokens(df, "peak_memory", "MiB", note)


def of_limit(df, *, note: str = ""):
    """The share of the physical limit that each implementation reaches, against T.

    From 0 on, unless the least is lost beside the greatest: then log.
    """
    return _over_tokens(df, "fraction_of_limit", "share of the limit", note, shares=True)


def _over_tokens(
    df, metric: str, unit: str, note: str, *, with_limits: bool = False, shares: bool = False
):
    rows = comparison_table.rows_of(df, metric, *MODES)
    if not len(rows):
        raise ValueError(f"no rows whose metric is {metric!r} with a mode of {', '.join(MODES)}")
    # Without a GPU the spread shows the machine's other work.
    with_bands = not rows["gpu"].isin(["", "cpu"]).any()
    kinds = list(rows.groupby(["shape", "queries"], sort=False))
    measured = [kind for kind in kinds if (kind[1]["median"] > 0).any()]
    left = [", ".join(name) for name, frame in kinds if not (frame["median"] > 0).any()]
    lines = [kind for kind in measured if _lengths(kind[1]) > 1]
    kinds = lines or measured or kinds  # of nothing at all the panels say so
    with looks.style():
        fig, panels = looks.panels(len(kinds) * len(MODES), 3.5)
        for index, axes in enumerate(panels):
            (shape, queries), frame = kinds[index // len(MODES)]
            mode = MODES[index % len(MODES)]
            late = frame["median"].isna() & frame["outcome"].isin(NO_TIME)
            frame = frame[(frame["mode"] == mode) & ~late]
            for backend, line in backends(frame):
                _line(axes, backend, line.sort_values("x_value"), with_limits, with_bands)
            axes.set_title(f"{mode}, {queries} queries\n{shape}", fontsize=9)
            axes.set(xlabel="T (tokens)", ylabel=unit)
            if (frame["median"] > 0).any():
                axes.set_xscale("log", base=2)
                if shares and _of_one_size(frame):
                    looks.from_zero(axes)
                else:
                    axes.set_yscale("log")
                _crosses(axes, frame)
                looks.plain_ticks(axes, frame["x_value"])
            else:  # a logarithmic axis needs a number
                axes.set(xticks=[], yticks=[])
                axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center")
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            look = {"ha": "right", "fontsize": 8, "color": looks.GREY, "bbox": box, "zorder": 5}
            axes.annotate(note, (0.98, 0.03), xycoords="axes fraction", **look)
        if left and measured:
            fig.suptitle("\n".join(["nothing was measured of", *left]), fontsize=8)
        looks.legend(fig, panels)
    return fig


def _lengths(frame) -> int:
    return frame[frame["median"] > 0]["x_value"].nunique()


def _of_one_size(frame) -> bool:
    found = frame["median"][frame["median"] > 0]
    return found.min() > 0.05 * found.max()


def _line(axes, backend: str, line, with_limits: bool, with_bands: bool) -> None:
    good = line[line["median"].notna() & (line["median"] > 0)]
    if backend in LIMIT_LOOKS:
        if with_limits:
            colour, label = LIMIT_LOOKS[backend]
            marker = "_" if len(good) == 1 else ""  # a line of one point is none
            look = {"color": colour, "label": label, "lw": 1.1, "marker": marker, "ms": 14}
            axes.plot(good["x_value"], good["median"], "--", **look)
        return
    if not len(good):
        return
    colour, marker = looks.look(backend)
    dense = bool((line["operation"] == comparison_table.DENSE).all())
    look = {"color": colour, "marker": marker, "label": backend, "zorder": 3}
    axes.plot(good["x_value"], good["median"], ":" if dense else "-", **look)
    if with_bands:
        low, high = good["q20"].astype(float), good["q80"].astype(float)
        axes.fill_between(good["x_value"], low, high, color=colour, alpha=0.18, lw=0)


def _crosses(axes, frame) -> None:
    """A cross at the top for each failure of what ran at some T; what never ran is in a table."""
    ran = set(frame[frame["median"].notna()]["backend"]) - set(LIMITS.values())
    failed = frame[frame["median"].isna() & frame["backend"].isin(ran)]
    failing = [(name, line["x_value"], line["outcome"]) for name, line in backends(failed)]
    looks.crosses(axes, failing, frame["x_value"])
