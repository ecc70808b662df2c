"""A benchmark whose shapes each run in a child process: one that crashes or hangs leaves rows."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nsa.experiments.comparison import bench
from nsa.experiments.comparison.cell import empty
from nsa.lab.measure import limits
from nsa.lab.measure.limits import Ceilings
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import CAP_S
from nsa.lab.process import gpus
from nsa.lab.process.trial import place_of, run_child
from nsa.lab.sweep import Budget

ENTRY = "nsa.experiments.comparison.bench:measure_spec"
PROCESS = "the process that measured this shape"
CRASHED = f"{PROCESS}: crash"
MARGIN_S = 30.0  # of a deadline, for start-up and for what is running when the budget ends


def compare(
    shapes: Sequence[Shape],
    *,
    deadline_s: float,
    budget_s: float = float("inf"),
    share_s: float = CAP_S,
    device: str = "cpu",
    workers: int = 1,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] = (),
    with_dense: bool = True,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
    entry: str = ENTRY,
) -> list[dict]:
    """The cells of `comparison.bench.bench`, each shape measured in a process of its own.

    Within a shape all implementations share one process and its inputs. deadline_s: for each shape;
    a budget somewhat below it lets the child say what did not fit. budget_s: for all; a shape whose
    turn comes later is not run. share_s: for each implementation, see `bench`. workers: shapes at
    once on a CPU, where Triton's kernels run interpreted; on "cuda" one on each visible GPU. A
    child that gives no result leaves a cell for each implementation, `outcome` "oom", "error" or
    "not run", and the reason.
    """
    every = bench.all_implementations(backends, peers, with_dense)
    spec = {
        "backends": None if backends is None else list(backends),
        "peers": list(peers),
        "with_dense": with_dense,
        "device": device,
        "threads": threads,
        "cpu_memory": True,
        "cap_s": share_s,
    }
    budget, done, stop = Budget(budget_s), 0, threading.Event()
    lent = gpus.all_visible() if device == "cuda" else gpus.Gpus()

    def one(gpu: str | None, numbered: tuple[int, Shape]) -> list[dict]:
        nonlocal done
        number, shape = numbered
        mine_s = budget.share(deadline_s)
        if mine_s <= 0:
            return [_lost(shape, i, "not run", budget.used_up, device) for i in every]
        within = {"shapes": [shape.to_dict()], "budget_s": max(mine_s - MARGIN_S, 0.7 * mine_s)}
        outcome = run_child(
            entry,
            spec | within,
            deadline_s=mine_s,
            folder=place_of(folder, number, shape),
            env={"TRITON_INTERPRET": "1"} if device == "cpu" else gpus.only(gpu),
            stop=stop,
        )
        done += 1
        if progress:
            how = f"{outcome.status}, {outcome.seconds:.1f} s {outcome.message}".strip()
            print(f"[{done}/{len(shapes)}] {shape}: {how}", file=sys.stderr, flush=True)
        if outcome.status == "ok":
            return outcome.result["cells"]
        status = outcome.status if outcome.status in ("oom", "error") else "not run"
        message = f"{PROCESS}: {outcome.status}, {outcome.message}"
        return [_lost(shape, i, status, message, device) for i in every]

    at_once = 1 if device.startswith("cuda") else workers  # unless there are GPUs to lend
    found = lent.map(one, enumerate(shapes), at_once, stop=stop)
    return [cell for cells in found for cell in cells]


def _lost(shape: Shape, implementation, outcome: str, message: str, device: str) -> dict:
    nan = float("nan")
    work = limits.work(shape, implementation.operation)
    return empty(shape, implementation) | {
        "outcome": outcome,
        "message": message,
        "ceilings": asdict(Ceilings(nan, nan)),
        "union": {},
        "timing": "absolute" if device.startswith("cuda") else "not meaningful",
        "limit_ms": dict.fromkeys(work, nan),
    }
