"""Child processes: unobserved steps followed by observed steps, a loss curve, or one step under
torch.profiler."""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from nsa.attention import witness
from nsa.attention.registry import Declined
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer, warmup_steps
from workbook.lab.measure import limits
from workbook.lab.measure.counting import Compilations, count_syncs
from workbook.lab.measure.kernels import activities_of, of_step
from workbook.lab.measure.recorders import (
    MIB,
    MemorySamples,
    changed,
    profiled,
    recorded_step,
)
from workbook.lab.measure.steps import facts, phase_ms
from workbook.lab.measure.timing import interleaved, mark, seconds_between, wait
from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.attention_stats import AttentionStats
from workbook.lab.observers.beat import Heartbeat
from workbook.lab.observers.deferred import SAMPLED
from workbook.lab.observers.module_order import ModuleOrder
from workbook.lab.observers.phases import PhaseTimes
from workbook.lab.observers.writers import CsvWriter
from workbook.rooms.throughput.trials import Measured, TrainCell, opened

WATCHED = 5  # steps that are timed by phase
CAPTURED = 2  # steps: the graph's capture and its first replay
ROUNDS, TURN = 3, 5  # of communication; steps of a turn
STEP = "nsa training step"  # its mark in a profile


def measure_rank(spec: dict) -> dict:
    """Measure one rank: {"cell": TrainCell.to_dict(), "threads": int or None} -> `Measured`. If
    the backend declines the model, the result is {"declined": why}."""
    with opened(spec) as (cell, trainer), _noted(trainer):
        try:
            with witness.recording() as seen:
                losses = [float(trainer.step(0))]
        except Declined as refusal:
            return {"declined": str(refusal)}
        losses += [float(trainer.step(step)) for step in range(1, warmup_of(trainer, cell))]
        found = _timed(trainer, cell.steps)
        found["losses"] = losses + found["losses"]
        found["phase_ms"] = phase_ms(trainer, WATCHED)
        if cell.device == "cuda":
            found["syncs"] = count_syncs(lambda: trainer.step(trainer.steps_done))
        else:
            found["peak_mib"] = recorded_step(trainer)[1].record()["peak"] / MIB
        if cell.observe:
            found |= _observing(trainer)
        if cell.parallel == "ddp" and not cell.cuda_graph:
            found["communication_ms"] = communication_ms(trainer)
        paths = {branch: sorted(served) for branch, served in seen.record()["paths"].items()}
        about = facts(trainer)
        found |= _ceilings(trainer, cell, about["device_name"])
        return asdict(Measured(**found, **about, paths=paths))


def train(spec: dict) -> dict:
    """Train {"cell": TrainCell.to_dict(), "seed": int, "threads": int or None}; return {"losses",
    "device_mib", "host_mib"}, each a list with a number per step, or {"declined": why}."""
    steps = spec["cell"]["steps"]
    changes = {"steps": steps, "schedule": "cosine", "warmup_steps": min(10, max(1, steps // 10))}
    with opened(spec, seed=spec["seed"], **changes) as (_, trainer):
        memory = MemorySamples(trainer.device)
        trainer.observers = (memory,)
        try:
            losses = trainer.run(steps)
        except Declined as refusal:
            return {"declined": str(refusal)}
    return {"losses": losses, "device_mib": memory.device_mib, "host_mib": memory.host_mib}


def profile_cell(spec: dict) -> dict[str, Any]:
    """Profile the step after the warm-up: {"cell": TrainCell.to_dict(), "threads": int or None}.

    Returns the result of `kernels.of_step`.
    """
    with opened(spec) as (cell, trainer):
        for step in range(warmup_of(trainer, cell)):
            trainer.step(step)
        device = trainer.device
        wait(device)
        with profiled(activities_of(device)) as seen:
            with record_function(STEP):
                trainer.step(trainer.steps_done)
            wait(device)
    return of_step(seen, STEP, device.type == "cuda")


def warmup_of(trainer: Trainer, cell: TrainCell) -> int:
    """Number of warm-up steps, including the capture and first replay of a CUDA graph."""
    if not cell.cuda_graph:
        return cell.warmup
    return max(cell.warmup, warmup_steps(trainer.parallel)) + CAPTURED


def _timed(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Time unobserved steps, from idle to idle."""
    device, first = trainer.device, trainer.steps_done
    if device.type == "cuda" and not trainer.config.cuda_graph:
        torch.cuda.reset_peak_memory_stats(device)
    waited, batches = trainer.data.waited_s, trainer.data.batches
    losses, memory = [], MemorySamples(device)
    with Compilations() as compiled:
        wait(device)
        started = time.perf_counter()
        marks = [mark(device)]
        for step in range(first, first + steps):
            losses.append(trainer.step(step))
            memory.take()
            marks.append(mark(device))
        wait(device)
        wall_s = time.perf_counter() - started
    ms = [1e3 * seconds_between(*pair) for pair in pairwise(marks)]
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


def _ceilings(trainer: Trainer, cell: TrainCell, name: str) -> dict[str, float]:
    low = cell.precision != "fp32"
    found = limits.measure_ceilings(trainer.device, torch.bfloat16 if low else torch.float32)
    nominal = limits.nominal_tflops(name) if low else float("nan")
    return {"matmul_tflops": found.matmul_tflops, "nominal_tflops": nominal}


def _observing(trainer: Trainer) -> dict[str, float]:
    """Measure {"watched_ms", "unwatched_ms", "watched_times"} of a step with all observers or none.

    As in a long run, the heartbeat, times by phase and losses cover every step, gradient arrival
    and module order every tenth. Attention statistics also cover every tenth, five times as often
    as in a long run.
    """
    # A sampling observer samples one step of each turn. Only the cost on a GPU is judged.
    rounds = 5 if trainer.device.type == "cuda" else 2
    found = interleaved(trainer, lambda: _all_observers(trainer), rounds=rounds, steps=SAMPLED)
    watched = {"watched_ms": found.watched_ms, "watched_times": found.ratio}
    return watched | {"unwatched_ms": found.plain_ms}


def communication_ms(trainer: Trainer) -> float:
    """Extra ms of a step under DDP over one whose gradients stay on their rank. Both run
    interleaved, see `interleaved`. Negative if it is smaller than other differences between
    two turns. The ranks' weights differ afterwards; every rank must call it."""
    found = interleaved(trainer, lambda: unsynced(trainer), rounds=ROUNDS, steps=TURN, wall=True)
    return found.plain_ms * (1 - found.ratio)


def unsynced(trainer: Trainer) -> contextlib.AbstractContextManager:
    """Context in which the trainer's steps send no gradients."""
    kept = {f.name: getattr(trainer.parallel, f.name) for f in fields(Parallel) if f.init}
    return changed(trainer, "parallel", _Unsynced(**kept))


class _Unsynced(Parallel):
    """Parallel for which no micro-batch is the last."""

    def micro(self, wrapped, last: bool):
        return super().micro(wrapped, False)


@contextlib.contextmanager
def _all_observers(trainer: Trainer) -> Iterator[None]:
    rank = os.environ.get("RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        writer = CsvWriter(Path(folder, f"losses-{rank}.csv"))
        observers: tuple[Any, ...] = (
            Heartbeat(io.StringIO(), file=Path(folder, f"beat-{rank}.jsonl")),
            GradientArrival(trainer.model, every=SAMPLED),
            ModuleOrder(trainer.model, every=SAMPLED),
            AttentionStats(trainer.model, every=SAMPLED, writers=[writer]),
            PhaseTimes(trainer.device),
            writer,
        )
        with changed(trainer, "observers", observers):
            try:
                yield
            finally:
                trainer.close()


@contextlib.contextmanager
def _noted(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"after {trainer.steps_done} steps")
        raise
