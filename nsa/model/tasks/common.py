"""What the tasks share: marks, scored targets, and checks of what was asked for."""

from dataclasses import asdict
from typing import Any, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from nsa.model.data import Batch
from nsa.model.train import Data

IGNORED = -100  # what cross entropy leaves out
MARK = 0  # starts a string, or asks for what follows a key


class Task(Data, Protocol):
    """Data whose answers can be counted."""

    seed: int
    vocab: int

    @property
    def chance(self) -> float:
        """Accuracy of a model that knows the task's rules and sees nothing of the row."""


def scored(
    ids: Int64[Tensor, "B T1"], answers: Int64[Tensor, "B S"], device: str | torch.device
) -> Batch:
    """Tokens and targets of ids [B, T + 1]; only the ids at `answers` are targets."""
    targets = torch.full_like(ids, IGNORED).scatter_(1, answers, ids.gather(1, answers))
    return ids[:, :-1].contiguous().to(device), targets[:, 1:].contiguous().to(device)


def limits(given: int | tuple[int, int] | None, most: int) -> tuple[int, int]:
    """(least, most) to draw from: as given, or `most` itself."""
    if given is None:
        return most, most
    return (given, given) if isinstance(given, int) else given


def described(task: Any) -> dict[str, Any]:
    return {"name": type(task).__name__.lower(), **asdict(task), "chance": task.chance}


def check_ints(task: Any, **least: int) -> None:
    for name, smallest in {"seed": 0, **least}.items():
        value = getattr(task, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is not an int")
        if value < smallest:
            raise ValueError(f"{name}={value} must be at least {smallest}")


def check_range(name: str, given: Any, least: int) -> None:
    """Raises unless it is None, a number or a pair (least, most), none of them too small."""
    pair = given if isinstance(given, tuple) else (given, given)
    if given is None:
        return
    if len(pair) != 2 or any(not isinstance(x, int) or isinstance(x, bool) for x in pair):
        raise TypeError(f"{name}={given!r} is not an int, a pair of ints (least, most) or None")
    if not least <= pair[0] <= pair[1]:
        raise ValueError(f"{name}={given!r}: at least {least}, and the larger number last")
