"""Tasks that only attention can solve: copying, a needle in a haystack, recall of many pairs.

Random bytes stay at a loss of log(vocab) whether or not a model attends to anything, and on text a
broken attention is only a little worse. Here a model that does not reach back answers by chance.

Batches are as in `nsa.model.data`: a function of (seed, step), drawn on the CPU. A target is -100
where nothing can be known, and every row scores the same number of tokens. Token 0 marks what is
asked for or repeated; further ids are split between symbols, keys, values and filler as each task
says.
"""

from typing import Any

import torch
from torch import nn

from nsa.model.precision import autocast
from nsa.model.tasks.common import IGNORED, MARK, Task
from nsa.model.tasks.copy import Copy
from nsa.model.tasks.needle import Needle
from nsa.model.tasks.recall import Recall
from nsa.model.train import EVALUATION, Data

__all__ = ["IGNORED", "MARK", "TASKS", "Copy", "Needle", "Recall", "Task", "accuracy", "task"]

TASKS = {task.__name__.lower(): task for task in (Copy, Needle, Recall)}


def task(name: str, **fields: Any) -> Task:
    """The task of that name ("copy", "needle", "recall"); lists, as JSON has them, are pairs."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


@torch.no_grad()
def accuracy(
    model: nn.Module,
    task: Data,
    *,
    batch: int,
    tokens: int,
    batches: int = 4,
    first_step: int = EVALUATION,
    precision: str = "fp32",
) -> float:
    """The share of scored targets that the model's most likely id meets, on batches of its own.

    They are the steps from `first_step` on, which no training run reaches. "bf16" and "fp16" are
    autocast. Waits for the device once.
    """
    device = next(model.parameters()).device
    right = torch.zeros((), device=device)
    scored = 0
    training = model.training
    model.eval()
    try:
        for step in range(first_step, first_step + batches):
            ids, targets = task.batch(step, batch, tokens, device)
            with autocast(precision, device):
                logits, _ = model(ids)
            counts = targets != IGNORED
            right += ((logits.argmax(-1) == targets) & counts).sum()
            scored += counts.sum()
    finally:
        model.train(training)
    return float(right / scored)
