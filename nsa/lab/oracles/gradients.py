"""Oracles of gradients: each arrives, none is always zero, all are finite, all ranks have the same.

One observer (nsa.lab.observers.arrival) notes them; each oracle reads another thing out of that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nsa.lab.observers.arrival import MISSING, ZERO, GradientArrival
from nsa.lab.observers.graph import unreachable
from nsa.lab.oracles.steps import Result, any_layer, broken, ok, some, unknown

KEEP = 50  # steps between two readings, which wait for the device


class Gradients:
    """Notes of each step which gradients are missing, zero or not finite; shared by the oracles.

    expected: names of parameters that rightly have none. Steps without a backward, as a replayed
    CUDA graph's, are not judged.
    """

    def __init__(self, model: nn.Module, expected: Collection[str] = ()) -> None:
        self._model, self.expected = model, frozenset(expected)
        self._arrival: GradientArrival | None = None
        self.why_not = ""
        try:
            self._arrival = GradientArrival(model, keep=KEEP, warn=False)
        except ValueError as error:
            self.why_not = str(error)
        self.steps: dict[int, dict[str, list[str]]] = {}
        self.unreachable: tuple[str, ...] | None = None
        self._open: dict[int, dict[str, Any]] = {}  # steps whose rows were not read yet
        self._now = {"backwards": 0, "optimizers": 0, "overflow": None}
        self._stepped = False

    def begin(self, step: int) -> None:
        self._now = {"backwards": 0, "optimizers": 0, "overflow": None}
        if self._arrival is not None:
            self._arrival.on_phase("data", step)

    def backward(self, roots: Sequence[Any]) -> None:
        if self._arrival is None:
            return
        if self.unreachable is None:
            self._reach(roots)
        self._now["backwards"] += 1
        self._arrival.on_phase("backward", -1)

    def optimizer(self, optimizer: Any) -> None:
        if self._arrival is not None and not self._now["optimizers"]:
            self._arrival.on_phase("optimizer", -1)
            # fp16's scaler has a fused optimizer skip a step whose gradients overflow
            self._now["overflow"] = getattr(optimizer, "found_inf", None)
        self._now["optimizers"] += 1
        self._stepped = True

    def end(self, step: int, loss: Any) -> None:
        if self._arrival is None:
            return
        if not self._now["optimizers"]:
            self._arrival.on_phase("optimizer", step)
        self._arrival.on_phase("end", step)
        if self._now["backwards"]:
            self._open[step] = dict(self._now)
        if len(self._open) >= KEEP:
            self.read()

    def read(self) -> None:
        """Reads what the steps so far left. Waits for the device."""
        for step, now in self._open.items():
            rows = [row for row in self._arrival.rows(step) if row["name"] not in self.expected]
            overflow = now["overflow"] is not None and bool(now["overflow"])
            skipped = overflow or (self._stepped and not now["optimizers"])
            bad = [row["name"] for row in rows if _not_finite(row["largest"])]
            self.steps[step] = {
                "missing": [row["name"] for row in rows if row["state"] == MISSING],
                "zero": [row["name"] for row in rows if row["state"] == ZERO],
                "bad": [] if skipped else bad,
                "unseen": [r["name"] for r in rows if r["state"] != MISSING
                           and r["largest"] is None],
            }  # fmt: skip
        self._open = {}

    def bad_parameters(self) -> list[str]:
        """Those that are not finite now."""
        named = [
            (n, p.detach()) for n, p in self._model.named_parameters() if p.is_floating_point()
        ]
        return [n for n, p in named if p.numel() and not bool(torch.isfinite(p).all())]

    def close(self) -> None:
        if self._arrival is not None:
            self._arrival.close()

    def _reach(self, roots: Sequence[Any]) -> None:
        named = list(self._model.named_parameters())
        try:
            found = [set(unreachable(root, named)) for root in roots]
        except ValueError:
            found = []
        common = set.intersection(*found) if found else set()
        self.unreachable = tuple(n for n, _ in named if n in common and n not in self.expected)


def arrival(seen: Gradients) -> Result:
    """Each trainable parameter has a gradient in each step, and not always one of zeros."""
    if not seen.steps:
        return unknown(seen.why_not or "no backward was seen")
    for step, found in seen.steps.items():
        if found["missing"]:
            names = found["missing"]
            reach = "" if set(names) - set(seen.unreachable or ()) else ": the loss does not reach"
            detail = f"step {step}: no gradient for {len(names)} parameters{reach} {some(names)}"
            return broken("missing-grad", detail, any_layer(names[0]))
    zero = set.intersection(*(set(found["zero"]) for found in seen.steps.values()))
    named = [name for name in next(iter(seen.steps.values()))["zero"] if name in zero]
    if named and len(seen.steps) > 1:
        detail = f"all zero in each of {len(seen.steps)} steps: {some(named)}"
        return broken("zero-grad", detail, any_layer(named[0]))
    if named:
        return unknown(f"zero in the only step, which initial weights may explain: {some(named)}")
    unseen = any(found["unseen"] for found in seen.steps.values())
    more = "; their values were gone when the step ended" if unseen else ""
    return ok(f"every gradient arrived in {len(seen.steps)} steps{more}")


def finite(seen: Gradients) -> Result:
    """Every gradient that was used, and every parameter at the end."""
    for step, found in seen.steps.items():
        if found["bad"]:  # in order of arrival: the first is nearest to where it came from
            names = found["bad"]
            detail = f"step {step}: {len(names)} gradients are not finite, first {some(names)}"
            return broken("nan-grad", detail, any_layer(names[0]))
    names = seen.bad_parameters()
    if names:
        detail = f"{len(names)} parameters are not finite: {some(names)}"
        return broken("nan-parameter", detail, any_layer(names[0]))
    return ok(f"gradients of {len(seen.steps)} steps and all parameters are finite")


def ranks(seen: Gradients) -> Result:
    """What one rank can say: its lists, which `compare_ranks` lays beside the others'."""
    lists = {
        str(step): {"missing": found["missing"], "zero": found["zero"]}
        for step, found in seen.steps.items()
    }
    return unknown("one rank alone") | {"arrivals": lists}


def compare_ranks(by_rank: Mapping[int, Result]) -> Result:
    """All ranks' lists of gradients: the same in each step, or the first difference.

    A branch that one rank took alone raises nothing under find_unused_parameters, and weights stay
    equal: only these lists show it.
    """
    if len(by_rank) == 1:
        return ok("one rank, which agrees with itself")
    lists = {rank: result.get("arrivals", {}) for rank, result in by_rank.items()}
    if len(lists) < 2 or not all(lists.values()):
        return unknown("fewer than two ranks told which gradients arrived")
    steps = [step for step in next(iter(lists.values())) if all(step in x for x in lists.values())]
    for step in steps:
        for state in ("missing", "zero"):
            sets = {rank: set(x[step][state]) for rank, x in lists.items()}
            apart = set.union(*sets.values()) - set.intersection(*sets.values())
            if apart:
                first = next(n for x in lists.values() for n in x[step][state] if n in apart)
                where = [rank for rank, names in sets.items() if first in names]
                detail = f"step {step}: {state} on rank {some(map(str, where))} alone: "
                return broken("ranks-differ", detail + some(sorted(apart)), any_layer(first))
    return ok(f"the same gradients on {len(lists)} ranks in {len(steps)} steps")


def _not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
