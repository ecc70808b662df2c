"""Figures of the backend comparison, in the common style."""

from workbook.rooms.comparison import table
from workbook.rooms.comparison.implementations import DENSE, LIMITS
from workbook.runs import looks, metrics

MODES = ("forward", "backward")
NO_TIME = ("not run", "ok")  # outcomes without a value that are not failures
LIMIT_LOOKS = {"limit": ("#000000", "limit of NSA"), "dense limit": ("#9a9a9a", "limit of dense")}


def latency(df, *, note: str = ""):
    """Plot time against T, log-log: a panel for each shape, kind of queries, and direction.

    NSA is drawn solid, dense attention dotted, the physical limits dashed, a failure as a cross at
    the top. A shape that the run had no time for is named above and gets no panel. Nor does a shape
    with a single T if others have more: the tables have it. `note` appears in every panel's
    corner. Raises ValueError without rows of latency.
    """
    return _over_tokens(df, "latency", "time of a call (ms)", note)


def headline(df, *, note: str = ""):
    """Plot the time of forward and backward against T in one panel, for a talk.

    The shape with the most lengths, on random queries: NSA's kernels, every other implementation
    that was measured, and the physical limits, each with its name at its end, and its time there
    as a multiple of `triton`'s. Raises ValueError without such rows.
    """
    rows = table.rows_of(df, "latency", "step")
    rows = _measured(rows[rows["queries"] == "random"])
    if rows["backend"].isin(LIMIT_LOOKS).all():
        raise ValueError("no rows of latency of mode step on random queries")
    shape = rows.groupby("shape", sort=False)["x_value"].nunique().idxmax()
    rows = rows[rows["shape"] == shape]
    at_longest = rows[rows["x_value"] == rows["x_value"].max()].set_index("backend")["median"]
    with looks.figure(1, 4.2, names="at ends") as (fig, (axes,)):
        fig.set_figwidth(8.4)
        for backend, line in looks.backends(rows):
            _line(axes, backend, line.sort_values("x_value"), metrics.on_gpu(rows))
            if {backend, "triton"} <= {*at_longest.index} and backend != "triton":
                times = at_longest[backend] / at_longest["triton"]
                axes.lines[-1].set_label(f"{axes.lines[-1].get_label()}: {times:.2g} x")
        looks.title(axes, f"Forward and backward of one call, {shape}", note)
        axes.set(xlabel="T (tokens)", ylabel="time (ms)")
        axes.set_xscale("log", base=2)
        looks.log_axis(axes.yaxis)
        looks.plain_ticks(axes, rows["x_value"])
    return fig


def memory(df, *, note: str = ""):
    """Plot peak memory beyond inputs and outputs against T, with panels as in `latency`."""
    return _over_tokens(df, "peak_memory", "memory beyond inputs and outputs (MiB)", note)


def of_limit(df, *, note: str = ""):
    """Plot the fraction of the physical limit that each implementation reaches, against T.

    The axis starts at 0, unless the range is too large: then it is logarithmic.
    """
    if not (df["metric"] == "fraction_of_limit").any():  # no time was measured
        rows = df[(df["metric"] == "latency") & ~df["backend"].isin(LIMITS.values())]
        df = rows.assign(metric="fraction_of_limit", median=float("nan"))
    return _over_tokens(df, "fraction_of_limit", "share of the limit", note)


def _over_tokens(df, metric: str, unit: str, note: str):
    rows = table.rows_of(df, metric, *MODES)
    if not len(rows):
        raise ValueError(f"no rows whose metric is {metric!r} with a mode of {', '.join(MODES)}")
    # Without a GPU the spread shows the machine's other work.
    with_bands = metrics.on_gpu(rows)
    kinds = list(rows.groupby(table.CURVE, sort=False))
    lengths = [_measured(frame)["x_value"].nunique() for _, frame in kinds]
    left = [", ".join(name) for (name, _), count in zip(kinds, lengths, strict=True) if not count]
    # if nothing was measured, the panels show that
    least = min(2, max(lengths))
    kinds = [kind for kind, count in zip(kinds, lengths, strict=True) if count >= least]
    with looks.figure(len(kinds) * len(MODES), 3.5, same_y=True, names="at ends") as made:
        fig, panels = made
        for index, axes in enumerate(panels):
            (shape, queries), frame = kinds[index // len(MODES)]
            mode = MODES[index % len(MODES)]
            late = frame["median"].isna() & frame["outcome"].isin(NO_TIME)
            frame = frame[(frame["mode"] == mode) & ~late]
            for backend, line in looks.backends(frame):
                _line(axes, backend, line.sort_values("x_value"), with_bands)
            # note beside the upper line: the lower may be as wide as the panel
            looks.title(axes, f"{mode.capitalize()}, {queries} queries\n{shape}", f"{note}\n")
            axes.set(xlabel="T (tokens)", ylabel=unit)
            found = _measured(frame)["median"]
            if len(found):
                axes.set_xscale("log", base=2)
                if metric == "fraction_of_limit" and found.min() > 0.05 * found.max():
                    looks.from_zero(axes)
                else:
                    looks.log_axis(axes.yaxis)
                _crosses(axes, frame)
                looks.plain_ticks(axes, frame["x_value"])
            else:  # a logarithmic axis needs a number
                axes.set(xticks=[], yticks=[])
                axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center")
        if left and max(lengths):
            fig.suptitle("\n".join(["nothing was measured of", *left]), fontsize=8)
    return fig


def _measured(frame):
    return frame[frame["median"] > 0]


def _line(axes, backend: str, line, with_bands: bool) -> None:
    good = _measured(line)
    x, y = good["x_value"], good["median"]
    if backend in LIMIT_LOOKS:
        colour, label = LIMIT_LOOKS[backend]
        marker = "_" if len(good) == 1 else ""  # a line of one point is invisible
        axes.plot(x, y, "--", color=colour, label=label, lw=1.1, marker=marker, ms=14)
    elif len(good):
        colour, marker = looks.look(backend)
        style = ":" if (line["operation"] == DENSE).all() else "-"
        axes.plot(x, y, style, color=colour, marker=marker, label=backend, zorder=3)
        if with_bands:
            low, high = good["q20"].astype(float), good["q80"].astype(float)
            axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def _crosses(axes, frame) -> None:
    """Mark failures of implementations that ran at some T; the rest are in a table."""
    ran = set(frame[frame["median"].notna()]["backend"]) - set(LIMITS.values())
    failed = frame[frame["median"].isna() & frame["backend"].isin(ran)]
    failing = [(name, line["x_value"], line["outcome"]) for name, line in looks.backends(failed)]
    looks.crosses(axes, failing, frame["x_value"])
