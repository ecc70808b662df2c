"""A program's warps, emulated: their turns, their copies and products, and what these work on."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Pointer:
    """Elements of a tensor's storage, at an offset or at a tensor of them."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.base, self.offset + other)

    def elements(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.base.as_strided((self.base.untyped_storage().nbytes()
                                     // self.base.element_size(),), (1,), 0)  # fmt: skip
        offset = torch.as_tensor(self.offset) + self.base.storage_offset()
        offset, mask = torch.broadcast_tensors(offset, mask)
        return flat, offset.long(), mask


class Descriptor:
    """Stands for a TensorDescriptor in a kernel."""

    def __init__(self, given: Any) -> None:
        self.view = given.base.as_strided(given.shape, given.strides)
        self.block_shape, self.layout = given.block_shape, given.layout
        self.dtype = given.base.dtype

    def read(self, at: Sequence[int]) -> Tensor:
        """The block at these coordinates, 0 past the tensor's ends."""
        block = torch.zeros(self.block_shape, dtype=self.dtype)
        places = zip(at, self.block_shape, strict=True)
        found = self.view[tuple(slice(first, first + size) for first, size in places)]
        block[tuple(slice(0, n) for n in found.shape)] = found
        return block


class Memory:
    """Shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i: int) -> "Memory":
        if not 0 <= i < len(self.data):
            raise IndexError(f"stage {i} of {len(self.data)}")
        return Memory(self.data[i])

    def reshape(self, shape: Sequence[int]) -> "Memory":
        return Memory(self.data.view(shape))

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory(self.data.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        self.data.copy_(values)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self) -> None:
        self.count = self.waited = self.bytes = self.phase = 0

    def arrive(self, bytes_more: int = 0) -> None:
        self.waited, self.bytes = self.waited - 1, self.bytes + bytes_more
        if self.waited < 0:
            raise AssertionError(f"more than {self.count} arrivals in one phase")
        self.settle()

    def settle(self) -> None:
        if not self.waited and not self.bytes:
            self.phase, self.waited = self.phase + 1, self.count


class Barriers(list):
    """[n, 1] of them in shared memory."""

    def index(self, i: int) -> Barrier:
        return self[i]


class Sum:
    """An accumulator; its value is there once its product has run and was waited for."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value


class Machine:
    """One program's warps, their turns drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.eager = self.random.choice((0.0, 0.5))  # how often a product runs before it must
        self.hurry = self.random.choice((0.05, 0.5))  # how often a copy lands before it must
        self.copies: list[Callable[[], None]] = []
        self.turns: list[SimpleNamespace] = []
        self.failed: BaseException | None = None
        self.of_thread = threading.local()

    # Turns

    def specialize(self, functions: Sequence[tuple], warps: Any, regs: Any) -> None:
        done = threading.Event()
        for function, args in functions:
            turn = SimpleNamespace(go=threading.Semaphore(0), ready=lambda: True, over=False)
            turn.thread = threading.Thread(target=self._run, args=(turn, function, args, done))
            turn.thread.daemon = True
            self.turns.append(turn)
        for turn in self.turns:
            turn.thread.start()
        self._next()
        done.wait(120)
        if self.failed is not None:
            raise self.failed
        assert done.is_set() and not self.copies, "copies were never waited for"

    def _run(self, turn: SimpleNamespace, function: Callable, args: tuple, done: Any) -> None:
        turn.go.acquire()
        self.of_thread.turn, self.of_thread.products = turn, deque()
        try:
            if self.failed is None:
                function(*args)
                assert not self.of_thread.products, "products were never waited for"
        except BaseException as error:
            self.failed = self.failed or error
        turn.over = True
        while self.copies and all(one.over for one in self.turns):
            self._land()
        if self.failed is not None or all(one.over for one in self.turns):
            done.set()
        else:
            self._next()

    def _next(self) -> None:
        while True:
            ready = [turn for turn in self.turns if not turn.over and turn.ready()]
            if self.copies and (not ready or self.random.random() < self.hurry):
                self._land()
                continue
            if not ready:
                self.failed = AssertionError("the kernel hangs: every warp waits at a barrier")
                ready = [turn for turn in self.turns if not turn.over]
            self.random.choice(ready).go.release()
            return

    def _land(self) -> None:
        """One of the copies under way, in no order."""
        self.copies.pop(self.random.randrange(len(self.copies)))()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets another have its turn, until `ready`."""
        turn = getattr(self.of_thread, "turn", None)
        if turn is None:
            return
        if self.of_thread.products and self.random.random() < self.eager:
            self.of_thread.products.popleft()()
        turn.ready = ready
        self._next()
        turn.go.acquire()
        turn.ready = lambda: True
        if self.failed is not None:
            raise self.failed

    # What hopper's modules have

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.waited = count

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            self.pause(lambda: barrier.phase & 1 != phase)

    def arrive(self, barrier: Barrier, pred: bool = True) -> None:
        self.pause()
        if pred:
            barrier.arrive()

    def expect(self, barrier: Barrier, count: int) -> None:
        self.pause()
        barrier.arrive(count)

    def copy(self, source: Descriptor, at: Sequence[int], barrier: Barrier, target: Memory) -> None:
        block = source.read(at)
        target.data.fill_(float("nan"))

        def land() -> None:
            target.data.copy_(block)
            barrier.bytes -= block.numel() * block.element_size()
            barrier.settle()

        self.copies.append(land)
        self.pause()

    def product(
        self, a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Sum:
        assert is_async, "a product that is not asynchronous needs no warps of its own"
        found, before = Sum(), acc if isinstance(acc, Sum) else Sum(acc)

        def run() -> None:
            left = a.data if isinstance(a, Memory) else a
            found.value = left.float() @ b.data.float()
            if use_acc:
                found.value = found.value + before.value

        self.of_thread.products.append(run)
        self.pause()
        return found

    def waited(self, outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        for _ in range(4):  # what is given back too early has been taken by now
            self.pause()
        while len(self.of_thread.products) > outstanding:
            self.of_thread.products.popleft()()
        values = [one.value if isinstance(one, Sum) else one for one in deps]
        assert all(value is not None for value in values), "a sum is read before its product ran"
        return values[0] if len(values) == 1 else tuple(values)
