"""Does a model learn what its attention should make learnable? One trial, one row.

A lesson trains a small model on tasks and then asks questions of it: tasks that it must have
learnt, and tasks that lie just out of its reach, on which it must stay at chance. Out of reach
tells what an accuracy near 1 cannot: that a window has w keys and not w + 1. The `peek` tells of an
attention that sees the future, which trains well and would fail at the first generated token.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from nsa.model.config import ModelConfig
from nsa.model.data import Batch, generator
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.tasks import Task, accuracy, task
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig, autocast

SOLVED = 0.9  # accuracy from which a task counts as solved
LUCK = 0.2  # above chance that 64 answers of 8 possible ones do not reach by luck
# A logit moves by less than this, in standard deviations, when only later tokens change: rounding.
PEEK = 0.02
PACED = ("tokens", "steps", "lr", "warmup_steps")  # of training, each stage's own
_EVALUATED = 4  # batches behind each accuracy


@dataclass(frozen=True)
class Learnt:
    """The row of a lesson: what its last look found, and how it came to that."""

    accuracy: dict[str, float]  # by question
    chance: dict[str, float]  # by question: what guessing reaches
    expected: dict[str, bool]  # by question: whether right attention learns it
    peek: float  # see `peek`
    as_expected: bool  # the verdict: every question as it should be, and `peek` below PEEK
    steps: int
    loss: float  # nats, of the last step
    curve: list[dict[str, Any]]  # a look each: step, tokens, loss, accuracies, whether all is right
    seconds: float
    parameters: int
    tokens: int  # T of the full rows
    device_name: str


@dataclass(frozen=True)
class Taking:
    """Several tasks, in turn: step by step, each with its own batches."""

    tasks: tuple[Task, ...]

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> Batch:
        turn = len(self.tasks)
        return self.tasks[step % turn].batch(step // turn, batch, tokens, device)


def learn(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Trains and asks: a `Learnt`, as a dict, for `nsa.lab.process.trial.run_child`.

    spec: "model" and "train", as their configs' to_dict() have them; "tasks", a list of
    {"name": ..., fields}, taken in turn; "questions" {name: {"task": {...}, "solved": bool}}, whose
    `solved` says whether right attention learns that one; "device"; optionally "every", the steps
    between two looks (25), "budget_s", after which it trains no further, and "threads".

    Optionally "stages": the same model is first trained on shorter rows, each stage with the fields
    PACED of "train", "tasks" and "questions" of its own and an optimizer made anew; after one that
    is not learnt, or too late, the full rows of "train" come at once. Only what is asked on them
    decides.

    A stage ends at its steps, or as soon as everything is as right attention has it at two looks in
    a row.
    """
    started = time.monotonic()
    ends = started + spec.get("budget_s", float("inf"))
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    config, train = ModelConfig.from_dict(spec["model"]), TrainConfig.from_dict(spec["train"])
    if train.steps is None:
        raise ValueError("steps=None: a lesson needs an end")
    model = LanguageModel(config)
    curve: list[dict[str, Any]] = []
    for stage in spec.get("stages", ()):
        if time.monotonic() > ends or (curve and not curve[-1]["right"]):
            break
        shorter = train.with_(**{name: stage[name] for name in PACED})
        curve += _stage(model, spec | stage, shorter, ends, curve)
    curve += _stage(model, spec, train, ends, curve)
    questions, last = _questions(spec), curve[-1]
    on_gpu = next(model.parameters()).device.type == "cuda"
    seen = peek(model, train.tokens, precision=train.precision)
    found = Learnt(
        accuracy={name: last[name] for name in questions},
        chance={name: asked.chance for name, (asked, _) in questions.items()},
        expected={name: solved for name, (_, solved) in questions.items()},
        peek=seen,
        as_expected=last["right"] and seen < PEEK,
        steps=last["step"],
        loss=last["loss"],
        curve=curve,
        seconds=time.monotonic() - started,
        parameters=parameter_count(model),
        tokens=train.tokens,
        device_name=torch.cuda.get_device_name() if on_gpu else "cpu",
    )
    return asdict(found)


def _stage(
    model: nn.Module,
    stage: Mapping[str, Any],
    train: TrainConfig,
    ends: float,
    before: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Trains a stage; what each look found. Weights are drawn where no stage was `before`."""
    if before:
        train = train.with_(seed=None)
    tasks = Taking(tuple(task(**one) for one in stage["tasks"]))
    trainer = Trainer(model, tasks, train, device=stage.get("device", "cpu"))
    questions, done = _questions(stage), before[-1]["step"] if before else 0
    looks: list[dict[str, Any]] = []
    for step in range(train.steps):
        loss = trainer.step(step)
        if (step + 1) % stage.get("every", 25) and step + 1 < train.steps:
            continue
        found = {name: _asked(model, asked, train) for name, (asked, _) in questions.items()}
        right = all(
            found[name] >= SOLVED if solved else found[name] <= asked.chance + LUCK
            for name, (asked, solved) in questions.items()
        )
        look = {"step": done + step + 1, "tokens": train.tokens, "loss": float(loss)}
        looks.append({**look, **found, "right": right})
        if time.monotonic() > ends or (right and len(looks) > 1 and looks[-2]["right"]):
            break
    return looks


def peek(model: nn.Module, tokens: int, *, precision: str = "fp32") -> float:
    """How far logits move when only later tokens change, in standard deviations of the logits.

    Rounding for attention that is causal; NaN counts as infinitely far. Random tokens, with three
    borders spread over the row.
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
        farthest = max(farthest, moved if moved == moved else float("inf"))
    return farthest


def _questions(stage: Mapping[str, Any]) -> dict[str, tuple[Task, bool]]:
    return {name: (task(**q["task"]), q["solved"]) for name, q in stage["questions"].items()}


def _asked(model: nn.Module, asked: Task, train: TrainConfig) -> float:
    sizes = {"batch": train.batch, "tokens": train.tokens, "batches": _EVALUATED}
    return accuracy(model, asked, **sizes, precision=train.precision)
