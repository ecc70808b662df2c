"""Common style of all figures, and the selection of rows of a metrics table that they show."""

import textwrap
from collections.abc import Container, Sequence
from contextlib import contextmanager

from workbook.runs import metrics

# Okabe and Ito's palette, distinct for colour-blind readers; its yellow, too pale for a line on
# white, is a grey here. The markers make it readable in black and white.
LOOKS = {
    "sequential": ("#7f7f7f", "s"),
    "masked": ("#E69F00", "^"),
    "gather": ("#0072B2", "o"),
    "packed": ("#009E73", "D"),
    "sdpa": ("#D55E00", "v"),
    "flex": ("#CC79A7", "P"),
    "flash": ("#56B4E9", "X"),
    "triton": ("#000000", "*"),
    "dense": ("#8C564B", "<"),  # of a training: whatever served it
    "dense-flash": ("#8C564B", "<"),
    "dense-cudnn": ("#4B4B8C", ">"),
    "dense-fa4": ("#6B6B00", "h"),
    "fla": ("#9467BD", "p"),
}
# For series that are no backends: phases, buckets, kinds, cells. The first seven are the palette's.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C564B",
    "#9467BD", "#6B6B00", "#7f7f7f",
)  # fmt: skip
MARKERS = "osD^vP<*>Xhpd"
GREY, RED = "#777777", "#c00000"  # for notes, and for errors
OTHERS = ("#C44E52", "d"), ("#1B7837", "H"), ("#4D4D4D", "8")
STYLE = {
    "figure.dpi": 120,
    "savefig.dpi": 120,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.grid.which": "both",
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "nsa",  # the same plot gives the same file
}


def look(backend: str) -> tuple[str, str]:
    """Colour and marker of a backend; an unknown name always gets the same of a few others."""
    return LOOKS.get(backend) or OTHERS[sum(map(ord, backend)) % len(OTHERS)]


def line(backend: str) -> dict[str, str]:
    """Arguments of `plot` for a backend's line; dense attention's is dotted."""
    colour, marker = look(backend)
    style = ":" if backend.startswith("dense") else "-"
    return {"color": colour, "marker": marker, "ls": style, "label": backend}


def series(number: int) -> tuple[str, str]:
    """Colour and marker of the n-th series of a figure; no two of 143 have both in common."""
    return PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]


def title(axes, text: str, note: str = "") -> None:
    """Set the title at the left and a note, e.g. the machine, at the right, clear of all curves."""
    axes.set_title(text)
    axes.set_title(note, loc="right", fontsize=8, color=GREY)


def nothing(text: str):
    """Figure with the reason why there is nothing to draw."""
    with figure(1, 0.8) as (fig, (axes,)):
        axes.set_axis_off()
        said = textwrap.fill(text, 72)  # outside the layout, which a long word would leave no room
        axes.text(0.5, 0.5, said, ha="center", va="center", in_layout=False)
    return fig


@contextmanager
def figure(count: int, height: float, *, same_y: bool = False, names: str = "below"):
    """`with figure(2, 3.0) as (fig, panels)`: axes of `panels` in the style, and at the end one
    legend for all of them; with `names="at ends"`, each line has its name at its end instead.
    `same_y` gives all panels one range of y."""
    with style():
        fig, axes_list = panels(count, height)
        yield fig, axes_list
        drawn = [axes for axes in axes_list if axes.dataLim.y0 <= axes.dataLim.y1]
        for axes in drawn if same_y else ():
            low, high = zip(*(each.get_ylim() for each in drawn), strict=True)
            axes.set_ylim(min(low), max(high))
            if axes.get_yscale() == "log":
                log_axis(axes.yaxis)
        named = _name_lines(fig, axes_list) if names == "at ends" else ()
        legend(fig, axes_list, named)


def _name_lines(fig, axes_list) -> set[str]:
    """Write each label once in a panel, at the end of its first line; return the labels. Markers
    alone keep to the legend."""
    fig.draw_without_rendering()  # names keep a distance in points
    named = set()
    for axes in axes_list:
        ends = {}
        for drawn in axes.lines:
            x, y = drawn.get_data()
            told = drawn.get_label()
            if len(x) and not told.startswith("_") and drawn.get_linestyle() != "None":
                ends.setdefault(told, (float(x[-1]), float(y[-1]), drawn.get_color()))
        farthest = max((x for x, *_ in ends.values()), default=0.0)
        for told, (x, y, colour) in sorted(ends.items(), key=lambda end: -end[1][1]):
            at_end(axes, x, y, told, colour, above=x < farthest)
            named.add(told)
    return named


def panels(count: int, height: float):
    """Make a figure and `count` axes of that height in inches, two a row."""
    import matplotlib.pyplot as plt

    columns, rows = min(count, 2), -(-count // 2)
    width = 6.4 if count == 1 else 10.5
    fig, grid = plt.subplots(rows, columns, figsize=(width, height * rows + 0.5), squeeze=False)
    for spare in grid.flat[count:]:
        spare.set_visible(False)
    return fig, list(grid.flat[:count])


def legend(fig, axes_list, without: Container[str] = ()) -> None:
    """Draw one legend below all panels, each name once, but for those of `without`."""
    found = {}
    for axes in axes_list:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in without:
                found.setdefault(label, handle)
    if not found:
        return
    for columns in range(max(1, min(len(found), int(fig.get_figwidth() / 2.1))), 0, -1):
        made = fig.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
        if columns == 1 or made.get_window_extent().width < fig.bbox.width:
            break
        made.remove()  # it would be cut off at both sides of the figure
    rows = -(-len(found) // columns)
    even = -(-len(found) // rows)  # makes the last row about as long as the others
    if even < columns:
        made.remove()
        fig.legend(found.values(), found.keys(), loc="outside lower center", ncols=even)


def caption(fig, text: str) -> None:
    """Write the figure's source at its foot, small and grey, and enlarge the figure; only once."""
    if any(there.get_gid() == "source" for there in fig.texts):
        return
    lines = textwrap.wrap(text, int(fig.get_figwidth() * 18))  # letters that fit in one line
    inches = 0.13 * len(lines) + 0.03
    fig.set_figheight(fig.get_figheight() + inches)
    share = inches / fig.get_figheight()
    held, engine = share, fig.get_layout_engine()
    # A moved legend leaves the layout: its height is reserved here. Without a layout it stays.
    for legend in fig.legends if engine else ():
        high = legend.get_window_extent().height / fig.bbox.height + 0.1 / fig.get_figheight()
        held = max(held, share + high)
        legend.set_bbox_to_anchor((0, share, 1, 1 - share), fig.transFigure)
    if engine:
        engine.set(rect=(0, held, 1, 1 - held))
    look = {"fontsize": 6.5, "color": GREY, "va": "bottom", "linespacing": 1.25, "gid": "source"}
    fig.text(0.006, 0.2 * share / len(lines), "\n".join(lines), **look)


def write(fig, folder, name: str, source: str, kinds: Sequence[str] = ("svg",)) -> list:
    """Write `name`.svg into a folder, in the style, with `source` at the foot and inside; the same
    figure gives the same bytes. kinds: "svg", "png" or both. Returns the paths."""
    import matplotlib.pyplot as plt

    about = {"Title": name, "Description": source}
    caption(fig, source)
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for axes in fig.axes:  # the last bits of a layout differ from one process to the next
        bounds = axes.get_position(original=True).bounds
        axes.set_position([round(bound, 6) for bound in bounds])
    files = [folder / f"{name}.{kind}" for kind in kinds]
    with style(), plt.rc_context({"svg.hashsalt": name}):
        for file in files:
            left_out = "Date" if file.suffix == ".svg" else "Software"
            fig.savefig(file, metadata=about | {left_out: None})
    return files


def at_end(axes, x: float, y: float, text: str, colour: str, above: bool = False) -> None:
    """Write a line's name beside its last point, moved down until no other name is there; or
    `above` it, for a line that ends before others, moved up."""
    look = {"textcoords": "offset points", "fontsize": 8, "color": colour, "annotation_clip": False}
    look["bbox"] = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.4}  # over other lines
    step, wanted = 9.0, _height(axes, y)  # points
    others = [there for there in axes.texts if there.xy[0] == x] if above else axes.texts
    taken = [there.xyann[1] + _height(axes, there.xy[1]) for there in others]
    level = wanted + 7 * above
    while any(abs(level - other) < step for other in taken):
        level += 1.0 if above else -1.0
    if above:
        look["ha"] = "left" if x <= axes.dataLim.x0 else "right"
    place = (0 if above else 6, round(level - wanted))
    axes.annotate(text, (x, y), xytext=place, va="baseline" if above else "center", **look)


def _height(axes, y: float) -> float:
    """Height of a value above the foot of the figure, in points."""
    return axes.transData.transform((1, y))[1] * 72 / axes.figure.dpi


def from_zero(axes) -> None:
    """Start the y axis at 0, with a twentieth of it free above the data."""
    top = axes.dataLim.y1  # -inf where nothing is drawn
    axes.set_ylim(0, top / 0.95 if top > 0 else None)


def crosses(axes, failures, tokens, *, top: bool = True, colour=lambda name: look(name)[0]) -> None:
    """Draw a row of crosses for each (name, positions on the x axis, their outcomes) of `failures`.

    Along the top edge, or the foot; the outcomes are written beside the first cross, or the last if
    the first is at the smallest of `tokens`, on the side with room.
    """
    across = axes.get_xaxis_transform()
    for level, (name, where, outcomes) in enumerate(failures):
        height = 0.97 - 0.06 * level if top else 0.04 + 0.06 * level
        style = {"color": colour(name), "transform": across, "clip_on": False, "zorder": 4}
        axes.plot(where, [height] * len(where), "x", ms=8, mew=2, **style)
        right = min(where) == min(tokens)
        axes.annotate(
            f"{name}: {', '.join(dict.fromkeys(outcomes))}",
            (max(where) if right else min(where), height), xycoords=across,
            xytext=(7 if right else -7, 0), textcoords="offset points",
            ha="left" if right else "right", va="center", fontsize=7.5, color=colour(name),
        )  # fmt: skip


def plain_ticks(axes, tokens) -> None:
    """Set a tick at each measured T, multiples of 1024 in k; of many every other has its T."""
    values = sorted(set(tokens))
    told = [length(v) if len(values) <= 8 or n % 2 == 0 else "" for n, v in enumerate(values)]
    axes.set_xticks(values, told)
    axes.xaxis.minorticks_off()  # those of a log y axis have its labels if it spans no decade


def length(tokens: float) -> str:
    """T as text: 32768 as 32k."""
    return f"{tokens / 1024:.0f}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:.0f}"


def log_axis(axis) -> None:
    """Set ticks at 1, 2 and 5 of each decade, written out, also if the axis spans no decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes, name = axis.axes, axis.axis_name
    getattr(axes, f"set_{name}scale")("log")
    low, high = getattr(axes, f"get_{name}lim")()
    if low <= 0:  # there is nothing but failures, and it could not be drawn
        low, high = getattr(axes, f"set_{name}lim")(1, 10)
    if high < 4 * low:
        middle = (low * high) ** 0.5
        getattr(axes, f"set_{name}lim")(middle / 2, 2 * middle)
    wide = high / low > 1e3
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10f}".rstrip("0").rstrip("."))
    )
    axis.set_minor_formatter(NullFormatter())


def style():
    """rc context of every figure."""
    import matplotlib
    import matplotlib.pyplot as plt

    # Load Jupyter's backend now: loaded inside the context, its settings would be undone at the
    # end, and only the first figure of a notebook would be shown.
    plt.draw_if_interactive()
    return matplotlib.rc_context(STYLE)


def over_tokens(df):
    """Rows over T in MiB, their numbers as floats."""
    rows = df[(df["x_name"] == "tokens") & (df["unit"] == "MiB")]
    return rows.assign(median=rows["median"].astype(float), x_value=rows["x_value"].astype(float))


def peaks(df, mode: str):
    """Peaks of that mode; ValueError if there are none, with the available modes."""
    rows = over_tokens(df)
    rows = rows[(rows["metric"] == "peak_memory") & (rows["mode"] == mode)]
    if rows.empty:
        modes = sorted(set(df["mode"]))
        raise ValueError(f"no peak_memory rows over tokens in MiB of mode {mode!r}; modes: {modes}")
    return rows


def models(rows) -> dict:
    """Rows by model, in order of appearance, each sorted by T; the last of a point measured twice,
    so a notebook's cell that is executed again replaces its points."""
    rows = rows.assign(model=[metrics.model_name(config) for config in metrics.configs(rows)])
    point = ["model", "backend", "mode", "metric", "x_value"]
    rows = rows.drop_duplicates(point, keep="last")
    return {
        name: frame.sort_values("x_value", kind="stable")
        for name, frame in rows.groupby("model", sort=False)
    }


def by_tokens(rows, values: str, index=("model", "backend")):
    """Pivot: one line for each `index`, a column for each T; lines in order of appearance."""
    table = rows.pivot_table(
        index=list(index), columns="x_value", values=values, aggfunc="last", sort=False,
        dropna=False,
    )  # fmt: skip
    return table[sorted(table.columns)].rename_axis(columns="T").dropna(how="all")


def backends(frame) -> list[tuple]:
    """(backend, its rows), those of `LOOKS` first and in that order."""
    present = dict.fromkeys(frame["backend"])
    ordered = [name for name in LOOKS if name in present]
    ordered += [name for name in present if name not in LOOKS]
    return [(name, frame[frame["backend"] == name]) for name in ordered]


def largest_common(frame) -> float:
    """Largest T that every backend has; if they share none, the largest of any."""
    sets = [set(line["x_value"]) for _, line in backends(frame)]
    return max(set.intersection(*sets) or set.union(*sets))
