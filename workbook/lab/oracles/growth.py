"""Oracles of quantities that must not grow from step to step: graph, live tensors, memory, code.

They test for steady growth. A least-squares line would report one late allocation as a leak, but
most slopes between all pairs of points (Theil and Sen) are 0 then, including the low quantiles.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from workbook.lab.measure.counting import Compilations
from workbook.lab.measure.recorders import MIB, MemorySamples
from workbook.lab.observers.graph import count_nodes
from workbook.lab.oracles.steps import Result, broken, device_of, ok, unknown

MOST = 64  # samples; then every second step, every fourth, ...
LOW = 0.2  # the quantile of the slopes that must be positive
LEAST = 4  # points that must be left
HOST_MIB = 0.25  # per step: RSS varies by less without a leak
DEVICE_MIB = 1 / 64  # the allocator counts exactly
LIST_KIB = 16.0  # of live tensors per step: keeping a number for each step is no leak
TOO_FEW = "too few steps to tell growth from warming up: {} of 6"


def skip_first_third(values: Sequence[Any]) -> Sequence[Any]:
    """Drop the first third of the values, the warm-up."""
    return values[len(values) // 3 :]


def steady_slope(steps: Sequence[float], values: Sequence[float]) -> float | None:
    """Slope reached by four fifths of all pairs of points, without the first third.

    Units of `values` per step; 0 or less for constant, falling or oscillating values, or a single
    jump. None for fewer than 4 points after the first third.

    Raises ValueError for steps and values of different numbers.
    """
    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps with {len(values)} values; each step needs one")
    x, y = (np.asarray(skip_first_third(each), dtype=float) for each in (steps, values))
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < LEAST:
        return None
    first, second = np.triu_indices(len(x), k=1)
    return float(np.quantile((y[second] - y[first]) / (x[second] - x[first]), LOW))


class Series:
    """Values by step, thinned to MOST by dropping every second one."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, ...]] = {}
        self.every = 1

    def wants(self, step: int) -> bool:
        return step % self.every == 0

    def put(self, step: int, *values: float) -> None:
        if len(self.rows) >= MOST:
            self.every *= 2
            self.rows = {step: row for step, row in self.rows.items() if self.wants(step)}
        if self.wants(step):
            self.rows[step] = values

    def column(self, index: int = 0) -> list[float]:
        return [row[index] for row in self.rows.values()]

    def slope(self, index: int = 0) -> float | None:
        return steady_slope(list(self.rows), self.column(index))


class Graph(Series):
    """Number of autograd nodes behind each step's backwards, which must not grow."""

    def begin(self, step: int) -> None:
        self._step, self._nodes = step, 0

    def backward(self, roots: Sequence[Any]) -> None:
        if self.wants(self._step):
            self._nodes += count_nodes(roots)

    def end(self, step: int, loss: Any) -> None:
        if self._nodes:
            self.put(step, self._nodes)

    def result(self) -> Result:
        slope, nodes = self.slope(), self.column()
        if slope is None:
            return unknown(TOO_FEW.format(len(nodes)) if nodes else "no backward was seen")
        told = f"from {nodes[0]:.0f} to {nodes[-1]:.0f} nodes in {len(nodes)} steps"
        if slope >= 1:
            detail = f"each backward goes through {slope:.0f} nodes more than the last: {told}"
            return broken("graph-growth", detail)
        return ok(f"the graph of a backward does not grow: {told}")


class Census(Series):
    """Tensors made since it began that live after a step, their bytes, the graphs that they hold.

    Distinguishes a kept graph from a list of tensors, and both from reference cycles. Objects that
    existed before are frozen, which hides them from the collector and from the census: a step costs
    a millisecond rather than the 100 ms of reading all objects that torch creates.
    """

    _frozen = False

    def begin(self, step: int) -> None:
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    def close(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def end(self, step: int, loss: Any) -> None:
        if self.wants(step):
            self.put(step, *self._count())

    def result(self) -> Result:
        nodes = self.slope(2)
        if nodes is None:
            return unknown(TOO_FEW.format(len(self.rows)))
        kib = self.slope(1) / 1024
        if kib < LIST_KIB and nodes < 1:
            count = f"{self.column()[-1]:.0f} new tensors live after the last step"
            return ok(f"{count}, and no more from step to step")
        before = self._count()
        gc.collect()
        dropped = np.subtract(before, self._count())
        lead = 2 if nodes >= 1 else 1
        late = skip_first_third(self.column(lead))
        if dropped[lead] > (late[-1] - late[0]) / 2:
            detail = (
                f"{kib:,.0f} KiB a step held by objects that only hold each other; the collector "
                f"freed {dropped[1] / MIB:,.1f} MiB"
            )
            return broken("cycle", detail)
        if nodes >= 1:
            detail = f"{nodes:.0f} nodes a step stay in graphs that live tensors hold"
            return broken("graph-kept", detail + f", with {kib:,.0f} KiB of tensors")
        detail = f"{kib:,.0f} KiB of tensors a step stay alive, without a graph"
        return broken("tensor-list", detail)

    def _count(self) -> tuple[float, float, float]:
        """Count tensors, bytes of their storages, and autograd nodes behind them."""
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


class Memory(Series):
    """Memory of the device, or of the host without one, after each step, in MiB."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._model = model

    def end(self, step: int, loss: Any) -> None:
        if not self.rows:  # the first step may have moved the model
            self._samples = MemorySamples(device_of(self._model))
        self._samples.take()
        self.put(step, (self._samples.device_mib or self._samples.host_mib)[-1])

    def result(self) -> Result:
        slope, mib = self.slope(), self.column()
        if slope is None:
            return unknown(TOO_FEW.format(len(mib)))
        device = bool(self._samples.device_mib)
        least, where = (DEVICE_MIB, "device") if device else (HOST_MIB, "host")
        told = f"from {mib[0]:,.1f} to {mib[-1]:,.1f} MiB in {len(mib)} steps"
        if slope >= least:
            detail = f"{where} memory grows by {slope:,.2f} MiB a step: {told}"
            return broken(f"{where}-leak", detail)
        return ok(f"{where} memory grows by less than {least:.2g} MiB a step: {told}")


class Recompilations(Series):
    """Compilations of each step: code that is compiled again and again is correct but slow."""

    def begin(self, step: int) -> None:
        self._open = Compilations().__enter__()

    def end(self, step: int, loss: Any) -> None:
        self._open.__exit__()
        self.put(step, self._open.count)

    def result(self) -> Result:
        counts = self.column()
        late = skip_first_third(counts)
        if len(late) < 2:
            return unknown("too few steps to tell compiling once from compiling always")
        steps = sum(count > 0 for count in late)
        if steps > len(late) / 2:
            detail = f"{sum(late):.0f} compilations in {steps} of the last {len(late)} steps"
            return broken("recompile", detail)
        return ok(f"{sum(counts):.0f} compilations, of them {sum(late):.0f} after the first third")
