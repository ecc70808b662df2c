"""The exhibit as a trial's subject: its loop, its console, and what slowed it.

The case study's script wrote a debug line at the start of the first five steps and a loss at step 1
and at every twentieth. Between step 5 and step 20 a healthy run is silent, however long a step is.
"""

import math
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbook.rooms.case_study.loop.design import design
from workbook.rooms.case_study.loop.model import build


@dataclass(frozen=True)
class PrintSchedule:
    """Steps count from 1: a debug line at the start of steps 1 to `first`, a loss at the end of
    step 1 and of every `every`-th."""

    first: int = 5
    every: int = 20

    def __post_init__(self) -> None:
        if self.first < 0 or self.every < 1:
            raise ValueError(
                f"first={self.first}, every={self.every}: `first` must be at least 0, `every` at "
                "least 1; the case study's are 5 and 20"
            )

    def at_start(self, step: int) -> bool:
        return step <= self.first

    def at_end(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def last_line(self, started: int, ended: int) -> int | None:
        """Step of the last line, once `started` steps have begun and `ended` of them are over.

        None before the first line. This is the step at which the old rule reports a hang.
        """
        lines = [step for step in range(1, started + 1) if self.at_start(step)]
        lines += [step for step in range(1, ended + 1) if self.at_end(step)]
        return max(lines, default=None)

    def silences(self, steps: int) -> list[tuple[int, int]]:
        """(line, next line) wherever more than one step passes between two lines."""
        lines = [s for s in range(1, steps + 1) if self.at_start(s) or self.at_end(s)]
        return [(a, b) for a, b in pairwise(lines) if b - a > 1]

    def debug(self, step: int, shape: Iterable[int]) -> str:
        return f"[debug] step {step}: input {tuple(shape)}"

    def loss(self, step: int, loss: float, rate: float) -> str:
        return f"step {step:04d} | loss {loss:.4f} | lr {rate:.2e}"


CASE_STUDY = PrintSchedule()


def last_step(text: str) -> int | None:
    """Step of the last line of a console; None if no line names one."""
    found = re.findall(r"^(?:\[debug\] )?step 0*(\d+)\b", text, re.MULTILINE)
    return int(found[-1]) if found else None


DEFAULTS = {
    "design": "tiny",  # name of a design in workbook.rooms.case_study.loop.design
    "changes": {},  # to that design
    "tokens": 128,
    "batch": 1,
    "device": "cpu",
    "seed": 1337,
    "lr": 1e-5,
    "first": 5,  # print schedule
    "every": 20,
    "aux_stats": False,  # gate statistics, read to the host in every step
    "tracing": False,  # write every operation by name
    "checkpointing": False,
    "lock_at": 0,  # step, from 1, that takes a lock twice (a planted hang); 0 for none
    "threads": None,
}


class ExhibitLoop:
    """Trains on random bytes with AdamW, and prints the same lines as the case study's script.

    ValueError for a setting that DEFAULTS does not have.
    """

    def __init__(self, given: dict[str, Any], progress: Any = None) -> None:
        if unknown := sorted(set(given) - set(DEFAULTS)):
            known = ", ".join(DEFAULTS)
            raise ValueError(f"an exhibit has no setting {unknown[0]!r}; it has {known}")
        self.settings = settings = DEFAULTS | given
        if settings["threads"]:
            torch.set_num_threads(settings["threads"])
        self._enter = progress.phase if progress else lambda phase: None
        self._backward = progress.backward if progress else torch.Tensor.backward
        self.schedule = PrintSchedule(settings["first"], settings["every"])
        chosen = design(settings["design"], **settings["changes"])
        options = {"checkpointing": settings["checkpointing"]}
        self.model = build(chosen, settings["seed"], settings["device"], **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings["lr"])
        self.stats: list[float] = []
        if settings["aux_stats"]:
            for block in self.model.blocks:
                block.attention.gate.register_forward_hook(self._statistics)

    def step(self, i: int) -> torch.Tensor:
        """Run step i, from 0; the console counts from 1."""
        with Trace() if self.settings["tracing"] else nullcontext():
            self._enter("data")
            tokens, targets = self.batch(i)
            if self.schedule.at_start(i + 1):
                print(self.schedule.debug(i + 1, tokens.shape), flush=True)
            self._enter("forward")
            if i + 1 == self.settings["lock_at"]:
                taken_twice(threading.Lock())
            _, loss = self.model(tokens, targets)
            self._enter("backward")
            self._backward(loss)
            self._enter("optimizer")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.schedule.at_end(i + 1):
                print(self.schedule.loss(i + 1, loss.item(), self.settings["lr"]), flush=True)
            self._enter("end")
            return loss.detach()

    def batch(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random bytes of step i and the ones after them: nothing to learn but their range."""
        settings = self.settings
        generator = torch.Generator().manual_seed(settings["seed"] + i)
        shape = (settings["batch"], settings["tokens"] + 1)
        drawn = torch.randint(self.model.design.vocab, shape, generator=generator)
        drawn = drawn.to(settings["device"])
        return drawn[:, :-1], drawn[:, 1:]

    def witness(self) -> dict[str, Any]:
        """Path witness: two variants with equal witnesses would compare a program with itself."""
        chosen = self.model.design
        switches = {n: self.settings[n] for n in ("aux_stats", "tracing", "checkpointing")}
        return {"attention": chosen.path, "defects": list(chosen.defects)} | switches

    def close(self) -> None:
        sys.stdout.flush()

    def _statistics(self, gate, args, weights) -> None:
        entropy = -(weights * weights.clamp_min(1e-9).log()).sum(-1)
        self.stats = [entropy.mean().item() / math.log(3), weights.max().item()]


def taken_twice(lock: threading.Lock) -> None:
    """Deadlock on purpose: wait for a lock that this thread holds."""
    with lock, lock:
        pass


make = ExhibitLoop  # the name in a trial's spec


class Trace(TorchDispatchMode):
    """Records every operation with its first shape, like the trace of the hang."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        self.lines.append(f"{operation} {shape}")
        return operation(*args, **(kwargs or {}))
