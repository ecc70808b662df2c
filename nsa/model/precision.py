"""The precisions in which a step can compute, and those in which it must not."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

PRECISIONS = ("fp32", "bf16", "fp16")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MASTER = (torch.float32, torch.float64)


def check_precision(precision: str) -> None:
    """Raises ValueError for a precision that is not one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; known are {', '.join(PRECISIONS)}")


def check_weights(model: nn.Module) -> None:
    """Raises ValueError unless the weights are wide enough to be trained as they are."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in _MASTER or not parameter.requires_grad:
            continue
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is fp16: AdamW's eps of 1e-8 becomes 0 in fp16 weights, so that the first "
                "zero gradient gives 0 / 0 and the loss is NaN from the second step on; keep the "
                "weights fp32 (model.float()) and let autocast compute: precision='bf16' would do, "
                "or 'fp16', which scales the loss too"
            )
        raise ValueError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}: updates smaller than its "
            "rounding would be lost; keep the weights fp32 (model.float()) and let autocast "
            "compute: precision='bf16' would do"
        )


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """What a forward runs under: autocast to bf16 or fp16 over fp32 weights, or nothing."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Scales losses in fp16, whose gradients below 6e-8 would be 0; elsewhere it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
