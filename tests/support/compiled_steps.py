"""Training steps under torch.compile: a program of its own, for it cannot trace checked types.

Prints a JSON object {name of the case: what happened}. The argument is torch.compile's backend;
"eager" generates no code.
"""

import json
import sys
from collections.abc import Callable

import torch
from observed import trainer
from tiny_models import tiny
from torch._dynamo.utils import counters

STEPS = 5
products: list[int] = []  # of each graph that was traced
CASES = {
    "three layers, a cosine": (
        tiny(layers=3),
        {"schedule": "cosine", "steps": STEPS, "warmup_steps": 2},
    ),
    "recomputed in bf16": (tiny(checkpoint="0:1"), {"precision": "bf16", "accumulate": 2}),
    "auto": (tiny(backend="auto", phi="mlp", gate="softmax"), {}),
    "shared selection": (tiny(layers=4, share_selection=2), {}),
    "dense": (tiny(attention="dense", backend="auto"), {}),
}


def graphs() -> list[int]:
    """Graphs that torch.compile has made, and how often it gave up on one."""
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def traced(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """A backend that runs the graph as it is, and notes how many linear products it has."""
    linear = torch.nn.functional.linear
    products.append(sum(node.target in (linear, torch._C._nn.linear) for node in graph.graph.nodes))
    return graph.forward


def train(name: str) -> dict:
    """The case's losses, compiled and not, its products, graphs after two steps and after all."""
    model, settings = CASES[name]
    settings = {"config": model, "lr": 3e-3, **settings}
    torch._dynamo.reset()
    counters.clear()
    products.clear()
    compiled = trainer(compile=True, **settings)
    losses = compiled.run(2)
    early = graphs()
    losses += compiled.run(STEPS - 2)
    plain = trainer(**settings)
    return {
        "losses": losses,
        "plain": plain.run(STEPS),
        "graphs": [early, graphs()],
        "products": list(products),
        "names": list(compiled.model.state_dict()) == list(plain.model.state_dict()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, backend = torch.nn.Module.compile, traced if sys.argv[1] == "eager" else sys.argv[1]
    torch.nn.Module.compile = lambda self, **options: plain(self, backend=backend, **options)
    names = sys.argv[2:] or CASES
    print(json.dumps({name: train(name) for name in names}))
