"""Oracles of what must not grow from step to step: the graph, tensors that live, memory, code."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from nsa.lab.measure.compilations import Compilations
from nsa.lab.measure.recorders import MIB, MemorySamples
from nsa.lab.observers.graph import count_nodes
from nsa.lab.oracles.steps import (
    Result,
    broken,
    device_of,
    ok,
    skip_first_third,
    steady_slope,
    unknown,
)

MOST = 64  # samples; then every second step, every fourth, ...
HOST_MIB = 0.25  # a step: what RSS moves by without a leak
DEVICE_MIB = 1 / 64  # the allocator counts exactly
LIST_KIB = 16.0  # of live tensors a step: a kept number for each step is no leak
TOO_FEW = "too few steps to tell growth from warming up: {} of 6"


class Series:
    """Values by step, thinned to MOST by leaving out every second."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows: list[tuple[float, ...]] = []
        self.every = 1

    def wants(self, step: int) -> bool:
        return step % self.every == 0

    def put(self, step: int, *values: float) -> None:
        if len(self.steps) >= MOST:
            self.every *= 2
            kept = [i for i, s in enumerate(self.steps) if s % self.every == 0]
            self.steps = [self.steps[i] for i in kept]
            self.rows = [self.rows[i] for i in kept]
        if self.wants(step):
            self.steps.append(step)
            self.rows.append(values)

    def column(self, index: int) -> list[float]:
        return [row[index] for row in self.rows]

    def slope(self, index: int = 0) -> float | None:
        return steady_slope(self.steps, self.column(index))


class Graph:
    """The autograd nodes behind each step's backwards: the same number, or at least not more."""

    def __init__(self) -> None:
        self._series = Series()
        self._step, self._nodes = -1, 0

    def begin(self, step: int) -> None:
        self._step, self._nodes = step, 0

    def backward(self, roots: Sequence[Any]) -> None:
        if self._series.wants(self._step):
            self._nodes += count_nodes(roots)

    def end(self, step: int, loss: Any) -> None:
        if self._nodes:
            self._series.put(step, self._nodes)

    def result(self) -> Result:
        slope, nodes = self._series.slope(), self._series.column(0)
        if slope is None:
            return unknown(TOO_FEW.format(len(nodes)) if nodes else "no backward was seen")
        told = f"from {nodes[0]:.0f} to {nodes[-1]:.0f} nodes in {len(nodes)} steps"
        if slope >= 1:
            detail = f"each backward goes through {slope:.0f} nodes more than the last: {told}"
            return broken("graph-growth", detail)
        return ok(f"the graph of a backward does not grow: {told}")


class Census:
    """Tensors made since it began that live after a step, their bytes, the graphs that they hold.

    Tells a graph that is kept from a list of tensors, and both from objects that only hold each
    other. What was there before is frozen, which hides it from the collector and from the census: a
    step costs a millisecond rather than the 100 of a look at all objects that torch makes.
    """

    def __init__(self) -> None:
        self._series = Series()
        self._frozen = False

    def begin(self, step: int) -> None:
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    def close(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def end(self, step: int, loss: Any) -> None:
        if self._series.wants(step):
            self._series.put(step, *self._count())

    def result(self) -> Result:
        rows = self._series.rows
        slopes = [self._series.slope(i) for i in (1, 2)]
        if not rows or slopes[0] is None:
            return unknown(TOO_FEW.format(len(rows)))
        kib, nodes = slopes[0] / 1024, slopes[1]
        if kib < LIST_KIB and nodes < 1:
            count = f"{rows[-1][0]:.0f} new tensors live after the last step"
            return ok(f"{count}, and no more from step to step")
        before, grown = self._count(), [last - first for first, last in self._ends()]
        gc.collect()
        left = self._count()
        dropped = [a - b for a, b in zip(before, left, strict=True)]
        lead = 2 if nodes >= 1 else 1
        if dropped[lead] > grown[lead] / 2:
            detail = (
                f"{kib:,.0f} KiB a step held by objects that only hold each other; the collector "
                f"freed {dropped[1] / MIB:,.1f} MiB"
            )
            return broken("cycle", detail)
        if nodes >= 1:
            detail = f"{nodes:.0f} nodes a step stay in graphs that live tensors hold"
            return broken("graph-kept", detail + f", with {kib:,.0f} KiB of tensors")
        return broken(
            "tensor-list", f"{kib:,.0f} KiB of tensors a step stay alive, without a graph"
        )

    def _ends(self) -> list[tuple[float, float]]:
        late = skip_first_third(self._series.rows)
        return list(zip(late[0], late[-1], strict=True))

    def _count(self) -> tuple[float, float, float]:
        """Tensors, bytes of their storages, autograd nodes behind them."""
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        storages: dict[int, int] = {}
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # a tensor without memory of its own: sparse, fake, freed
        roots = [x for x in tensors if x.grad_fn is not None]
        return float(len(tensors)), float(sum(storages.values())), float(count_nodes(roots))


class Memory:
    """What the device, or the host without one, holds after each step."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._samples: MemorySamples | None = None
        self._series = Series()

    def end(self, step: int, loss: Any) -> None:
        if self._samples is None:
            self._samples = MemorySamples(device_of(self._model))
        self._samples.take()
        on_device = self._samples.device_mib
        self._series.put(step, on_device[-1] if on_device else self._samples.host_mib[-1])

    def result(self) -> Result:
        slope, mib = self._series.slope(), self._series.column(0)
        if slope is None:
            return unknown(TOO_FEW.format(len(mib)))
        device = bool(self._samples and self._samples.device_mib)
        least, where = (DEVICE_MIB, "device") if device else (HOST_MIB, "host")
        told = f"from {mib[0]:,.1f} to {mib[-1]:,.1f} MiB in {len(mib)} steps"
        if slope >= least:
            return broken(
                f"{where}-leak", f"{where} memory grows by {slope:,.2f} MiB a step: {told}"
            )
        return ok(f"{where} memory grows by less than {least:.2g} MiB a step: {told}")


class Recompilations:
    """Code that is compiled again and again: right, and slow."""

    def __init__(self) -> None:
        self._series = Series()
        self._open: Compilations | None = None

    def begin(self, step: int) -> None:
        self._open = Compilations()
        self._open.__enter__()

    def end(self, step: int, loss: Any) -> None:
        if self._open is not None:
            self._open.__exit__()
            self._series.put(step, self._open.count)
            self._open = None

    def result(self) -> Result:
        counts = self._series.column(0)
        late = skip_first_third(counts)
        if len(late) < 2:
            return unknown("too few steps to tell compiling once from compiling always")
        steps = sum(count > 0 for count in late)
        if steps > len(late) / 2:
            detail = f"{sum(late):.0f} compilations in {steps} of the last {len(late)} steps"
            return broken("recompile", detail)
        return ok(f"{sum(counts):.0f} compilations, of them {sum(late):.0f} after the first third")
