"""A cell's model, data and trainer, put together and taken apart again: the inside of a trial."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from nsa.experiments.throughput.cell import TrainCell
from nsa.model import parallel
from nsa.model.data import synthetic, text
from nsa.model.llama import LanguageModel
from nsa.model.prefetch import Prefetch
from nsa.model.train import Trainer

DATA_SEED = 1337  # the same batches for every seed of the weights


@contextlib.contextmanager
def session(cell: TrainCell, threads: int | None = None, **changes: Any) -> Iterator[Trainer]:
    """The cell's trainer, without observers; `changes` are those of its TrainConfig.

    Under torchrun one rank's, else the only one. Its `data` is a Prefetch. Closed at the end.
    """
    if threads:
        torch.set_num_threads(threads)
    if cell.device == "cuda":
        place = parallel.start(cell.parallel)
        device = place.device if place.kind != "none" else "cuda"
    else:
        place = replace(parallel.start(cell.parallel, backend="gloo"), device="cpu")
        device = "cpu"
    try:
        config = cell.config()
        source = text(seed=DATA_SEED) if cell.data == "text" else synthetic(DATA_SEED, config.vocab)
        with Prefetch(source) as data:
            trainer = Trainer(
                LanguageModel(config),
                data,
                cell.training(**changes),
                device=device,
                parallel=place,
            )
            trainer.model.train()
            try:
                yield trainer
            finally:
                trainer.close()
    finally:
        place.close()
