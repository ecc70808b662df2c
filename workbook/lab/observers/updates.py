"""Share of weights that each optimizer step changes: bf16 weights round small updates away.

A bf16 number has 8 significant bits, so an update below 1/512 to 1/256 of a weight leaves it
unchanged. fp32 weights, which autocast keeps, have 24 bits and lose nothing at any usual learning
rate.
"""

from typing import Any

import torch
from torch import Tensor


class Updates:
    """Observer of a Trainer that compares all weights before and after each optimizer step.

    Costs a copy of the weights, and one pass over both copies per step; nothing waits for a GPU.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._before: list[Tensor] = []
        self._rows: list[tuple[int, Tensor]] = []

    def on_phase(self, name: str, step: int) -> None:
        if name == "optimizer":
            self._before = [p.detach().clone() for p in self._parameters]
        elif name == "end" and self._before:
            pairs = zip(self._before, self._parameters, strict=True)
            changed = torch.stack([(a != b.detach()).sum() for a, b in pairs])
            self._rows.append((step, changed.sum()))
            self._before = []

    def rows(self) -> list[dict[str, Any]]:
        """One row per step: step, changed (share of weights), weights (dtype). Waits for a GPU."""
        total = sum(p.numel() for p in self._parameters)
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self._parameters})
        return [
            {"step": step, "changed": int(changed) / total, "weights": ", ".join(dtypes)}
            for step, changed in self._rows
        ]
