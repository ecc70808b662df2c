"""Work of real ranks in test_ranks_memory.py: `record`, on GPUs `peaks`, is called in each."""

import gc
from unittest import mock

import torch

from nsa.model import parallel
from nsa.model.train import warmup_steps
from workbook.lab.measure.recorders import recorder_for, training_tensors
from workbook.lab.training import TrainingSpec, open_trainer

BEFORE = 2  # steps: AdamW's state is made, and DDP has its buckets anew


def record(cells: dict) -> dict:
    """The recorder's account of a later step of each cell: {name: {"spec", "ddp", "changes"}}."""
    here = parallel.start("ddp", backend="gloo", device="cpu")  # once, for all
    found = {name: _of_a_step(**cell) for name, cell in cells.items()}
    here.close()
    return found


def _of_a_step(spec: dict, ddp: dict, changes: dict) -> dict:
    gc.collect()  # FSDP2's states hold one another
    start = parallel.start

    def started(kind, **options):
        return start(kind, **options, **ddp)

    with (
        mock.patch.object(parallel, "start", started),
        open_trainer(TrainingSpec.from_dict(spec), threads=1, **changes) as trainer,
    ):
        for step in range(BEFORE):
            trainer.step(step)
        with recorder_for("cpu", training_tensors(trainer.model, trainer.optimizer)) as seen:
            trainer.observers = (seen,)
            trainer.step(BEFORE)
        return seen.record()


def peaks(spec: dict) -> dict:
    """{"allocated", "reserved", "gpu"} of a process that only trains, its first steps included."""
    with open_trainer(TrainingSpec.from_dict(spec)) as trainer:
        for step in range(warmup_steps(trainer.parallel) + 2):
            trainer.step(step)
        torch.cuda.synchronize()
        held, taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"allocated": held, "reserved": taken, "gpu": torch.cuda.get_device_name()}
