"""Training configuration: settings, optimizer, learning-rate schedule and precision."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from nsa.model.config import check_bool, check_complete, check_names, check_number, keep_int
from nsa.spelling import choice

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a Trainer: sizes, AdamW, learning rate, precision, and execution of steps.

    Raises:
        TypeError: a size that is not an int, a rate that is not a number, a flag that is no bool.
        ValueError: values that are unknown or do not fit; the message suggests valid ones.
    """

    batch: int  # sequences of one optimizer step of the whole job: all ranks and micro-batches
    tokens: int  # T
    steps: int | None = None  # where a "cosine" ends
    lr: float = 1e-3
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 10
    clip: float | None = 1.0  # maximum norm of the gradient; None: no clipping
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.95)
    accumulate: int = 1  # micro-batches of a step, on each rank
    precision: str = "fp32"
    compile: bool = False  # torch.compile of each block
    cuda_graph: bool = False  # the whole step as one CUDA graph
    nonfinite: str | None = None  # "skip" such a step; "stop": skip all after it too
    seed: int | None = None  # draws the weights anew; None keeps them

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "warmup_steps", "accumulate"):
            keep_int(self, name)
        for name, least in (("steps", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                keep_int(self, name, least)
        for name in ("compile", "cuda_graph"):
            check_bool(name, getattr(self, name))
        check_number("lr", self.lr, above=0.0)
        for name in ("min_lr", "weight_decay"):
            check_number(name, getattr(self, name), least=0.0)
        if self.clip is not None:
            check_number("clip", self.clip, above=0.0)
        for beta in self.betas:
            check_number("betas", beta, least=0.0, below=1.0)
        choice("precision", self.precision, ("fp32", *AUTOCAST))
        choice("nonfinite", self.nonfinite, (None, "skip", "stop"))
        choice("schedule", self.schedule, ("constant", "cosine"))
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is more than lr={self.lr}")
        if self.schedule == "cosine" and self.steps is None:
            raise ValueError("schedule='cosine' needs steps, the step at which it ends")
        if self.schedule == "cosine" and self.steps < self.warmup_steps:
            raise ValueError(
                f"steps={self.steps} end before warmup_steps={self.warmup_steps} do; "
                "a shorter warm-up or more steps would do"
            )
        if self.batch % self.accumulate:
            below = self.batch // self.accumulate * self.accumulate
            raise ValueError(
                f"batch={self.batch} is not a multiple of accumulate={self.accumulate}; nearest "
                f"that are: {below or self.accumulate} and {below + self.accumulate}"
            )

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0.

        It rises by lr / warmup_steps per step and first reaches `lr` at step warmup_steps -
        1. "cosine" then falls, to `min_lr` at the last of `steps` steps, and stays there.
        """
        if step + 1 < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - (self.warmup_steps - 1)) / max(1, self.steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + cos(pi * min(1.0, done)))

    def with_(self, **changes: Any) -> "TrainConfig":
        """Return a copy with some fields changed. Raises ValueError for an unknown field."""
        check_names(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` restores the same config."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Restore the config from `to_dict`. Raises ValueError for names unknown or missing."""
        check_complete(cls, values)
        betas = values.get("betas", cls.betas)
        if len(betas) != 2:
            raise ValueError(f"betas={betas} must be two numbers, e.g. {cls.betas}")
        return cls(**{**values, "betas": tuple(betas)})  # JSON has only lists


def adamw(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """torch's AdamW, fused on a GPU, where it applies a loss scaler's decisions without a sync.

    Tensors of two or more dimensions decay; norms and biases do not. With a CUDA graph its rate is
    a tensor: a graph bakes in numbers, and rereads tensors.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay}
    plain = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW(
        [decayed, plain],
        lr=torch.tensor(config.lr, device=device) if config.cuda_graph else config.lr,
        betas=config.betas,
        fused=device.type == "cuda" or None,
        capturable=config.cuda_graph,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate, in place if it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_weights(model: nn.Module) -> None:
    """Raise ValueError unless the weights' dtype is wide enough for training."""
    would_do = (
        "keep the weights fp32 (model.float()) and let autocast compute: precision='bf16' would do"
    )
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float32, torch.float64) or not parameter.requires_grad:
            continue
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is fp16: AdamW's eps of 1e-8 becomes 0 in fp16 weights, so that the first "
                "zero gradient gives 0 / 0 and the loss is NaN from the second step on; "
                f"{would_do}, or 'fp16', which scales the loss too"
            )
        raise ValueError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}: updates smaller than its "
            f"rounding would be lost; {would_do}"
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Context of a forward: autocast to bf16 or fp16 over fp32 weights, or a null context."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST[precision])
