"""The learning rate of each step: a linear warm-up, then constant or half a cosine."""

from math import cos, pi

SCHEDULES = ("constant", "cosine")


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    schedule: str = "constant",
    steps: int | None = None,
    min_lr: float = 0.0,
) -> float:
    """The rate of step number `step`, counted from 0.

    It rises by lr / warmup_steps a step and is `lr` for the first time at step warmup_steps - 1.
    "cosine" then falls, to `min_lr` at the last of `steps` steps, and stays there.
    """
    if step + 1 < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - (warmup_steps - 1)) / max(1, steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + cos(pi * min(1.0, done)))
