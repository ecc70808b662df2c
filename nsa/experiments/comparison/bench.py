"""Every implementation side by side on the same inputs in one process: accuracy first, then speed.

How an implementation ended is a value: the `outcome` of its cell.
"""

from collections.abc import Callable, Sequence

import torch

from nsa.experiments.comparison import implementations
from nsa.experiments.comparison.cell import UNKNOWN, Runner, add_graphs, empty
from nsa.experiments.comparison.implementations import Implementation
from nsa.lab.measure import limits
from nsa.lab.measure.limits import Ceilings
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import CAP_S, Clock

Say = Callable[[str], None]


def all_implementations(
    backends: Sequence[str] | None = None,
    paths: Sequence[str] = (),
    with_dense: bool = True,
) -> list[Implementation]:
    """Backends, dense attention, fla-core and peers; backends with T x T tensors come last."""
    ours = implementations.backends(backends)
    theirs = [
        *(implementations.providers() if with_dense else []),
        implementations.fla(),
        *map(implementations.peer, paths),
    ]
    first = [i for i in ours if i.name in ("triton", "flash")]
    return [*first, *theirs, *(i for i in ours if i not in first)]


def bench(
    shapes: Sequence[Shape],
    *,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] = (),
    with_dense: bool = True,
    device: str | torch.device = "cpu",
    budget_s: float | None = None,
    cap_s: float = CAP_S,
    cpu_memory: bool = False,
    say: Say = lambda line: None,
    into: list[dict] | None = None,
) -> list[dict]:
    """One `cell.Cell`, as a dict, for each shape and implementation, in that order.

    cpu_memory: record memory on a CPU, too, by torch's profiler, some builds of which write to
    stderr. into: the list that cells are added to as they come, so that an interrupted run leaves
    what it has. ValueError for an unknown backend, before anything runs.
    """
    chosen = all_implementations(backends, peers, with_dense)
    device = torch.device(device)
    clock = Clock(budget_s, cap_s)
    ceilings: dict[str, Ceilings] = {}
    runner = Runner(device, clock, cpu_memory)
    cells = [] if into is None else into
    measured = []
    for shape in shapes:
        if shape.dtype not in ceilings:
            ceilings[shape.dtype] = _ceilings(device, shape)
        say(f"{shape}")
        drawn, why = runner.draw(shape)
        union = {} if drawn is None else runner.union(drawn)
        for implementation in chosen:
            cell = empty(shape, implementation, device.type, ceilings[shape.dtype])
            if drawn is None:
                cell["message"] = why
            else:
                cell["union"] = union
                runner.fill(cell, implementation, drawn)
            cells.append(cell)
            measured.append((cell, shape, implementation))
            say("  " + line_of(cell))
        del drawn
        runner.release()
    if device.type == "cuda":
        add_graphs(measured, runner, lambda cell: say("  graph " + line_of(cell)))
    return cells


def _ceilings(device: torch.device, shape: Shape) -> Ceilings:
    """Unknown where the device cannot tell any more; what was measured stays."""
    try:
        return limits.measure_ceilings(device, shape.torch_dtype)
    except Exception:
        return UNKNOWN


def measure_spec(spec: dict) -> dict:
    """`bench` as a trial: {"shapes", and its keyword arguments} -> {"cells"}."""
    given = dict(spec)
    shapes = [Shape.from_dict(values) for values in given.pop("shapes")]
    threads = given.pop("threads", None)
    if threads:
        torch.set_num_threads(threads)
    return {"cells": bench(shapes, say=lambda line: print(line, flush=True), **given)}


def line_of(cell: dict) -> str:
    """One line of progress."""
    times = [
        f"{mode} {cell['latency_ms'][mode][0]:.3g}"
        for mode in ("forward", "backward", "graph_forward", "graph_backward")
        if mode in cell["latency_ms"]
    ]
    said = ", ".join(times) + " ms" * bool(times)
    return f"{cell['name']}: {' '.join(filter(None, (cell['outcome'], said, cell['message'])))}"
