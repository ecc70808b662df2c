"""Oracles of learning: parameters that no optimizer holds or changes, rows without a gradient.

Both read gradients when an optimizer is about to use them: those of its own parameters, and of
parameters that no optimizer holds.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from workbook.lab.oracles.growth import MOST
from workbook.lab.oracles.steps import Result, broken, ok, some, unknown

CHUNK = 2**20  # elements of a parameter hashed at once
LEAST_LOOKS = 4
BLOCK, SHARE = 8, 0.25  # adjacent rows, such as a head's; share of all rows: fewer are dead units
DENSE = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)  # all rows have the same use


class Learning:
    """Record which trainable parameters an optimizer holds, which rows had a gradient, and changes.

    expected: names of parameters that should have no gradient. Costs one pass over the gradients in
    up to MOST steps, and two passes over the parameters in total.
    """

    def __init__(self, model: nn.Module, subject: Any = None, expected: Collection[str] = ()):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._parameters = {n: p for n, p in named if n not in expected}
        self._kinds = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
        self._subject = subject
        self._before: dict[str, int | None] = {}
        self._held: set[int] = set()
        self._rates: dict[int, float] = defaultdict(float)  # the highest of each held parameter
        self._alive: dict[str, Tensor] = {}  # rows that had a gradient in any step
        self._looks: Counter[str] = Counter()
        # Number of these rows at the last two looks whose number is a power of two.
        self._early: dict[str, tuple[Tensor, Tensor]] = {}
        self._now, self._every = 0, 1
        self.steps = 0  # in which an optimizer was called

    def begin(self, step: int) -> None:
        if not self._before:
            self._before = {name: digest(p) for name, p in self._parameters.items()}
        self._now, self._stepped = step, False

    def optimizer(self, optimizer: Any) -> None:
        mine = {id(p) for p in self._take(optimizer)}
        self.steps += not self._stepped
        self._stepped = True
        if self._now % self._every:
            return
        for name, p in self._parameters.items():
            if p.grad is not None and (id(p) in mine or id(p) not in self._held):
                self._look(name, p.grad)
        if max(self._looks.values(), default=0) >= MOST * self._every.bit_length():
            self._every *= 2  # MOST more at twice the distance

    def changed(self, name: str) -> bool | None:
        """True if any of its values differs from before the first step; None if unknown."""
        before = self._before.get(name)
        return None if before is None else digest(self._parameters[name]) != before

    def optimizers(self) -> Result:
        """Check that parameters with a gradient are held by an optimizer, and change."""
        if not self.steps:
            return unknown("no optimizer was called")
        got = [name for name, alive in self._alive.items() if bool(alive.any())]
        if not got:
            return unknown("no gradient was there when an optimizer was called")
        free = [name for name in got if id(self._parameters[name]) not in self._held]
        if free:
            for optimizer in _others(self._subject):
                self._take(optimizer)
            free = [name for name in free if id(self._parameters[name]) not in self._held]
        free = [name for name in free if not self.changed(name)]  # an optimizer may hold a copy
        said = f"{len(free)} of {len(got)} parameters with a gradient are in no optimizer"
        if free and 2 * len(free) < len(got):
            return broken("not-optimized", f"{said}: {some(free)}", free[0])
        found = ok(f"{len(got) - len(free)} of {len(got)} parameters with a gradient are in one")
        hints = [f"{said}, as where only a part is to be trained: {some(free)}"] if free else []
        stuck = [name for name in got if name not in free and self.changed(name) is False]
        still = [name for name in stuck if not self._rates[id(self._parameters[name])]]
        late = [name for name in stuck if name not in still]
        if self.steps > 1 and still:
            hints.append(f"the learning rate of {some(still)} was 0 in {self.steps} steps")
        if self.steps > 1 and late and len(stuck) < len(got):  # else the steps may all be skipped
            kind = str(self._parameters[late[0]].dtype).removeprefix("torch.")
            hints.append(
                f"{some(late)} did not change in {self.steps} steps, though they have a gradient: "
                f"the steps may be too small for {kind}"
            )
        return found | ({"hint": "; ".join(hints)} if hints else {})

    def rows(self) -> Result:
        """Hint at rows of a gradient that were zero in every step while other rows were not."""
        looks = max(self._looks.values(), default=0)
        if looks < LEAST_LOOKS:
            return unknown(f"too few steps with an optimizer to tell: {looks} of {LEAST_LOOKS}")
        dead = {}
        for name, alive in self._alive.items():
            rows = (~alive).nonzero().flatten().tolist()
            # for example an embedding's, where rare tokens occur in some steps only
            growing = int(self._early[name][0]) != len(alive) - len(rows)
            if rows and len(rows) < len(alive) and not growing and self._matters(name, rows):
                dead[name] = rows
        if not dead:
            return ok(f"no part of a gradient was zero in each of {looks} steps")
        told = [
            f"{len(r)} of {len(self._alive[n])} rows of {n} ({_spans(r)})" for n, r in dead.items()
        ]
        said = f"zero in each of {looks} steps: {some(told)}"
        return ok("no gradient was judged by its rows") | {"hint": said}

    def _matters(self, name: str, rows: list[int]) -> bool:
        module = self._kinds.get(id(self._parameters[name]))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return False
        total = len(self._alive[name])
        tail = rows == list(range(total - len(rows), total))  # a table longer than what is used
        if tail and not isinstance(module, DENSE):
            return False
        return len(rows) >= SHARE * total or any(b - a + 1 >= BLOCK for a, b in _runs(rows))

    def _take(self, optimizer: Any) -> list[Tensor]:
        found = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._held.add(id(p))
                rate = float(group.get("lr", 1.0))
                self._rates[id(p)] = max(self._rates[id(p)], rate)
                found.append(p)
        return found

    def _look(self, name: str, gradient: Tensor) -> None:
        gradient = getattr(gradient, "_local_tensor", gradient).detach()
        if gradient.is_sparse or not gradient.numel():
            return
        alive = gradient != 0
        alive = alive.flatten(1).any(1) if alive.dim() > 1 else alive.any().reshape(1)
        if name in self._alive:
            alive |= self._alive[name]
        self._alive[name] = alive
        self._looks[name] += 1
        if self._looks[name].bit_count() == 1:
            total = alive.sum()
            self._early[name] = (self._early.get(name, (total, total))[1], total)


@torch.no_grad()
def digest(parameter: Tensor) -> int | None:
    """Hash that almost surely changes if any value changes; None if it cannot be computed."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    try:
        tensor = getattr(parameter, "_local_tensor", parameter).detach()
        size = sizes.get(tensor.element_size())
        if size is None or tensor.is_complex():
            return None
        bits = tensor.contiguous().view(size).flatten()
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for number, part in enumerate(bits.split(CHUNK)):
            # distinct odd factors: integers wrap, and their sum is the same in any order
            factors = torch.arange(part.numel(), device=part.device).mul_(2654435761).bitwise_or_(1)
            total += (part.long() * factors).sum() * (2 * number + 1)
        return int(total)
    except (RuntimeError, NotImplementedError, ValueError):
        return None  # not there yet, sparse, fake


def _others(subject: Any) -> list[Any]:
    """Optimizers, also uncalled ones: the subject's own, and any that the collector lists."""
    kept = list(vars(subject).values()) if hasattr(subject, "__dict__") else []
    kept += [x for each in kept if isinstance(each, list | tuple) for x in each]
    return [x for x in kept + gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    by_run = groupby(enumerate(rows), key=lambda each: each[1] - each[0])
    runs = [[row for _, row in run] for _, run in by_run]
    return [(run[0], run[-1]) for run in runs]


def _spans(rows: list[int]) -> str:
    return some(str(a) if a == b else f"{a} to {b}" for a, b in _runs(rows))
