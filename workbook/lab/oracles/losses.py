"""Oracles of the loss curve: hints, and a fault only if the user has stated a bound."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch

from workbook.lab.oracles.growth import skip_first_third
from workbook.lab.oracles.steps import Result, broken, ok, unknown

LEAST = 12  # losses to detect an explosion
TIMES = 10.0  # multiple of the largest of the first third
LEAST_FLAT = 50  # losses to detect a plateau


class Losses:
    """Losses of the steps, read when a result is requested, and the highest learning rates."""

    def __init__(self) -> None:
        self._losses: dict[int, Any] = {}
        self._rates: list[float] = []

    def optimizer(self, optimizer: Any) -> None:
        self._rates.append(max(float(group.get("lr", 1.0)) for group in optimizer.param_groups))

    def end(self, step: int, loss: Any) -> None:
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().clone() if loss.numel() == 1 else None
        if loss is not None:
            self._losses[step] = loss

    def explosion(self, most: str = "") -> Result:
        """Hint at finite but exploding losses; with `most`, broken if a loss is above it."""
        losses = self._finite()
        if most:
            if not losses:
                return unknown("no loss was reported")
            step, worst = max(losses.items(), key=lambda item: item[1])
            said = f"the largest loss is {worst:.4g}, in step {step}; at most {most} was stated"
            return broken("loss-explosion", said) if worst > float(most) else ok(said)
        values = list(losses.values())
        if len(values) < LEAST:
            return unknown(f"too few losses: {len(values)} of {LEAST}")
        first = max(map(abs, values[: len(values) // 3]))
        last = median(values[-max(3, len(values) // 10) :])
        if last <= TIMES * first or not first:
            return ok(f"the loss ends at {last:.4g}, and its first third was up to {first:.4g}")
        step = next(step for step, value in losses.items() if value > TIMES * first)
        said = f"the loss is above {TIMES:g} x its first third since step {step}, and ends at"
        return ok("the loss is finite") | {"hint": f"{said} {last:.4g}"}

    def plateau(self, most: str = "") -> Result:
        """Hint at a loss that does not fall; with `most`, broken if it ends above that."""
        values = list(self._finite().values())
        if most:
            if not values:
                return unknown("no loss was reported")
            last = median(values[-max(1, len(values) // 10) :])
            said = f"the loss ends at {last:.4g}; at most {most} was stated"
            return broken("loss-plateau", said) if last > float(most) else ok(said)
        if len(values) < LEAST_FLAT:
            return unknown(f"too few losses: {len(values)} of {LEAST_FLAT}")
        rates = skip_first_third(self._rates)
        if rates and rates[-1] > 1.5 * rates[0]:
            return unknown("the learning rate still warms up")
        third = len(values) // 3
        first, last = median(values[:third]), median(values[-third:])
        said = f"from {first:.4g} to {last:.4g}, medians of the first and the last third"
        if last < first:
            return ok(f"the loss falls {said}")
        hint = f"the loss does not fall in {len(values)} steps: {said}"
        return ok("the loss is finite") | {"hint": hint}

    def _finite(self) -> dict[int, float]:
        found = {step: float(loss) for step, loss in self._losses.items()}
        return {step: loss for step, loss in found.items() if math.isfinite(loss)}
