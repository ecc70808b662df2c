"""Child processes: a part of a soak, and a training under one allocator setting."""

import contextlib
import gc
import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.attention import witness
from nsa.model.train import Trainer
from workbook.lab.measure.recorders import MIB, MemorySamples, live_cpu_storages
from workbook.lab.measure.steps import StepMeter, facts
from workbook.lab.measure.timing import mark, seconds_between, wait
from workbook.lab.observers.guard_rules import levels
from workbook.lab.observers.guards import Guards, Stopped, explained, save_or_say
from workbook.lab.search.factors import CUBLAS
from workbook.lab.training import TrainingSpec, open_trainer
from workbook.rooms.soak.trials import COLUMNS, FILE, PLANT_AFTER

CHUNK = 20  # steps between writes to the file, each of which waits for the device once


class Samples:
    """Observer that writes a line for each step to `file`, with COLUMNS, in chunks.

    `seconds` use the device's own clock, NaN for the first step of a chunk, which begins with an
    idle device. MiB are measured after the step; `tensors_mib` is what torch's allocator has handed
    out, or on a CPU the size of tensors made since the start. Nothing is waited for before `write`.
    Garbage, some KiB per step, is not growth: it is collected there.
    """

    def __init__(self, trainer: Trainer, file: Path) -> None:
        self.device, self.file = trainer.device, file
        self.memory = MemorySamples(trainer.device)
        self.steps: list[int] = []
        self.tensors_mib = [] if self.device.type == "cpu" else self.memory.device_mib
        gc.collect()
        gc.freeze()  # existing objects stay and are not scanned repeatedly
        self.marks = [mark(self.device)]
        file.write_text(",".join(COLUMNS) + "\n")

    def on_step(self, step: int, loss: Tensor) -> None:
        self.marks.append(mark(self.device))
        self.steps.append(step)
        self.memory.take()
        if self.device.type == "cpu":
            self.tensors_mib.append(sum(live_cpu_storages().values()) / MIB)

    def write(self, guards: Guards) -> None:
        """Write the lines of the steps since the last call, with their losses from the guards.
        Waits for the device."""
        wait(self.device)
        seconds = [math.nan, *(seconds_between(*pair) for pair in pairwise(self.marks[1:]))]
        told = {step: (loss, norm) for step, loss, norm in guards.take()}
        new, held = len(self.steps), self.memory
        series = (self.tensors_mib, held.reserved_mib, held.peak_mib, held.host_mib)
        columns = [one[-new:] if one else [math.nan] * new for one in series]
        with self.file.open("a") as file:
            for step, took, *mib in zip(self.steps, seconds, *columns, strict=False):
                row = (step, took, *mib, *told.get(step, (math.nan, math.nan)))
                file.write(",".join(map(repr, row)) + "\n")
        self.steps.clear()
        gc.collect()
        self.marks = [mark(self.device)]

    @property
    def limited_mib(self) -> float:
        """MiB that a guard compares with its memory limit, after the last step."""
        return (self.memory.peak_mib or self.memory.host_mib)[-1]

    def close(self) -> None:
        gc.unfreeze()


class Leak:
    """Observer that keeps one more tensor after every step."""

    def __init__(self, mib: float, device: torch.device) -> None:
        self.mib, self.device, self.kept = mib, device, []

    def on_step(self, step: int, loss: Tensor) -> None:
        self.kept.append(torch.ones(round(self.mib * MIB / 4), device=self.device))


def sum_in_a_fixed_order() -> None:
    """Make a restarted training comparable bit for bit with one that went on. By default torch
    sums the gradient of an embedding on a GPU in any order, so that no two trainings are equal."""
    for name, value in CUBLAS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def train(spec: dict) -> dict[str, Any]:
    """Train to step `until`, with a line per step in `folder`/samples.csv.

    spec: {"cell": TrainingSpec.to_dict(), "folder", "until"}, and optionally {"threads", "resume":
    a checkpoint, "save_at": the step before which one is written, to "checkpoints", "guard": texts
    of `--guard`, "leak_mib": per step after the first PLANT_AFTER, "over_mib": [warn, stop], limits
    above the memory held by then, "changes": of the TrainConfig}.

    Returns {"steps_done", "saved": file or why not, "stop": how a guard ended it, or None,
    "warnings", "limits_mib", "paths"} and `facts`.
    """
    cell, folder = TrainingSpec.from_dict(spec["cell"]), Path(spec["folder"])
    guard, limits, saved, stop = list(spec.get("guard", ())), [], "", None
    ahead = cell.device == "cuda"  # its host must not wait for text; on a CPU it would take cores
    how = {"nonfinite": "stop", **spec.get("changes", {})}
    if ahead:
        sum_in_a_fixed_order()
    with contextlib.ExitStack() as opened:
        trainer = opened.enter_context(
            open_trainer(cell, threads=spec.get("threads"), prefetch=ahead, **how)
        )
        seen = opened.enter_context(witness.recording())
        if spec.get("resume"):
            trainer.load(spec["resume"])
        samples, guards = Samples(trainer, folder / FILE), Guards(levels=levels(guard))
        trainer.observers = (samples, guards)
        try:
            if spec.get("leak_mib"):
                _steps(trainer, PLANT_AFTER, samples, guards)
                limits = [samples.limited_mib + more for more in spec["over_mib"]]
                guard.append("memory={:.4f}MiB:warn,{:.4f}MiB:stop".format(*limits))
                guards = Guards(levels=levels(guard))
                trainer.observers = (Leak(spec["leak_mib"], trainer.device), samples, guards)
            for end in _ends(trainer.steps_done, spec["until"], spec.get("save_at")):
                _steps(trainer, end, samples, guards)
                if end == spec.get("save_at"):
                    saved = save_or_say(trainer, Path(spec["checkpoints"]))
        except Stopped as stopped:
            stop = explained(stopped, trainer)
            with contextlib.suppress(Stopped):
                guards.settle()  # the losses of the last steps
            samples.write(guards)
            if stop.reason != "non_finite":
                saved = save_or_say(trainer, Path(spec["checkpoints"]))
        return {
            "steps_done": trainer.steps_done,
            "saved": saved,
            "stop": None if stop is None else stop.record(),
            "warnings": guards.warnings,
            "limits_mib": limits,
            "paths": {branch: sorted(by) for branch, by in seen.record()["paths"].items()},
        } | facts(trainer)


def _ends(now: int, until: int, save_at: int | None) -> Iterator[int]:
    if save_at is not None and now < save_at < until:
        yield save_at
    yield until


def _steps(trainer: Trainer, until: int, samples: Samples, guards: Guards) -> None:
    while trainer.steps_done < until:
        for step in range(trainer.steps_done, min(until, trainer.steps_done + CHUNK)):
            trainer.step(step)
        guards.settle()
        samples.write(guards)


def under_setting(spec: dict) -> dict[str, Any]:
    """Measure steps from idle to idle, under the environment's allocator setting:
    {"cell", "steps", "threads"}. Returns `StepMeter.result`, a value per step, and
    "losses"."""
    cell, meter, losses = TrainingSpec.from_dict(spec["cell"]), StepMeter(), []
    if cell.device == "cuda":
        sum_in_a_fixed_order()
    with open_trainer(cell, threads=spec.get("threads")) as trainer:
        for step in range(spec["steps"]):
            meter.begin()
            losses.append(trainer.step(step))
            meter.end()
        return meter.result() | {"losses": torch.stack(losses).tolist()}
