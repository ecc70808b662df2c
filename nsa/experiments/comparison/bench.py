"""Every implementation side by side on the same inputs in one process: accuracy first, then speed.

How an implementation ended is a value: a cell is a flat dict with an `outcome` of OUTCOMES. Only
"ok" carries speed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from nsa.experiments.comparison import cell as bench_graphs
from nsa.experiments.comparison import implementations
from nsa.experiments.comparison.cell import Runner, empty
from nsa.experiments.comparison.implementations import DENSE, NSA, Implementation
from nsa.lab.measure import limits
from nsa.lab.measure.limits import Ceilings
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import CAP_S, Clock

OUTCOMES = ("ok", "red", "declined", "skipped", "oom", "error", "not run")
LIMITS = {NSA: "limit", DENSE: "dense limit"}  # under whose names the limits stand in tables

Say = Callable[[str], None]


def all_implementations(
    backends: Sequence[str] | None = None,
    paths: Sequence[str] = (),
    with_dense: bool = True,
) -> list[Implementation]:
    """Backends, dense attention, fla-core and peers; those that T x T slows down come last."""
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
    """One cell for each shape and implementation, in that order.

    A cell has `shape` (Shape.to_dict), `name`, `operation`, `outcome`, `message`, `checked`,
    `errors` {mode: [worst, limit]}, `latency_ms` {mode: [median, q20, q80]}, `limit_ms` {mode},
    `memory_mib` {mode}, `paths` (the witness), `union` {neighbours: blocks}, `ceilings` and
    `timing`: "absolute" on a GPU, "not meaningful" on a CPU. Modes: forward and backward, on a GPU
    step, and for short T graph_forward and graph_backward.

    `cpu_memory`: record memory on a CPU, too, by torch's profiler,
    some builds of which write to stderr. `into`: the list that cells are added to as they come, so
    that an interrupted run leaves what it has. ValueError for an unknown backend, before anything
    runs.
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
        common = {"ceilings": asdict(ceilings[shape.dtype]), "union": {}}
        common["timing"] = "absolute" if device.type == "cuda" else "not meaningful"
        say(f"{shape}")
        drawn, why = runner.draw(shape)
        if drawn is not None:
            common["union"] = runner.union(drawn)
        for implementation in chosen:
            work = limits.work(shape, implementation.operation)
            limit_ms = {m: w.limit_ms(ceilings[shape.dtype]) for m, w in work.items()}
            cell = empty(shape, implementation) | common | {"limit_ms": limit_ms}
            cell |= {"outcome": "not run", "message": why} if drawn is None else {}
            if drawn is not None:
                runner.fill(cell, implementation, drawn)
            cells.append(cell)
            measured.append((cell, shape, implementation))
            say("  " + line_of(cell))
        del drawn
        runner.release()
    if device.type == "cuda":
        bench_graphs.add_graphs(measured, runner, lambda cell: say("  graph " + line_of(cell)))
    return cells


def _ceilings(device: torch.device, shape: Shape) -> Ceilings:
    """Unknown where the device cannot tell any more; what was measured stays."""
    try:
        return limits.measure_ceilings(device, shape.torch_dtype)
    except Exception:
        return Ceilings(math.nan, math.nan)


def measure_spec(spec: dict) -> dict:
    """`bench` as a trial: {"shapes", and its keyword arguments} -> {"cells"}."""
    given = dict(spec)
    shapes = [Shape.from_dict(values) for values in given.pop("shapes")]
    threads = given.pop("threads", None)
    if threads:
        torch.set_num_threads(threads)
    return {"cells": bench(shapes, say=lambda line: print(line, flush=True), **given)}


def line_of(cell: dict) -> str:
    """One line for a person who waits."""
    times = [
        f"{mode} {cell['latency_ms'][mode][0]:.3g}"
        for mode in ("forward", "backward", "graph_forward", "graph_backward")
        if mode in cell["latency_ms"]
    ]
    said = ", ".join(times) + " ms" * bool(times)
    return f"{cell['name']}: {' '.join(filter(None, (cell['outcome'], said, cell['message'])))}"


def limits_as_cells(cells: Sequence[dict]) -> Iterator[dict]:
    """The limit of each shape and operation as a cell of its own, for tables and plots."""
    seen = set()
    for cell in cells:
        key = (repr(cell["shape"]), cell["operation"])
        if key not in seen:
            seen.add(key)
            latency = {mode: [ms, ms, ms] for mode, ms in cell["limit_ms"].items()}
            yield cell | {
                "name": LIMITS[cell["operation"]], "outcome": "ok", "message": "", "checked": "",
                "errors": {}, "latency_ms": latency, "memory_mib": {}, "paths": {},
            }  # fmt: skip
