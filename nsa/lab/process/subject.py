"""What a trial runs: anything that makes steps, named by its import path; and the trial's inside.

"package.module:make" names a function make(settings, progress) that returns an object with
step(i) -> the loss of step i, counted from 0: a tensor, a number or None. That is all a stranger's
training needs. What else it has is used: `model`, a torch.nn.Module; `close()`; `oracles()` ->
{name: {"ok", "detail"}}, asked at the end; `witness()` -> what ran and `result()` -> what came of
it, both JSON-able.

Of several ranks each makes its own subject, under torchrun's variables; it joins its process group
itself, with `join` or any other way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.lab.process import child, preflight, trial
from nsa.lab.watch import Progress, Unheard, flight_recorder

FAR_S = 3600.0  # beyond any trial: the supervisor ends a trial, not the process group


@dataclass
class Steps:
    """A step function as a subject: `Steps(lambda i: ..., model)`."""

    function: Callable[[int], Any]
    model: Any = None

    def step(self, i: int) -> Any:
        return self.function(i)


def make(path: str, settings: dict[str, Any], progress: Progress) -> Any:
    """The subject that `path` names.

    ValueError where there is none, or where what was made has no step(i).
    """
    trial.check_entry(path)
    maker = child.resolve(path)
    if maker is None:
        module, _, name = path.partition(":")
        raise ValueError(f"subject={path!r}: {module} has no {name!r}")
    subject = maker(settings, progress)
    if not hasattr(subject, "step"):
        raise ValueError(
            f"subject={path!r} made a {type(subject).__name__}, which has no step(i); "
            "nsa.lab.process.subject.Steps(function) makes one of a function"
        )
    return subject


def rank_and_ranks() -> tuple[int, int]:
    """This process's place, as torchrun says; (0, 1) outside it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(backend: str = "gloo") -> tuple[int, int]:
    """Joins the process group of a launch; (rank, ranks). Nothing happens in a single process."""
    from datetime import timedelta

    import torch.distributed as dist

    rank, ranks = rank_and_ranks()
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=FAR_S))
    return rank, ranks


def run(given: dict[str, Any]) -> dict[str, Any]:
    """The inside of a trial's process: makes given["spec"]'s subject and does its steps.

    Leaves what it saw in left-K.json in given["folder"], however it ends.
    """
    rank, _ = rank_and_ranks()
    folder, spec = Path(given["folder"]), given["spec"]
    stacks = open(folder / f"stacks-{rank}.txt", "a")  # noqa: SIM115  as long as we live
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    progress = Progress(folder / f"progress-{rank}.bin", rank=rank, lasting=True)
    progress.listens()
    left = {"losses": [], "oracles": {}, "witness": None, "peak_mib": None, "result": None}
    losses: list[Any] = []
    try:
        _run(spec, progress, losses, left)
    except BaseException:
        if rank_and_ranks()[1] > 1:  # collectives that do not match are told by all ranks' records
            flight_recorder.write(folder, rank)
        raise
    finally:
        with contextlib.suppress(Exception):
            left["losses"] = [str(float(loss)) for loss in losses if loss is not None]
        with contextlib.suppress(Exception):
            left["peak_mib"] = _peak_mib()
        child.put(folder / f"left-{rank}.json", left)
    return {"steps": spec["steps"]}


def _run(spec: dict[str, Any], progress: Progress, losses: list[Any], left: dict[str, Any]) -> None:
    _seed(spec["seed"])
    progress.attach()
    subject = make(spec["subject"], spec["settings"], progress)
    left["source"] = preflight.source_hash(spec["subject"])
    watched: Any = contextlib.nullcontext()
    if spec["oracles"]:
        from nsa.lab import oracles

        watched = oracles.Watch(spec["oracles"], subject, spec["settings"])
    with watched as seen, _witnessed(subject, left):
        for i in range(spec["steps"]):
            progress.step(i)
            if seen is not None:
                seen.begin(i)
            loss = subject.step(i)
            losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            if seen is not None:
                seen.end(i, loss)
        progress.enter("end")

        def remake(changes: dict[str, Any]) -> Any:
            _seed(spec["seed"])
            settings = {**spec["settings"], **changes}
            return make(spec["subject"], settings, Unheard(progress))

        if seen is not None:
            left["oracles"] = seen.results(remake)
        if hasattr(subject, "oracles"):
            left["oracles"] |= subject.oracles()
        if hasattr(subject, "result"):
            left["result"] = subject.result()
    if hasattr(subject, "close"):
        subject.close()


@contextlib.contextmanager
def _witnessed(subject: Any, left: dict[str, Any]) -> Iterator[None]:
    """Which implementations of attention ran, where any of ours is there to run."""
    witness = sys.modules.get("nsa.attention.witness")
    with witness.recording() if witness else contextlib.nullcontext() as recorded:
        yield
    if recorded is not None and recorded.paths:
        left["witness"] = recorded.record()
    if hasattr(subject, "witness"):
        left["witness"] = subject.witness()


def _seed(seed: int) -> None:
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def _peak_mib() -> float:
    """Of the device, or of this process where none is in use."""
    import resource

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
