"""Cache of compiled kernels per kind of call, to avoid Triton's inspection of every argument.

Before each launch Triton derives from all arguments which compiled kernel they need: 25 to 60 us on
the host, as much as the kernel takes at T = 2048. The kernels that an operator needs are determined
by the shapes, strides, dtypes and alignments of its tensors and by its numbers. So a call of the
same kind as an earlier one launches the same compiled kernels in the same order.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn
from triton import knobs

from nsa.config import NSAConfig

MOST = 512  # cached kinds of calls; then the cache is cleared
INTERPRETED = knobs.runtime.interpret  # as triton.jit read it when the kernels were defined
GRAIN = 16  # bytes; Triton compiles for pointers that are multiples of it, or are not


class Known(NamedTuple):
    """Cached launch of an earlier call."""

    kernel: Any  # result of triton.jit
    meta: dict[str, Any]  # constants and options that it was called with by name
    constants: tuple  # those of them that are arguments, in their order
    compiled: Any


class Call:
    """Launches of one call: those `known` from an earlier call of its kind, or new ones."""

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
    """Run kernel[grid](*args, **meta); pass all constants by name after args, none by default."""
    call = getattr(_of_thread, "call", None)
    if call is None:
        kernel[grid](*args, **meta)
    else:
        call.launch(kernel, grid, args, meta)


def prepared(function: Callable) -> Callable:
    """Decorator of a function whose kernels do not depend on the values of tensors.

    Its launches by `launch` are cached by the kind of the arguments, but not after an error.
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
    """True if Triton compiles for x: a plain tensor on a GPU, without the interpreter."""
    return x.is_cuda and type(x) in (Tensor, nn.Parameter) and not INTERPRETED


def _kind(x: Any) -> Any:
    """Cache key of an argument: all that a launch depends on, without the tensors themselves."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % GRAIN
    if isinstance(x, list | tuple):
        return tuple(map(_kind, x))
    if isinstance(x, Mapping):
        return tuple((name, _kind(value)) for name, value in x.items())
    if is_dataclass(x) and not isinstance(x, NSAConfig):
        return type(x), _kind(vars(x))
    return x
