"""A tiny model in training, with observers."""

from contextlib import contextmanager

import torch
from tiny_models import tiny

from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import TrainConfig, Trainer


def trainer(*observers, model=None, config=None, data=None, device="cpu", **training):
    """A Trainer of `model`, or of a tiny one of `config`; an observer may be made of the model."""
    model = LanguageModel(config or tiny()) if model is None else model
    training = TrainConfig(**{"batch": 2, "tokens": 32, "seed": 0, **training})
    made = [x(model) if isinstance(x, type) else x for x in observers]
    return Trainer(model, data or synthetic(seed=0), training, device=device, observers=made)


def trained(make, steps=1, model=(), **training):
    """An observer of a tiny model, `make(model)`, after so many steps; and the model."""
    model = LanguageModel(tiny(**dict(model)))
    observer = make(model)
    trainer(observer, model=model, **training).run(steps)
    return observer, model


def drive(model, observers, steps=1, passes=1, first=0, forward=None):
    """Tell observers what a training loop does; the loss is `forward()`."""

    def tell(name, step):
        for observer in observers:
            observer.on_phase(name, step)

    for step in range(first, first + steps):
        tell("data", step)
        for _ in range(passes):
            tell("forward", step)
            loss = (forward or model)()
            tell("backward", step)
            loss.backward()
        tell("optimizer", step)
        model.zero_grad()
        tell("end", step)


@contextmanager
def no_sync():
    """An error where the host waits for the GPU."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class AtOptimizer:
    """An observer that calls look(model, step) when a step's gradients are complete."""

    def __init__(self, look, model=None):
        self.look, self.model = look, model

    def on_start(self, trainer):
        self.model = trainer.model

    def on_phase(self, name, step):
        if name == "optimizer":
            self.look(self.model, step)
