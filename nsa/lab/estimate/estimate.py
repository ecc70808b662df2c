"""What a training will hold at its peak, by whom, and the largest that fits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from nsa.lab.estimate import layers, reserved, small
from nsa.lab.estimate.alloc_conf import Settings
from nsa.lab.estimate.pretend import Gpu, gpu_named
from nsa.lab.estimate.trace import Trace, steady, trace
from nsa.lab.measure.allocations import Stream, replay
from nsa.lab.training import TrainingSpec

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)
LAYER = layers.LAYER
STEPS = 3  # replayed by the allocator's model: AdamW's state is born in the first


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, as its allocator would count them."""

    allocated: int  # the peak, as torch.cuda.max_memory_allocated; on a CPU of the allocator's
    reserved: int | None  # the peak, as torch.cuda.max_memory_reserved; None on a CPU
    phase: str  # where the peak is
    phases: dict[str, int]  # the peak of each phase
    by_category: dict[str, int]  # at the peak
    by_phase_category: dict[str, dict[str, int]]
    saved: dict[str, int]  # alive when the forward ends, by module; layers count together
    how: str
    unknown: dict[str, int]  # operators that the table does not know: bytes that each may add
    gpu: str = ""
    calibrated: bool = True
    uncertainty: float = 0.0
    notes: tuple[str, ...] = ()


def estimate(spec: TrainingSpec, *, gpu: str = "NVIDIA H200", allocator: str = "") -> Estimate:
    """The peak of a training step, without a device: see `nsa.lab.estimate.trace`.

    gpu: the name of a GPU, or a part of it, whose programs and workspaces are meant; unused with
    device="cpu". allocator: settings as in PYTORCH_CUDA_ALLOC_CONF. Categories are of what is asked
    for; `allocated` is of blocks, which may be larger. ValueError for a GPU or a setting that is
    unknown; RuntimeError where neither a trace nor small real runs can be had.
    """
    chosen = gpu_named(gpu) if spec.device == "cuda" else None
    settings = Settings.parse(allocator)
    try:
        traced, how = whole(spec, chosen)
    except UNTRACEABLE as error:
        return _from_runs(spec, chosen, error)
    found, top = replay(steady(traced.stream)), None
    told: dict[str, Any] = {"how": how, "saved": saved(traced), "unknown": dict(traced.unknown)}
    if chosen:
        held = _with_resident(traced.stream, chosen.resident)
        blocks = reserved.replay(held, settings, repeat=STEPS)
        top = blocks.peak.reserved
        for name in found["phases"]:
            found["phases"][name] = max(found["phases"][name], blocks.phases[name].allocated)
    return _made(chosen, found, reserved=top, **told)


def whole(spec: TrainingSpec, gpu: Gpu | None = None) -> tuple[Trace, str]:
    """The trace of all layers, and how it was had: of a long run of like layers four are traced and
    one is repeated, unless they turn out not to be alike."""
    short = layers.shortened(spec)
    if short is None:
        return trace(spec, gpu), "traced"
    try:
        traced = trace(short.spec, gpu)
        found, few = layers.repeated(traced, short.like), short.spec.config().layers
        return found, f"{few} of {len(short.like)} layers traced, one in the middle repeated"
    except layers.Irregular as error:
        return trace(spec, gpu), f"traced, for of a few layers {error}"


def _from_runs(spec: TrainingSpec, gpu: Gpu | None, error: Exception) -> Estimate:
    found = small.estimated(spec)
    why = f"{error} needs a value, or makes a shape of values, which a trace has not"
    notes = (why, *found["notes"])
    told = {"how": found["how"], "saved": {}, "unknown": {}, "reserved": None}
    return _made(gpu, found, uncertainty=found["error"], notes=notes, **told)


def _made(gpu: Gpu | None, found: dict[str, Any], **told: Any) -> Estimate:
    resident = gpu.resident if gpu and told["reserved"] is None else 0
    phases = {name: size + resident for name, size in found["phases"].items()}
    phase = max(phases, key=lambda name: phases[name])
    by_phase = {name: dict(held) for name, held in found["by_phase_category"].items()}
    for held in by_phase.values():
        held["resident"] += gpu.resident if gpu else 0
    place = {"gpu": gpu.name, "calibrated": gpu.measured} if gpu else {}
    sizes = {"allocated": phases[phase], "phase": phase, "phases": phases}
    categories = {"by_category": by_phase[phase], "by_phase_category": by_phase}
    return Estimate(**sizes, **categories, **place, **told)


def _with_resident(stream: Stream, size: int) -> Stream:
    """The same after one allocation of that size, which stays."""
    made = Stream()
    made.alloc(-1, size)
    made.addresses.extend(stream.addresses)
    made.sizes.extend(stream.sizes)
    made.marks = [(at + 1, name) for at, name in stream.marks]
    return made


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
        found[LAYER.sub("blocks.*", traced.where.get(address, ""))] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _forward(stream: Stream) -> tuple[int, int]:
    """Where the last forward starts and ends."""
    marks = [*stream.marks, (len(stream), "end")]
    number = max(i for i, (_, phase) in enumerate(marks) if phase == "forward")
    return marks[number][0], marks[number + 1][0]
