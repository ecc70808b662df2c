"""The inside of a throughput trial: warm up, time steps that nobody watches, then watch some."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.experiments.throughput.cell import Measured, TrainCell
from nsa.experiments.throughput.overheads import communication_ms, observing
from nsa.lab.measure import limits
from nsa.lab.measure.counting import Compilations, count_syncs
from nsa.lab.measure.limits import nominal_tflops
from nsa.lab.measure.recorders import MIB, MemorySamples, recorder_for
from nsa.lab.measure.timing import wait
from nsa.lab.observers.phases import BETWEEN, PhaseTimes
from nsa.model.llama import parameter_count
from nsa.model.train import Trainer, warmup_steps

WATCHED = 5  # steps that are timed by phase
CAPTURED = 2  # steps: the graph's capture and its first replay


def measure_rank(spec: dict) -> dict:
    """`Measured` by one rank: {"cell": TrainCell.to_dict(), "threads": int or None}.

    Where the backend does not take the model, it is {"declined": why}.
    """
    cell = TrainCell.from_dict(spec["cell"])
    with cell.opened(spec.get("threads")) as trainer, _noted(trainer):
        try:
            with witness.recording() as seen:
                losses = [float(trainer.step(0))]
        except Declined as refusal:
            return {"declined": str(refusal)}
        warmup = warmup_of(trainer, cell)
        losses += [float(trainer.step(step)) for step in range(1, warmup)]
        found = _timed(trainer, cell.steps)
        found["losses"] = losses + found["losses"]
        found["phase_ms"] = _by_phase(trainer)
        if cell.device == "cuda":
            found["syncs"] = count_syncs(lambda: trainer.step(trainer.steps_done)).total
        else:
            found["peak_mib"] = _cpu_peak(trainer)
        if cell.observe:
            found |= observing(trainer)
        if cell.parallel == "ddp" and not cell.cuda_graph:
            found["communication_ms"] = communication_ms(trainer)
        return asdict(Measured(**found, **_facts(trainer, cell), paths=_paths(seen)))


def warmup_of(trainer: Trainer, cell: TrainCell) -> int:
    """Steps before those that count; a CUDA graph is captured and replayed among them."""
    if not cell.cuda_graph:
        return cell.warmup
    return max(cell.warmup, warmup_steps(trainer.parallel)) + CAPTURED


def _timed(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Steps that nobody watches, from idle to idle."""
    device, first = trainer.device, trainer.steps_done
    if device.type == "cuda" and not trainer.config.cuda_graph:
        torch.cuda.reset_peak_memory_stats(device)
    waited, batches = trainer.data.waited_s, trainer.data.batches
    losses, memory = [], MemorySamples(device)
    with Compilations() as compiled:
        wait(device)
        started = time.perf_counter()
        marks = [_mark(device)]
        for step in range(first, first + steps):
            losses.append(trainer.step(step))
            memory.take()
            marks.append(_mark(device))
        wait(device)
        wall_s = time.perf_counter() - started
    ms = [_between_ms(a, b) for a, b in pairwise(marks)]
    tokens = trainer.config.batch * trainer.config.tokens * steps
    waited, batches = trainer.data.waited_s - waited, trainer.data.batches - batches
    found = {
        "step_ms": float(np.median(ms)),
        "step_ms_q20": float(np.quantile(ms, 0.2)),
        "step_ms_q80": float(np.quantile(ms, 0.8)),
        "step_ms_each": ms,
        "tokens_s": 1e3 * tokens / sum(ms),
        "recount_tokens_s": tokens / wall_s,
        "losses": torch.stack(losses).tolist(),
        "device_mib": memory.device_mib,
        "host_mib": memory.host_mib,
        "recompilations": compiled.count,
        "loader_wait_ms": 1e3 * waited / max(1, batches),
    }
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated(device) / MIB
    return found


def _by_phase(trainer: Trainer) -> dict[str, float]:
    times = PhaseTimes(trainer.device)
    with observed(trainer, times):
        for step in range(trainer.steps_done, trainer.steps_done + WATCHED):
            trainer.step(step)
    return {row["phase"]: row["median_ms"] for row in times.table() if row["phase"] != BETWEEN}


def _cpu_peak(trainer: Trainer) -> float:
    """What torch's allocator holds at most in one step, in MiB."""
    recorder = recorder_for("cpu", dict)
    with recorder, observed(trainer, recorder):
        trainer.step(trainer.steps_done)
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
