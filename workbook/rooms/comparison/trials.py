"""Compare all implementations on the same inputs in one process: accuracy first, then speed.

`compare` gives each shape a child process, so that one that crashes or hangs leaves rows. The
`outcome` of a cell records how its implementation ended.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whyhung.process import gpus
from whyhung.process.child import so_far
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure import limits
from workbook.lab.measure.limits import Ceilings
from workbook.lab.measure.shapes import Shape, shapes_from
from workbook.lab.measure.timing import CAP_S, Clock
from workbook.rooms.comparison.cell import UNKNOWN, Runner, add_graphs, empty
from workbook.rooms.comparison.implementations import all_implementations

ENTRY = "workbook.rooms.comparison.trials:measure_spec"
PROCESS = "the process that measured this shape"
CRASHED = f"{PROCESS}: crash"
MARGIN_S = 30.0  # of a deadline, for start-up and for the call that is running when the budget ends


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    shapes_from(values["shapes"], values["tokens"], values["queries"])
    if wrong := [path for path in values["peers"] if ":" not in path]:
        raise ValueError(f"peers={wrong[0]!r} is not of the form import.path:function")
    all_implementations(values["backends"] or None, values["peers"], values["dense"])


def compare(
    shapes: Sequence[Shape],
    *,
    deadline_s: float,
    budget_s: float = float("inf"),
    share_s: float = CAP_S,
    device: str = "cpu",
    workers: int = 1,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
    entry: str = ENTRY,
    **chosen: Any,
) -> list[dict]:
    """Run `bench` with each shape in a separate process, and return the cells.

    Within a shape all implementations share one process and its inputs. deadline_s: for each shape;
    a budget somewhat below it lets the child report what did not fit. budget_s: for all; a shape
    that would start later is not run. share_s: for each implementation, see `bench`. workers:
    concurrent shapes on a CPU, where Triton's kernels are interpreted; on "cuda" one per visible
    GPU. chosen: arguments of `all_implementations`. A child that does not return leaves the cells
    that it has measured, and one for each other implementation, with `outcome` "oom", "error" or
    "not run" and the reason.
    """
    every = all_implementations(**chosen)
    common = chosen | {"device": device, "threads": threads, "cpu_memory": True, "cap_s": share_s}

    def spec(shape: Shape, s: float) -> dict:
        return common | {"shapes": [shape.to_dict()], "budget_s": max(s - MARGIN_S, 0.7 * s)}

    def cells(shape: Shape, ended: Outcome) -> list[dict]:
        if ended.status == "ok":
            return ended.result["cells"]
        lost = {"outcome": "not run", "message": ended.message}
        if ended.status != "not run":
            lost["message"] = f"{PROCESS}: {ended.status}, {ended.message}"
        if ended.status in ("oom", "error"):
            lost["outcome"] = ended.status
        done = (ended.so_far or {}).get("cells", [])
        return done + [empty(shape, one, device) | lost for one in every[len(done) :]]

    ended = sweep.measure(
        entry,
        shapes,
        spec,
        deadline_s=deadline_s,
        budget_s=budget_s,
        workers=1 if device.startswith("cuda") else workers,  # unless there are GPUs to assign
        gpus=gpus.all_visible() if device == "cuda" else None,
        env={"TRITON_INTERPRET": "1"} if device == "cpu" else None,
        folder=folder,
        progress=progress,
    )
    return [cell for pair in zip(shapes, ended, strict=True) for cell in cells(*pair)]


def measure_spec(spec: dict) -> dict:
    """Run `bench` as a trial: {"shapes", and its keyword arguments} -> {"cells"}."""
    given = dict(spec)
    shapes = [Shape.from_dict(values) for values in given.pop("shapes")]
    if threads := given.pop("threads", None):
        torch.set_num_threads(threads)
    cells: list[dict] = []

    def say(line: str) -> None:
        print(line, flush=True)
        so_far({"cells": cells})

    return {"cells": bench(shapes, say=say, into=cells, **given)}


def bench(
    shapes: Sequence[Shape],
    *,
    device: str | torch.device = "cpu",
    budget_s: float | None = None,
    cap_s: float = CAP_S,
    cpu_memory: bool = False,
    say: Callable[[str], None] = lambda line: None,
    into: list[dict] | None = None,
    **chosen: Any,
) -> list[dict]:
    """Measure one cell, see `cell.empty`, for each shape and implementation, in that order.

    cpu_memory: also record memory on a CPU, by torch's profiler, some builds of which write to
    stderr. into: a list that cells are appended to as they finish, so that an interrupted run keeps
    its results. chosen: arguments of `all_implementations`. Raises ValueError for an unknown
    backend, before anything runs.
    """
    every = all_implementations(**chosen)
    device = torch.device(device)
    runner = Runner(device, Clock(budget_s, cap_s), cpu_memory)
    ceilings: dict[str, Ceilings] = {}
    cells = [] if into is None else into
    measured = []
    for shape in shapes:
        if shape.dtype not in ceilings:
            ceilings[shape.dtype] = UNKNOWN  # if the device cannot be measured; results are kept
            with contextlib.suppress(Exception):
                ceilings[shape.dtype] = limits.measure_ceilings(device, shape.torch_dtype)
        say(f"{shape}")
        drawn, why = runner.draw(shape)
        union = {} if drawn is None else runner.union(drawn)
        for implementation in every:
            cell = empty(shape, implementation, device.type, ceilings[shape.dtype])
            if drawn is None:
                cell["message"] = why
            else:
                cell["union"] = union
                runner.fill(cell, implementation, drawn)
            cells.append(cell)
            measured.append((cell, shape, implementation))
            say("  " + _line_of(cell))
        del drawn
        runner.release()
    if device.type == "cuda":
        add_graphs(measured, runner, lambda cell: say("  graph " + _line_of(cell)))
    return cells


def _line_of(cell: dict) -> str:
    """One line of progress."""
    ms = {mode: values[0] for mode, values in cell["latency_ms"].items() if mode != "step"}
    said = ", ".join(f"{mode} {median:.3g}" for mode, median in ms.items()) + " ms" * bool(ms)
    return f"{cell['name']}: {' '.join(filter(None, (cell['outcome'], said, cell['message'])))}"
