"""AdamW as the training loop uses it."""

from typing import Any

import torch
from torch import Tensor, nn

from nsa.model.train_config import TrainConfig


def adamw(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """torch's fused AdamW on a GPU, where it also takes a loss scaler's decisions without a sync.

    With a CUDA graph its rate is a tensor: a graph repeats numbers, and reads tensors anew.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=torch.tensor(config.lr, device=device) if config.cuda_graph else config.lr,
        betas=config.betas,
        fused=device.type == "cuda" or None,
        capturable=config.cuda_graph,
    )


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Matrices (and anything of more dimensions) with weight decay, norms and biases without."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
