"""The inside of a throughput trial: warm up, time steps that nobody watches, then watch some."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.lab import limits
from nsa.lab.compilations import Compilations
from nsa.lab.flops import nominal_tflops
from nsa.lab.phases import PhaseTimes
from nsa.lab.recorders import MIB, recorder_for, training_tensors
from nsa.lab.throughput_cell import TrainCell
from nsa.lab.timing import wait
from nsa.lab.training_session import session
from nsa.model.llama import parameter_count
from nsa.model.train import Trainer

WATCHED = 5  # steps that are timed by phase, and as many without communication


def measure_rank(spec: dict) -> dict:
    """One rank's measurements: {"cell": TrainCell.to_dict(), "threads": int or None}.

    `tokens_s` is the whole job's, by the device's own clock over all timed steps; `recount_tokens_s`
    by the wall clock, from an idle device to an idle device. `communication_ms` is what a step takes
    longer than one whose gradients stay where they are (under FSDP2 parameters are still gathered).
    `device_mib` and `host_mib` are taken after each timed step. `recompilations` are those after
    step 2. `loader_wait_ms` is a step's mean. Where the backend does not take the model, it is
    {"declined": why}.
    """
    cell = TrainCell.from_dict(spec["cell"])
    with session(cell, spec.get("threads")) as trainer, _noted(trainer):
        try:
            with witness.recording() as seen:
                losses = [float(trainer.step(0))]
        except Declined as refusal:
            return {"declined": str(refusal)}
        losses += [float(trainer.step(step)) for step in range(1, cell.warmup)]
        found = _timed(trainer, cell.warmup, cell.steps)
        step = cell.warmup + cell.steps
        found["losses"] = losses + found["losses"]
        found["phase_ms"], step = _by_phase(trainer, step), step + WATCHED
        if not cell.cuda_graph:
            found["syncs"], step = _syncs(trainer, step), step + 2
        if cell.device == "cpu":
            found["peak_mib"], step = _cpu_peak(trainer, step), step + 1
        if cell.ranks > 1:
            found["communication_ms"] = found["step_ms"] - _unsynced_ms(trainer, step)
        return found | _facts(trainer, cell) | {"paths": _paths(seen)}


def _timed(trainer: Trainer, first: int, steps: int) -> dict[str, Any]:
    """Steps that nobody watches, from idle to idle."""
    device = trainer.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    waited, batches = trainer.data.waited_s, trainer.data.batches
    losses, device_mib, host_mib = [], [], []
    with Compilations() as compiled:
        wait(device)
        started = time.perf_counter()
        marks = [_mark(device)]
        for step in range(first, first + steps):
            losses.append(trainer.step(step))
            marks.append(_mark(device))
            host_mib.append(_resident_mib())
            if device.type == "cuda":
                device_mib.append(torch.cuda.memory_allocated(device) / MIB)
        wait(device)
        wall_s = time.perf_counter() - started
    ms = [_between_ms(a, b) for a, b in zip(marks[:-1], marks[1:], strict=True)]
    tokens = trainer.config.batch * trainer.config.tokens * steps
    found = {
        "step_ms": float(np.median(ms)),
        "step_ms_q20": float(np.quantile(ms, 0.2)),
        "step_ms_q80": float(np.quantile(ms, 0.8)),
        "step_ms_each": ms,
        "tokens_s": 1e3 * tokens / sum(ms),
        "recount_tokens_s": tokens / wall_s,
        "losses": torch.stack(losses).tolist(),
        "device_mib": device_mib,
        "host_mib": host_mib,
        "recompilations": compiled.count,
        "loader_wait_ms": 1e3 * (trainer.data.waited_s - waited)
        / max(1, trainer.data.batches - batches),
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated(device) / MIB
    return found


def _by_phase(trainer: Trainer, first: int) -> dict[str, float]:
    times = PhaseTimes(trainer.device)
    with observed(trainer, times):
        for step in range(first, first + WATCHED):
            trainer.step(step)
    return {row["phase"]: row["median_ms"] for row in times.table() if row["phase"] != "between"}


def _unsynced_ms(trainer: Trainer, first: int) -> float:
    """A step's median when gradients stay on their rank. The ranks' weights differ afterwards."""
    kept = trainer.parallel
    trainer.parallel = _Unsynced(kept)
    try:
        return _timed(trainer, first, WATCHED)["step_ms"]
    finally:
        trainer.parallel = kept


class _Unsynced:
    """A Parallel none of whose micro-batches is the last."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def micro(self, wrapped, last: bool):
        return self.inner.micro(wrapped, False)


def _syncs(trainer: Trainer, step: int) -> int | None:
    """Host waits inside a step, None without a GPU."""
    if trainer.device.type != "cuda":
        return None
    trainer.step(step)
    return syncs.count(lambda: trainer.step(step + 1))


def _cpu_peak(trainer: Trainer, step: int) -> float:
    """What torch's allocator holds at most in one step, in MiB."""
    with recorder_for("cpu", training_tensors(trainer.model, trainer.optimizer)) as recorder:
        with observed(trainer, recorder):
            trainer.step(step)
    return recorder.record()["peak"] / MIB


def _facts(trainer: Trainer, cell: TrainCell) -> dict[str, Any]:
    device = trainer.device
    low = cell.precision != "fp32"
    ceilings = limits.measure_ceilings(device, torch.bfloat16 if low else torch.float32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "parameters": parameter_count(trainer.model),
        "matmul_tflops": ceilings.matmul_tflops,
        "nominal_tflops": nominal_tflops(name) if low else float("nan"),
        "device_name": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _paths(seen: witness.Witness) -> dict[str, list[str]]:
    return {branch: sorted(served) for branch, served in seen.record()["paths"].items()}


def _mark(device: torch.device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between_ms(start, end) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def _resident_mib() -> float:
    """This process's memory in RAM, NaN outside Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * 4096 / MIB


@contextlib.contextmanager
def observed(trainer: Trainer, observer: Any) -> Iterator[None]:
    """Steps inside have this observer, too."""
    before = trainer.observers
    trainer.observers = (*before, observer)
    try:
        yield
    finally:
        trainer.observers = before


@contextlib.contextmanager
def _noted(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"after {trainer.steps_done} steps")
        raise
