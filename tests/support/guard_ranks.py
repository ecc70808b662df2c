"""Work of each rank in test_guards.py: trainings that one rank alone has a reason to end.

`guard_ranks.py FOLDER BACKEND`, as ranks, leaves FOLDER/rank<r>.json: {name: what became of it}.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from tiny_models import tiny
from torch.distributed.tensor import DTensor

from nsa.model import parallel
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from workbook.lab.observers import guards
from workbook.lab.observers.guards import Guards, Stopped

BAD = 2  # the step, on the last rank alone
STEPS = 6
TIMEOUT_S = 60  # of what waits for another rank
DDP = {"kind": "ddp"}
# name: (kind and options, changes of TrainConfig, value of the loss in the bad step)
CASES = {
    "ddp": (DDP, {}, math.nan),
    "ddp accumulated": (DDP, {"accumulate": 2}, math.inf),
    "ddp fp16": (DDP, {"precision": "fp16"}, math.nan),
    "ddp skip": (DDP, {"nonfinite": "skip", "clip": None}, math.nan),
    "ddp captured": (DDP, {"cuda_graph": True}, math.nan),
    "fsdp": ({"kind": "fsdp"}, {}, math.nan),
    "fsdp skip": ({"kind": "fsdp"}, {"nonfinite": "skip", "accumulate": 2}, math.nan),
}


def weights(trained):
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in trained.parameters)
    return torch.cat([p.detach().flatten().cpu() for p in whole])


class Spoilt:
    """Seeded batches; those of some steps make the loss not finite, by a hook of the head."""

    def __init__(self, *steps, value=math.nan):
        self.steps, self.value, self.data = steps, value, synthetic(0)

    def batch(self, step, *sizes):
        self.factor.fill_(self.value if step in self.steps else 1.0)
        return self.data.batch(step, *sizes)

    def plant(self, trained):
        self.factor = torch.ones((), device=trained.device)
        trained.model.head.register_forward_hook(lambda module, args, out: out * self.factor)


class Before:
    """The weights before each step."""

    def on_start(self, trained):
        self.trained, self.weights = trained, {}

    def on_phase(self, name, step):
        if name == "data":
            self.weights[step] = weights(self.trained)


def ended(place, changes, value, folder, halts=None):
    torch.manual_seed(0)
    config = TrainConfig(**{"batch": 4, "tokens": 48, "lr": 1e-2, "nonfinite": "stop"} | changes)
    bad = BAD + 20 * config.cuda_graph
    mine = not halts and place.rank == place.ranks - 1
    data, before = Spoilt(*[bad] * mine, value=value), Before()
    trained = Trainer(LanguageModel(tiny()), data, config, device=place.device, parallel=place)
    data.plant(trained)
    guard = Guards(folder / f"HALT-{place.kind}")
    trained.observers = (before, guard, *([halts] if halts else []))
    found, began = {}, time.monotonic()
    try:
        trained.run(STEPS + 20 * config.cuda_graph)
        guard.settle()
    except Stopped as stopped:
        found["stop"] = guards.explained(stopped, trained).record()
    found |= {
        "seconds": time.monotonic() - began,
        "bad step": bad,
        "steps done": trained.steps_done,
        "left out": guard.left_out,
        "rows": guard.take(),
    }
    if not halts:
        after = weights(trained) if "stop" in found else before.weights[bad + 1]
        found["unchanged"] = torch.equal(after, before.weights[bad])
        found["sum"] = float(after.double().sum())
    trained.close()
    place.barrier()
    return found


class Touches:
    """Makes the halt file in step 1."""

    def __init__(self, place, file):
        self.mine, self.file = place.rank == 0, file

    def on_phase(self, name, step):
        if name == "optimizer" and step == 1 and self.mine:
            self.file.write_text("enough")


def main(folder, backend):
    torch.set_num_threads(1)
    folder, on = Path(folder), "cuda" if backend == "nccl" else "cpu"
    here = parallel.start("ddp", backend=backend, device=on, timeout_s=TIMEOUT_S)
    at, seen = {"rank": here.rank, "ranks": here.ranks, "device": here.device}, {}
    for name, (options, changes, value) in CASES.items():
        if on == "cuda" or not changes.get("cuda_graph"):
            seen[name] = ended(Parallel(**options, **at), changes, value, folder)
    place = Parallel("ddp", **at)
    seen["halted"] = ended(place, {}, 1.0, folder, Touches(place, folder / "HALT-ddp"))
    (folder / f"rank{here.rank}.json").write_text(json.dumps(seen))
    here.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
