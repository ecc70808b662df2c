"""The training loop: AdamW, clipping, autocast, and phases that observers may watch."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nsa.attention import witness

PRECISIONS = ("fp32", "bf16")


@runtime_checkable
class Data(Protocol):
    """Seeded and stateless in `step`, so that a run can be repeated from anywhere."""

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both int64 [B, T]."""


class Trainer:
    """Trains a LanguageModel, one batch a step.

    AdamW with betas 0.9 and 0.95, decay 0.1 on parameters of two or more dimensions and none on
    norms and biases; gradients clipped to norm 1; `lr` reached linearly over `warmup_steps`, then
    constant. "bf16" is autocast over fp32 weights and fp32 optimizer states.

    `seed` draws the model's weights anew, so that equal seeds train equally whatever ran before;
    None keeps the weights as they are.

    Each observer may have on_phase(name, step), called at the start of "data", "forward",
    "backward" and "optimizer" and with "end" after the step, and on_step(step, loss), called after
    that with the loss still on its device. Gradients can be looked at when "optimizer" starts; they
    are gone at "end".

    Raises ValueError for an unknown precision, fp16 included, and for sizes below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        batch: int,
        tokens: int,
        lr: float = 1e-3,
        warmup_steps: int = 10,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
        seed: int | None = None,
        observers: Sequence[Any] = (),
    ) -> None:
        check_precision(precision)
        for name, value in (("batch", batch), ("tokens", tokens), ("warmup_steps", warmup_steps)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if seed is not None:
            model.reset_parameters(seed)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.data, self.batch, self.tokens = data, batch, tokens
        self.lr, self.warmup_steps = lr, warmup_steps
        self.precision = precision
        self.observers = tuple(observers)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=lr, betas=(0.9, 0.95))
        self.steps_done = 0

    def step(self, step: int) -> Tensor:
        """Trains on batch number `step`; returns the loss, fp32, without waiting for the device."""
        # Left over from before the first step, they would be added to its own.
        self.model.zero_grad(set_to_none=True)
        with witness.where(step=step):
            self._enter("data", step)
            tokens, targets = self._batch(step)
            self._enter("forward", step)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                _, loss = self.model(tokens, targets)
            self._enter("backward", step)
            loss.backward()
            self._enter("optimizer", step)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (step + 1) / self.warmup_steps)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self._enter("end", step)
        loss = loss.detach()
        for observer in self.observers:
            if hasattr(observer, "on_step"):
                observer.on_step(step, loss)
        return loss

    def run(self, steps: int) -> list[float]:
        """Trains the next `steps` steps; returns their losses in nats. Waits for the device once.

        If attention outputs were not finite, one RuntimeWarning names the place of the first: at
        once on a CPU, at the end on a GPU. An open `witness.recording()` counts them as well.
        """
        self.model.train()
        losses = []
        with witness.recording() as seen:
            for step in range(self.steps_done, self.steps_done + steps):
                losses.append(self.step(step))
                self.steps_done = step + 1
            seen.non_finite()  # warns
        return torch.stack(losses).tolist() if losses else []

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.data.batch(step, self.batch, self.tokens)
        if self.device.type != "cuda":
            return tokens.to(self.device), targets.to(self.device)
        # From memory that is not pinned, the copy would wait for the step before to end.
        return (
            tokens.pin_memory().to(self.device, non_blocking=True),
            targets.pin_memory().to(self.device, non_blocking=True),
        )

    def _enter(self, phase: str, step: int) -> None:
        for observer in self.observers:
            if hasattr(observer, "on_phase"):
                observer.on_phase(phase, step)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices (and anything of more dimensions) with weight decay, norms and biases without."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def check_precision(precision: str) -> None:
    """Raises ValueError unless the training loop can keep its losses finite in this precision."""
    if precision == "fp16":
        raise ValueError(
            "precision='fp16' is refused: gradients below 6e-8 become 0 in fp16 unless the loss is "
            "scaled, and AdamW's eps of 1e-8 becomes 0 in fp16 weights, so that the first zero "
            "gradient gives 0 / 0 and the loss is NaN from the second step on; "
            "precision='bf16' would do, or 'fp32'"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; known are {', '.join(PRECISIONS)}")
