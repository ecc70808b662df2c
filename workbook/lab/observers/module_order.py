"""Order in which the modules' backwards run, and the module at which a step stopped."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from workbook.lab.observers.deferred import Sampled

_KEY = "nsa.modules"


@dataclass
class _Step:
    number: int
    passes: int = 0  # backwards so far
    began: float = 0.0
    entered: list[tuple[int, str, float]] = field(default_factory=list)


def refuse_without_hooks(trainer: Any) -> None:
    """Raise ValueError for compiled models and replayed CUDA graphs."""
    config = getattr(trainer, "config", None)
    for name in ("compile", "cuda_graph"):
        if getattr(config, name, False):
            raise ValueError(f"{name}=True runs no hooks of modules; observe without it")


class ModuleOrder(Sampled):
    """Observer that records when each module's backward begins, and the current module.

    A module's backward begins when the node that made its output is about to run: outer modules
    before inner ones that share it. Hooks are on nodes and not on tensors, so in-place operations
    on outputs stay legal. Times are the host's. Works under DDP and with checkpointing: a
    recomputed layer appears once. `every` and `keep` are those of `Sampled`.

    Cost: 6 us of host time for each module in an observed step with otherwise empty caches, 15 us
    in a step of 54 ms.
    """

    def __init__(self, model: nn.Module, *, every: int = 1, keep: int = 10) -> None:
        super().__init__(_Step, every, keep)
        self._modules = [(name, module) for name, module in model.named_modules() if name]
        # (step, phase, module) of the last module entered; the name is "" before the first
        self.last: tuple[int | None, str, str] = (None, "", "")

    on_start = staticmethod(refuse_without_hooks)

    def on_phase(self, name: str, step: int) -> None:
        if name == "data" or self._now is not None:
            self.last = (step, name, "")
        super().on_phase(name, step)
        if name == "backward" and self._now is not None:
            self._now.passes += 1
            self._now.began = time.perf_counter()

    def here(self) -> str:
        """Current place in words; `Heartbeat(detail=order.here)` adds it to every line."""
        step, phase, module = self.last
        if step is None:
            return "no step was observed yet"
        return f"step {step}, {phase}" + (f" in {module}" if module else "")

    def rows(self, step: int | None = None) -> list[dict[str, Any]]:
        """One row per backward of a module: step, micro, order, name, ms since backward began.

        `micro` counts the backwards of a step (accumulation). Default: the last observed step.
        Raises ValueError for a step that is not kept.
        """
        record = self._kept(step)
        began: dict[tuple[int, str], float] = {}
        for micro, name, seconds in record.entered:
            began.setdefault((micro, name), seconds)
        rows, places = [], Counter()
        for (micro, name), seconds in began.items():
            row = {"step": record.number, "micro": micro, "order": places[micro], "name": name}
            rows.append(row | {"ms": 1e3 * seconds})
            places[micro] += 1
        return rows

    def _attach(self) -> list[Any]:
        hooks = []
        for name, module in self._modules:
            hooks.append(module.register_forward_pre_hook(partial(self._forward, name)))
            hooks.append(module.register_forward_hook(partial(self._watch, name)))
        return hooks

    def _forward(self, name: str, module: nn.Module, args: Any) -> None:
        step, phase, _ = self.last
        self.last = (step, phase, name)

    def _watch(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for x in (output,) if isinstance(output, Tensor) else _tensors(output):
            node = x.grad_fn
            if node is None:
                continue
            names = node.metadata.get(_KEY)
            if names is None:
                node.metadata[_KEY] = names = [name]
                node.register_prehook(partial(self._enter, names))
            else:  # an outer module that returns what an inner one made
                names.append(name)

    def _enter(self, names: list[str], gradients: Any) -> None:
        step = self._now
        if step is None:
            return
        seconds = time.perf_counter() - step.began
        for name in reversed(names):
            step.entered.append((step.passes - 1, name, seconds))
        self.last = (step.number, "backward", names[0])


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)
