"""`nsa figures`: the headline plots, redrawn from the runs that docs/results.md cites."""

import importlib

from nsa.cli.options import GOOD, command, runs_option

# Name of the figure, the run that it is of, what draws it from the run's metrics.csv.
HEADLINES = (
    ("memory", "01_memory_scaling-28623959", "nsa.experiments.memory.plots:scaling"),
    ("latency", "02_backend_comparison-7d821386", "nsa.experiments.comparison.plots:latency"),
    ("tokens_per_second", "04_throughput-fca040d9", "nsa.experiments.throughput.plots:speed"),
    ("losses", "04_throughput-25571656", "nsa.experiments.throughput.plots:losses"),
)


def add(commands) -> None:
    made = command(commands, "figures", redraw, "Redraw the headline plots from committed runs.")
    made.add_argument("--to", metavar="DIR", default="figures", help="folder; default: figures")
    runs_option(made)


def redraw(arguments) -> int:
    """Writes each headline as SVG, naming its run inside; the same records give the same bytes."""
    from pathlib import Path

    import matplotlib.pyplot as plt

    from nsa.workbook import looks
    from nsa.workbook.store import Run, open_store

    target = Path(arguments.to)
    target.mkdir(parents=True, exist_ok=True)
    for name, run, entry in HEADLINES:
        module, _, function = entry.partition(":")
        df = Run(open_store(arguments.runs).find(run)).metrics()
        note = {"note": df["gpu"].iloc[0]} if function in ("latency", "speed") else {}
        figure = getattr(importlib.import_module(module), function)(df, **note)
        about = {"Title": name, "Description": f"run {run}", "Date": None}
        with looks.style(), plt.rc_context({"svg.hashsalt": name}):
            figure.savefig(target / f"{name}.svg", metadata=about)
        plt.close(figure)
        print(f"{target / name}.svg  of run {run}")
    return GOOD
