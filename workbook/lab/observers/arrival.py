"""Arrival of gradients: missing, zero or not, and when; and parameters that no gradient can reach.

A projection whose gradient arrives as zero is as dead as one whose gradient does not arrive, so
counting arrivals alone is not enough.
"""

import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbook.lab.observers.deferred import Deferred, Sampled
from workbook.lab.observers.graph import unreachable

ARRIVED, MISSING, ZERO = "arrived", "missing", "zero"


@dataclass
class _Step:
    number: int
    began: float = 0.0  # of the latest backward
    arrivals: list[tuple[int, float]] = field(default_factory=list)  # parameter, s since it began
    looked_at: list[int] = field(default_factory=list)  # parameters that hold a gradient
    largest: list[float] = field(default_factory=list)  # absolute value of each, once read


class GradientArrival(Sampled):
    """Observer that records each parameter's gradient: arrived, missing or all zero, and when.

    Works on the bare model, so also under DDP, with accumulation and with checkpointing. Times are
    the host's, which runs ahead of a GPU. Zero gradients are detected on the device, in the
    gradients that the optimizer is about to use: under DDP the ranks' average.

    Before the first backward, parameters that the loss cannot reach are stored in `unreachable`,
    with a warning if `warn`; if the graph does not show them, it stays None and
    `unreachable_unknown` is the reason. `every` and `keep` are those of `Sampled`.

    Cost: 3 to 7 us of host time for each parameter in an observed step, and one reduction of all
    gradients on the device; before the first backward 1 to 3 us for each node of the graph.

    Raises ValueError for a model without a trainable parameter.
    """

    def __init__(
        self, model: nn.Module, *, every: int = 1, keep: int = 100, warn: bool = True
    ) -> None:
        super().__init__(_Step, every, keep)
        self._model, self._warn = model, warn
        self._bind()
        self._norms = Deferred()
        self.unreachable: tuple[str, ...] | None = None
        self.unreachable_unknown, self._loss = "", None
        self._catch = model.register_forward_hook(self._catch_loss)

    def on_start(self, trainer: Any) -> None:
        """Raise ValueError if the trainer replays a CUDA graph, in which no Python code runs."""
        config = getattr(trainer, "config", None)
        if getattr(config, "cuda_graph", False):
            raise ValueError("cuda_graph=True replays steps without hooks; observe without it")
        if getattr(config, "compile", False):
            # Only a backward shows what a compiled graph reaches, and hooks would break the graph.
            self._forget_loss("a compiled graph hides which of its inputs have gradients")
        super().close()
        self._bind()  # FSDP2 has put other parameters into the model

    def on_phase(self, name: str, step: int) -> None:
        super().on_phase(name, step)
        if self._now is None:
            return
        if name == "backward":
            self._check_reach()
            self._now.began = time.perf_counter()
        elif name == "optimizer":
            self._look(self._now)

    def rows(self, step: int | None = None) -> list[dict[str, Any]]:
        """One row per parameter of that step (default: the last), in order of arrival, missing
        last: step, name, state, order, ms since its backward began, arrivals (one for each backward
        of the step) and largest, the gradient's largest absolute value, NaN included.

        Raises ValueError for a step that is not kept. Waits for the device.
        """
        self._read(self._norms.all())
        record = self._kept(step)
        largest = dict(zip(record.looked_at, record.largest, strict=False))
        arrived: dict[int, list[float]] = {}
        for index, seconds in record.arrivals:
            arrived.setdefault(index, []).append(seconds)
        order = [*arrived, *(i for i in range(len(self._names)) if i not in arrived)]
        rows = []
        for place, index in enumerate(order):
            times, most = arrived.get(index, []), largest.get(index)
            row = {"step": record.number, "name": self._names[index], "state": MISSING}
            row |= {"order": None, "ms": None, "arrivals": len(times), "largest": most}
            if times:
                row |= {"state": ZERO if most == 0 else ARRIVED, "order": place}
                row["ms"] = 1e3 * times[0]
            rows.append(row)
        return rows

    def close(self) -> None:
        super().close()
        self._forget_loss(self.unreachable_unknown)

    def _bind(self) -> None:
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires a gradient, so none can arrive")
        self._names, self._parameters = list(trained), list(trained.values())

    def _attach(self) -> list[Any]:
        return [
            p.register_post_accumulate_grad_hook(partial(self._arrive, index))
            for index, p in enumerate(self._parameters)
        ]

    def _arrive(self, index: int, _: Tensor) -> None:
        step = self._now
        if step is not None:
            step.arrivals.append((index, time.perf_counter() - step.began))

    def _look(self, step: _Step) -> None:
        self._read(self._norms.ready())
        gradients = [p.grad for p in self._parameters]
        # this rank's part of those that FSDP2 has sharded
        local = [g if type(g) is Tensor else getattr(g, "_local_tensor", g) for g in gradients]
        step.looked_at = [i for i, g in enumerate(local) if g is not None and g.numel()]
        if step.looked_at:
            # The largest value, since a sum of squares underflows to 0 for small values.
            norms = torch._foreach_norm([local[i] for i in step.looked_at], ord=float("inf"))
            self._norms.put(step, torch.stack([norm.float() for norm in norms]))

    def _read(self, norms: Any) -> None:
        for record, values in norms:
            record.largest = values.tolist()

    def _catch_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        scalars = [x for x in outputs if isinstance(x, Tensor) and x.numel() == 1 and x.grad_fn]
        if scalars:
            self._loss = scalars[-1]

    def _check_reach(self) -> None:
        if self._loss is None:
            return
        why = ""
        try:
            named = zip(self._names, self._parameters, strict=True)
            self.unreachable = unreachable(self._loss, named)
        except ValueError as error:
            why = str(error)
        self._forget_loss(why)
        if self.unreachable and self._warn:
            warnings.warn(
                f"the loss does not reach {len(self.unreachable)} parameter(s), which will not be "
                f"trained: {', '.join(self.unreachable)}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _forget_loss(self, why: str) -> None:
        self._loss, self.unreachable_unknown = None, why
        self._catch.remove()
