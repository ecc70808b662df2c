"""One training step with fake tensors: when each storage is born and when it dies, and whose it is.

Nothing is computed. A dispatch mode above FakeTensorMode sees every operator, writes the storages
of its results into a Stream, and frees them when Python and autograd let go of them, which is when
they would be freed in a real step. What an operator allocates besides its results, and what is no
operator of torch's, `operators` knows.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.lab.estimate import operators
from nsa.lab.estimate.pretend import DEVICE, Gpu, pretended
from nsa.lab.measure.allocations import Stream
from nsa.lab.measure.recorders import training_tensors
from nsa.lab.training import TrainingSpec
from nsa.model import parallel
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import Trainer

GRAIN = {"cuda": 512, "cpu": 1}  # an allocator rounds a request up to a multiple
aten = torch.ops.aten
# With any dispatch mode on, autograd takes the left one, which has a result of its own, for the
# right one, which writes into the zeros that the backward has just made.
IN_PLACE = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}


@dataclass
class Trace:
    """A step's stream, in which no address is used twice, and whose each one is."""

    stream: Stream = field(default_factory=Stream)
    where: dict[int, str] = field(default_factory=dict)  # the innermost module of each address
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    operators: int = 0


class Tracker(TorchDispatchMode):
    """Writes a Trace; an observer of the Trainer, for the phases, and hooks of its modules."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.trace, self.device = Trace(), device
        self._grain = GRAIN[device]
        self._addresses: dict[int, int] = {}  # by storage
        self._modules: list[str] = []
        self._watched: Any = dict
        self._backward = False
        self._next = 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.trace.operators += 1
        if self._backward and func in IN_PLACE and torch._C._current_autograd_node() is not None:
            func = IN_PLACE[func]
        out = operators.substitute(self, func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.born(leaf)
        self.besides(*operators.besides(self, func, args, kwargs, out))
        return out

    def born(self, tensor: Tensor) -> None:
        """Its storage, if it is new and on the device, is in the stream until it goes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._addresses or tensor.device.type != self.device:
            return
        size = -(-storage.nbytes() // self._grain) * self._grain
        if size:
            address = self._alloc(size)
            self._addresses[key] = address
            weakref.finalize(storage, self._gone, key, address)

    def besides(self, *sizes: int) -> None:
        """What an operator allocates and frees again, all held at once."""
        rounded = [-(-size // self._grain) * self._grain for size in sizes if size]
        for address in [self._alloc(size) for size in rounded]:
            self.trace.stream.free(address)

    def _alloc(self, size: int) -> int:
        address, self._next = self._next, self._next + 1
        self.trace.stream.alloc(address, size)
        if self._modules:
            self.trace.where[address] = self._modules[-1]
        return address

    def _gone(self, key: int, address: int) -> None:
        if self._addresses.get(key) == address:
            del self._addresses[key]
        self.trace.stream.free(address)

    def on_start(self, trainer: Trainer) -> None:
        self._watched = training_tensors(trainer.model, trainer.optimizer)
        for name, module in trainer.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
            module.register_forward_hook(lambda *_: self._left(), always_call=True)

    def _left(self) -> None:
        self._modules.pop()

    def on_phase(self, name: str, step: int) -> None:
        self._backward = name == "backward"
        self.trace.stream.mark(name)
        self.tag()

    def tag(self) -> None:
        for category, tensors in self._watched().items():
            keys = (t.untyped_storage()._cdata for t in tensors)
            found = {self._addresses[key] for key in keys if key in self._addresses}
            self.trace.stream.tag(category, found)


def trace(spec: TrainingSpec, gpu: Gpu | None = None) -> Trace:
    """The first step of that training, on one rank and launched one by one; see `steady`.

    gpu: the one that is pretended, for a spec on "cuda".
    """
    train = spec.training(seed=None, compile=False, cuda_graph=False)
    with contextlib.ExitStack() as held:
        if spec.device == "cuda":
            assert gpu is not None
            held.enter_context(pretended(gpu, flash=spec.backend == "flash"))
        else:
            held.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracker = held.enter_context(Tracker(spec.device))
        device = DEVICE if spec.device == "cuda" else torch.device("cpu")
        with device:
            model = LanguageModel(spec.config())
        # Where it is already; a fake parameter cannot be swapped for itself.
        with mock.patch.object(nn.Module, "to", lambda module, *_: module):
            place = replace(parallel.SINGLE, device=str(device))
            data = synthetic(0, spec.config().vocab)
            trainer = Trainer(model, data, train, device=device, parallel=place)
        trainer.observers = (tracker,)
        trainer.model.train()
        trainer.step(0)
        tracker.tag()
        found = tracker.trace
        found.stream = _copied(found.stream)  # what dies from here on is no event of the step
    return found


def _copied(stream: Stream) -> Stream:
    made = Stream()
    made.addresses, made.sizes = stream.addresses[:], stream.sizes[:]
    made.marks, made.tags = list(stream.marks), list(stream.tags)
    return made


def steady(stream: Stream) -> Stream:
    """The stream of a later step, from that of the first: what that left behind is there before.

    AdamW makes its state in the first step; in later ones it is held from the start.
    """
    first = stream.marks[0][0]
    freed = {a for a, size in zip(stream.addresses, stream.sizes, strict=True) if size < 0}
    before: list[tuple[int, int]] = []
    events: list[tuple[int, int]] = []
    moved = []  # events before each position that went to the front
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


def streams(spec: TrainingSpec, gpu: Gpu | None = None) -> Iterator[Stream]:
    """The first step's stream and a later one's."""
    found = trace(spec, gpu).stream
    yield found
    yield steady(found)
