"""Trainings over sequences on several ranks, for tests/nsa/parallel: `python cp_training.py
FOLDER COMPILER`, started as ranks. Leaves FOLDER/rank<r>.pt, and FOLDER/<way>.pt, a checkpoint of
each. COMPILER is torch.compile's backend: "inductor" on each rank generates and compiles C++."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from rank_entries import whole
from tiny_models import tiny

from nsa.model import parallel
from nsa.model.data import IGNORED, Synthetic
from nsa.model.llama import LanguageModel
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig

STEPS = 2
# name: (options of Parallel with cp by the number of ranks, TrainConfig, model)
WAYS = {
    "ddp": ({"kind": "ddp"}, {}, {}),
    "ddp accumulated, few scored": ({"kind": "ddp"}, {"accumulate": 2, "lr": 2e-3}, {}),
    "fsdp": ({"kind": "fsdp"}, {}, {"compress_rope": "after", "phi": "mlp"}),
    "fsdp checkpointed, padded": ({"kind": "fsdp"}, {"tokens": 57}, {"checkpoint": "all"}),
    "fsdp ulysses, compiled": (
        {"kind": "fsdp", "cp_method": "ulysses"},
        {},
        {"sinks": "learned"},
    ),
    "fsdp, shared selection": ({"kind": "fsdp"}, {}, {"share_selection": 2}),
    "ddp ulysses, shared selection": (
        {"kind": "ddp", "cp_method": "ulysses"},
        {},
        {"share_selection": 2, "checkpoint": "all"},
    ),
    "ddp, one branch": (
        {"kind": "ddp", "find_unused_parameters": True},
        {},
        {"force_branch": "slc", "shared_kv": True},
    ),
}


class FewScored(Synthetic):
    """Tokens of which only the last 5 targets of a row are scored: all on the tail's rank."""

    def batch(self, *args, **options):
        tokens, targets = super().batch(*args, **options)
        targets[:, :-5] = IGNORED
        return tokens, targets


class Gradients:
    """Observer that keeps each step's gradients, whole and on the CPU."""

    def __init__(self):
        self.seen = []

    def on_start(self, trainer):
        self.named = list(trainer.model.named_parameters())

    def on_phase(self, phase, step):
        if phase == "optimizer":
            self.seen.append({n: whole(p.grad) for n, p in self.named if p.grad is not None})


def trainer_of(name, place):
    """A trainer of one of WAYS, in fp64, whose batches have 4 rows; one process never compiles."""
    _, train, model = WAYS[name]
    data = (FewScored if "few" in name else Synthetic)(seed=3, vocab=256)
    train = train | {"compile": "compiled" in name and place.ranks > 1}
    config = TrainConfig(**{"batch": 4, "tokens": 64, "seed": 5, "clip": None} | train)
    made = LanguageModel(tiny(**model)).double()
    return Trainer(made, data, config, parallel=place, observers=[Gradients()])


def train(name, place):
    """(losses, gradients of the first step, a loss on other batches) and the trainer."""
    trainer = trainer_of(name, place)
    losses = trainer.run(STEPS)
    gradients = trainer.observers[0].seen[0]
    return {"losses": losses, "gradients": gradients, "held out": trainer.evaluate(2)}, trainer


def main(folder, compiler):
    torch.set_num_threads(1)
    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **options: plain(self, backend=compiler, **options)
    here = parallel.start("ddp", backend="gloo", device="cpu")
    seen = {}
    for name, (options, _, _) in WAYS.items():
        cp = 2 if "ulysses" in name or here.ranks == 2 or "accumulated" in name else here.ranks
        place = Parallel(**options, cp=cp, rank=here.rank, ranks=here.ranks)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            seen[name], trainer = train(name, place)
        seen[name]["said"] = [str(w.message) for w in said if "padded" in str(w.message)]
        trainer.save(Path(folder, f"{name}.pt"))
        trainer.close()
    torch.save(seen, Path(folder, f"rank{here.rank}.pt"))
    dist.barrier()
    here.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
