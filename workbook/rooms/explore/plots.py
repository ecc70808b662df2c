"""Pictures of an example. Margins are fixed, since automatic layout takes half the time."""

from contextlib import contextmanager

import numpy as np

from nsa.reference.nsa import BRANCHES
from workbook.rooms.explore.example import NEIGHBOURS, Example, Seen
from workbook.rooms.explore.gates import Gates
from workbook.runs import looks

NAMES = {"cmp": "compressed", "slc": "selected", "win": "window"}
COLOURS = {"cmp": "#E69F00", "slc": "#0072B2", "win": "#009E73"}
FORCED, CHOSEN, LEFT_OUT = "#D55E00", "#0072B2", "#BBBBBB"
WIDTH = 9.6  # inches
# Ends of the token axis, as fractions of the width: a slider below has the same length.
BEGIN, END = 0.085, 0.985
GAP = 0.14  # between two maps, of a map's width
BINS = 1200  # of a query's tokens; more would be narrower than a dot


def seen(example: Example, query: int):
    """Plot, by branch, the tokens (columns) that each query (rows) sees, the query marked; below,
    its weight for each token in each branch."""
    from matplotlib.colors import to_rgb

    tokens, count = example.choice.tokens, len(example.rows)
    future = (example.rows > example.rows[:, None]).numpy()
    with figure(5.0) as fig:
        fig.subplots_adjust(left=BEGIN, right=END, top=0.94, bottom=0.1, hspace=0.32)
        above, below = fig.subplots(2, 1, height_ratios=(3.1, 1))
        # one image in one pair of axes, which draws twice as fast as three pairs
        apart = round(GAP * count)
        image = np.ones((count, 3 * count + 2 * apart, 3))
        for number, branch in enumerate(BRANCHES):
            part = image[:, number * (count + apart) :][:, :count]
            part[future] = to_rgb("#EEEEEE")
            part[example.sees[branch].numpy()] = to_rgb(COLOURS[branch])
        step = tokens * (count + apart) / count
        begins = [number * step for number in range(3)]
        extent = (0, begins[-1] + tokens, tokens, 0)
        above.imshow(image, aspect="auto", extent=extent, interpolation="nearest")
        above.hlines([query + 0.5] * 3, begins, [x + tokens for x in begins], color="black", lw=1)
        above.grid(False)
        above.spines[["left", "bottom"]].set_visible(False)
        ends = [0, tokens]
        above.set_xticks([x + t for x in begins for t in ends], [f"{t}" for t in ends] * 3)
        above.set_yticks(_quarters(tokens))
        above.set_ylabel("query")
        for branch, x in zip(BRANCHES, begins, strict=True):
            above.text(x, -0.02 * tokens, NAMES[branch], va="bottom")
        _weights(below, example, example.at(query))
    return fig


def _quarters(tokens: int) -> list[int]:
    """Ticks at quarters of T: round numbers if T is a power of two."""
    return sorted({tokens * n // 4 for n in range(5)})


def _weights(axes, example: Example, one: Seen) -> None:
    """Draw a band per branch, from 0 to the query's largest weight in it."""
    tokens = example.choice.tokens
    for level, branch in enumerate(reversed(BRANCHES)):
        x, heights = _largest(one.weights[branch].numpy())
        most = heights.max() if len(heights) else 0.0
        if most > 0:
            look = {"step": "mid", "color": COLOURS[branch], "lw": 0}
            axes.fill_between(x, level, level + 0.85 * heights / most, **look)
        label = f"largest {most:.2g}" if most > 0 else "sees none"
        look = {"ha": "right", "va": "center", "fontsize": 8, "color": looks.GREY}
        axes.text(tokens * 0.995, level + 0.5, label, **look)
    axes.axvline(one.query, color="black", lw=1)
    axes.set(xlim=(-0.5, tokens - 0.5), ylim=(0, 3), xlabel="token", xticks=_quarters(tokens))
    axes.set_yticks([0.4, 1.4, 2.4], [NAMES[b] for b in reversed(BRANCHES)])
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.grid(False)
    looks.title(axes, f"Weights of query {one.query}, a mean over the group's heads")


def selection(example: Example, query: int):
    """Plot the blocks (vertical) that each query (horizontal) selects, over their importance;
    beside it, the importance of each block to one query, and the choice."""
    from matplotlib.colors import to_rgb

    config, tokens = example.config, example.choice.tokens
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
    image = np.where(legal, grey, 0.93)[..., None] * np.ones(3)
    image[taken], image[forced] = to_rgb(CHOSEN), to_rgb(FORCED)
    with figure(4.0) as fig:
        grid = fig.add_gridspec(
            1, 2, width_ratios=(1.35, 1), left=BEGIN, right=END, top=0.92, bottom=0.13, wspace=0.2
        )
        axes = fig.add_subplot(grid[0])
        extent = (-0.5, tokens - 0.5, -0.5, count - 0.5)
        axes.imshow(
            image.transpose(1, 0, 2), origin="lower", aspect="auto", extent=extent,
            interpolation="nearest",
        )  # fmt: skip
        axes.axvline(query, color="black", lw=1)
        axes.grid(False)
        axes.set(xlabel="query", ylabel="block")
        between = f"{NEIGHBOURS} neighbours: {example.distinct:.1f} distinct blocks"
        looks.title(axes, f"n = {config.select_count} of {count} blocks", between)
        _importance(fig.add_subplot(grid[1]), example.at(query))
    return fig


def _importance(axes, one: Seen) -> None:
    heights = one.importance.numpy()
    begun = max(one.blocks, default=-1) + 1
    groups = (
        (FORCED, "forced", one.forced),
        (CHOSEN, "chosen", sorted({*one.blocks} - {*one.forced})),
        (LEFT_OUT, "left out", sorted({*range(begun)} - {*one.blocks})),
    )
    for colour, label, members in groups:
        # one outline for all bars of a kind, which is faster than a patch each
        j = np.array(members, int)
        x = np.stack([j - 0.45, j - 0.45, j + 0.45, j + 0.45], 1).ravel()
        y = np.stack([0 * heights[j], heights[j], heights[j], 0 * heights[j]], 1).ravel()
        axes.fill(x, y, color=colour, lw=0, label=label)
    axes.set(xlabel="block", xlim=(-0.6, max(begun, 2) - 0.4))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, ncols=3, loc="upper center")
    top = heights[:begun].max() if begun else 0.0
    axes.set_ylim(0, 1.25 * top or 1)
    looks.title(axes, f"Importance to query {one.query}", "Eq. 8 to 11")


def gates(example: Example, found: Gates):
    """Plot the shares of the gates, a bar per head, or per layer if there are several; beside it,
    the gated branches' shares of the output's norm."""
    import torch

    layers = len(found.shares)
    bars = found.shares[0] if layers == 1 else found.shares.mean(1)
    where, norms = example.output_norms
    parts = found.means.mean((0, 1)) * norms
    parts = parts / parts.sum(-1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
    with figure(3.4) as fig:
        left, right = fig.subplots(1, 2)
        fig.subplots_adjust(left=BEGIN, right=END, top=0.84, bottom=0.16, wspace=0.2)
        below = np.zeros(len(bars))
        for index, branch in enumerate(BRANCHES):
            heights = bars[:, index].numpy()
            look = {"color": COLOURS[branch], "label": NAMES[branch], "width": 0.85}
            left.bar(np.arange(len(bars)), heights, bottom=below, **look)
            below += heights
        left.set(xlabel="query head" if layers == 1 else "layer", ylabel="share of the gates")
        left.xaxis.get_major_locator().set_params(integer=True)
        colours = [COLOURS[branch] for branch in BRANCHES]
        right.stackplot(where.numpy(), parts.T.numpy(), colors=colours, lw=0)
        right.set(xlabel="query", ylabel="share of the output", xlim=(0, example.choice.tokens - 1))
        for axes, title in ((left, found.name), (right, "gate x norm of a branch's output")):
            axes.set(ylim=(0, 1))
            axes.grid(False)
            looks.title(axes, title)
        handles, labels = left.get_legend_handles_labels()
        fig.legend(handles, labels, loc="upper center", ncols=3, fontsize=9)
    return fig


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
