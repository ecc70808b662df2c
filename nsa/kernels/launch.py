"""Launches of a call like one before, without Triton's look at every argument.

Before each launch Triton works out from all arguments which compiled kernel they need: 25 to 60 us
of the host, as much as the kernel takes where T is 2048. What the launches of an operator need
follows from the shapes, strides, dtypes and alignments of its tensors and from its numbers. So a
call that is like an earlier one launches the same compiled kernels in the same order.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn
from triton import knobs

from nsa.config import NSAConfig

MOST = 512  # kinds of calls that are known; then all are forgotten
INTERPRETED = knobs.runtime.interpret  # as triton.jit asked when the kernels were made
GRAIN = 16  # bytes; Triton compiles for pointers that are multiples of it, or are not


class Known(NamedTuple):
    """A launch of an earlier call."""

    kernel: Any  # what triton.jit made
    meta: dict[str, Any]  # constants and options that it was called with by name
    constants: tuple  # those of them that are arguments, in their order
    compiled: Any


class Call:
    """The launches of one call: those `known` of an earlier one like it, or its own."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known, self.made, self.new = known, [], False

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple, meta: dict[str, Any]) -> None:
        number = len(self.made)
        one = self.known[number] if number < len(self.known) else None
        if one is not None and one.kernel is kernel and one.meta == meta:
            one.compiled[(*grid, 1, 1)[:3]](*args, *one.constants)
        else:
            compiled = kernel[grid](*args, **meta)
            constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
            one, self.new = Known(kernel, meta, constants, compiled), True
        self.made.append(one)


_known: dict[tuple, list[Known]] = {}
_of_thread = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """kernel[grid](*args, **meta); all constants after the first by name, and none by default."""
    call = getattr(_of_thread, "call", None)
    if call is None:
        kernel[grid](*args, **meta)
    else:
        call.launch(kernel, grid, args, meta)


def prepared(function: Callable) -> Callable:
    """`function` of tensors and numbers; which kernels it launches depends on no tensor's values.

    What it launches by `launch` is kept by all that the launches depend on, and after an error not.
    """

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        if not compiles_for(args[0]):
            return function(*args, **named)
        key = function, _kind(args), _kind(named)
        before, call = getattr(_of_thread, "call", None), Call(_known.get(key, ()))
        _of_thread.call = call
        try:
            found = function(*args, **named)
        finally:
            _of_thread.call = before
        if call.new:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = call.made
        return found

    return called


def compiles_for(x: Tensor) -> bool:
    """Whether Triton compiles for x: a plain tensor on a GPU, and nothing is interpreted."""
    return x.is_cuda and type(x) in (Tensor, nn.Parameter) and not INTERPRETED


def _kind(x: Any) -> Any:
    """All of an argument that a launch depends on, without the tensors themselves."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % GRAIN
    if isinstance(x, list | tuple):
        return tuple(map(_kind, x))
    if isinstance(x, Mapping):
        return tuple((name, _kind(value)) for name, value in x.items())
    if is_dataclass(x) and not isinstance(x, NSAConfig):
        return type(x), _kind(vars(x))
    return x
