"""Code shared by all operators: registration, config as plain numbers, sequences, GPU."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from nsa.config import NSAConfig
from nsa.kernels.launch import prepared
from nsa.kernels.sequences import Axis, Sequences, dense, packed

SIZES = tuple(field.name for field in fields(NSAConfig))


def on_its_device(function: Callable) -> Callable:
    """Run `function` with its first tensor's GPU as the current one, on which Triton launches."""

    @wraps(function)
    def guarded(x, *args, **kwargs):
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(x, *args, **kwargs)

    return guarded


class Operator:
    """nsa::name as a torch operator that bypasses torch's dispatcher where possible.

    The dispatcher and its autograd cost the host 30 to 150 us per call, as much as the launches of
    a short one. So a call with plain tensors runs the function itself, or an autograd.Function of
    the same parts, unless something has to see the operator: a compiler, a mode, a profiler. The
    last argument may be a list of tensors; then the result is one, too. `op` is torch's operator.
    """

    def __init__(self, name: str, function: Callable) -> None:
        self.name, self.function = name, on_its_device(prepared(function))
        self.op = torch.library.custom_op(f"nsa::{name}", self.function, mutates_args=())
        self.overload = getattr(torch.ops.nsa, name).default
        self.register_fake = self.op.register_fake
        self._direct: Callable | None = None  # None: autograd raises, by the operator

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the backward, with the arguments of torch.library."""
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
    """autograd.Function of an operator; its last argument is the index where the list starts."""

    def forward(ctx, *given):
        *args, several = given  # last, since the backward checks which arguments need a gradient
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
    """Decorator: turn a function of tensors and numbers into nsa::name."""
    return lambda function: Operator(name, function)


def seen(args: Sequence[Any]) -> bool:
    """True if a call must go through the operator: it is observed, or tensors are not plain."""
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
    """Config as a list of sizes, an operator's argument."""
    return [getattr(config, name) for name in SIZES]


def sequences_at(
    rows: int,
    cu_seqlens: Tensor | None,
    batch: int,
    sizes: Sequence[int],
    starts: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tokens: int | None,
) -> Sequences:
    """Sequences of a call whose `rows` queries begin at `starts` [sequences] among `tokens` tokens.

    starts None: the queries are at all tokens. cu_seqlens_q: bounds of packed queries.
    """
    if starts is None:
        return sequences_of(rows, cu_seqlens, batch, sizes)
    if cu_seqlens_q is None:
        queries = Axis(batch, rows // batch, starts=starts)
    else:
        queries = Axis(starts.shape[0], rows, cu_seqlens_q, starts)
    return replace(sequences_of(tokens, cu_seqlens, batch, sizes), offset=queries)


def sequences_of(
    tokens: int, cu_seqlens: Tensor | None, batch: int, sizes: Sequence[int]
) -> Sequences:
    """Sequences of a call on a flat axis of `tokens`: packed, or `batch` of one length."""
    if cu_seqlens is not None:
        return packed(cu_seqlens, tokens, _config(tuple(sizes)))
    if isinstance(tokens, int):
        return _dense(batch, tokens // batch, tuple(sizes))
    return dense(batch, tokens // batch, NSAConfig(*sizes))  # tokens is symbolic while torch traces


@lru_cache(maxsize=256)
def _config(sizes: tuple[int, ...]) -> NSAConfig:
    return NSAConfig(*sizes)


@lru_cache(maxsize=256)
def _dense(batch: int, length: int, sizes: tuple[int, ...]) -> Sequences:
    """Dense sequences, cached by shape to save host time in short calls."""
    return dense(batch, length, _config(sizes))


def contiguous(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which kernels assume."""
    return x if x.stride(-1) == 1 else x.contiguous()
