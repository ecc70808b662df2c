"""Trace of a training step with fake tensors: birth, death and owner of each storage.

Nothing is computed. A dispatch mode above FakeTensorMode sees every operator, writes the storages
of its results into a Stream, and frees them when Python and autograd release them, which is when
they would be freed in a real step. Temporaries of operators, and programs that are not torch
operators, are handled by `operators`.
"""

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.attention import span
from nsa.attention.backends import gather, packed
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import Trainer, check_capturable
from workbook.lab import sequential
from workbook.lab.estimate import operators, ranks
from workbook.lab.estimate.gpus import Gpu
from workbook.lab.estimate.libraries import round_up
from workbook.lab.estimate.pretend import DEVICE, Quick, pretended
from workbook.lab.measure.allocations import Stream
from workbook.lab.measure.recorders import training_tensors
from workbook.lab.training import TrainingSpec

GRAIN = {"cuda": 512, "cpu": 1}  # an allocator rounds a request up to a multiple
aten = torch.ops.aten
# With any dispatch mode on, autograd uses the left operator, which returns a new tensor, instead of
# the right one, which writes into zeros just made by the backward.
IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}


def _caller() -> str:
    """Name of the innermost Python function that called the operator, directly or from C++."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("__torch_dispatch__", "_fn", "inner"):  # torch's wrappers
        frame = frame.f_back
    return frame.f_code.co_name


def _owned(tensor: Tensor) -> bool:
    """Return True if nothing else holds the storage: the fake tensor itself has two references."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2


@dataclass
class Trace:
    """A step's stream, in which no address is used twice, and the owner of each address."""

    stream: Stream = field(default_factory=Stream)
    where: dict[int, str] = field(default_factory=dict)  # module by address
    streams: dict[int, int] = field(default_factory=dict)  # stream number by address, unless 0
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    operators: int = 0


class Tracker(TorchDispatchMode):
    """Writes a Trace; also an observer of the Trainer, for phases, and hooks of its modules."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.trace, self.device = Trace(), device
        self.current_stream: Callable[[], int] = lambda: 0
        self._grain = GRAIN[device]
        self._addresses: dict[int, int] = {}  # by storage
        self._ends: dict[int, weakref.finalize] = {}
        self._modules: list[str] = []
        self._watched: Any = dict
        self._backward = self._optimizing = False
        self._next = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and two wrappers around each operator take time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # for sharded tensors; their local parts are dispatched
        kwargs = kwargs or {}
        self.trace.operators += 1
        if func in IN_PLACE:
            func = self._in_place(func, args)
        out = operators.substitute(self, func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if self._optimizing and args:
            self._name_as(args[0], out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.born(leaf)
        self.besides(*operators.besides(self, func, args, kwargs, out))
        return out

    def _in_place(self, func, args):
        """Return the operator that C++ calls without modes and tensor subclasses."""
        if func is aten.add.Tensor:
            caller = _caller()
            # Gradients of several uses are summed, and a mask is added to the scores.
            summed = caller == "_engine_run_backward" and _owned(args[0])
            if summed or caller == "scaled_dot_product_attention":
                return aten.add_.Tensor
        elif self._backward and torch._C._current_autograd_node() is not None:
            return IN_PLACE[func]
        return func

    def _name_as(self, first: Any, out: Any) -> None:
        """Assign results that the optimizer computes from a tensor to that tensor's module."""
        if not (isinstance(first, list) and isinstance(out, list)):
            first, out = [first], [out]
        for x, made in zip(first, out, strict=False):  # an operator may return fewer
            if isinstance(x, Tensor) and isinstance(made, Tensor):
                name = self.trace.where.get(self._addresses.get(x.untyped_storage()._cdata, 0))
                self._modules = [] if name is None else [name]
                self.born(made)
                self._modules = []

    def born(self, tensor: Tensor) -> None:
        """Record the storage, if new and on the device, in the stream until it is freed."""
        if not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._addresses or tensor.fake_device.type != self.device:
            return
        size = round_up(storage.nbytes(), self._grain)
        if size:
            address = self._alloc(size)
            self._addresses[key] = address
            self._ends[key] = weakref.finalize(storage, self._gone, key, address)

    def freed(self, tensor: Tensor) -> None:
        """Free the storage now, although it is still referenced."""
        if end := self._ends.get(tensor.untyped_storage()._cdata):
            end()

    def besides(self, *sizes: int) -> None:
        """Record temporaries of an operator, all held at once and then freed."""
        rounded = (round_up(size, self._grain) for size in sizes if size)
        for address in [self._alloc(size) for size in rounded]:
            self.trace.stream.free(address)

    def _alloc(self, size: int) -> int:
        address, self._next = self._next, self._next + 1
        self.trace.stream.alloc(address, size)
        if number := self.current_stream():
            self.trace.streams[address] = number
        if self._modules:
            self.trace.where[address] = self._modules[-1]
        return address

    def _gone(self, key: int, address: int) -> None:
        if self._addresses.get(key) == address:
            del self._addresses[key]
        self.trace.stream.free(address)

    def on_start(self, trainer: Trainer) -> None:
        self._model = trainer.model
        self._watched = training_tensors(trainer.model, trainer.optimizer)
        for name, module in trainer.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
            module.register_forward_hook(lambda *_: self._left(), always_call=True)
        self._named()

    def _named(self, attribute: str = "") -> None:
        """Assign parameters, or their attribute of that name, to their modules."""
        for name, parameter in self._model.named_parameters():
            x = getattr(parameter, attribute) if attribute else parameter
            if x is not None and (address := self._addresses.get(x.untyped_storage()._cdata)):
                self.trace.where[address] = name.rpartition(".")[0]

    def _left(self) -> None:
        self._modules.pop()

    def on_phase(self, name: str, step: int) -> None:
        self._backward, self._optimizing = name == "backward", name == "optimizer"
        if self._optimizing:
            self._named("grad")
        self.trace.stream.mark(name)
        self.tag()

    def tag(self) -> None:
        for category, tensors in self._watched().items():
            keys = (t.untyped_storage()._cdata for t in tensors)
            found = {self._addresses[key] for key in keys if key in self._addresses}
            self.trace.stream.tag(category, found)


# Backends that loop over chunks of queries with range, and the number of chunks traced.
LOOPS = (span, gather, packed)
CHUNKS = 6


def few(*bounds: int) -> Sequence[int]:
    """Replace `range`, keeping CHUNKS items: the first two, the last three, and one in the middle.

    Tensors grow from chunk to chunk, and no result except those written in place outlives the next
    chunk: so no skipped chunk holds more than the last.
    """
    every = range(*bounds)
    if len(every) <= CHUNKS:
        return every
    count = len(every)
    return [every[i] for i in (0, 1, count // 2, count - 3, count - 2, count - 1)]


def newest(blocks: Tensor, t: int, size: int) -> range:
    """Return as many blocks as `sequential` selects for token t. Their indices are unknown in a
    trace, but since all differ and include the token's own, the bytes are the same."""
    own = t // size
    return range(max(0, own + 1 - blocks.shape[0]), own + 1)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Patch the backends' loops to work without values and with few chunks."""
    with contextlib.ExitStack() as held:
        for module in LOOPS:
            held.enter_context(mock.patch.object(module, "range", few, create=True))
        held.enter_context(mock.patch.object(sequential, "chosen", newest))
        yield


def trace(
    spec: TrainingSpec,
    gpu: Gpu | None = None,
    *,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Trace:
    """Trace the first step of that training, on rank 0, launched eagerly; see `steady`.

    gpu: the pretended GPU, for a spec on "cuda". ddp: DDP options as in Parallel. changes:
    overrides of the spec's TrainConfig.
    """
    eager = {"seed": None, "compile": False, "cuda_graph": False}
    if spec.device == "cpu":
        eager["nonfinite"] = None  # the host reads the norm, which has no value here
    train = spec.training(**changes | eager)
    with contextlib.ExitStack() as held:
        if spec.device == "cuda":
            assert gpu is not None
            held.enter_context(pretended(gpu, flash=spec.backend == "flash"))
        else:
            held.enter_context(Quick())
        held.enter_context(_without_values())
        tracker = held.enter_context(Tracker(spec.device))
        device = DEVICE if spec.device == "cuda" else torch.device("cpu")
        with device:
            model = LanguageModel(spec.config())
        if spec.device == "cpu":  # the host would check fp16 gradients for overflow
            held.enter_context(mock.patch.object(GradScaler, "_maybe_opt_step", _taken))
        # The model is already there; a fake parameter cannot be swapped for itself.
        with mock.patch.object(nn.Module, "to", lambda module, *_: module):
            place = ranks.place_of(spec, str(device), **ddp)
            if spec.cuda_graph:
                check_capturable(spec.training(**changes), device, place)
            held.enter_context(ranks.ranked(tracker, place))
            data = synthetic(0, spec.config().vocab)
            trainer = Trainer(model, data, train, device=device, parallel=place)
        trainer.observers = (tracker,)
        trainer.model.train()
        trainer.step(0)
        tracker.tag()
        # Later frees are not events of the step.
        found, tracker.trace = tracker.trace, Trace()
    return found


def _taken(scaler: GradScaler, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.step()


def steady(stream: Stream) -> Stream:
    """Convert the stream of the first step to that of a later one: blocks it leaves exist before.

    AdamW creates its state in the first step; in later ones it is held from the start.
    """
    first = stream.marks[0][0]
    freed = {a for a, size in zip(stream.addresses, stream.sizes, strict=True) if size < 0}
    before: list[tuple[int, int]] = []
    events: list[tuple[int, int]] = []
    moved = []  # index in `events` for each position
    for at, (address, size) in enumerate(zip(stream.addresses, stream.sizes, strict=True)):
        moved.append(len(events))
        early = at < first or (size >= 0 and address not in freed)
        (before if early else events).append((address, size))
    moved.append(len(events))
    made = Stream()
    for address, size in before + events:
        made.alloc(address, size)
    made.marks = [(len(before) + moved[at], phase) for at, phase in stream.marks]
    made.tags = [(len(before) + moved[at], *rest) for at, *rest in stream.tags]
    return made
