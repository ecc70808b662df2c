"""What all operators need: a registration, a config as plain numbers, sequences, their GPU."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from nsa.config import NSAConfig
from nsa.kernels.launch import prepared
from nsa.kernels.sequences import Sequences, dense, packed

SIZES = tuple(field.name for field in fields(NSAConfig))


def on_its_device(function: Callable) -> Callable:
    """`function` with its first tensor's GPU as the current one: that is where Triton launches."""

    @wraps(function)
    def guarded(x, *args, **kwargs):
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(x, *args, **kwargs)

    return guarded


class Operator:
    """nsa::name as a torch operator, and past torch's dispatcher where nobody looks on.

    The dispatcher and its autograd cost the host 30 to 150 us a call, as much as the launches of a
    short one. So a call of plain tensors goes to the function itself, or to an autograd.Function of
    the same parts, unless something would see the operator: a compiler, a mode, a profiler. A last
    argument may be a list of tensors; the result is then one, too. `op` is what torch registered.
    """

    def __init__(self, name: str, function: Callable) -> None:
        self.name, self.function = name, on_its_device(prepared(function))
        self.op = torch.library.custom_op(f"nsa::{name}", self.function, mutates_args=())
        self.overload = getattr(torch.ops.nsa, name).default
        self.register_fake = self.op.register_fake
        self._direct: Callable | None = None  # without a formula autograd refuses, by the operator

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """The formula, as torch.library takes it."""
        self.op.register_autograd(backward, setup_context=setup_context)
        self._direct = _function(self.name, self.function, backward, setup_context).apply

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        *first, last = args
        several = isinstance(last, list) and isinstance(last[0], Tensor)
        flat = (*first, *last) if several else args
        learned = torch.is_grad_enabled() and any(map(_learned, flat))
        if seen(flat) or (learned and self._direct is None):
            return self.overload(*args)
        if not learned:
            return self.function(*args)
        found = self._direct(*flat, len(first) if several else None)
        return list(found) if several else found


def _function(
    name: str, function: Callable, backward: Callable, setup_context: Callable
) -> type[torch.autograd.Function]:
    """The autograd.Function of an operator: its arguments, and from where on they are a list."""

    def forward(ctx, *given):
        *args, several = given  # last, for the formula asks which of its arguments need a gradient
        ctx.several = several
        if several is not None:
            args = [*args[:several], args[several:]]
        found = function(*args)
        setup_context(ctx, args, found)
        return found if several is None else tuple(found)

    def back(ctx, *grads):
        if ctx.several is None:
            return *backward(ctx, *grads), None
        *first, last = backward(ctx, list(grads))
        return *first, *last, None

    parts = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(name, (torch.autograd.Function,), parts)


def _learned(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def operator(name: str) -> Callable[[Callable], Operator]:
    """The decorated function, of tensors and numbers, as nsa::name."""
    return lambda function: Operator(name, function)


def seen(args: Sequence[Any]) -> bool:
    """Whether a call of an operator is to be seen as one, or is not of plain tensors."""
    kinds = {type(x) for x in args if isinstance(x, Tensor)}
    return (
        not kinds <= {Tensor, nn.Parameter}
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def sizes_of(config: NSAConfig) -> list[int]:
    """The config as an operator takes it."""
    return [getattr(config, name) for name in SIZES]


def sequences_of(
    tokens: int, cu_seqlens: Tensor | None, batch: int, sizes: Sequence[int]
) -> Sequences:
    """The sequences of a call on a flat axis of `tokens`: packed, or `batch` of one length."""
    if cu_seqlens is not None:
        return packed(cu_seqlens, tokens, _config(tuple(sizes)))
    if isinstance(tokens, int):
        return _dense(batch, tokens // batch, tuple(sizes))
    return dense(batch, tokens // batch, NSAConfig(*sizes))  # while torch traces, no number


@lru_cache(maxsize=256)
def _config(sizes: tuple[int, ...]) -> NSAConfig:
    return NSAConfig(*sizes)


@lru_cache(maxsize=256)
def _dense(batch: int, length: int, sizes: tuple[int, ...]) -> Sequences:
    """Of each shape once: a short call feels the host's work."""
    return dense(batch, length, _config(sizes))


def contiguous(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which is what kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
