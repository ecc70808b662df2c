"""Training steps under torch.compile: a program of its own, for it cannot trace checked types.

Prints a JSON object {name of the case: what happened}. The argument is torch.compile's backend.
"""

import json
import sys

import torch
from tiny_models import tiny
from torch._dynamo.utils import counters

from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import TrainConfig, Trainer

STEPS = 5
CASES = {
    "three layers, a cosine": (
        tiny(layers=3),
        {"schedule": "cosine", "steps": STEPS, "warmup_steps": 2},
    ),
    "recomputed in bf16": (tiny(checkpoint="0:1"), {"precision": "bf16", "accumulate": 2}),
    "auto": (tiny(backend="auto", phi="mlp", gate="softmax"), {}),
    "dense": (tiny(attention="dense", backend="auto"), {}),
}


def graphs() -> list[int]:
    """Graphs that torch.compile has made, and how often it gave up on one."""
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def train(name: str) -> dict:
    """The case's losses, compiled and not, and the graphs after two steps and after all."""
    model, settings = CASES[name]
    settings = TrainConfig(**{"batch": 2, "tokens": 32, "seed": 0, "lr": 3e-3, **settings})

    def trainer(**changes) -> Trainer:
        return Trainer(LanguageModel(model), synthetic(seed=0), settings.with_(**changes))

    torch._dynamo.reset()
    counters.clear()
    compiled = trainer(compile=True)
    losses = compiled.run(2)
    early = graphs()
    losses += compiled.run(STEPS - 2)
    return {
        "losses": losses,
        "plain": trainer().run(STEPS),
        "graphs": [early, graphs()],
        "names": list(compiled.model.state_dict()) == list(trainer().model.state_dict()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, backend = torch.nn.Module.compile, sys.argv[1]
    torch.nn.Module.compile = lambda self, **options: plain(self, backend=backend, **options)
    names = sys.argv[2:] or CASES
    print(json.dumps({name: train(name) for name in names}))
