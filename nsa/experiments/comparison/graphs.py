"""Times from CUDA graphs, captured when all else is measured: a failed capture can spoil nothing.

What a capture leaves behind when it fails (a stream in error, an allocator that still records)
would reach every implementation that is measured after it in the same process.
"""

from collections.abc import Callable, Sequence

from nsa.experiments.comparison.cell import Runner
from nsa.experiments.comparison.implementations import Implementation
from nsa.experiments.comparison.record import add, brief
from nsa.lab.measure import timing
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import NoTime

TOKENS = 4096  # launches are felt at short T alone
SLOW_MS = 20.0


def add_graphs(
    measured: Sequence[tuple[dict, Shape, Implementation]],
    runner: Runner,
    say: Callable[[dict], None] = lambda cell: None,
) -> None:
    """Writes graph_forward and graph_backward into the cells that ran, are short, and can be
    captured; into the others' messages, why not. The outcome stays as it is."""
    for shape in dict.fromkeys(shape for _, shape, _ in measured):
        mine = [(cell, i) for cell, s, i in measured if s == shape and eligible(cell, i)]
        if not mine:
            continue
        drawn, why = runner.draw(shape)
        for cell, implementation in mine:
            if drawn is None or runner.broken:
                add(cell, f"no CUDA graph: {why or runner.broken}")
                continue
            runner.clock.start()
            try:
                runner.clock.check(0.0, "a CUDA graph")
                capture(cell, implementation, drawn)
            except NoTime as error:
                add(cell, f"no CUDA graph: {error}")
            except (Exception, SystemExit) as error:
                add(cell, f"no CUDA graph: {brief(error)}")
            runner.release()
            if runner.broken:
                runner.broken = f"that of {implementation.name} broke the device: {runner.broken}"
            say(cell)
        del drawn
        runner.release()


def eligible(cell: dict, implementation: Implementation) -> bool:
    """Launches are felt at short T alone, and a capture needs a graph-safe backward, too."""
    ms = cell["latency_ms"]
    short = cell["shape"]["tokens"] <= TOKENS and "backward" in ms and ms["forward"][0] <= SLOW_MS
    return implementation.graph and cell["outcome"] == "ok" and short


def capture(cell: dict, implementation: Implementation, drawn) -> None:
    """On leaves of its own, which no forward on another stream has met."""
    fresh = drawn.fresh()
    leaves = [fresh.leaves()[name] for name in implementation.reaches(fresh)]
    taken = timing.graph_latency(lambda: implementation.call(fresh, None), leaves, fresh.do)
    for mode, found in zip(("graph_forward", "graph_backward"), taken, strict=True):
        cell["latency_ms"][mode] = [found.median, found.q20, found.q80]
