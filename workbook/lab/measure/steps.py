"""Costs of a step: seconds from idle to idle device, memory at its peak, operations dispatched.

The steps of a trial are timed without instrumentation. Measurements that slow a step (phases,
allocations, gradients, operations) follow afterwards, each in separate steps.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a user's training imports none of ours
    from nsa.model.train import Trainer

# Names of the measurements in a trial's result: one number, or one per step.
MEASURED = (
    "seconds", "processor", "forward", "backward", "optimizer", "allocated", "reserved",
    "fragmentation", "growing", "operations", "nodes",
)  # fmt: skip
MIB = 2**20
PHASE_STEPS = 3  # steps with timed phases: the median counts
CONSTANT = ("parameters", "gradients", "optimizer_state", "resident")  # at any T; others grow


class StepMeter:
    """Meter for any training in this process: begin() before and end() after each step.

    On a GPU both synchronize the device, and end() reads the step's peaks from torch's allocator.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)
        self._began = self._cpu_began = 0.0

    def begin(self, *_: Any) -> None:
        cuda = _cuda()
        if cuda is not None:
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def end(self, *_: Any) -> None:
        cuda = _cuda()
        if cuda is not None:
            cuda.synchronize()
        self.found["seconds"].append(time.perf_counter() - self._began)
        self.found["processor"].append(time.process_time() - self._cpu_began)
        if cuda is not None:
            stats, found = cuda.memory_stats(), self.found
            for name in ("allocated", "reserved", "inactive_split", "requested"):
                found[name].append(stats.get(f"{name}_bytes.all.peak", 0) / MIB)
            found["fragmentation"].append(found["reserved"][-1] - found["allocated"][-1])

    def result(self) -> dict[str, list[float]]:
        """Values of each step: seconds, processor seconds (all threads), and on a GPU MiB at its
        peak."""
        return {name: [float(f"{v:.6g}") for v in values] for name, values in self.found.items()}


def facts(trainer: Trainer) -> dict[str, Any]:
    """Facts beside a training's measurements: {"parameters": their number, "device_name": the
    GPU's, or "cpu", "torch": its version, "threads": torch's on the CPU}."""
    import torch

    from nsa.model.llama import parameter_count

    on_gpu = trainer.device.type == "cuda"
    return {
        "parameters": parameter_count(trainer.model),
        "device_name": torch.cuda.get_device_name(trainer.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _cuda() -> Any:
    """torch.cuda if this process uses a GPU, else None; does not import torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def further_steps(trainer: Trainer, model: Any, *, count: bool) -> tuple[dict, dict]:
    """Run separate measurement steps after all others; return (result, oracles) of the trial.

    Result: seconds of phases; MiB at the peak and the part that grows with the batch; a digest of
    the gradients; operations and autograd nodes if `count`. Oracles: arrival and finite, and ranks
    if there are several. `model` names a subject's expectations, see workbook.lab.oracles.Watch.
    """
    from workbook.lab.measure.recorders import observed

    def step(*more: Any) -> Any:
        with observed(trainer, *more):
            return trainer.step(trainer.steps_done)

    # Without a GPU processor time is used, since the cores are shared.
    clock = time.perf_counter if trainer.device.type == "cuda" else time.process_time
    ms = phase_ms(trainer, PHASE_STEPS, clock)
    found = {phase: ms[phase] / 1e3 for phase in ("forward", "backward", "optimizer")}
    found |= _memory(trainer)
    digest, told = _gradients(trainer, model, step)
    found["gradients"] = digest
    if count:
        found |= _counted(trainer, step)
    return found, told


def phase_ms(
    trainer: Trainer, steps: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median ms of each phase over further steps; on a CPU, by this clock."""
    from workbook.lab.measure.recorders import observed
    from workbook.lab.observers.phases import BETWEEN, PhaseTimes

    times = PhaseTimes(trainer.device, clock)
    with observed(trainer, times):
        for _ in range(steps):
            trainer.step(trainer.steps_done)
    return {row["phase"]: row["median_ms"] for row in times.table() if row["phase"] != BETWEEN}


def _memory(trainer: Trainer) -> dict[str, Any]:
    """Peak memory by category; on a GPU without the peak itself, which every step reports."""
    from workbook.lab.measure.recorders import recorded_step

    record = recorded_step(trainer)[1].record()
    found = {} if trainer.device.type == "cuda" else {"allocated": record["peak"] / MIB}
    if held := record["by_category"]:
        found["growing"] = sum(v for name, v in held.items() if name not in CONSTANT) / MIB
        found["held"] = {name: value / MIB for name, value in held.items()}
    return found


def _gradients(trainer: Trainer, model: Any, step: Any) -> tuple[str, dict]:
    from workbook.lab import oracles
    from workbook.lab.measure.recorders import local

    digest = hashlib.sha256()

    def on_phase(name: str, number: int) -> None:
        if name == "optimizer":
            for parameter in trainer.parameters:
                grad = parameter.grad
                if grad is not None:
                    digest.update(local(grad).detach().float().cpu().numpy().tobytes())

    asked = ("arrival", "finite", *(["ranks"] if trainer.parallel.ranks > 1 else []))
    with oracles.Watch(asked, model) as seen:
        number = trainer.steps_done
        seen.begin(number)
        seen.end(number, step(SimpleNamespace(on_phase=on_phase)))
    return digest.hexdigest()[:16], seen.results()


def _counted(trainer: Trainer, step: Any) -> dict[str, int]:
    from workbook.lab.measure.counting import Count
    from workbook.lab.oracles.steps import Steps

    counter = Count()
    backward = SimpleNamespace(backward=lambda roots: counter.forward_ended(roots[0]))
    with Steps([backward]) as seen, counter:
        seen.begin(trainer.steps_done)
        seen.end(trainer.steps_done, step())
    return {"operations": counter.total, "nodes": counter.nodes}
