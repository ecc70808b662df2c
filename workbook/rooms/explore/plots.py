"""Pictures of an example. Margins are fixed, since automatic layout takes half the time."""

from contextlib import contextmanager
from typing import Any

import numpy as np

from nsa.reference.nsa import BRANCHES
from workbook.rooms.explore.example import NEIGHBOURS, Example
from workbook.rooms.explore.gates import Gates
from workbook.runs import looks
from workbook.runs.live import Grip, Kept

NAMES = {"cmp": "compressed", "slc": "selected", "win": "window"}
COLOURS = {"cmp": "#E69F00", "slc": "#0072B2", "win": "#009E73"}
FORCED, CHOSEN, LEFT_OUT = "#D55E00", "#0072B2", "#BBBBBB"
KINDS = {"forced": FORCED, "chosen": CHOSEN, "left out": LEFT_OUT}
WIDTH = 9.6  # inches
# Ends of the token axis, as fractions of the width: a slider below has the same length.
BEGIN, END = 0.085, 0.985
TOP, FOOT, SPLIT, BOTTOM = 0.94, 0.1, 0.555, 0.13
# Where the query is dragged: the maps of what is seen, and the map of selections.
GRIPS = {
    "keys seen": Grip(BEGIN, END, 1 - TOP, 1 - 0.3925, vertical=True),
    "selection": Grip(BEGIN, SPLIT, 0.08, 1 - BOTTOM),
}
GAP = 0.14  # between two maps, of a map's width
BINS = 1200  # of a query's tokens; more would be narrower than a dot


def seen() -> Kept:
    """Keep a figure of the tokens (columns) that each query (rows) sees, by branch, the query
    marked; below, its weight for each token in each branch. It moves by (example, query)."""
    with figure(5.0) as fig:
        fig.subplots_adjust(left=BEGIN, right=END, top=TOP, bottom=FOOT, hspace=0.32)
        above, below = fig.subplots(2, 1, height_ratios=(3.1, 1))
        look = {"aspect": "auto", "interpolation": "nearest"}
        image = above.imshow(np.ones((1, 1, 3)), **look)
        (line,) = above.plot([], [], color="black", lw=1)
        above.grid(False)
        above.spines[["left", "bottom"]].set_visible(False)
        above.set_ylabel("query")
        above.set_navigate(False)
        names = [above.text(0, 0, NAMES[branch], va="bottom") for branch in BRANCHES]
        look = {"ha": "right", "va": "center", "fontsize": 8, "color": looks.GREY}
        bands = {b: below.fill([0], [0], color=COLOURS[b], lw=0)[0] for b in BRANCHES}
        most = {b: below.text(0, 2.5 - n, "", **look) for n, b in enumerate(BRANCHES)}
        now = below.axvline(0, color="black", lw=1)
        below.set(ylim=(0, 3), xlabel="token")
        below.set_yticks([0.4, 1.4, 2.4], [NAMES[b] for b in reversed(BRANCHES)])
        below.tick_params(axis="y", length=0, labelsize=8.5)
        below.grid(False)
        title = below.set_title("")
    shown: list[Any] = [None, None]  # the example whose image is set, and its T

    def move(example: Example, query: int) -> tuple:
        tokens, count = example.choice.tokens, len(example.rows)
        # one image in one pair of axes, which draws twice as fast as three pairs
        apart = round(GAP * count)
        begins = [n * tokens * (count + apart) / count for n in range(len(BRANCHES))]
        if shown[0] is not example:
            shown[0] = example
            image.set_data(_maps(example, apart))
        if shown[1] != tokens:
            shown[1] = tokens
            image.set_extent((0, begins[-1] + tokens, tokens, 0))
            above.set(xlim=(0, begins[-1] + tokens), ylim=(tokens, 0), yticks=_quarters(tokens))
            ends = [0, tokens]
            above.set_xticks([x + t for x in begins for t in ends], [f"{t}" for t in ends] * 3)
            above.get_xticklabels()[-1].set_ha("right")
            for text, x in zip(names, begins, strict=True):
                text.set_position((x, -0.02 * tokens))
            below.set(xlim=(-0.5, tokens - 0.5), xticks=_quarters(tokens))
        line.set_data([x + t for x in begins for t in (0, tokens, np.nan)], [query + 0.5] * 9)
        now.set_xdata([query, query])
        one = example.at(query)
        for level, branch in enumerate(reversed(BRANCHES)):
            x, heights = _largest(one.weights[branch].numpy())
            top = heights.max() if len(heights) else 0.0
            bands[branch].set_xy(_steps(x, level + 0.85 * heights / (top or 1), level))
            most[branch].set_text(f"largest {top:.2g}" if top > 0 else "sees none")
            most[branch].set_x(tokens * 0.995)
        title.set_text(f"Weights of query {query}, a mean over the group's heads")
        return tokens, example

    moving = (line, *bands.values(), *most.values(), now, title)
    return Kept(fig, ((image,), moving), move)


def _maps(example: Example, apart: int) -> np.ndarray:
    """Image [R, 3 R + 2 apart, 4] uint8 of what the queries see, a map a branch."""
    count = len(example.rows)
    future = (example.rows > example.rows[:, None]).numpy()
    image = np.full((count, 3 * count + 2 * apart, 4), 255, np.uint8)
    for number, branch in enumerate(BRANCHES):
        part = image[:, number * (count + apart) :][:, :count]
        part[future] = _rgba("#EEEEEE")
        part[example.sees[branch].numpy()] = _rgba(COLOURS[branch])
    return image


def _rgba(colour: str) -> list[int]:
    from matplotlib.colors import to_rgba

    return [round(255 * part) for part in to_rgba(colour)]


def _quarters(tokens: int) -> list[int]:
    """Ticks at quarters of T: round numbers if T is a power of two."""
    return sorted({tokens * n // 4 for n in range(5)})


def _steps(x: np.ndarray, heights: np.ndarray, level: float) -> np.ndarray:
    """Outline [N, 2] of a bar of each height around its x, above `level`."""
    half = (x[1] - x[0]) / 2 if len(x) > 1 else 0.5
    edges = np.stack([x - half, x + half], 1).ravel()
    tops = np.repeat(heights, 2)
    if not len(x):
        return np.full((1, 2), float(level))
    points = np.stack([edges, tops], 1)
    return np.concatenate([[[edges[0], level]], points, [[edges[-1], level]]])


def selection() -> Kept:
    """Keep a figure of the blocks (vertical) that each query (horizontal) selects, over their
    importance; beside it, the importance of each block to one query, and the choice. It moves by
    (example, query)."""
    with figure(4.0) as fig:
        grid = fig.add_gridspec(
            1, 2, width_ratios=(1.35, 1), left=BEGIN, right=END, top=0.92, bottom=BOTTOM, wspace=0.2
        )
        left, right = (fig.add_subplot(part) for part in grid)
        look = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
        image = left.imshow(np.ones((1, 1, 3)), **look)
        now = left.axvline(0, color="black", lw=1)
        left.grid(False)
        left.set(xlabel="query", ylabel="block")
        bars = {
            label: right.fill([0], [0], color=colour, lw=0, label=label)[0]
            for label, colour in KINDS.items()
        }
        right.set(xlabel="block")
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend(fontsize=8, ncols=3, loc="upper center")
        looks.title(right, "", "Eq. 8 to 11")
        titles = left.set_title(""), left.set_title("", loc="right"), right.set_title("")
    shown: list[Any] = [None, None]  # the example whose image is set, and what the axes show

    def move(example: Example, query: int) -> tuple:
        tokens, count = example.choice.tokens, example.selected[0].shape[1]
        one = example.at(query)
        heights = one.importance.numpy()
        begun = max(one.blocks, default=-1) + 1
        frame = tokens, count, _ceiling(heights[:begun].max() if begun else 0.0)
        if shown[0] is not example:
            shown[0] = example
            image.set_data(_choices(example))
            between = f"{NEIGHBOURS} neighbours: {example.distinct:.1f} distinct blocks"
            looks.title(left, f"n = {example.config.select_count} of {count} blocks", between)
        if shown[1] != frame:
            shown[1] = frame
            image.set_extent((-0.5, tokens - 0.5, -0.5, count - 0.5))
            left.set(xlim=(-0.5, tokens - 0.5), ylim=(-0.5, count - 0.5))
            right.set(xlim=(-0.6, max(count, 2) - 0.4), ylim=(0, 1.25 * frame[-1]))
        now.set_xdata([query, query])
        chosen, out = {*one.blocks} - {*one.forced}, {*range(begun)} - {*one.blocks}
        for bar, members in zip(bars.values(), (one.forced, chosen, out), strict=True):
            bar.set_xy(_bars(np.array(sorted(members), int), heights))
        titles[2].set_text(f"Importance to query {query}")
        return frame, example

    return Kept(fig, ((image, *titles[:2]), (now, *bars.values(), titles[2])), move)


def _choices(example: Example) -> np.ndarray:
    """Image [NB, R, 4] uint8: blocks forced, chosen, left out by importance, and not begun."""
    config = example.config
    scores, blocks = (x.numpy() for x in example.selected)
    rows, count = example.rows.numpy(), scores.shape[1]
    j = np.arange(count)
    own = (rows // config.select_block)[:, None]
    legal = j <= own
    taken = np.zeros((len(rows), count + 1), bool)
    np.put_along_axis(taken, np.where(blocks < 0, count, blocks), True, axis=1)
    taken = taken[:, :count]
    forced = taken & ((j < config.select_initial) | (j > own - config.select_local))
    # relative to the importance of the blocks that are not forced
    free = np.where(legal & ~forced, scores, 0)
    grey = 1 - 0.5 * (free / np.maximum(free.max(1, keepdims=True), 1e-9)) ** 2
    image = np.full((*legal.shape, 4), 255, np.uint8)
    image[..., :3] = 255 * np.where(legal, grey, 0.93)[..., None]
    image[taken], image[forced] = _rgba(CHOSEN), _rgba(FORCED)
    return image.transpose(1, 0, 2)


def _bars(j: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """Outline [4 N, 2] of all bars of a kind, which is faster than a patch each."""
    x = np.stack([j - 0.45, j - 0.45, j + 0.45, j + 0.45], 1).ravel()
    y = np.stack([0 * heights[j], heights[j], heights[j], 0 * heights[j]], 1).ravel()
    return np.stack([x, y], 1)


def _ceiling(value: float) -> float:
    """Next of 1, 2, 5, 10, ... above a value, so that an axis keeps its ticks for a while."""
    if value <= 0:
        return 1.0
    decade = 10.0 ** np.floor(np.log10(value))
    return next(decade * step for step in (1, 2, 5, 10) if value <= decade * step)


def gates() -> Kept:
    """Keep a figure of the shares of the gates, a bar per head, or per layer if there are several;
    beside it, the gated branches' shares of the output's norm. It moves by (example, gates)."""
    with figure(3.4) as fig:
        left, right = fig.subplots(1, 2)
        fig.subplots_adjust(left=BEGIN, right=END, top=0.84, bottom=0.16, wspace=0.2)
        handles = [left.bar([0], [1], color=COLOURS[branch]) for branch in BRANCHES]
        names = [NAMES[branch] for branch in BRANCHES]
        fig.legend(handles, names, loc="upper center", ncols=3, fontsize=9)
    shown: list[Any] = [None]

    def move(example: Example, found: Gates) -> tuple:
        frame = example, found.name
        if shown[0] != frame:
            shown[0] = frame
            _shares(left, found)
            _parts(right, example, found)
        return (frame,)

    return Kept(fig, (), move)


def _shares(axes, found: Gates) -> None:
    layers = len(found.shares)
    bars = found.shares[0] if layers == 1 else found.shares.mean(1)
    below = np.zeros(len(bars))
    axes.clear()
    for index, branch in enumerate(BRANCHES):
        heights = bars[:, index].numpy()
        axes.bar(np.arange(len(bars)), heights, bottom=below, color=COLOURS[branch], width=0.85)
        below += heights
    axes.set(xlabel="query head" if layers == 1 else "layer", ylabel="share of the gates")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(ylim=(0, 1))
    axes.grid(False)
    looks.title(axes, found.name)


def _parts(axes, example: Example, found: Gates) -> None:
    import torch

    where, norms = example.output_norms
    parts = found.means.mean((0, 1)) * norms
    parts = parts / parts.sum(-1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
    axes.clear()
    colours = [COLOURS[branch] for branch in BRANCHES]
    axes.stackplot(where.numpy(), parts.T.numpy(), colors=colours, lw=0)
    axes.set(xlabel="query", ylabel="share of the output", xlim=(0, example.choice.tokens - 1))
    axes.set(ylim=(0, 1))
    axes.grid(False)
    looks.title(axes, "gate x norm of a branch's output")


@contextmanager
def figure(height: float):
    """Make a figure of WIDTH in the common style, to be laid out manually."""
    from matplotlib.figure import Figure

    with looks.style():
        yield Figure(figsize=(WIDTH, height), layout="none", dpi=100)


def _largest(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and values, reduced to the largest per bin, so that no peak is lost."""
    each = -(-len(values) // BINS)
    if each <= 1:
        return np.arange(len(values)), values
    padded = np.pad(values, (0, -len(values) % each)).reshape(-1, each)
    return np.arange(len(padded)) * each + (each - 1) / 2, padded.max(1)
