"""Oracles of gradients: each arrives, none is always zero, all are finite, all ranks have the same.

One observer (workbook.lab.observers.arrival) records them; each oracle checks another property.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbook.lab.observers.arrival import MISSING, ZERO, GradientArrival
from workbook.lab.observers.graph import unreachable
from workbook.lab.oracles.learning import digest
from workbook.lab.oracles.steps import Result, anywhere, broken, ok, some, unknown

KEEP = 50  # steps between two readings, which wait for the device
OTHERS = 0.5  # of a step: faults from the ranks' average are ordered after a rank's own


class Gradients:
    """Record per step which gradients are missing, zero or not finite; shared by the oracles.

    expected: names of parameters that should have none. Steps without a backward, such as those of
    a replayed CUDA graph, are not judged. Do not use it as a listener if `why_not` is not empty.
    """

    def __init__(self, model: nn.Module, expected: Collection[str] = ()) -> None:
        self._model, self.expected = model, frozenset(expected)
        self.why_not = ""
        try:
            self._arrival = GradientArrival(model, keep=KEEP, warn=False)
        except ValueError as error:
            self.why_not = str(error)
        self.steps: dict[int, dict[str, list[str]]] = {}
        self.local = Local(model) if several() else None
        self.unreachable: tuple[str, ...] | None = None
        self._open: dict[int, dict[str, Any]] = {}  # steps whose rows were not read yet
        self._stepped = False
        self._without: dict[str, int | None] = {}  # digests, if without gradient at first

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
            # fp16's scaler makes a fused optimizer skip a step whose gradients overflow
            self._now["overflow"] = getattr(optimizer, "found_inf", None)
        self._now["optimizers"] += 1
        self._stepped = True

    def end(self, step: int, loss: Any) -> None:
        if not self._now["optimizers"]:
            self._arrival.on_phase("optimizer", step)
        self._arrival.on_phase("end", step)
        if self.local is not None:
            self.local.end(step, loss)
        if self._now["backwards"]:
            if not self.steps and not self._open:
                named = self._model.named_parameters()
                self._without = {
                    n: digest(p) for n, p in named if p.requires_grad and p.grad is None
                }
            self._open[step] = self._now
        if len(self._open) >= KEEP:
            self.read()

    def read(self) -> None:
        """Read the pending rows of the steps so far. Waits for the device."""
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
        if self.local is not None:
            self.local.read()

    def bad_parameters(self) -> list[str]:
        """Names of the parameters that are not finite now."""
        floats = [(n, p) for n, p in self._model.named_parameters() if p.is_floating_point()]
        return [n for n, p in floats if not bool(torch.isfinite(p.detach()).all())]

    def averaged(self, names: Collection[str]) -> set[str]:
        """Names of parameters that have changed since the first step, in which they had no
        gradient: they are updated without an optimizer, as an average of other parameters is."""
        now = dict(self._model.named_parameters())
        before = {
            n: self._without[n] for n in names if n in now and self._without.get(n) is not None
        }
        return {name for name, was in before.items() if digest(now[name]) != was}

    def alone(self, names: Collection[str]) -> bool:
        """True if all are biases of modules whose weights are not among them: a loss may be
        independent of a bias, such as a critic's last one."""
        weights = {f"{name.removesuffix('bias')}weight" for name in names}
        known = dict(self._model.named_parameters())
        return all(n.endswith("bias") for n in names) and weights <= known.keys() - set(names)

    def close(self) -> None:
        self._arrival.close()
        if self.local is not None:
            self.local.close()

    def _reach(self, roots: Sequence[Any]) -> None:
        named = list(self._model.named_parameters())
        try:
            found = [set(unreachable(root, named)) for root in roots]
        except ValueError:
            found = []
        common = set.intersection(*found) if found else set()
        self.unreachable = tuple(n for n, _ in named if n in common and n not in self.expected)


class Local:
    """Check that this rank's own gradients are finite, before the ranks' average spreads a fault.

    A parameter's hook runs when its accumulation ends, and DDP's after it. Costs one reduction of
    each gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._now: list[tuple[str, Tensor]] = []
        self._steps: dict[int, tuple[list[str], Tensor, Any]] = {}
        self.found: dict[int, tuple[str, bool]] = {}  # step: first parameter to arrive, loss is bad
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._see, n)) for n, p in named
        ]

    def _see(self, name: str, parameter: Tensor) -> None:
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if gradient is not None and gradient.numel() and not gradient.is_sparse:
            largest = torch.linalg.vector_norm(gradient.detach(), float("inf"))
            self._now.append((name, largest.float()))

    def end(self, step: int, loss: Any) -> None:
        if self._now:
            names = [name for name, _ in self._now]
            scalar = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
            told = torch.as_tensor(loss).detach() if scalar else None
            self._steps[step] = names, torch.stack([x for _, x in self._now]), told
            self._now = []
        if len(self._steps) >= KEEP:
            self.read()

    def read(self) -> None:
        """Record per step the first non-finite parameter, and True if the loss was not finite."""
        for step, (names, largest, loss) in self._steps.items():
            bad = [n for n, x in zip(names, largest.tolist(), strict=True) if not math.isfinite(x)]
            if bad:
                self.found[step] = bad[0], loss is not None and not math.isfinite(float(loss))
        self._steps = {}

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def several() -> bool:
    """True if this is one of several ranks."""
    distributed = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    return joined and distributed.get_world_size() > 1


def arrival(seen: Gradients) -> Result:
    """Check that each trainable parameter has a gradient, at least in some steps, not all zero."""
    if not seen.steps:
        return unknown(seen.why_not or "no backward was seen")
    numbers = list(seen.steps)
    missing = {step: found[MISSING] for step, found in seen.steps.items() if found[MISSING]}
    lasting = _lasting(seen.steps)
    moved = seen.averaged([name for name, since in lasting.items() if since == numbers[0]])
    gone = {name: since for name, since in lasting.items() if name not in moved}
    if gone:
        step = min(gone.values())
        names = [name for name in missing[step] if gone.get(name) == step]
        reach = "" if set(names) - set(seen.unreachable or ()) else ": the loss does not reach"
        detail = f"step {step}: no gradient for {len(names)} parameters{reach} {some(names)}"
        return broken("missing-grad", detail, names[0])
    first, *others = seen.steps.values()
    named = [name for name in first[ZERO] if all(name in found[ZERO] for found in others)]
    if named and others and not seen.alone(named):
        detail = f"all zero in each of {len(seen.steps)} steps: {some(named)}"
        return broken("zero-grad", detail, named[0])
    if named and not others:
        return unknown(f"zero in the only step, which initial weights may explain: {some(named)}")
    unseen = any(found["unseen"] for found in seen.steps.values())
    more = "; their values were gone when the step ended" if unseen else ""
    hints = [f"all zero in each of {len(numbers)} steps: {some(named)}"] if named else []
    rare = dict.fromkeys(name for names in missing.values() for name in names)
    if rare := [name for name in rare if name not in moved]:
        hints.append(f"no gradient for {some(rare)} in some of {len(numbers)} steps")
    every = "every other" if hints or moved else "every"
    found = ok(f"{every} gradient arrived in {len(numbers)} steps{more}")
    return found | ({"hint": "; ".join(hints)} if hints else {})


def _lasting(steps: Mapping[int, Mapping[str, list[str]]]) -> dict[str, int]:
    """{name: step} of parameters without a gradient from that step to the end.

    Excludes those missing in the last step alone, and those of similar modules, such as experts or
    layers, of which another was missing and came back: these are used only in some steps.
    """
    since: dict[str, int] = {}
    rare: set[str] = set()
    for step, found in steps.items():
        names = set(found[MISSING])
        rare |= {anywhere(name) for name in since if name not in names}
        since = {name: since.get(name, step) for name in found[MISSING]}
    last = list(steps)[-1] if len(steps) > 1 else None
    return {n: step for n, step in since.items() if step != last and anywhere(n) not in rare}


def finite(seen: Gradients) -> Result:
    """Check that every gradient that was used, and every parameter at the end, is finite.

    "at" is the step if the fault was this rank's own, half a step later if the average brought it.
    """
    for step, found in seen.steps.items():
        if names := found["bad"]:  # in order of arrival: the first is nearest to the origin
            detail = f"step {step}: {len(names)} gradients are not finite, first {some(names)}"
            own = seen.local.found.get(step) if seen.local is not None else None
            if own is None:
                return broken("nan-grad", detail, names[0]) | {"at": step + OTHERS}
            name, loss = own
            before = f"its own gradient of {name} was not finite before it was averaged"
            also = ", and its loss is not either" if loss else ""
            return broken("nan-grad", f"{detail}; {before}{also}", name) | {"at": step}
    if names := seen.bad_parameters():
        detail = f"{len(names)} parameters are not finite: {some(names)}"
        return broken("nan-parameter", detail, names[0])
    return ok(f"gradients of {len(seen.steps)} steps and all parameters are finite")


def ranks(seen: Gradients) -> Result:
    """Result of one rank: its lists of gradients, for `compare_ranks`."""
    lists = {str(step): {key: x[key] for key in (MISSING, ZERO)} for step, x in seen.steps.items()}
    return unknown("one rank alone") | {"arrivals": lists}


def compare_ranks(by_rank: Mapping[int, Result]) -> Result:
    """Compare all ranks' lists of gradients: equal in each step, or report the first difference.

    A branch taken by one rank alone raises no error under find_unused_parameters, and weights stay
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
