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
import textwrap
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from gluon_machine import Barrier, Barriers, Descriptor, Machine, Memory, Pointer
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
