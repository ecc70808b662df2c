"""What a step allocates, recorded from torch's own allocators, on a CPU or a CUDA device.

A recorder is an observer of any loop that announces its phases through on_phase(name, step):

    with recorder_for(device, watched) as recorder: ...   # one step that calls recorder.on_phase
    recorder.record()

Each phase is recorded on its own, so that a stream never holds more than a phase in torch's own,
much larger, form. MemorySamples, below, tells what device and process hold after each step.
"""

import contextlib
import ctypes
import gc
import math
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa.lab.measure.allocations import Section, Stream, blocks_of, read_section, replay

_PAGE = resource.getpagesize()


class MemorySamples:
    """MiB after each step: `device_mib` by torch's allocator, empty without a GPU, and `host_mib`
    in RAM, NaN outside Linux. An observer, or `take` by hand: about 20 us, and nothing is waited
    for. Before the first sample glibc gives back what was freed (milliseconds): pages that it keeps
    would take up what a leak holds, and nothing would grow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_mib: list[float] = []
        self.host_mib: list[float] = []

    def on_step(self, step: int, loss: torch.Tensor) -> None:
        self.take()

    def take(self) -> None:
        if self.device.type == "cuda":
            self.device_mib.append(torch.cuda.memory_allocated(self.device) / MIB)
        if not self.host_mib:
            _give_back_freed()
        self.host_mib.append(resident_mib())


def _give_back_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl and macOS lack it
    if trim is not None:
        trim(0)


def resident_mib() -> float:
    """What this process holds in RAM; NaN outside Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / MIB
    except OSError:
        return math.nan


@contextlib.contextmanager
def profiled(activities: Iterable[ProfilerActivity]) -> Iterator[profile]:
    """The work inside is profiled; ask for its events afterwards."""
    found = profile(activities=list(activities))
    start(found)
    try:
        yield found
    finally:
        found.stop()


def start(found: profile) -> None:
    """Starts it. torch 2.11 warns, once a process, of further cycles, of which there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        found.start()


Watched = Callable[[], Mapping[str, Iterable[Tensor]]]
MIB = 2**20
AGREEMENT = 0.01


def recorder_for(device: str | torch.device, watched: Watched, **options: Any) -> "Recorder":
    """The recorder for that device; ValueError for one that is neither a CPU nor a CUDA device."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} cannot be recorded; 'cpu' and 'cuda' can")
    return (CpuRecorder if kind == "cpu" else CudaRecorder)(watched, **options)


class Recorder:
    """Shared by both: opens and closes a section at each phase, and tags the watched tensors.

    `watched()` gives {category: tensors} for parameters, gradients and optimizer_state as they are
    when it is called, which is at each border between phases.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.stream = Stream()
        self.phase: str | None = None

    def __enter__(self) -> "Recorder":
        self._tag()
        return self

    def on_phase(self, name: str, step: int) -> None:
        """The phase `name` starts; "end" ends the last one."""
        self._leave()
        self.stream.mark(name)
        if name != "end":
            self.phase = name
            self._open()

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.phase is not None:
            self._close(self.phase)
            self.phase = None
            self._tag()

    def _tag(self) -> None:
        for category, tensors in self.watched().items():
            self.stream.tag(category, {t.untyped_storage().data_ptr() for t in tensors})

    def _open(self) -> None:
        raise NotImplementedError

    def _close(self, phase: str) -> None:
        raise NotImplementedError

    def record(self) -> dict:
        """Bytes: {"peak", "phases", "by_category", "by_phase_category", "held", "cross_check"}."""
        found = replay(self.stream)
        return {
            "peak": found.peak.bytes,
            "phases": {name: peak.bytes for name, peak in found.phases.items()},
            "by_category": found.peak.by_category,
            "by_phase_category": {name: peak.by_category for name, peak in found.phases.items()},
            "held": found.held,
            "cross_check": {
                "events": len(self.stream),
                "unknown_frees": found.unknown_frees,
                "lost_bytes": found.lost_bytes,
            },
        }


class CpuRecorder(Recorder):
    """Allocator events through torch.profiler, about 8 us each. Not the process's resident memory.

    Only memory events are recorded: with operations, one event would cost three times as much.
    What a library allocates behind torch's back (oneDNN's scratch, Python's objects) is not seen.
    """

    def __enter__(self) -> "CpuRecorder":
        for address, size in live_cpu_storages().items():
            self.stream.alloc(address, size)
        super().__enter__()
        return self

    def _open(self) -> None:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        start(self._profile)
        torch.autograd._enable_record_function(False)

    def _close(self, phase: str) -> None:
        torch.autograd._enable_record_function(True)
        self._profile.stop()
        allocation = torch._C._profiler._EventType.Allocation
        waiting = list(reversed(self._profile.profiler.kineto_results.experimental_event_tree()))
        while waiting:
            event = waiting.pop()
            if event.tag == allocation and event.extra_fields.device.type == "cpu":
                size = event.extra_fields.alloc_size
                if size > 0:
                    self.stream.alloc(event.extra_fields.ptr, size)
                elif size < 0:
                    self.stream.free(event.extra_fields.ptr)
            waiting.extend(reversed(event.children))
        del self._profile

    def record(self) -> dict:
        found = super().record()
        check = found["cross_check"]
        # Frees of what was alive before the recording are not reported, the rest must be.
        lost = check["lost_bytes"] / max(1, found["peak"])
        check["agrees"] = check["unknown_frees"] == 0 and lost <= AGREEMENT
        check["note"] = "" if check["agrees"] else f"frees of {lost:.1%} of the peak went unseen"
        return found


class CudaRecorder(Recorder):
    """Peaks from torch.cuda's own statistics; their categories from the allocator's history.

    The history keeps at most `max_entries` events a phase. One that overflows, or an allocator that
    keeps none, leaves the categories empty, and the record says so. Resets the peak statistics.
    """

    def __init__(self, watched: Watched, max_entries: int = 2_000_000) -> None:
        super().__init__(watched)
        self.max_entries = max_entries
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self.device = torch.cuda.current_device()
        native = torch.cuda.get_allocator_backend() == "native"
        self.missing = "" if native else "the allocator keeps no history"

    def __enter__(self) -> "CudaRecorder":
        if not self.missing:
            for address, size in blocks_of(torch.cuda.memory._snapshot(), self.device).items():
                self.stream.alloc(address, size)
        super().__enter__()
        return self

    def _open(self) -> None:
        if not self.missing:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=self.max_entries
            )
        torch.cuda.reset_peak_memory_stats()

    def _close(self, phase: str) -> None:
        peak = torch.cuda.max_memory_allocated()
        self.peaks[phase] = max(peak, self.peaks.get(phase, 0))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        if self.missing:
            return
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)  # which also empties it
        self.missing = extend(self.stream, read_section(snapshot, self.device), self.max_entries)

    def record(self) -> dict:
        found = {"by_category": {}, "by_phase_category": {}, "held": {}, "cross_check": {}}
        history = None
        if not self.missing:
            found |= super().record()
            history = found["peak"]
        found["peak"] = max(self.peaks.values())
        found["phases"] = dict(self.peaks)
        found["reserved"] = self.reserved
        found["cross_check"] |= cross_check(found["peak"], history, self.missing)
        return found


def extend(stream: Stream, section: Section, max_entries: int) -> str:
    """Adds a section's events to the stream; the reason why it is incomplete, or ""."""
    if section.entries >= max_entries:
        return f"the history overflowed {max_entries} entries"
    for address, size in section.events:
        if size is None:
            stream.free(address)
        else:
            stream.alloc(address, size)
    return ""


def cross_check(statistics: int, history: int | None, missing: str = "") -> dict:
    """Two peaks, in MiB, of the same step, and whether they agree within 1 %."""
    checked = {"statistics_mib": statistics / MIB, "history_mib": None, "agrees": False}
    if history is None:
        return checked | {"note": missing}
    difference = history / statistics - 1
    checked |= {"history_mib": history / MIB, "difference": difference}
    if abs(difference) <= AGREEMENT:
        return checked | {"agrees": True, "note": ""}
    note = f"the history's peak differs by {difference:+.1%} from torch.cuda's statistics"
    return checked | {"note": f"{note}; the categories are of the history"}


def live_cpu_storages() -> dict[int, int]:
    """Address and bytes of every CPU storage that torch's allocator gave to a tensor Python knows.

    Borrowed memory (torch.frombuffer, torch.from_numpy) cannot be resized and is left out.
    """
    found = {}
    for thing in gc.get_objects():
        # `type` rather than isinstance, which asks proxies for their __class__ and wakes them
        if not issubclass(type(thing), Tensor) or thing.layout is not torch.strided:
            continue
        if thing.device.type == "cpu" and type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Watched:
    """What to watch of a model and its optimizer."""

    def watched() -> dict[str, list[Tensor]]:
        parameters = list(model.parameters())
        states = (value for state in optimizer.state.values() for value in state.values())
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer_state": [value for value in states if isinstance(value, Tensor)],
        }

    return watched
