"""Trace of one rank of several without the others: the real DDP and FSDP2, over a process group
that sends nothing.

Their allocations are traced like all others: DDP's buckets, copies made by its hooks, FSDP2's
shards, gathered blocks and buffers, and gloo's copies of these. NCCL's own allocations are outside
torch's allocator and not counted. Rank 0 is traced: if a parameter is not divisible by the ranks,
FSDP2 pads every shard to the size of rank 0's, so no rank holds more.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from nsa.model import parallel
from nsa.model.parallel import Parallel
from workbook.lab.training import TrainingSpec


def place_of(spec: TrainingSpec, device: str, **options: Any) -> Parallel:
    """Return rank 0 of the spec's ranks, which trains without the others inside `ranked`.

    options: DDP options as in Parallel. ValueError for invalid combinations.
    """
    parallel.check(spec.parallel, **options)
    if spec.parallel == "none":
        return replace(parallel.SINGLE, device=device)
    # A static graph differs only in its first step, and a search for unused parameters only by two
    # integers per parameter.
    options |= {"static_graph": False, "find_unused_parameters": False}
    at = {"ranks": spec.ranks, "cp": spec.cp, "device": device, "joined": False}
    return _Alone(spec.parallel, **at, **options)


class _Alone(Parallel):
    """Parallel whose DDP treats each full bucket as already averaged."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        if self.kind == "ddp" and self.comm_hook == "none":
            wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        return wrapped


def _done(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


@contextlib.contextmanager
def ranked(tracker: Any, place: Parallel) -> Iterator[None]:
    """Allow `place` to train inside, with the modes of `tracker` on. No effect for one rank
    without DDP or FSDP2. ValueError in a process that already has a process group."""
    if place.kind == "none":
        yield
        return
    if dist.is_initialized():
        raise ValueError(
            f"parallel={place.kind!r} is traced in a process group of its own, and this process is "
            "in one; another process would do, or an estimate before the group is joined"
        )
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with contextlib.ExitStack() as held:
        # torch permanently makes it print this rank's number.
        held.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        with _disable_current_modes():
            store = FakeStore()
            dist.init_process_group("fake", store=store, rank=place.rank, world_size=place.ranks)
        held.callback(dist.destroy_process_group)
        replaced = [(device_mesh, "init_device_mesh", _unseen(device_mesh.init_device_mesh))]
        replaced += _for_ddp() if place.kind == "ddp" else _for_fsdp(tracker)
        for owner, name, value in replaced:
            held.enter_context(mock.patch.object(owner, name, value, create=name == "device"))
        yield


Replaced = tuple[Any, str, Any]


def _unseen(call: Callable) -> Callable:
    """Wrap a call on rank lists or on whole tensors that no rank holds, hiding it."""

    def called(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **options)

    return called


def _for_ddp() -> Iterator[Replaced]:
    from torch.nn.parallel import distributed

    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return reduce(tensor, *args, **options)
        return mock.Mock(get_future=lambda: _done([tensor]))

    yield dist, "all_reduce", all_reduce
    # This compares values, which fake tensors do not have.
    yield distributed, "_verify_param_shape_across_processes", lambda *_: None


def _for_fsdp(tracker: Any) -> Iterator[Replaced]:
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
    )
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def seen(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Wrap a resize of a storage, which no operator reports."""

        def resized(tensor: Tensor) -> None:
            tracker.freed(tensor)
            resize(tensor)
            tracker.born(tensor)

        return resized

    shapes = "_propagate_tensor_meta_non_cached"
    yield ShardingPropagator, shapes, _unseen(getattr(ShardingPropagator, shapes))
    for module in (_fsdp_param, _fsdp_param_group):
        for name in ("alloc_storage", "free_storage"):
            if hasattr(module, name):
                yield module, name, seen(getattr(module, name))

    def copied(call: Callable) -> Callable:
        """Wrap a collective of gloo, which sends a copy of the gathered or scattered tensor."""

        def called(comm: Any, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
            tracker.besides(max(output_tensor.nbytes, input_tensor.nbytes))
            return call(comm, output_tensor, input_tensor, **options)

        return called

    if tracker.device == "cpu":
        for kind in (_fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter):
            yield kind, "__call__", copied(kind.__call__)
    else:
        # A sharded tensor is a meta tensor for C++, as is its local part.
        yield DTensor, "device", property(lambda sharded: sharded._local_tensor.device)
        streams = _Streams()
        tracker.current_stream = streams.number
        yield from streams.replaced()


class _Streams:
    """Replacement for torch.cuda streams without a GPU: numbered, and nothing waits."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._current = [self._make()]

    def _make(self, *_: Any, **__: Any) -> mock.Mock:
        return mock.Mock(number=next(self._numbers))

    @contextlib.contextmanager
    def _inside(self, stream: mock.Mock) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def number(self) -> int:
        return self._current[-1].number

    def replaced(self) -> Iterator[Replaced]:
        yield torch.cuda, "Stream", self._make
        yield torch.cuda, "Event", _Event
        yield torch.cuda, "stream", self._inside
        yield torch.cuda, "current_stream", lambda *_: self._current[-1]


class _Event:
    """Event of torch.cuda that nothing waits for; a class, as torch's own annotations need."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record
