"""A benchmark whose shapes each run in a child process: one that crashes or hangs leaves rows."""

from collections.abc import Sequence
from pathlib import Path

from nsa.experiments.comparison import bench
from nsa.experiments.comparison.cell import empty
from nsa.lab import sweep
from nsa.lab.measure.shapes import Shape
from nsa.lab.measure.timing import CAP_S
from nsa.lab.process import gpus
from nsa.lab.process.trial import Outcome

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
    common = {
        "backends": None if backends is None else list(backends),
        "peers": list(peers),
        "with_dense": with_dense,
        "device": device,
        "threads": threads,
        "cpu_memory": True,
        "cap_s": share_s,
    }

    def spec(shape: Shape, seconds: float) -> dict:
        budget_s = max(seconds - MARGIN_S, 0.7 * seconds)
        return common | {"shapes": [shape.to_dict()], "budget_s": budget_s}

    def cells(shape: Shape, ended: Outcome) -> list[dict]:
        if ended.status == "ok":
            return ended.result["cells"]
        status = ended.status if ended.status in ("oom", "error") else "not run"
        message = ended.message
        if ended.status != "not run":
            message = f"{PROCESS}: {ended.status}, {message}"
        lost = {"outcome": status, "message": message}
        return [empty(shape, implementation, device) | lost for implementation in every]

    ended = sweep.measure(
        entry,
        shapes,
        spec,
        deadline_s=deadline_s,
        budget_s=budget_s,
        workers=1 if device.startswith("cuda") else workers,  # unless there are GPUs to lend
        gpus=gpus.all_visible() if device == "cuda" else None,
        env={"TRITON_INTERPRET": "1"} if device == "cpu" else None,
        folder=folder,
        progress=progress,
    )
    return [cell for pair in zip(shapes, ended, strict=True) for cell in cells(*pair)]
