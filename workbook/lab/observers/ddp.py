"""Trace of the buckets in which DDP averages gradients on each rank, in the first two steps.

DDP observes the order of gradients in the first step, and rebuilds its buckets after it unless it
looks for unused parameters. The first step alone shows buckets (one for all) that are never used
again.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from workbook.lab.measure.timing import mark, seconds_between

MOST_STEPS = 8
_ONE_HOOK = "DDP takes one communication hook only; wrap the model again to trace its buckets"


class BucketTrace:
    """Observer that traces DDP's buckets by a communication hook that averages as DDP does.

    `steps` counts the averaged backwards since the model was wrapped, from 0; a step has one.
    Gradients are divided by the number of ranks and summed in their own dtype, as without a hook:
    bitwise equal for 2, 4, 8, ... ranks.

    A hook cannot be removed. After the traced steps it still costs a Python call and one more pass
    over the gradients for each bucket, which a line on `out` reports once.

    Raises ValueError for a model that is not wrapped in DDP or already has a hook, since DDP
    accepts only one, and for more than 8 traced steps.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        steps: Sequence[int] = (0, 1),
        *,
        out: TextIO | None = sys.stderr,
    ) -> None:
        if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"buckets are DDP's; got a {type(wrapped).__name__}, and neither FSDP2 nor a model "
                "alone has any"
            )
        if wrapped._comm_hooks:
            names = ", ".join(hook.__qualname__ for hook, _ in wrapped._comm_hooks)
            raise ValueError(f"{_ONE_HOOK}: it has {names}")
        self.steps = frozenset(steps)
        if len(self.steps) > MOST_STEPS:
            raise ValueError(
                f"{len(self.steps)} traced steps keep rows and events of every bucket; trace at "
                f"most {MOST_STEPS}"
            )
        if min(self.steps, default=-1) < 0:
            raise ValueError(f"steps={tuple(steps)}; name at least one, counted from 0")
        self._last = max(self.steps)
        self._wrapped, self._out = wrapped, out
        self._names = {p: name for name, p in wrapped.module.named_parameters()}
        rebuilds = wrapped.static_graph or not wrapped.find_unused_parameters
        self._later = "rebuilt" if rebuilds else "initial"
        self._step: int | None = None  # the trainer's number
        self._count = 0  # averaged backwards so far
        self._hook_s = 0.0
        self._rows: list[dict[str, Any]] = []
        self._timed: list[tuple[dict[str, Any], Any, Any]] = []  # row, start, end of an answer
        try:
            wrapped.register_comm_hook(self, _average)
        except RuntimeError as error:  # a built-in hook, which DDP does not list
            raise ValueError(f"{_ONE_HOOK}: {str(error).splitlines()[0]}") from error

    def on_phase(self, name: str, step: int) -> None:
        self._step = step

    def rows(self) -> list[dict[str, Any]]:
        """Rows per bucket: rank, step, buckets, index, elements, bytes, dtype, is_last, ms, names.

        `buckets` is "initial" in the first step and "rebuilt" after it, if DDP rebuilds; `ms` is
        the time from this rank's gradients being ready until the average is, including the wait for
        other ranks; `names` are the bucket's parameters. Waits for the device.
        """
        while self._timed:
            row, start, end = self._timed.pop()
            if not isinstance(end, float):
                end.synchronize()
            row["ms"] = 1e3 * seconds_between(start, end)
        return [dict(row) for row in self._rows]

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        entered = time.perf_counter()
        group, buffer = self._wrapped.process_group, bucket.buffer()
        start = mark(buffer.device) if self._count in self.steps else None
        future = allreduce_hook(group, bucket)
        if start is not None:
            row = {
                "rank": dist.get_rank(group),
                "step": self._count if self._step is None else self._step,
                "buckets": self._later if self._count > 0 else "initial",
                "index": bucket.index(),
                "elements": buffer.numel(),
                "bytes": buffer.nbytes,
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "is_last": bucket.is_last(),
                "ms": None,
                "names": [self._names[p] for p in bucket.parameters()],
            }
            self._rows.append(row)

            def done(future: torch.futures.Future) -> Tensor:
                value = future.value()
                self._timed.append((row, start, mark(value.device)))
                return value

            future = future.then(done)
        self._hook_s += time.perf_counter() - entered
        if bucket.is_last():
            self._count += 1
            if self._count == self._last + 1 and self._out is not None:
                self._out.write(
                    "bucket trace: done. Its hook stays until the model is wrapped again and costs "
                    "one call of Python and one more pass over the gradients for each bucket "
                    f"({1e3 * self._hook_s / self._count:.2f} ms of the host's time a step so "
                    "far)\n"
                )
        return future


def _average(trace: BucketTrace, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return trace._reduce(bucket)
