"""The training step of this package as what a trial runs, made of a plan's factors."""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.attention import witness
from nsa.lab.process.subject import rank_and_ranks
from nsa.lab.search.branchwise import branchwise
from nsa.lab.search.factors import TRAINING_SUBJECT, Factor, known
from nsa.lab.search.planted import without_gradient
from nsa.lab.watch import Progress
from nsa.model import parallel
from nsa.model.config import ModelConfig
from nsa.model.data import synthetic, text
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset
from nsa.model.train import TrainConfig, Trainer

_BRANCH = {"cmp": "compressed_backend", "slc": "selected_backend", "win": "window_backend"}


def make(settings: dict[str, Any], progress: Progress) -> "TrainingSubject":
    """Model, data and Trainer of `settings`, named as in nsa.lab.search.training_factors.

    What is not given has its default. ValueError for a name or a value that is not legal.
    """
    return TrainingSubject(complete(settings), progress)


def complete(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with every default. What a trial alone knows (attempt, ...) is passed over."""
    factors: dict[str, Factor] = known(TRAINING_SUBJECT)
    given = {
        name: factors[name].check(value) for name, value in settings.items() if name in factors
    }
    return {name: factor.default for name, factor in factors.items()} | given


class TrainingSubject:
    """step(i) trains on batch number i; `model` is the bare model, `trainer` all that trains it."""

    def __init__(self, settings: dict[str, Any], progress: Progress) -> None:
        self.settings = settings
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._set_up(settings, progress, opened)
            self._open = opened.pop_all()

    def _set_up(self, settings: dict[str, Any], progress: Any, opened: Any) -> None:
        if settings["threads"]:
            torch.set_num_threads(settings["threads"])
        if settings["deterministic"]:
            torch.use_deterministic_algorithms(True)
            opened.callback(torch.use_deterministic_algorithms, False)
        if settings["anomaly"]:
            opened.enter_context(torch.autograd.set_detect_anomaly(True))
        backends = {branch: settings[name] for branch, name in _BRANCH.items()}
        opened.enter_context(branchwise(backends, safe_packing=settings["safe_packing"]))
        place = _place(settings)
        opened.callback(place.close)
        config = model_config(settings)
        seed = settings["seed"]
        data = text(seed=seed) if settings["data"] == "text" else synthetic(seed, config.vocab)
        self.trainer = Trainer(
            LanguageModel(config),
            data,
            training_config(settings),
            device=place.device,
            parallel=place,
        )
        self.model = self.trainer.model
        names = [name for name, _ in self.model.named_parameters()]
        self.without_gradient = without_gradient(config, names)  # rightly, so no oracle minds
        self.observers = _observers(settings, self.trainer)
        self.trainer.observers = (progress, *self.observers.values())
        opened.callback(self.trainer.close)
        self.trainer.model.train()
        self._seen = opened.enter_context(witness.recording())

    def step(self, i: int) -> Tensor:
        """Trains on batch i; the loss, fp32, on its device."""
        return self.trainer.step(i)

    def witness(self) -> dict[str, Any]:
        """Which implementation served which branch, how often, and how the model was wrapped."""
        return self._seen.record() | {
            "wrapped": type(self.trainer.wrapped).__name__,
            "compiled": self.trainer.config.compile,
            "packing": "safe" if self.settings["safe_packing"] else "unsafe",
        }

    def close(self) -> None:
        """Puts back what it changed in this process, and leaves the process group."""
        self._open.close()


def model_config(settings: dict[str, Any]) -> ModelConfig:
    """The model that complete settings mean."""
    changes = {name: settings[name] for name in ("layers", "dim") if settings[name] is not None}
    return preset(
        settings["preset"],
        **changes,
        backend=settings["backend"],
        checkpoint=settings["checkpoint"],
        strict=settings["strict"],
        force_branch=None if settings["branch"] == "all" else settings["branch"],
        **settings["changes"],
    )


def training_config(settings: dict[str, Any]) -> TrainConfig:
    """How complete settings train it."""
    return TrainConfig(
        batch=settings["batch"],
        tokens=settings["tokens"],
        lr=float(settings["lr"]),
        precision=settings["dtype"],
        compile=settings["compile"],
        seed=settings["seed"],
    )


def _place(settings: dict[str, Any]) -> parallel.Parallel:
    device = settings["device"]
    if rank_and_ranks()[1] == 1:
        gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return replace(parallel.SINGLE, device="cuda" if gpu else "cpu")
    backend = settings["communication"]
    return parallel.start(
        settings["parallel"],
        backend=None if backend == "auto" else backend,
        device=device,
        static_graph=settings["static_graph"],
        find_unused_parameters=settings["find_unused_parameters"],
        # A trial is ended by its supervisor, which has looked at it, and not by the process group.
        timeout_s=3600,
    )


def _observers(settings: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    tracing, found = settings["tracing"], {}
    if settings["aux_stats"]:
        from nsa.lab.observers.attention_stats import AttentionStats

        found["aux_stats"] = AttentionStats(trainer.model, every=1, keep=2)
    if tracing in ("arrival", "all"):
        from nsa.lab.observers.arrival import GradientArrival

        found["arrival"] = GradientArrival(trainer.model, keep=2, warn=False)
    if tracing in ("modules", "all"):
        from nsa.lab.observers.module_order import ModuleOrder

        found["modules"] = ModuleOrder(trainer.model, keep=2)
    if tracing == "buckets" or (tracing == "all" and trainer.parallel.kind == "ddp"):
        from nsa.lab.observers.ddp import BucketTrace

        found["buckets"] = BucketTrace(trainer.wrapped)
    return found
