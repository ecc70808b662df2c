"""Counted while code runs: operations, calls that make the host wait, and what is compiled."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.lab.measure.recorders import profiled
from nsa.lab.observers.graph import count_nodes

# cudaMemcpyAsync returns at once; where it must not, torch has a cudaStreamSynchronize follow.
WAITS = re.compile(r"cuda\w+Synchronize|cu(Stream|Ctx|Event)Synchronize|cu(da)?Memcpy[^A]*")
# These wait for the device now and then; a warm caching allocator makes none of them.
ALLOCATES = re.compile(r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)\w*")
_RANGE = "nsa.syncs.step"


class Count(TorchDispatchMode):
    """Counts every operation that reaches the dispatcher; 1.4 to 2 times the time of a loop.

    forward, nodes: operations and autograd nodes of the forward, once `forward_ended` was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.forward = self.nodes = 0

    @property
    def total(self) -> int:
        return self.by_name.total()

    @property
    def backward(self) -> int:
        return self.total - self.forward

    @property
    def syncs(self) -> int:
        return self.by_name["_local_scalar_dense"]

    def forward_ended(self, loss: Tensor) -> None:
        self.forward, self.nodes = self.total, count_nodes([loss])

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.by_name[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


@dataclass
class Syncs:
    """What one step asked of the CUDA runtime that waits for the device."""

    by_call: dict[str, int]  # cudaStreamSynchronize: 2, ...
    by_line: dict[str, int] = field(default_factory=dict)  # file:line as far as torch tells
    by_operation: dict[str, int] = field(default_factory=dict)  # aten::item: 2, ...

    @property
    def total(self) -> int:
        """Calls that wait for the device; allocations are listed and not counted."""
        return sum(n for name, n in self.by_call.items() if WAITS.fullmatch(name))


def count_syncs(step: Callable[[], Any], *, warm: int = 2) -> Syncs:
    """Runs `step` `warm` times, once under the profiler and once more to find the lines.

    Calls of cudaMalloc and cudaFree, which a warm caching allocator does not make, are in `by_call`
    but not in the total.

    Raises ValueError without a GPU: there is nothing to wait for.
    """
    if not torch.cuda.is_available():
        raise ValueError("device syncs are a GPU's, and torch sees none here")
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    activities = ProfilerActivity.CPU, ProfilerActivity.CUDA
    with profiled(activities) as profile, torch.profiler.record_function(_RANGE):
        step()
    found = syncs_in(profile.events())
    torch.cuda.synchronize()
    found.by_line = _lines(step)
    return found


def syncs_in(events: Iterable[Any]) -> Syncs:
    """The waiting calls inside the step's range, of a profile's events."""
    events = list(events)
    ranges = [e.time_range for e in events if e.name == _RANGE and "CPU" in str(e.device_type)]
    if not ranges:
        raise ValueError(f"the profile has no range {_RANGE!r}, so nothing tells where the step is")
    calls, operations = Counter(), Counter()
    for event in events:
        name, parent = event.name, event.cpu_parent
        waits = WAITS.fullmatch(name)
        inside = ranges[0].start <= event.time_range.start <= ranges[0].end
        if inside and (waits or ALLOCATES.fullmatch(name)):
            calls[name] += 1
        if inside and waits:
            told = parent is not None and parent.name != _RANGE
            operations[parent.name if told else "no operation of torch"] += 1
    return Syncs(dict(calls), by_operation=dict(operations))


def _lines(step: Callable[[], Any]) -> dict[str, int]:
    """file:line of each sync that torch's own sync debug mode warns of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = (f"{w.filename}:{w.lineno}" for w in seen if "synchronizing CUDA" in str(w.message))
    return dict(Counter(places))


class Compilations:
    """`with Compilations() as seen:`, then `seen.count`, that of this process and its threads:
    `graphs` of torch.compile and `kernels` of Triton.

    Looks at what is loaded and loads nothing: code that has not imported torch._dynamo or Triton at
    the end has compiled nothing with it.
    """

    graphs = kernels = 0

    @property
    def count(self) -> int:
        return self.graphs + self.kernels

    def __enter__(self) -> "Compilations":
        self._graphs_before = _graphs()
        runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
        self._runtime = runtime if hasattr(runtime, "jit_post_compile_hook") else None
        if self._runtime is not None:
            self._hook = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = self._compiled
        return self

    def __exit__(self, *error: object) -> None:
        self.graphs = _graphs() - self._graphs_before
        if self._runtime is not None:
            self._runtime.jit_post_compile_hook = self._hook

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        self.kernels += 1
        return self._hook(*args, **kwargs) if self._hook is not None else None


def _graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0
