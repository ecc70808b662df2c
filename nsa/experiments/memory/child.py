"""The inside of a memory trial: build the model, warm up, record one step, time some more."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.experiments.memory.cell import Cell
from nsa.lab.measure.recorders import MIB, recorder_for, training_tensors
from nsa.lab.training import open_trainer
from nsa.model.llama import parameter_count
from nsa.model.train import Trainer

TIMED_STEPS = 3
TIMING_SHARE = 0.5  # of the time to the deadline, so that timing never costs the memory figures


def measure_cell(spec: dict) -> dict:
    """The row of one cell: {"cell": Cell.to_dict(), "deadline_s": ..., "threads": int or None}.

    Step 0 warms up: kernels are compiled, the optimizer's state is made. Step 1 is recorded.
    `step_ms` is the median of up to three further steps that nobody observes, NaN if there was no
    time for one. An error says in which step and phase it came. Where the backend does not take
    the model, the row is {"declined": why}.
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
        row = _record(trainer, progress, cell)
        losses.append(row.pop("loss"))
        left = spec["deadline_s"] - (time.monotonic() - started)
        times = _time(trainer, losses, TIMING_SHARE * left - row["recorded_s"])
    return row | {
        "step_ms": 1e3 * sorted(times)[len(times) // 2] if times else float("nan"),
        "step_ms_each": [1e3 * seconds for seconds in times],
        "parameters": parameter_count(trainer.model),
        "losses": losses,
        "device_name": _device_name(cell.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": cell.config().to_dict(),
    }


def _record(trainer: Trainer, progress: "_Progress", cell: Cell) -> dict[str, Any]:
    first_peak = None
    if cell.device == "cuda":
        first_peak = torch.cuda.max_memory_allocated() / MIB
    recorder = recorder_for(cell.device, training_tensors(trainer.model, trainer.optimizer))
    trainer.observers = (progress, recorder)
    started = time.monotonic()
    with witness.recording() as seen, recorder:
        loss = trainer.step(1)
    loss = float(loss)
    recorded_s = time.monotonic() - started
    trainer.observers = (progress,)
    found = recorder.record()
    return {
        "peak_mib": found["peak"] / MIB,
        "reserved_mib": found["reserved"] / MIB if "reserved" in found else float("nan"),
        "first_step_peak_mib": float("nan") if first_peak is None else first_peak,
        **{f"{phase}_mib": size / MIB for phase, size in found["phases"].items()},
        "by_category_mib": _in_mib(found["by_category"]),
        "by_phase_category_mib": {
            phase: _in_mib(sizes) for phase, sizes in found["by_phase_category"].items()
        },
        "held_mib": _in_mib(found["held"]),
        "cross_check": found["cross_check"],
        "witness": seen.record(),
        "recorded_s": recorded_s,
        "loss": loss,
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


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
