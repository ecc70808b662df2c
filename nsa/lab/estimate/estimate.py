"""What a training will hold at its peak, by whom, and the largest that fits."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nsa.lab.estimate import libraries, reserved
from nsa.lab.estimate.alloc_conf import Settings
from nsa.lab.estimate.pretend import Gpu, gpu_named
from nsa.lab.estimate.steps import run_of
from nsa.lab.estimate.trace import Trace, steady, trace
from nsa.lab.measure.allocations import Stream, replay
from nsa.lab.training import TrainingSpec

# Peaks with compiled blocks over those without, the least and the most of the pairs that runs of
# 04_throughput on an H200 have, torch 2.11.
COMPILED = (0.878, 0.954)


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, as its allocator would count them."""

    allocated: int  # the peak, as torch.cuda.max_memory_allocated; on a CPU of the allocator's
    reserved: int | None  # the peak, as torch.cuda.max_memory_reserved; None on a CPU
    phase: str  # where the peak is
    phases: dict[str, int]  # the peak of each phase
    by_category: dict[str, int]  # at the peak; on a GPU "rounding" is what blocks have beyond
    by_phase_category: dict[str, dict[str, int]]
    saved: dict[str, int]  # alive when the forward ends, by module; layers count together
    how: str
    unknown: dict[str, int]  # operators that the table does not know: bytes that each may add
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
    """The peak of a training step, without a device: see `nsa.lab.estimate.trace`.

    gpu: the name of a GPU, or a part of it, whose programs and workspaces are meant; unused with
    device="cpu". allocator: settings as in PYTORCH_CUDA_ALLOC_CONF. ddp: options of DDP that
    `Parallel` has. changes: of the spec's TrainConfig. ValueError for a GPU, a setting or an option
    that is unknown, and for a step that cannot be captured.
    """
    chosen = gpu_named(gpu) if spec.device == "cuda" else None
    settings = Settings.parse(allocator)
    traced = trace(spec, chosen, ddp=ddp, **changes)
    if chosen is None:
        found, most = replay(steady(traced.stream)), None
    else:
        run = run_of(traced, captured=spec.cuda_graph, resident=chosen.resident)
        found, home = replay(run.stream), run.homes.__getitem__
        took = reserved.replay(
            run.stream, settings, total=chosen.total, where=home, emptied=run.emptied
        )
        most = took.peak.reserved
        for phase, size in found["phases"].items():
            found["phases"][phase] = took.phases[phase].allocated
            rest = took.phases[phase].allocated - size
            found["by_phase_category"][phase]["rounding"] = rest
    phases = found["phases"]
    phase = max(phases, key=lambda name: phases[name])
    return Estimate(
        allocated=phases[phase],
        reserved=most,
        phase=phase,
        phases=phases,
        by_category=found["by_phase_category"][phase],
        by_phase_category=found["by_phase_category"],
        saved=saved(traced),
        how="traced",
        unknown=dict(traced.unknown),
        gpu=chosen.name if chosen else "",
        calibrated=_measured(chosen),
        uncertainty=1 - COMPILED[0] if spec.compile else 0.0,
        notes=(*(libraries.notes() if chosen else ()), *_notes(spec, ddp)),
    )


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


def _measured(gpu: Gpu | None) -> bool:
    return gpu is None or gpu.measured


def saved(traced: Trace) -> dict[str, int]:
    """Bytes by module that the forward allocated and that live when it ends, the largest first."""
    born, ended = _forward(traced.stream)
    alive: dict[int, int] = {}
    for at in range(ended):
        address, size = traced.stream.addresses[at], traced.stream.sizes[at]
        if size < 0:
            alive.pop(address, None)
        elif at >= born:
            alive[address] = size
    found: dict[str, int] = defaultdict(int)
    for address, size in alive.items():
        found[traced.where.get(address, "")] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _forward(stream: Stream) -> tuple[int, int]:
    """Where the last forward starts and ends."""
    marks = [*stream.marks, (len(stream), "end")]
    number = max(i for i, (_, phase) in enumerate(marks) if phase == "forward")
    return marks[number][0], marks[number + 1][0]
