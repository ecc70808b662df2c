"""The inside of a trial's process: makes the subject, does its steps, writes down what it saw."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from pathlib import Path
from typing import Any

from nsa.lab.process import preflight
from nsa.lab.process.rank_child import put
from nsa.lab.process.subject import make, rank_and_ranks
from nsa.lab.watch import Progress, Unheard


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Runs given["spec"]; leaves left-K.json in given["folder"], however it ends."""
    rank, _ = rank_and_ranks()
    folder, spec = Path(given["folder"]), given["spec"]
    stacks = open(folder / f"stacks-{rank}.txt", "a")  # noqa: SIM115  as long as we live
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    progress = Progress(folder / f"progress-{rank}.bin", rank=rank, lasting=True)
    progress.listens()
    left: dict[str, Any] = {"losses": [], "oracles": {}, "witness": None, "peak_mib": None}
    left["result"] = None
    losses: list[Any] = []
    try:
        _run(spec, progress, losses, left)
    finally:
        with contextlib.suppress(Exception):
            left["losses"] = [str(float(loss)) for loss in losses if loss is not None]
        with contextlib.suppress(Exception):
            left["peak_mib"] = _peak_mib()
        put(folder / f"left-{rank}.json", left)
    return {"steps": spec["steps"]}


def _run(spec: dict[str, Any], progress: Progress, losses: list[Any], left: dict[str, Any]) -> None:
    _seed(spec["seed"])
    progress.attach()
    subject = make(spec["subject"], spec["settings"], progress)
    left["source"] = preflight.source_hash(spec["subject"])
    with _watching(spec, subject) as seen, _witnessed(subject, left):
        for i in range(spec["steps"]):
            progress.step(i)
            seen.begin(i)
            loss = subject.step(i)
            losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            seen.end(i, loss)
        progress.enter("end")

        def remake(changes: dict[str, Any]) -> Any:
            _seed(spec["seed"])
            settings = {**spec["settings"], **changes}
            return make(spec["subject"], settings, Unheard(progress))

        left["oracles"] = seen.results(remake)
        if hasattr(subject, "oracles"):
            left["oracles"] |= subject.oracles()
        if hasattr(subject, "result"):
            left["result"] = subject.result()
    if hasattr(subject, "close"):
        subject.close()


@contextlib.contextmanager
def _witnessed(subject: Any, left: dict[str, Any]) -> Any:
    """Which implementations of attention ran, where any of ours is there to run."""
    witness = sys.modules.get("nsa.attention.witness")
    if witness is None:
        yield
    else:
        with witness.recording() as recorded:
            yield
        if recorded.paths:
            left["witness"] = recorded.record()
    if hasattr(subject, "witness"):
        left["witness"] = subject.witness()


@contextlib.contextmanager
def _watching(spec: dict[str, Any], subject: Any) -> Any:
    if not spec["oracles"]:
        yield _Nobody()
        return
    from nsa.lab import oracles

    with oracles.Watch(spec["oracles"], subject, spec["settings"]) as seen:
        yield seen


class _Nobody:
    """No oracle was asked for."""

    def begin(self, step: int) -> None: ...

    def end(self, step: int, loss: Any) -> None: ...

    def results(self, remake: Any) -> dict[str, Any]:
        return {}


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
