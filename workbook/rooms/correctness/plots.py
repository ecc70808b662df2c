"""Figures of the correctness notebook: the definition, and what each mutant attends to."""

import textwrap
from collections.abc import Sequence

import numpy as np

from workbook.rooms.correctness.definition import Definition
from workbook.rooms.correctness.gallery import RIGHT, Seen
from workbook.rooms.correctness.table import difference
from workbook.runs import looks

BRANCHES = {"cmp": "compressed", "slc": "selected", "win": "window"}
SMALL = 75  # dots an inch
HEADS = ("#0072B2", "#56B4E9", "#999999", "#CC79A7")
LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS = {"cmp": "#E69F00", "slc": "#0072B2", "win": "#009E73"}


def what_is_seen(found: Definition):
    """Plot tokens (columns) that each query (rows) sees, by branch; selections of both groups."""
    from matplotlib.colors import ListedColormap

    shown = [("cmp", 0, "compressed"), ("win", 0, "window")]
    shown += [("slc", g, f"selected, KV head {g}") for g in range(len(found.sees["slc"]))]
    with looks.style():
        fig, panels = _grid(len(shown), 4, 3.0)
        size, step = found.config.select_block, found.config.compress_stride
        for axes, (branch, group, title) in zip(panels, shown, strict=True):
            mask = found.sees[branch][group].numpy()
            future = np.triu(np.ones_like(mask, dtype=float), 1)
            axes.imshow(future, cmap=ListedColormap(["white", "#eeeeee"]), vmin=0, vmax=1)
            seen = np.ma.masked_where(~mask, mask)
            axes.imshow(seen, cmap=ListedColormap([COLOURS[branch]]), interpolation="nearest")
            grid = {"cmp": step, "slc": size, "win": found.tokens}[branch]
            for edge in range(grid, found.tokens, grid):
                axes.axvline(edge - 0.5, color="#777777", lw=0.3)
            axes.grid(False)
            axes.set(title=title, xlabel="token", ylabel="query")
    return fig


def importance_of(found: Definition, query: int):
    """Plot Eq. 8 to 11 for one query of the first group: p_cmp by head, the matrix of Eq. 9,
    importance, the choice. Raises ValueError for a query that does not exist."""
    if not 0 <= query < found.tokens:
        raise ValueError(f"query {query}: the picture has {found.tokens} queries")
    config = found.config
    with looks.style():
        import matplotlib.pyplot as plt

        fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11.5, 3.2))
        below = np.zeros(found.p_cmp.shape[-1])
        for head, line in enumerate(found.p_cmp[0, :, query].numpy()):
            look = {"width": 0.85, "label": f"head {head}", "color": HEADS[head % len(HEADS)]}
            left.bar(np.arange(len(line)), line, bottom=below, **look)
            below += line
        left.set(title=f"p_cmp of query {query} (Eq. 8)", xlabel="compressed key i")
        left.set_ylabel("probability, summed over heads")
        left.legend(fontsize=7.5)
        strides = found.matrix.T.numpy()
        image = middle.imshow(strides, cmap="Greys", aspect="auto", interpolation="nearest")
        middle.grid(False)
        middle.set(title="strides shared, M (Eq. 9)", xlabel="compressed key i", ylabel="block j")
        fig.colorbar(image, ax=middle, ticks=range(int(found.matrix.max()) + 1))
        chosen = {int(j) for j in found.blocks[0, query] if j >= 0}
        own = query // config.select_block
        for j, value in enumerate(found.importance[0, query].numpy()):
            forced = j < config.select_initial or own - config.select_local < j <= own
            colour = "#D55E00" if forced else "#0072B2" if j in chosen else "#bbbbbb"
            height = value if j <= own else 0.0
            right.bar(j, height, color=colour, width=0.85)
            word = "forced" if forced else "chosen" if j in chosen else "later" if j > own else ""
            look = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": colour}
            right.annotate(word, (j, height), **look)
        for axes in (left, middle, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
        title = f"importance, and the choice of n = {config.select_count}"
        right.set(title=title, xlabel="block j", ylabel="importance (Eq. 10)")
    return fig


def gates_of(found: Definition):
    """Plot the three gates of the first head over the tokens; they need not add up to 1."""
    with looks.figure(1, 2.2) as (fig, (axes,)):
        for index, (branch, name) in enumerate(BRANCHES.items()):
            axes.plot(found.gates[:, 0, index], color=COLOURS[branch], label=name)
        axes.set(title="gates of head 0 (Eq. 5)", xlabel="token", ylim=(0, 1))
        fig.set_dpi(SMALL)  # lines over a grid weigh most in a notebook
    return fig


def gallery(all_seen: Sequence[Seen]):
    """Plot each mutant's picture minus that of correct code; red is too much, blue too little.

    Grey marks what correct code attends to. A missing picture is replaced by the reason.
    """
    from matplotlib.colors import ListedColormap

    mutants = [seen for seen in all_seen if seen.mutant != RIGHT]
    with looks.style():
        fig, panels = _grid(len(mutants), 6, 1.75, dpi=80)
        for axes, seen in zip(panels, mutants, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(False)
            axes.set_title(textwrap.fill(seen.mutant, 22), fontsize=6.8)
            axes.set_xlabel(f"{seen.view.replace('_', ' ')}, {seen.backend}", fontsize=6.5)
            wrong = difference(seen, all_seen)
            if wrong is None:
                why = textwrap.fill(textwrap.shorten(seen.message, 90), 24)
                axes.text(0.5, 0.5, why, ha="center", va="center", fontsize=6).set_in_layout(False)
                axes.set_box_aspect(1)
                continue
            square = wrong.shape[0] == wrong.shape[1]
            right = np.array(seen.picture) - wrong
            if square:
                grey = ListedColormap(["white", "#d9d9d9"])
                axes.imshow(right > 0, cmap=grey, vmin=0, vmax=1, interpolation="nearest")
            most = np.abs(wrong).max() or 1.0
            # Small differences must be visible beside large ones: the location matters.
            shown = np.sign(wrong) * (np.abs(wrong) / most) ** 0.4
            shown = np.ma.masked_where(np.abs(wrong) < 1e-4, shown)
            look = {"cmap": "RdBu_r", "vmin": -1.1, "vmax": 1.1, "interpolation": "nearest"}
            axes.imshow(shown, **look, aspect="equal" if square else "auto")
    return fig


def curves(rows: Sequence[dict]):
    """Plot the training loss of each lesson, one panel each, correct attention in black."""
    lessons: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("curve"):
            key = row["lesson"], row["backend"], row["tokens"]
            lessons.setdefault(key, []).append(row)
    if not lessons:
        return looks.nothing("no lesson was learnt in this run")
    mutants = list(dict.fromkeys(row["mutant"] for taught in lessons.values() for row in taught))
    others = [name for name in mutants if name != RIGHT]
    with looks.figure(len(lessons), 2.6) as (fig, panels):
        for axes, ((name, backend, tokens), taught) in zip(panels, lessons.items(), strict=True):
            for row in taught:
                look = {"color": "black", "lw": 2.6, "ls": "-"}
                if row["mutant"] != RIGHT:
                    colour = LINES[others.index(row["mutant"]) % len(LINES)]
                    look = {"color": colour, "lw": 1.4, "ls": "--"}
                steps, losses = zip(*((x["step"], x["loss"]) for x in row["curve"]), strict=True)
                marker = "o" if len(steps) < 40 else ""
                axes.plot(steps, losses, **look, label=row["mutant"], marker=marker, ms=3.5)
            axes.set(title=f"{name}, {backend}, T = {tokens}", yscale="log")
            axes.set(xlabel="step", ylabel="loss (nats)")
        fig.set_dpi(SMALL)
    return fig


def _grid(count: int, columns: int, inches: float, dpi: int = 100):
    import matplotlib.pyplot as plt

    columns = min(columns, count)
    rows = -(-count // columns)
    size = (inches * columns, (inches + 0.42) * rows)
    fig, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, dpi=dpi)
    for spare in list(grid.flat)[count:]:
        spare.set_visible(False)
    return fig, list(grid.flat)[:count]
