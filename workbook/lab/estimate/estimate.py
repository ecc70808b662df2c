"""Estimate of a training's peak memory by owner, and of the largest size that fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from nsa.spelling import choice
from workbook.lab.estimate import layers, libraries, reserved, search
from workbook.lab.estimate.alloc_conf import Settings
from workbook.lab.estimate.gpus import GIB, Gpu, gpu_named
from workbook.lab.estimate.steps import Run, run_of
from workbook.lab.estimate.trace import Trace, steady, trace
from workbook.lab.measure.allocations import lifetimes, replay
from workbook.lab.oracles.steps import anywhere
from workbook.lab.training import TrainingSpec

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)
GRAINS = {"tokens": 64, "batch": 1}
STATE = ("parameters", "gradients", "optimizer_state")
# Ratio of peaks with and without compiled blocks: minimum and maximum over the pairs in runs of
# 04_throughput on an H200, torch 2.11.
COMPILED = (0.878, 0.955)


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of one rank, as counted by its allocator."""

    allocated: int  # the peak, as torch.cuda.max_memory_allocated; on a CPU of its allocator
    reserved: int | None  # the peak, as torch.cuda.max_memory_reserved; None on a CPU
    phase: str  # phase of the peak
    phases: dict[str, int]  # the peak of each phase
    by_category: dict[str, int]  # at the peak; on a GPU "rounding" is the excess of blocks
    by_phase_category: dict[str, dict[str, int]]
    saved: dict[str, int]  # alive at the end of the forward, by module, layers merged
    how: str
    unknown: dict[str, int]  # operators not in the table: bytes that each may add
    gpu: str = ""
    calibrated: bool = True
    uncertainty: float = 0.0
    notes: tuple[str, ...] = ()


def estimate(
    spec: TrainingSpec,
    *,
    gpu: str = "NVIDIA H200",
    allocator: str = "",
    ddp: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Estimate:
    """Estimate the peak of a training step, without a device: see `workbook.lab.estimate.trace`.

    gpu: name, or part of the name, of the GPU whose kernels and workspaces are assumed; unused with
    device="cpu". allocator: settings as in PYTORCH_CUDA_ALLOC_CONF. ddp: DDP options as in
    `Parallel`. changes: overrides of the spec's TrainConfig. ValueError for an unknown GPU, setting
    or option, and for a step that cannot be captured; RuntimeError for a step that needs values,
    which a trace does not have. `sequential` takes up to minutes.
    """
    return _estimate(spec, gpu, Settings.parse(allocator), ddp, changes)[0]


def _estimate(
    spec: TrainingSpec,
    gpu: str,
    settings: Settings,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Estimate, Run | None]:
    """Return the estimate and, on a GPU, the steps replayed by the allocator model."""
    libraries.check(spec.config().backend)
    chosen, run = gpu_named(gpu) if spec.device == "cuda" else None, None
    traced, how = whole(spec, chosen, ddp=ddp, **changes)
    told: dict[str, Any] = {"how": how, "saved": saved(traced), "unknown": dict(traced.unknown)}
    told["notes"] = (*(libraries.notes() if chosen else ()), *_notes(spec, ddp))
    told["uncertainty"] = 1 - COMPILED[0] if spec.compile else 0.0
    if chosen is None:
        found = replay(steady(traced.stream))
    else:
        run = run_of(traced, captured=spec.cuda_graph, resident=chosen.resident)
        found, took = replay(run.stream), _took(run, settings, total=chosen.total)
        for phase, size in found["phases"].items():
            found["phases"][phase] = took.phases[phase].allocated
            found["by_phase_category"][phase]["rounding"] = took.phases[phase].allocated - size
        told |= {"gpu": chosen.name, "calibrated": chosen.measured}
    phases, by_phase = found["phases"], found["by_phase_category"]
    phase = max(phases, key=lambda name: phases[name])
    if chosen and not chosen.measured:  # `resident` may be entirely wrong
        told["uncertainty"] += chosen.resident / phases[phase]
    made = Estimate(
        allocated=phases[phase],
        reserved=took.peak.reserved if chosen else None,
        phase=phase,
        phases=phases,
        by_category=by_phase[phase],
        by_phase_category=by_phase,
        **told,
    )
    return made, run


def _took(run: Run, settings: Settings, room: int | None = None, **more: Any) -> reserved.Reserved:
    """Replay the steps in the allocator model, with `room` bytes or without a limit."""
    home = run.homes.__getitem__
    return reserved.replay(run.stream, settings, room, where=home, emptied=run.emptied, **more)


def whole(spec: TrainingSpec, gpu: Gpu | None = None, **how: Any) -> tuple[Trace, str]:
    """Return the trace of all layers, and how it was made: for a long run of equal layers four are
    traced and one is repeated, unless they turn out to differ. Buckets and shards span layers: with
    several ranks all are traced. RuntimeError for a step that needs values."""
    short = layers.shortened(spec) if spec.parallel == "none" else None
    try:
        if short is None:
            return trace(spec, gpu, **how), "traced"
        try:
            found = layers.repeated(trace(short.spec, gpu, **how), short.like)
        except layers.Irregular as error:
            return trace(spec, gpu, **how), f"traced, for of a few layers {error}"
    except UNTRACEABLE as error:
        raise RuntimeError(
            f"{error} needs a value, or makes a shape of values, which a trace has not; "
            f"take another backend than {spec.backend!r}"
        ) from error
    few = short.spec.config().layers
    return found, f"{few} of {len(short.like)} layers traced, one in the middle repeated"


def _notes(spec: TrainingSpec, ddp: Mapping[str, Any]) -> Iterator[str]:
    if spec.parallel != "none":
        beside = "; what NCCL holds is beside torch's allocator" * (spec.device == "cuda")
        yield f"rank 0 of {spec.ranks}{beside}"
    if ddp.get("static_graph"):
        yield "the first step of a static graph is not traced, a later one is"
    if spec.cuda_graph:
        yield "what CUDA itself keeps of a graph is beside torch's allocator"
    if spec.compile:
        least, most = COMPILED
        yield (
            "compiled blocks are not traced: this is the program without compile, and with it "
            f"{least} to {most} of that was held in the records of 04_throughput on an H200"
        )


@dataclass(frozen=True)
class Bracket:
    """A size that fits, 0 if none does, and a larger one that does not: multiples of `grain`,
    adjacent or within search.CLOSE of each other."""

    what: str  # "tokens" or "batch"
    fits: int
    does_not: int | None  # None if all fit, up to the model's max_tokens
    grain: int
    at: Estimate | None  # at `fits`
    beyond: Estimate | None  # at `does_not`
    looks: int  # number of sizes estimated


def largest(
    spec: TrainingSpec,
    what: str,
    gib: float,
    *,
    gpu: str = "NVIDIA H200",
    allocator: str = "",
    grain: int | None = None,
) -> Bracket:
    """Find the largest T or batch of that training that fits `gib` GiB of a GPU, or of RAM.

    On a GPU CUDA's context is subtracted, and the allocator model determines if the rest
    suffices. Sizes are multiples of `grain`, by default 64 tokens or one sequence per rank.
    ValueError for another `what`, and if weights, gradients and AdamW's state alone exceed it.
    """
    choice("what", what, tuple(GRAINS))
    grain = grain or GRAINS[what] * (spec.ranks if what == "batch" else 1)
    settings, most = Settings.parse(allocator), None
    chosen = gpu_named(gpu) if spec.device == "cuda" else None
    room = int(gib * GIB) - (chosen.context if chosen else 0)
    if what == "tokens" and (longest := spec.config().max_tokens) is not None:
        most = longest // grain
    seen: dict[int, Estimate] = {}

    def look(size: int) -> tuple[int, bool]:
        found, run = _estimate(replace(spec, **{what: size * grain}), gpu, settings)
        seen[size] = found
        state = sum(found.by_phase_category["optimizer"][name] for name in STATE)
        if state > room:
            raise ValueError(
                f"{gib:g} GiB cannot hold the training at any size: weights, gradients and AdamW's "
                f"state alone are {state / GIB:.2f} GiB, and there is room for {room / GIB:.2f}"
            )
        fits = found.allocated <= room
        if fits and run is not None and found.reserved > room:
            fits = _took(run, settings, room).out_of_memory is None
        return found.allocated, fits

    fits, does_not = search.boundary(look, room, max(1, getattr(spec, what) // grain), most)
    beyond = None if does_not is None else does_not * grain
    ends = seen.get(fits), seen.get(does_not)
    return Bracket(what, fits * grain, beyond, grain, *ends, looks=len(seen))


def saved(traced: Trace) -> dict[str, int]:
    """Bytes by module allocated by the forward and alive at its end, the largest first."""
    lives = lifetimes(traced.stream)
    start, end = [span for name, *span in lives.spans if name == "forward"][-1]
    found: dict[str, int] = defaultdict(int)
    for block in (lives.alive(end) & (lives.born >= start)).nonzero()[0].tolist():
        address = traced.stream.addresses[lives.born[block]]
        found[anywhere(traced.where.get(address, ""))] += int(lives.sizes[block])
    return dict(sorted(found.items(), key=lambda item: -item[1]))
