"""Subjects of trials: anything that makes steps, named by its import path; and the trial's process.

"package.module:make" names a function make(settings, progress) that returns an object with
step(i) -> the loss of step i, counted from 0: a tensor, a number or None. That is all a third-party
training needs. Optional members: `model`, a torch.nn.Module; `close()`; `oracles()` ->
{name: {"ok", "detail"}}, called at the end; `witness()` -> a record of what ran and `result()` ->
its outcome, both JSON-serializable.

A torch.nn.Module without step(i), its class or a function that makes one gets a default step, see
default_step. "train.py", or "package.module" as by python -m, is a script and run unmodified.

With several ranks each makes its own subject, under torchrun's variables; it joins its process
group itself, with `join` or in any other way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whyhung.process import child, preflight, script, sources, trial
from whyhung.watch import Progress, Unheard, flight_recorder

FAR_S = 3600.0  # beyond any trial: the supervisor ends a trial, not the process group


@dataclass
class Steps:
    """Step function as a subject: `Steps(lambda i: ..., model)`."""

    function: Callable[[int], Any]
    model: Any = None

    def step(self, i: int) -> Any:
        return self.function(i)


def make(path: str, settings: dict[str, Any], progress: Progress) -> Any:
    """Return the subject that `path` names.

    Raises ValueError if there is none, or if the object made has no step(i).
    """
    trial.check_entry(path)
    maker = child.resolve(path)
    if maker is None:
        module, _, name = path.partition(":")
        raise ValueError(f"subject={path!r}: {module} has no {name!r}")
    if _takes_progress(maker):
        subject = maker(settings, progress)
    else:
        from whyhung.process import default_step

        subject = default_step.made(maker, settings, path)
    if not hasattr(subject, "step"):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(subject, torch.nn.Module):
            from whyhung.process import default_step

            return default_step.DefaultStep(subject, path, settings)
        raise ValueError(
            f"subject={path!r} made a {type(subject).__name__}, which has no step(i); "
            "whyhung.process.subject.Steps(function) makes one of a function"
        )
    return subject


def _takes_progress(maker: Any) -> bool:
    """Return True if it is called with (settings, progress), rather than with settings by name."""
    torch = sys.modules.get("torch")
    module = torch.nn.Module if torch is not None else ()
    try:
        names = list(inspect.signature(maker).parameters)
        if isinstance(maker, module):
            return False
        if isinstance(maker, type) and issubclass(maker, module):
            return names[:2] == ["settings", "progress"]
        inspect.signature(maker).bind({}, None)
    except TypeError:
        return False
    except ValueError:  # C code does not tell
        return True
    return True


def rank_and_ranks() -> tuple[int, int]:
    """Return (rank, number of ranks), as set by torchrun; (0, 1) outside it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(backend: str = "gloo") -> tuple[int, int]:
    """Join the process group of a launch; return (rank, ranks). No effect in a single process."""
    from datetime import timedelta

    import torch.distributed as dist

    rank, ranks = rank_and_ranks()
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=FAR_S))
    return rank, ranks


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Body of a trial's process: make given["spec"]'s subject and run its steps.

    Writes its results to left-K.json in given["folder"], however it ends.
    """
    rank, _ = rank_and_ranks()
    folder, spec = Path(given["folder"]), given["spec"]
    stacks = open(folder / f"stacks-{rank}.txt", "a")  # noqa: SIM115  as long as we live
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    progress = Progress(folder / f"progress-{rank}.bin", lasting=True)
    left = {"losses": [], "oracles": {}, "witness": None, "peak_mib": None, "result": None}
    losses: list[Any] = []
    script.keep_output_short()
    stood_on = child.read(folder / "sources.json", {})
    loaded = _Loaded(folder / f"loaded-{rank}.json", stood_on)
    left["source"] = preflight.digest_of(sources.hashes(stood_on))
    try:
        if script.is_script(spec["subject"]):
            _run_script(given, progress, loaded, left)
        else:
            _run(given, progress, loaded, losses, left)
    except BaseException:
        if rank_and_ranks()[1] > 1:  # mismatched collectives show in all ranks' records
            flight_recorder.write(folder, rank)
        raise
    finally:
        with contextlib.suppress(Exception):
            left["losses"] = [str(float(loss)) for loss in losses if loss is not None]
        with contextlib.suppress(Exception):
            left["peak_mib"] = _peak_mib()
        with contextlib.suppress(Exception):
            loaded.leave()
        child.put(folder / f"left-{rank}.json", left)
    return {"steps": spec["steps"]}


class _Loaded:
    """Files imported in addition to those known beforehand; written to `file`."""

    def __init__(self, file: Path, known: Mapping[str, str]) -> None:
        self._file, self._known, self._began = file, known, time.time()

    def leave(self) -> None:
        """Write the list; call after step 0 too, since a killed trial never reaches its end."""
        found = {f: h for f, h in sources.loaded().items() if f not in self._known}
        for file in found:
            with contextlib.suppress(OSError):
                if os.stat(file).st_mtime > self._began:
                    found[file] = "changed while it ran"
        child.put(self._file, found)


class _Nothing(contextlib.nullcontext):
    """Attachment that does nothing; has all methods of an attachment."""

    def __enter__(self) -> _Nothing:
        return self

    def begin(self, step: int) -> None:
        """Called before a step, counted from 0."""

    def end(self, step: int, loss: Any = None) -> None:
        """Called after a step, with its loss if the subject returned one."""

    def results(self, remake: Callable | None = None) -> dict[str, Any]:
        """Return results of oracles; `remake(changes)` remakes the subject with other settings."""
        return {}

    def measured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (measurements for the trial's result, results of oracles about them)."""
        return {}, {}

    def notes(self) -> list[str]:
        """Return sentences for the trial's page, after it is closed."""
        return []

    def witness(self) -> Any:
        """Return a JSON-serializable record of what ran, after it is closed; None if unknown."""


@contextlib.contextmanager
def _attached(given: dict[str, Any], left: dict[str, Any], subject: Any = None) -> Iterator[Any]:
    """Yield the attachment that given["attached"] names, "package.module:Class"; see `_Nothing`."""
    path = given.get("attached")
    if path is None:
        made: Any = _Nothing()
    else:
        made = child.resolve(path)(
            given["spec"], Path(given["folder"]), rank_and_ranks()[0], subject
        )
    try:
        with made:
            yield made
    finally:
        left["notes"] = [*left.get("notes", ()), *made.notes()]
    left["witness"] = subject.witness() if hasattr(subject, "witness") else made.witness()


def _run_script(
    given: dict[str, Any], progress: Progress, loaded: _Loaded, left: dict[str, Any]
) -> None:
    spec = given["spec"]
    _seed(spec["seed"])
    words = script.arguments(spec["argv"], spec["settings"])
    with _attached(given, left) as attached:

        def begin(step: int) -> None:
            if step == 1:
                loaded.leave()
            attached.begin(step)

        done = script.run(spec["subject"], words, progress, begin, attached.end)
        left["result"] = {"steps": done} | attached.measured()[0]
        left["oracles"] = attached.results()


def _run(
    given: dict[str, Any],
    progress: Progress,
    loaded: _Loaded,
    losses: list[Any],
    left: dict[str, Any],
) -> None:
    spec = given["spec"]
    _seed(spec["seed"])
    progress.attach()
    subject = make(spec["subject"], spec["settings"], progress)
    with _attached(given, left, subject) as attached:
        for i in range(spec["steps"]):
            progress.step(i)
            attached.begin(i)
            loss = subject.step(i)
            attached.end(i, loss)
            losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            if i == 0:
                loaded.leave()
        progress.enter("end")

        def remake(changes: dict[str, Any]) -> Any:
            _seed(spec["seed"])
            settings = {**spec["settings"], **changes}
            return make(spec["subject"], settings, Unheard(progress))

        left["oracles"] = attached.results(remake)
        if hasattr(subject, "oracles"):
            left["oracles"] |= subject.oracles()
        left["notes"] = [*left.get("notes", ()), *getattr(subject, "notes", ())]
        if hasattr(subject, "result"):
            left["result"] = subject.result()
        measured, told = attached.measured()
        if measured:
            left["result"] = {**measured, **(left["result"] or {})}
        left["oracles"] |= told
    if hasattr(subject, "close"):
        subject.close()


def _seed(seed: int) -> None:
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def _peak_mib() -> float:
    """Return the peak memory in MiB of the device, or of this process if none is in use."""
    import resource

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
