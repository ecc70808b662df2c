"""Recorders of a step's allocations from torch's own allocators, on a CPU or a CUDA device.

A recorder is an observer of any loop that announces its phases through on_phase(name, step):

    with recorder_for(device, watched) as recorder: ...   # one step that calls recorder.on_phase
    recorder.record()

Each phase is recorded separately, so that at most one phase exists in torch's own, much larger,
form. MemorySamples, below, samples the memory of device and process after each step.
"""

import ctypes
import gc
import math
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from workbook.lab.measure.allocations import Stream, add_history, blocks_of, replay, timeline

MIB = 2**20
AGREEMENT = 0.01
MOST_ENTRIES = 2_000_000  # of the history of torch's CUDA allocator
POINTS = 300  # number of points in a record's timeline
Watched = Callable[[], Mapping[str, Iterable[Tensor]]]


class MemorySamples:
    """MiB after each step: from torch's allocator `device_mib` of tensors, `reserved_mib` of the
    device and `peak_mib`, the maximum of tensors since the last reset, all three empty without a
    GPU; and `host_mib` in RAM, NaN outside Linux. Use as an observer, or call `take`: about 20 us
    on a CPU, without waiting. Before the first sample glibc returns freed pages (milliseconds):
    pages it kept would absorb a leak, and nothing would grow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_mib: list[float] = []
        self.reserved_mib: list[float] = []
        self.peak_mib: list[float] = []
        self.host_mib: list[float] = []

    def take(self, *_: Any) -> None:
        if self.device.type == "cuda":
            held = torch.cuda.memory_stats(self.device)  # one call that includes the others
            self.device_mib.append(held.get("allocated_bytes.all.current", 0) / MIB)
            self.reserved_mib.append(held.get("reserved_bytes.all.current", 0) / MIB)
            self.peak_mib.append(held.get("allocated_bytes.all.peak", 0) / MIB)
        if not self.host_mib:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS lack it
            if trim is not None:
                trim(0)
        self.host_mib.append(resident_mib())

    on_step = take


def resident_mib() -> float:
    """Resident memory of this process in MiB; NaN if /proc is unavailable, as outside Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return math.nan
    return pages * resource.getpagesize() / MIB


@contextmanager
def profiled(activities: Iterable[ProfilerActivity], **options: Any) -> Iterator[profile]:
    """Profile the work inside; its events are available afterwards."""
    found = profile(activities=list(activities), **options)
    with warnings.catch_warnings():
        # torch 2.11 warns, once per process, about further cycles, but there are none
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        found.start()
    try:
        yield found
    finally:
        found.stop()


def recorder_for(device: str | torch.device, watched: Watched) -> "Recorder":
    """Return the recorder for that device; ValueError unless it is a CPU or CUDA device."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} cannot be recorded; 'cpu' and 'cuda' can")
    return CpuRecorder(watched) if kind == "cpu" else CudaRecorder(watched)


class Recorder:
    """Base class: records each phase, and tags the watched tensors.

    `watched()` returns {category: tensors} for the current parameters, gradients and
    optimizer_state; it is called at each border between phases.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched, self.stream = watched, Stream()
        self._phase = ExitStack()

    def __enter__(self) -> "Recorder":
        for address, size in self._before().items():
            self.stream.alloc(address, size)
        self._tag()
        return self

    def on_phase(self, name: str, step: int) -> None:
        """Start the phase `name`; "end" ends the last one."""
        self._phase.close()
        self.stream.mark(name)
        if name != "end":
            self._phase.callback(self._tag)
            self._phase.enter_context(self._recording(name))

    def __exit__(self, *error: object) -> None:
        self._phase.close()

    def _tag(self) -> None:
        for category, addresses in self._addresses().items():
            self.stream.tag(category, addresses)

    def _addresses(self) -> dict[str, set[int]]:
        """Return the current addresses of the watched tensors."""
        return {
            category: {t.untyped_storage().data_ptr() for t in tensors}
            for category, tensors in self.watched().items()
        }

    def _before(self) -> dict[int, int]:
        """Address and bytes of each existing block."""
        raise NotImplementedError

    def _recording(self, phase: str) -> AbstractContextManager[None]:
        """Record the allocations inside into the stream."""
        raise NotImplementedError

    def record(self) -> dict:
        """Results of `replay` and, as "timeline", of `timeline`; "cross_check" contains "agrees",
        True if another count matches, and "note", the reason if not."""
        return replay(self.stream) | {"timeline": timeline(self.stream, POINTS)}


class CpuRecorder(Recorder):
    """Records allocator events through torch.profiler, about 8 us each: with operations, one would
    cost three times as much. This is not the process's resident memory: allocations outside torch
    (oneDNN's scratch, Python's objects) are not recorded.
    """

    def _before(self) -> dict[int, int]:
        return live_cpu_storages()

    @contextmanager
    def _recording(self, phase: str) -> Iterator[None]:
        with profiled([ProfilerActivity.CPU], profile_memory=True) as seen:
            torch.autograd._enable_record_function(False)
            try:
                yield
            finally:
                torch.autograd._enable_record_function(True)
        allocation = torch._C._profiler._EventType.Allocation
        waiting = list(reversed(seen.profiler.kineto_results.experimental_event_tree()))
        while waiting:
            event = waiting.pop()
            if event.tag == allocation and event.extra_fields.device.type == "cpu":
                size = event.extra_fields.alloc_size
                if size > 0:
                    self.stream.alloc(event.extra_fields.ptr, size)
                elif size < 0:
                    self.stream.free(event.extra_fields.ptr)
            waiting.extend(reversed(event.children))

    def record(self) -> dict:
        found = super().record()
        check = found["cross_check"]
        # Frees of blocks alive before the recording are not reported, all others must be.
        lost = check["lost_bytes"] / max(1, found["peak"])
        check["agrees"] = check["unknown_frees"] == 0 and lost <= AGREEMENT
        check["note"] = "" if check["agrees"] else f"frees of {lost:.1%} of the peak went unseen"
        return found


class CudaRecorder(Recorder):
    """Peaks from torch.cuda's own statistics; their categories from the allocator's history.

    The history holds at most MOST_ENTRIES events per phase. If it overflows, or the allocator has
    none, the categories are empty and the record notes it. Resets the peak statistics.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self.device = torch.cuda.current_device()
        native = torch.cuda.get_allocator_backend() == "native"
        self.missing = "" if native else "the allocator keeps no history"

    def _before(self) -> dict[int, int]:
        return {} if self.missing else blocks_of(torch.cuda.memory._snapshot(), self.device)

    @contextmanager
    def _recording(self, phase: str) -> Iterator[None]:
        history = torch.cuda.memory._record_memory_history
        if not self.missing:
            history("all", context=None, stacks="python", max_entries=MOST_ENTRIES)
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peaks[phase] = max(torch.cuda.max_memory_allocated(), self.peaks.get(phase, 0))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        if not self.missing:
            snapshot = torch.cuda.memory._snapshot()
            history(None)  # which also empties it
            self.missing = add_history(self.stream, snapshot, self.device, MOST_ENTRIES)

    def record(self) -> dict:
        names = ("by_category", "by_phase_category", "held", "cross_check", "timeline")
        found: dict[str, Any] = {name: {} for name in names}
        if not self.missing:
            found |= super().record()
        history, statistics = found.get("peak"), max(self.peaks.values())
        found |= {"peak": statistics, "phases": dict(self.peaks), "reserved": self.reserved}
        found["cross_check"] |= cross_check(statistics, history, self.missing)
        return found


def cross_check(statistics: int, history: int | None, missing: str = "") -> dict:
    """Compare two peaks of the same step, in MiB; "agrees" is True if within 1 %."""
    checked = {"statistics_mib": statistics / MIB, "history_mib": None, "agrees": False}
    if history is None:
        return checked | {"note": missing}
    difference = history / statistics - 1
    checked |= {"history_mib": history / MIB, "difference": difference}
    if abs(difference) <= AGREEMENT:
        return checked | {"agrees": True, "note": ""}
    note = f"the history's peak differs by {difference:+.1%} from torch.cuda's statistics"
    return checked | {"note": f"{note}; the categories are of the history"}


def recorded_step(trainer: Any) -> tuple[Tensor, Recorder]:
    """Run one more step of a Trainer with a recorder added; return (loss, recorder)."""
    watched = training_tensors(trainer.model, trainer.optimizer)
    with recorder_for(trainer.device, watched) as recorder, observed(trainer, recorder):
        loss = trainer.step(trainer.steps_done)
    return loss, recorder


def observed(trainer: Any, *more: Any) -> AbstractContextManager[None]:
    """Context in which a Trainer has these observers beside its own."""
    return changed(trainer, "observers", (*trainer.observers, *more))


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of `owner` has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def live_cpu_storages() -> dict[int, int]:
    """Address and bytes of every CPU storage that torch allocated for a tensor visible to Python.

    Borrowed memory (torch.frombuffer, torch.from_numpy) cannot be resized and is left out.
    """
    found = {}
    for tensor in live_tensors("cpu"):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def live_tensors(device: str) -> Iterator[Tensor]:
    """Yield every tensor on that device type that Python's gc tracks."""
    for thing in gc.get_objects():
        # `type` rather than isinstance, which reads __class__ of proxies and activates them
        if type(thing) not in (Tensor, torch.nn.Parameter) or thing.layout is not torch.strided:
            continue
        if thing.device.type == device:
            yield thing


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Watched:
    """Tensors to watch of a model and its optimizer; of FSDP2-sharded tensors, the local shard."""

    def watched() -> dict[str, list[Tensor]]:
        states = (value for state in optimizer.state.values() for value in state.values())
        return by_category(model.parameters(), (x for x in states if isinstance(x, Tensor)))

    return watched


def by_category(parameters: Iterable[Tensor], states: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return this rank's part of the parameters, their gradients and the optimizer's states."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = {"parameters": parameters, "gradients": gradients, "optimizer_state": states}
    return {name: [local(x) for x in tensors] for name, tensors in found.items()}


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, else the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
