"""What a trial runs: anything that makes steps, named by its import path.

"package.module:make" names a function make(settings, progress) that returns an object with
step(i) -> the step's loss, or None. That is all a stranger's training needs. What else it has is
used: `model`, a torch.nn.Module; `close()`; `oracles()` -> {name: {"ok", "detail"}}, asked at the
end; `witness()` -> what ran and `result()` -> what came of it, both JSON-able.

Of several ranks each makes its own subject, under torchrun's variables; it joins its process group
itself, with `join` or any other way.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nsa.lab.process import trial
from nsa.lab.watch import Progress


@runtime_checkable
class Subject(Protocol):
    """The least that a subject has."""

    def step(self, i: int) -> Any:
        """Step number i, from 0; returns the loss, a tensor or a number, or None."""


@dataclass
class Steps:
    """A step function as a subject: `Steps(lambda i: ..., model)`."""

    function: Callable[[int], Any]
    model: Any = None

    def step(self, i: int) -> Any:
        return self.function(i)


def make(path: str, settings: dict[str, Any], progress: Progress) -> Subject:
    """The subject that `path` names. A torch.nn.Module or a function of one step will do as well.

    ValueError where there is none, or where what was made has no step(i).
    """
    trial.check_entry(path)
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"subject={path!r}: {module} has no {name!r}")
        found = getattr(found, part)
    subject = found(settings, progress)
    if not isinstance(subject, Subject):
        raise ValueError(
            f"subject={path!r} made a {type(subject).__name__}, which has no step(i); "
            "nsa.lab.process.subject.Steps(function) makes one of a function"
        )
    return subject


def rank_and_ranks() -> tuple[int, int]:
    """This process's place, as torchrun says; (0, 1) outside it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(backend: str = "gloo", timeout_s: float = 3600.0) -> tuple[int, int]:
    """Joins the process group of a launch; (rank, ranks). Nothing happens in a single process.

    The timeout is far beyond any trial's: the supervisor ends a trial, not the process group.
    """
    from datetime import timedelta

    import torch.distributed as dist

    rank, ranks = rank_and_ranks()
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return rank, ranks
