"""Test whether a model learns what its attention should make learnable. One trial, one row.

A lesson trains a small model on tasks and then evaluates it on questions: tasks that it must have
learnt, and tasks just out of its reach, on which it must stay at chance. The latter detect what an
accuracy near 1 cannot: that a window has w keys and not w + 1. The `peek` detects attention that
sees the future, which trains well and would fail at the first generated token.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nsa.model.config import ModelConfig
from nsa.model.data import Batch, generator
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.tasks import Task, accuracy
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig, autocast

SOLVED = 0.9  # accuracy from which a task counts as solved
LUCK = 0.2  # margin above chance that 64 answers out of 8 values do not reach by luck
# A logit moves by less than this, in standard deviations, when only later tokens change: rounding.
PEEK = 0.02
_EVALUATED = 4  # batches behind each accuracy


@dataclass(frozen=True)
class Learnt:
    """Row of a lesson: its last evaluation, and the training that led to it."""

    accuracy: dict[str, float]  # by question
    chance: dict[str, float]  # by question: accuracy of guessing
    expected: dict[str, bool]  # by question: True if correct attention learns it
    peek: float  # see `peek`
    as_expected: bool  # the verdict: every question as it should be, and `peek` below PEEK
    steps: int
    loss: float  # nats, of the last step
    curve: list[dict[str, Any]]  # evaluations: step, tokens, loss, accuracies, right or not
    seconds: float
    parameters: int
    tokens: int  # T of the full rows
    device_name: str


@dataclass(frozen=True)
class Stage:
    """Tasks that are trained on alternately, each with its own batches, and questions at this T."""

    train: TrainConfig
    tasks: tuple[Task, ...]
    questions: dict[str, tuple[Task, bool]]  # with True if correct attention learns it

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> Batch:
        turn = len(self.tasks)
        return self.tasks[step % turn].batch(step // turn, batch, tokens, device)


@dataclass(frozen=True)
class Lesson:
    """A model, and stages with increasing T; only the questions of the last stage decide."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    device: str = "cpu"


def learn(lesson: Lesson, *, every: int = 25, budget_s: float = math.inf) -> dict[str, Any]:
    """Train and evaluate; return a `Learnt` as a dict. every: steps between evaluations.

    Each stage has a new optimizer. It ends after its steps, or once everything is as expected of
    correct attention at two evaluations in a row. After a stage that is not learnt, or when
    `budget_s` is over, the last stage follows at once; the budget also ends its training.
    """
    started = time.monotonic()
    model, last = LanguageModel(lesson.model), lesson.stages[-1]
    curve: list[dict[str, Any]] = []
    for stage in lesson.stages:
        late = time.monotonic() > started + budget_s or (curve and not curve[-1]["right"])
        if stage is last or not late:
            curve += _taught(model, stage, lesson.device, every, started + budget_s, curve)
    look = curve[-1]
    seen = peek(model, last.train.tokens, precision=last.train.precision)
    on_gpu = torch.device(lesson.device).type == "cuda"
    found = Learnt(
        accuracy={name: look[name] for name in last.questions},
        chance={name: asked.chance for name, (asked, _) in last.questions.items()},
        expected={name: solved for name, (_, solved) in last.questions.items()},
        peek=seen,
        as_expected=look["right"] and seen < PEEK,
        steps=look["step"],
        loss=look["loss"],
        curve=curve,
        seconds=time.monotonic() - started,
        parameters=parameter_count(model),
        tokens=last.train.tokens,
        device_name=torch.cuda.get_device_name() if on_gpu else "cpu",
    )
    return asdict(found)


def _taught(
    model: nn.Module, stage: Stage, device: str, every: int, ends: float, before: Sequence[dict]
) -> list[dict[str, Any]]:
    """Train a stage; return its evaluations. Weights are initialized if no stage was `before`."""
    train = stage.train.with_(seed=None) if before else stage.train
    trainer = Trainer(model, stage, train, device=device)
    done = before[-1]["step"] if before else 0
    looks: list[dict[str, Any]] = []
    for step in range(train.steps):
        loss = trainer.step(step)
        if (step + 1) % every and step + 1 < train.steps:
            continue
        found = {name: _asked(model, asked, train) for name, (asked, _) in stage.questions.items()}
        right = all(
            found[name] >= SOLVED if solved else found[name] <= asked.chance + LUCK
            for name, (asked, solved) in stage.questions.items()
        )
        look = {"step": done + step + 1, "tokens": train.tokens, "loss": float(loss)}
        looks.append({**look, **found, "right": right})
        if time.monotonic() > ends or (right and len(looks) > 1 and looks[-2]["right"]):
            break
    return looks


def peek(model: nn.Module, tokens: int, *, precision: str = "fp32") -> float:
    """Largest change of logits when only later tokens change, in standard deviations of the logits.

    Causal attention gives rounding error; NaN counts as infinite. Uses random tokens, with three
    cuts spread over the row.
    """
    device, random = next(model.parameters()).device, generator(0, 0)
    shape = (1, tokens)
    before, after = (torch.randint(model.config.vocab, shape, generator=random) for _ in range(2))
    farthest = 0.0
    for cut in torch.linspace(tokens / 4, 0.9 * tokens, 3).int().tolist():
        changed = torch.cat((before[:, :cut], after[:, cut:]), dim=1)
        with torch.no_grad(), autocast(precision, device):
            plain, other = (model(x.to(device))[0][:, :cut].float() for x in (before, changed))
        moved = float((plain - other).abs().max() / plain.std())
        farthest = max(farthest, moved if moved == moved else math.inf)
    return farthest


def _asked(model: nn.Module, asked: Task, train: TrainConfig) -> float:
    sizes = {"batch": train.batch, "tokens": train.tokens, "batches": _EVALUATED}
    return accuracy(model, asked, **sizes, precision=train.precision)
