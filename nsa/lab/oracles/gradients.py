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
from nsa.lab.oracles.steps import Result, broken, ok, some, unknown

KEEP = 50  # steps between two readings, which wait for the device


class Gradients:
    """Notes of each step which gradients are missing, zero or not finite; shared by the oracles.

    expected: names of parameters that rightly have none. Steps without a backward, as a replayed
    CUDA graph's, are not judged. Not to be told of steps where `why_not` says something.
    """

    def __init__(self, model: nn.Module, expected: Collection[str] = ()) -> None:
        self._model, self.expected = model, frozenset(expected)
        self.why_not = ""
        try:
            self._arrival = GradientArrival(model, keep=KEEP, warn=False)
        except ValueError as error:
            self.why_not = str(error)
        self.steps: dict[int, dict[str, list[str]]] = {}
        self.unreachable: tuple[str, ...] | None = None
        self._open: dict[int, dict[str, Any]] = {}  # steps whose rows were not read yet
        self._stepped = False

    def begin(self, step: int) -> None:
        self._now = {"backwards": 0, "optimizers": 0, "overflow": None}
        self._arrival.on_phase("data", step)

    def backward(self, roots: Sequence[Any]) -> None:
        if self.unreachable is None:
            self._reach(roots)
        self._now["backwards"] += 1
        self._arrival.on_phase("backward", -1)

    def optimizer(self, optimizer: Any) -> None:
        if not self._now["optimizers"]:
            self._arrival.on_phase("optimizer", -1)
            # fp16's scaler has a fused optimizer skip a step whose gradients overflow
            self._now["overflow"] = getattr(optimizer, "found_inf", None)
        self._now["optimizers"] += 1
        self._stepped = True

    def end(self, step: int, loss: Any) -> None:
        if not self._now["optimizers"]:
            self._arrival.on_phase("optimizer", step)
        self._arrival.on_phase("end", step)
        if self._now["backwards"]:
            self._open[step] = self._now
        if len(self._open) >= KEEP:
            self.read()

    def read(self) -> None:
        """Reads what the steps so far left. Waits for the device."""
        for step, now in self._open.items():
            skipped = bool(now["overflow"]) or (self._stepped and not now["optimizers"])
            found = self.steps[step] = {key: [] for key in (MISSING, ZERO, "bad", "unseen")}
            for row in self._arrival.rows(step):
                name, state, largest = row["name"], row["state"], row["largest"]
                if name in self.expected:
                    continue
                if state in (MISSING, ZERO):
                    found[state].append(name)
                if largest is None:
                    found["unseen"] += [name] * (state != MISSING)
                elif not (math.isfinite(largest) or skipped):
                    found["bad"].append(name)
        self._open = {}

    def bad_parameters(self) -> list[str]:
        """Those that are not finite now."""
        floats = [(n, p) for n, p in self._model.named_parameters() if p.is_floating_point()]
        return [n for n, p in floats if not bool(torch.isfinite(p.detach()).all())]

    def close(self) -> None:
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
        if names := found[MISSING]:
            reach = "" if set(names) - set(seen.unreachable or ()) else ": the loss does not reach"
            detail = f"step {step}: no gradient for {len(names)} parameters{reach} {some(names)}"
            return broken("missing-grad", detail, names[0])
    first, *others = seen.steps.values()
    named = [name for name in first[ZERO] if all(name in found[ZERO] for found in others)]
    if named and others:
        detail = f"all zero in each of {len(seen.steps)} steps: {some(named)}"
        return broken("zero-grad", detail, named[0])
    if named:
        return unknown(f"zero in the only step, which initial weights may explain: {some(named)}")
    unseen = any(found["unseen"] for found in seen.steps.values())
    more = "; their values were gone when the step ended" if unseen else ""
    return ok(f"every gradient arrived in {len(seen.steps)} steps{more}")


def finite(seen: Gradients) -> Result:
    """Every gradient that was used, and every parameter at the end."""
    for step, found in seen.steps.items():
        if names := found["bad"]:  # in order of arrival: the first is nearest to where it came from
            detail = f"step {step}: {len(names)} gradients are not finite, first {some(names)}"
            return broken("nan-grad", detail, names[0])
    if names := seen.bad_parameters():
        detail = f"{len(names)} parameters are not finite: {some(names)}"
        return broken("nan-parameter", detail, names[0])
    return ok(f"gradients of {len(seen.steps)} steps and all parameters are finite")


def ranks(seen: Gradients) -> Result:
    """What one rank can say: its lists, which `compare_ranks` lays beside the others'."""
    lists = {str(step): {key: x[key] for key in (MISSING, ZERO)} for step, x in seen.steps.items()}
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
        for state in (MISSING, ZERO):
            sets = {rank: set(x[step][state]) for rank, x in lists.items()}
            apart = set.union(*sets.values()) - set.intersection(*sets.values())
            if apart:
                first = next(n for x in lists.values() for n in x[step][state] if n in apart)
                where = [rank for rank, names in sets.items() if first in names]
                detail = f"step {step}: {state} on rank {some(map(str, where))} alone: "
                return broken("ranks-differ", detail + some(sorted(apart)), first)
    return ok(f"the same gradients on {len(lists)} ranks in {len(steps)} steps")
