"""The inside of a memory trial: build the model, warm up, record one step, time some more."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.experiments.memory.cell import Cell, Measured
from nsa.lab.measure.recorders import MIB, recorder_for, training_tensors
from nsa.lab.training import open_trainer
from nsa.model.llama import parameter_count
from nsa.model.train import Trainer

TIMED_STEPS = 3
TIMING_SHARE = 0.5  # of the time to the deadline, so that timing never costs the memory figures


def measure_cell(spec: dict) -> dict:
    """`Measured` of a cell: {"cell": Cell.to_dict(), "deadline_s": ..., "threads": int or None}.

    Step 0 warms up: kernels are compiled, the optimizer's state is made. Step 1 is recorded. Up to
    three further steps are timed, as many as there is time for. An error says in which step and
    phase it came. Where the backend does not take the model, it is {"declined": why}.
    """
    started = time.monotonic()
    cell = Cell.from_dict(spec["cell"])
    progress = _Progress()
    opened = open_trainer(cell.spec(), threads=spec.get("threads"), observers=(progress,))
    with opened as trainer, progress.noted():
        try:
            losses = [float(trainer.step(0))]
        except Declined as refusal:
            return {"declined": str(refusal)}
        recorded = _record(trainer, progress, cell, losses)
        left = spec["deadline_s"] - (time.monotonic() - started)
        times = _time(trainer, losses, TIMING_SHARE * left - recorded["recorded_s"])
    timed = {"step_ms_each": [1e3 * seconds for seconds in times]}
    if times:
        timed["step_ms"] = 1e3 * sorted(times)[len(times) // 2]
    return asdict(
        Measured(
            **recorded,
            **timed,
            parameters=parameter_count(trainer.model),
            losses=losses,
            device_name=torch.cuda.get_device_name() if cell.device == "cuda" else "cpu",
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            model=cell.config().to_dict(),
        )
    )


def _record(
    trainer: Trainer, progress: "_Progress", cell: Cell, losses: list[float]
) -> dict[str, Any]:
    """The fields of Measured that one recorded step gives; its loss goes to `losses`."""
    on_gpu = {}
    if cell.device == "cuda":
        on_gpu["first_step_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
    recorder = recorder_for(cell.device, training_tensors(trainer.model, trainer.optimizer))
    trainer.observers = (progress, recorder)
    started = time.monotonic()
    with witness.recording() as seen, recorder:
        loss = trainer.step(1)
    losses.append(float(loss))
    recorded_s = time.monotonic() - started
    trainer.observers = (progress,)
    found = recorder.record()
    if "reserved" in found:
        on_gpu["reserved_mib"] = found["reserved"] / MIB
    return on_gpu | {
        "peak_mib": found["peak"] / MIB,
        **{f"{phase}_mib": size / MIB for phase, size in found["phases"].items()},
        "by_category_mib": _in_mib(found["by_category"]),
        "by_phase_category_mib": {
            phase: _in_mib(sizes) for phase, sizes in found["by_phase_category"].items()
        },
        "held_mib": _in_mib(found["held"]),
        "cross_check": found["cross_check"],
        "witness": seen.record(),
        "recorded_s": recorded_s,
    }


def _time(trainer: Trainer, losses: list[float], budget_s: float) -> list[float]:
    times: list[float] = []
    while len(times) < TIMED_STEPS and sum(times) + max(times, default=0.0) < budget_s:
        started = time.perf_counter()
        losses.append(float(trainer.step(len(losses))))  # float() waits for the loss ...
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()  # ... and this for the optimizer
        times.append(time.perf_counter() - started)
    return times


class _Progress:
    """Remembers where the loop is, so that an error can say it."""

    def __init__(self) -> None:
        self.place = "before the first step"

    def on_phase(self, name: str, step: int) -> None:
        self.place = f"in step {step}, phase {name}"

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(self.place)
            raise


def _in_mib(sizes: dict[str, int]) -> dict[str, float]:
    return {name: size / MIB for name, size in sizes.items()}
