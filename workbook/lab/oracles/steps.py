"""Observe a training's steps, backwards and optimizers, and build the oracles' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from whyhung.watch.counting import in_place_of

Result = dict[str, Any]


class Steps:
    """Call its listeners' begin(step), backward(roots), optimizer(optimizer), end(step, loss).

    Backwards and optimizers are detected wherever this process calls them: step functions need no
    changes. Listeners may omit methods that they do not need.
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
        """Remove every hook."""
        while self._undo:
            self._undo.pop()()
        self._tell("close")

    def begin(self, step: int) -> None:
        """Call before a step."""
        self._step = step
        self._tell("begin", step)

    def end(self, step: int, loss: Any) -> None:
        """Call after the step, with its return value."""
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
    """Undecided result, which is no failure."""
    return ok(detail) | {"ok": None}


def broken(what: str, detail: str, name: str = "") -> Result:
    return {"ok": False, "detail": detail, "what": what, "place": anywhere(name)}


def anywhere(name: str) -> str:
    """Replace the numbers in `name`: blocks.1.mlp.weight becomes blocks.*.mlp.weight."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def some(names: Iterable[str], most: int = 4) -> str:
    """List the first `most` names, and the number of others."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def device_of(model: nn.Module | None) -> torch.device:
    """GPU on which the model has a parameter, else the CPU."""
    devices = {p.device for p in model.parameters()} if model is not None else set()
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
