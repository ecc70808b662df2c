"""What operators allocate besides their results, and operators that fake tensors cannot run."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# Operators by another way: each is called as the operator is, and sees the same modes.
SUBSTITUTES: dict[str, dict[Any, Callable]] = {
    "cpu": {aten._pin_memory.default: lambda x, *_: x},
    "cuda": {aten._pin_memory.default: lambda x, *_: x},
}
# Bytes that an operator allocates and frees again, from (args, kwargs, out).
BESIDES: dict[str, dict[Any, Callable[..., tuple[int, ...]]]] = {"cpu": {}, "cuda": {}}


def substitute(tracker: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The results of `func` by another way; NotImplemented where it runs as it is."""
    instead = SUBSTITUTES[tracker.device].get(func)
    if instead is None:
        return NotImplemented
    with tracker:
        return instead(*args, **kwargs)


def besides(tracker: Any, func: Any, args: tuple, kwargs: dict, out: Any) -> tuple[int, ...]:
    """Bytes of what it allocates and frees again."""
    found = BESIDES[tracker.device].get(func)
    return found(args, kwargs, out) if found else ()
