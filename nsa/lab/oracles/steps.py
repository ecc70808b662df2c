"""Around the steps of a training: its backwards, its optimizer, and what an oracle says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from whyhung.watch.counting import in_place_of

Result = dict[str, Any]


class Steps:
    """Tells its listeners of begin(step), backward(roots), optimizer(optimizer), end(step, loss).

    Backwards and optimizers are found wherever this process calls them: a stranger's step function
    needs no word of it. Listeners may leave out what they do not need.
    """

    def __init__(self, listeners: Iterable[Any]) -> None:
        self._listeners = list(listeners)
        self._step: int | None = None
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Self:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
            def run(tensors: Any, *args: Any, **options: Any) -> Any:
                roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                if self._step is not None and not torch.compiler.is_compiling():
                    self._tell("backward", roots)
                return plain(tensors, *args, **options)

            return run

        def stepping(optimizer: Any, *_: Any) -> None:
            if self._step is not None:
                self._tell("optimizer", optimizer)

        # which Tensor.backward calls as well
        undo = in_place_of(torch.autograd, "backward", watched)
        self._undo = [undo, register_optimizer_step_pre_hook(stepping).remove]
        return self

    def __exit__(self, *error: object) -> None:
        """Takes every hook away."""
        while self._undo:
            self._undo.pop()()
        self._tell("close")

    def begin(self, step: int) -> None:
        """Before a step."""
        self._step = step
        self._tell("begin", step)

    def end(self, step: int, loss: Any) -> None:
        """After it, with what it returned."""
        self._step = None
        self._tell("end", step, loss)

    def _tell(self, what: str, *about: Any) -> None:
        for listener in self._listeners:
            method = getattr(listener, what, None)
            if method is not None:
                method(*about)


def ok(detail: str) -> Result:
    return {"ok": True, "detail": detail, "what": "", "place": ""}


def unknown(detail: str) -> Result:
    """It could not tell; that is no failure."""
    return ok(detail) | {"ok": None}


def broken(what: str, detail: str, name: str = "") -> Result:
    return {"ok": False, "detail": detail, "what": what, "place": anywhere(name)}


def anywhere(name: str) -> str:
    """`name` in a model of any depth: blocks.1.mlp.weight as blocks.*.mlp.weight."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def some(names: Iterable[str]) -> str:
    """The first four of them."""
    listed = list(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return ", ".join(listed[:4]) + more


def device_of(model: nn.Module | None) -> torch.device:
    """A GPU where the model has a parameter on one."""
    devices = {p.device for p in model.parameters()} if model is not None else set()
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
