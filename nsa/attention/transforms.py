"""State of torch during a call: torch.func transforms and autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C import _functorch

GRAD, VMAP, JVP, SECOND = "grad", "vmap", "jvp", "second derivative"
ALL = frozenset((GRAD, VMAP, JVP, SECOND))
FIRST = frozenset((GRAD, VMAP))
_NAMES = {"Grad": GRAD, "Vmap": VMAP, "Jvp": JVP}


def active() -> frozenset[str]:
    """Names of the torch.func transforms that a call needs to support; none for a plain call.

    A Hessian needs jvp and a second derivative, a per-sample gradient needs grad and vmap.
    """
    if not torch._C._are_functorch_transforms_active():
        return frozenset()
    levels = [one.key().name for one in _functorch.get_interpreter_stack()]
    asked = {_NAMES[level] for level in levels if level in _NAMES}
    return frozenset(asked | ({SECOND} if len(levels) - levels.count("Vmap") > 1 else set()))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast dtype on the device; None if autocast is off, as on "meta"."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast, which would round the fp32 scores that softmax needs."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
