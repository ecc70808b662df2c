"""Counters for running code: operations, calls that block the host, and compilations."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from workbook.lab.measure.recorders import profiled
from workbook.lab.observers.graph import count_nodes

# cudaMemcpyAsync returns at once; where torch must wait, it adds a cudaStreamSynchronize.
WAITS = re.compile(r"cuda\w+Synchronize|cu(Stream|Ctx|Event)Synchronize|cu(da)?Memcpy[^A]*")
_RANGE = "nsa.syncs.step"


class Count(TorchDispatchMode):
    """Counts every operation that reaches the dispatcher; slows a loop by 1.4 to 2 times.

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


def count_syncs(step: Callable[[], Any], *, warm: int = 2) -> int:
    """Count the CUDA runtime calls of a step that wait for the device: `step` runs `warm` times
    and once under the profiler. ValueError without a GPU: there is nothing to wait for."""
    if not torch.cuda.is_available():
        raise ValueError("device syncs are a GPU's, and torch sees none here")
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    activities = ProfilerActivity.CPU, ProfilerActivity.CUDA
    with profiled(activities) as profile, torch.profiler.record_function(_RANGE):
        step()
    return waits_in(profile.events())


def waits_in(events: Iterable[Any]) -> int:
    """Count the waiting calls inside the step's range among a profile's events."""
    events = list(events)
    ranges = [e.time_range for e in events if e.name == _RANGE and "CPU" in str(e.device_type)]
    if not ranges:
        raise ValueError(f"the profile has no range {_RANGE!r}, so nothing tells where the step is")
    first, last = ranges[0].start, ranges[0].end
    return sum(
        bool(WAITS.fullmatch(e.name)) and first <= e.time_range.start <= last for e in events
    )


class Compilations:
    """Counts compilations in this process and its threads: `graphs` of torch.compile and
    `kernels` of Triton. Use `with Compilations() as seen:`, then `seen.count`.

    Inspects loaded modules and imports none: code that has not imported torch._dynamo or Triton by
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
