"""Attachments of a trial for torch models: oracles, a meter, memory snapshots, the witness.

`whyhung.process.runner.run(spec, attached=PATH)` creates `Attached` in each rank's process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbook.lab.measure.steps import StepMeter

PATH = "workbook.lab.attached:Attached"


class Attached(contextlib.ExitStack):
    """All attachments requested by a trial's spec, around the steps of one rank.

    spec: the trial's, as written by `Spec.to_dict`; folder: for a snapshot's files; subject: the
    object that makes the steps, None for a script.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path, rank: int, subject: Any = None):
        super().__init__()
        self._spec, self._subject = spec, subject
        self._make = folder, rank
        self._seen = self._meter = self._made = self._recorded = None
        self._parts: list[Any] = []  # called at a step's begin in this order, at its end reversed

    @staticmethod
    def check(asked: tuple[str, ...]) -> None:
        """Raise ValueError for unknown oracles."""
        from workbook.lab import oracles

        oracles.check(asked)

    @staticmethod
    def merge(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the results of all ranks into one."""
        from workbook.lab import oracles

        return oracles.merge(by_rank)

    def __enter__(self) -> Attached:
        if self._spec["oracles"]:
            from workbook.lab import oracles

            watch = oracles.Watch(self._spec["oracles"], self._subject, self._spec["settings"])
            self._seen = self.enter_context(watch)
            self._parts.append(self._seen)
        witness = sys.modules.get("nsa.attention.witness")
        if witness is not None and self._subject is not None:
            self._recorded = self.enter_context(witness.recording())
        if "measure" in self._spec["observers"]:
            self._meter = StepMeter()
            self._parts.append(self._meter)
        self._take_snapshots()
        return self

    def _take_snapshots(self) -> None:
        asked = dict(name.split("=") for name in self._spec["observers"] if "=" in name)
        if "memory_snapshot" not in asked:
            return
        import torch

        from workbook.lab.observers.memory_snapshot import MemorySnapshot

        model = getattr(self._subject, "model", None)
        model = model if isinstance(model, torch.nn.Module) else None
        made = MemorySnapshot(int(asked["memory_snapshot"]), *self._make, model=model)
        self.callback(made.close)
        self._made = made
        trainer = getattr(self._subject, "trainer", None)
        if hasattr(trainer, "steps_done"):  # our own trainer reports its phases
            trainer.observers = (*trainer.observers, made)
        else:
            self._parts.append(made)

    def begin(self, step: int) -> None:
        """Call before a step; steps are counted from 0."""
        for part in self._parts:
            part.begin(step)

    def end(self, step: int, loss: Any = None) -> None:
        """Call after a step. Reversed order: the others' work is not part of the step's time."""
        for part in reversed(self._parts):
            part.end(step, loss)

    def results(self, remake: Callable | None = None) -> dict[str, Any]:
        """Results of the oracles, {} without any."""
        return {} if self._seen is None else self._seen.results(remake)

    def measured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (measurements of the steps, results of oracles about them)."""
        if self._meter is None:
            return {}, {}
        found = self._meter.result()
        if not hasattr(self._subject, "measured"):
            return found, {}
        more, told = self._subject.measured(count="count" in self._spec["observers"])
        return found | more, told

    def notes(self) -> list[str]:
        """Notes of a snapshot, after it is closed."""
        return [] if self._made is None else list(self._made.notes)

    def witness(self) -> dict[str, Any] | None:
        """Attention implementations that ran, or None if none of ours did."""
        recorded = self._recorded
        return recorded.record() if recorded is not None and recorded.paths else None
