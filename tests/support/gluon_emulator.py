"""Runs kernels of Gluon on a CPU, adversarially: Triton's interpreter knows none of them.

A partition of warps is a thread, one of which runs at a time; at every barrier, copy and product
the next one is drawn. A copy by TMA poisons where it will write with NaN and lands at some later
moment; a product of a warpgroup reads shared memory as late as a wait allows, or earlier. So what
reads too early or gives back too early is wrong for some seed, and where nothing can go on, the
kernel hangs and this says so. Layouts, registers and times are not emulated.
"""

import ast
import functools
import inspect
import random
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Change = Callable[[str], str]


class Int(int):
    """A scalar of a kernel: divided as a GPU does, toward zero."""

    def to(self, dtype: Any) -> "Int":
        return self

    def __floordiv__(self, other: int) -> "Int":
        return Int(abs(self) // abs(other) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other: int) -> "Int":
        return Int(self - (self // other) * other)


def _kept(name: str) -> Callable:
    plain = getattr(int, name)

    def of_int(self: Int, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Int(found)

    return of_int


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "rshift"):
    setattr(Int, f"__{_name}__", _kept(f"__{_name}__"))


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


def _both(of_ints: Callable, of_tensors: Callable) -> Callable:
    def either(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return of_tensors(torch.as_tensor(a), torch.as_tensor(b))
        return Int(of_ints(a, b))

    return either


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def _load(at: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    flat, offset, mask = at.elements(torch.as_tensor(mask))
    found = torch.where(
        mask, flat[torch.where(mask, offset, 0)], torch.tensor(other).to(flat.dtype)
    )
    return Int(found) if found.dim() == 0 and not found.is_floating_point() else found


def _store(at: Pointer, values: Tensor, mask: Any = True) -> None:
    flat, offset, mask = at.elements(torch.as_tensor(mask))
    values, offset, mask = torch.broadcast_tensors(values, offset, mask)
    flat[offset[mask]] = values[mask].to(flat.dtype)


def _allocate(dtype: Any, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Any:
    if value is not None:
        return Memory(value)
    if dtype is torch.int64:
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) > 1 else Barrier()
    unknown = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return Memory(torch.full(shape, unknown, dtype=dtype))


def _language(program: int, programs: int, machine: Machine) -> SimpleNamespace:
    nothing = lambda *args: None  # noqa: E731
    return SimpleNamespace(
        program_id=lambda axis: Int(program), num_programs=lambda axis: Int(programs),
        constexpr=None, int32=torch.int32, int64=torch.int64, float32=torch.float32,
        static_range=range, cast=lambda x, dtype, bitcast: x.view(dtype),
        split=lambda x: (x[..., 0], x[..., 1]),
        bfloat16=torch.bfloat16, int8=torch.int8, int16=torch.int16, abs=torch.abs,
        floor=torch.floor, gather=lambda x, index, axis: x.gather(axis, index.long()),
        minimum=_both(min, torch.minimum), maximum=_both(max, torch.maximum), where=_where,
        cdiv=lambda a, b: (Int(a) + b - 1) // b, exp2=torch.exp2, log2=torch.log2,
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout: x, load=_load, store=_store,
        allocate_shared_memory=_allocate, warp_specialize=machine.specialize,
        NVMMADistributedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing,
        BlockedLayout=nothing, NVMMASharedLayout=nothing, DistributedLinearLayout=nothing,
        SwizzledSharedLayout=nothing,
    )  # fmt: skip


class _Rebound(ast.NodeTransformer):
    """x += y as x = x + y: a kernel's values are never changed in place."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        read = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], ast.BinOp(read, node.op, node.value))


@functools.cache
def _source(plain: Callable) -> str:
    return textwrap.dedent(inspect.getsource(plain))


@functools.cache
def _compiled(source: str, name: str) -> Any:
    tree = ast.parse(source)
    tree.body[0].decorator_list = []
    return compile(ast.fix_missing_locations(_Rebound().visit(tree)), name, "exec")


def _emulated(
    function: Any, world: dict[str, Any], made: dict[Any, Any], change: Change
) -> Callable:
    """`function` of Gluon, and what it calls, with the emulator's names for Gluon's."""
    plain = function.fn
    if plain not in made:
        names = dict(plain.__globals__)
        exec(_compiled(change(_source(plain)), plain.__name__), names)
        made[plain] = names[plain.__name__]
        for name, value in plain.__globals__.items():
            if hasattr(value, "fn") and hasattr(value, "arg_names"):
                names[name] = _emulated(value, world, made, change)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
        names.update(world)
    return made[plain]


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    if isinstance(x, bool) or x is None:
        return x
    if isinstance(x, int):
        return Int(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if type(x) is tuple:
        return tuple(map(_argument, x))
    return x


def run(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    seed: int = 0,
    change: Change = str,
    **named: Any,
) -> None:
    """kernel[grid](*args, **named) on tensors of the CPU, one program after the other.

    change: what is done to the source of each of its functions, to see a fault found.
    """
    named.pop("num_warps", None)
    for program in range(grid[0]):
        machine = Machine(seed + program)
        world = {
            **dict.fromkeys(("gl", "tl"), _language(program, grid[0], machine)),
            "mbarrier": SimpleNamespace(
                init=machine.init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect,
                MBarrierLayout=lambda: None,
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=machine.copy),
            "range": lambda *ends: map(Int, range(*ends)),
            "fence_async_shared": lambda: None, "warpgroup_mma": machine.product,
            "warpgroup_mma_wait": machine.waited,
        }  # fmt: skip
        constants = (named[name] for name in kernel.arg_names[len(args) :])
        _emulated(kernel, world, {}, change)(*map(_argument, args), *constants)
