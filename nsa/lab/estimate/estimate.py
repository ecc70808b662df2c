"""What a training will hold at its peak, by whom, and the largest that fits."""

from collections import defaultdict
from dataclasses import dataclass

from nsa.lab.estimate import libraries
from nsa.lab.estimate.pretend import Gpu, gpu_named
from nsa.lab.estimate.trace import Trace, steady, trace
from nsa.lab.measure.allocations import Stream, replay
from nsa.lab.training import TrainingSpec


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
    device="cpu". allocator: settings as in PYTORCH_CUDA_ALLOC_CONF. ValueError for a GPU or a
    setting that is unknown.
    """
    chosen = gpu_named(gpu) if spec.device == "cuda" else None
    traced = trace(spec, chosen)
    found = replay(steady(traced.stream))
    resident = chosen.resident if chosen else 0
    phases = {name: size + resident for name, size in found["phases"].items()}
    phase = max(phases, key=lambda name: phases[name])
    found["by_category"]["resident"] += resident
    return Estimate(
        allocated=phases[phase],
        reserved=None,
        phase=phase,
        phases=phases,
        by_category=found["by_category"],
        by_phase_category=found["by_phase_category"],
        saved=saved(traced),
        how="traced",
        unknown=dict(traced.unknown),
        gpu=chosen.name if chosen else "",
        calibrated=_measured(chosen),
        notes=libraries.notes() if chosen else (),
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
