"""Memory of one step from its first allocation to its last: an area for each category."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from workbook.lab.measure.allocations import CATEGORIES
from workbook.runs import looks

COLOURS = dict(zip(CATEGORIES, looks.PALETTE, strict=False)) | {"resident": "#c8c8c8"}
# Permanent categories first and short-lived ones last, so that a step's shape is on top.
UPWARDS = (
    "resident", "parameters", "optimizer_state", "gradients", "inputs", "activations", "temporaries"
)  # fmt: skip


def timeline(steps: Mapping[str, dict], height: float = 3.2):
    """Draw a panel for each title, a step's data from `workbook.lab.measure.allocations.timeline`.

    Areas are stacked, in MiB or GiB; dashed lines and names mark the phases, a point the peak.
    ValueError if no step is given.
    """
    if not steps:
        raise ValueError("no step to draw; a record of --memory-snapshot has one as 'timeline'")
    highest = max(sum(map(np.asarray, found["mib"].values())).max() for found in steps.values())
    unit, scale = ("GiB", 1024.0) if highest >= 2048 else ("MiB", 1.0)
    with looks.figure(len(steps), height) as (fig, panels):
        for axes, (title, found) in zip(panels, steps.items(), strict=True):
            events, below = np.asarray(found["events"]), np.zeros(len(found["events"]))
            for name in UPWARDS:
                if name in found["mib"]:
                    above = below + np.asarray(found["mib"][name]) / scale
                    look = {"color": COLOURS[name], "label": name.replace("_", " "), "lw": 0}
                    axes.fill_between(events, below, above, step="post", **look)
                    below = above
            at = int(np.argmax(below))
            axes.plot(events[at], below[at], "v", color="black", ms=5, clip_on=False, zorder=4)
            axes.set(xlim=(0, events[-1] or 1), ylim=(0, 1.22 * below.max() or 1))
            _phases(axes, found["phases"], events[-1])
            right = at > len(events) / 2
            axes.annotate(
                f"{below[at]:.4g} {unit}", (events[at], below[at]), fontsize=8,
                xytext=(-6 if right else 6, 3), textcoords="offset points",
                ha="right" if right else "left",
            )  # fmt: skip
            axes.set(xlabel="the allocator's events", ylabel=f"held ({unit})")
            axes.grid(False, axis="x")
            looks.title(axes, title)
    return fig


def of_record(file: Path):
    """Figure of the step in a memory-rankK.json."""
    found = json.loads(file.read_bytes())
    title = f"Step {found['step']}, rank {found['rank']}, {found['device']}"
    return timeline({title: found["timeline"]})


def drawn(file: Path) -> Path:
    """Draw that figure as .svg beside the file, and return its path."""
    import matplotlib.pyplot as plt

    fig, picture = of_record(file), file.with_suffix(".svg")
    with looks.style():
        fig.savefig(picture, metadata={"Date": None})
    plt.close(fig)
    return picture


def _phases(axes, phases: list, end: int) -> None:
    """Draw a dashed line at each phase's start, with its name if there is room."""
    starts = [start for _, start in phases] + [end]
    for (name, start), behind in zip(phases, starts[1:], strict=True):
        axes.axvline(start, color="black", lw=0.7, ls="--", alpha=0.6)
        if behind - start > 0.012 * len(name) * max(end, 1):
            place = {"xy": (start, 0.985), "xycoords": axes.get_xaxis_transform()}
            axes.annotate(name, **place, xytext=(3, 0), textcoords="offset points",
                          va="top", fontsize=8)  # fmt: skip
