"""Attention in plain torch as one operator, for tracing and function transforms.

torch.compile and torch.export see one node whose shapes follow from its inputs', for any length,
and torch.func an operator that has a gradient and a rule for vmap. A plain call runs the same
functions as an autograd.Function, without torch's dispatcher.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nsa.attention.transforms import without_autocast


class Operator:
    """nsa::NAME and nsa::NAME_backward, of a class of three static functions.

    forward(*tensors, *numbers) returns (o, *kept, lse), all of them new and each led by the batch;
    a kept one without elements stands for o. backward(do, dlse or None, *tensors, *kept,
    lse, *numbers) returns the gradients of the first tensors, contiguous, and shapes(*tensors,
    *numbers) the outputs of forward, uninitialized. Without a backward, forward returns o alone,
    and there is no gradient.
    """

    def __init__(self, name: str, parts: type) -> None:
        self.parts, given = parts, list(parts.forward.__annotations__.values())[:-1]
        self._tensors = given.count(Tensor)
        op = _registered(name, parts.forward, parts.shapes)
        self.overload = op._opoverload
        functions = {"forward": parts.forward, "setup_context": self._save_all}
        if not hasattr(parts, "backward"):
            functions |= {"setup_context": _nothing, "jvp": lambda ctx, *_: None}
            self._plain, self._transformed = parts.forward, _function(name, functions)
            return
        self._trained = trained = len(parts.backward.__annotations__["return"].__args__)
        back = _registered(f"{name}_backward", parts.backward, partial(_like, trained))
        op.register_autograd(partial(self._back, back._opoverload), setup_context=self._save_all)
        once = {"forward": parts.backward, "setup_context": _nothing}
        once = _function(f"{name}_backward", once | {"backward": _refuse})
        self._transformed = _function(name, functions | {"backward": partial(self._back, once)})
        plain = {"backward": plain_backward(partial(self._back, parts.backward))}
        self._plain, self._plain_with_lse = (
            _function(parts.__name__, plain | {"forward": partial(self._forward, lse)})
            for lse in (False, True)
        )

    def __call__(self, *args: Any) -> Tensor:
        """Return o for the arguments of `forward`."""
        output = self._taken(self._plain)(*args)
        return output[0] if isinstance(output, tuple) else output

    def with_lse(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Return (o, lse) for the arguments of `forward`; both are differentiable."""
        output = self._taken(self._plain_with_lse)(*args)
        return output[0], output[-1]

    def _taken(self, plain: Callable) -> Callable:
        if torch._C._are_functorch_transforms_active():
            return self._transformed
        return self.overload if torch.compiler.is_compiling() else plain

    def _save(self, ctx: Any, inputs: Sequence, output: Sequence[Tensor]) -> None:
        o, *kept = output
        kept = [x if x.numel() else o for x in kept]
        ctx.save_for_backward(*inputs[: self._tensors], *kept)
        ctx.numbers, ctx.shape = inputs[self._tensors :], o.shape

    def _save_all(self, ctx: Any, inputs: Sequence, output: Sequence[Tensor]) -> None:
        self._save(ctx, inputs, output)
        ctx.set_materialize_grads(False)  # what is kept has none

    def _forward(self, with_lse: bool, ctx: Any, *args: Any) -> Tensor | tuple[Tensor, Tensor]:
        output = self.parts.forward(*args)
        self._save(ctx, args, output)
        return (output[0], output[-1]) if with_lse else output[0]

    def _back(self, function: Callable, ctx: Any, do: Tensor | None, *others: Any) -> tuple:
        nones = (None,) * (self._tensors + len(ctx.numbers))
        dlse = others[-1] if others else None
        if do is None:
            if dlse is None:
                return nones
            do = ctx.saved_tensors[0].new_zeros(ctx.shape)
        grads = function(do, dlse, *ctx.saved_tensors, *ctx.numbers)
        return *grads, *nones[self._trained :]


def _function(name: str, parts: dict[str, Callable]) -> Callable:
    """`apply` of an autograd.Function with these parts; with a setup_context it has vmap too."""
    made = type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in parts.items()})
    if "setup_context" in parts:
        made.vmap = staticmethod(partial(_vmap, made.apply))
    return made.apply


def _nothing(ctx: Any, inputs: Sequence, output: Sequence) -> None:
    ctx.set_materialize_grads(False)


def operator(name: str) -> Callable[[type], Operator]:
    """Decorator: turn a class of the form that Operator describes into nsa::name."""
    return lambda parts: Operator(name, parts)


def plain_backward(backward: Callable) -> Callable:
    """Decorator of a Function's backward: ignore autocast and refuse create_graph.

    Tensors saved besides its inputs have no graph: a second derivative would be silently wrong.
    """

    def run(ctx, do, *others):
        if torch.is_grad_enabled():
            _refuse()
        with without_autocast(do.device):
            return backward(ctx, do, *others)

    return run


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "this backend has no second derivative (create_graph=True); backend='masked' has one"
    )


def _vmap(function: Callable, info: Any, dims: Sequence[int | None], *args: Any) -> tuple:
    """Fold the vmapped dimension into the batch, the first dimension of every tensor here."""
    count = info.batch_size
    outputs = function(*(_larger(x, dim, count) for x, dim in zip(args, dims, strict=True)))
    return tree_map(lambda x: x.unflatten(0, (count, x.shape[0] // count)), outputs), 0


def _larger(x: Any, dim: int | None, count: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _registered(name: str, function: Callable, shapes: Callable) -> Any:
    """Register nsa::name with torch.library."""

    @wraps(function)
    def plain(x, *args):  # a compiled backward under autocast would cast inside
        with without_autocast(x.device):
            return function(x, *args)

    op = torch.library.custom_op(f"nsa::{name}", plain, mutates_args=())
    op.register_fake(shapes)
    return op


def _like(trained: int, do: Tensor, dlse: Tensor | None, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors[:trained])
