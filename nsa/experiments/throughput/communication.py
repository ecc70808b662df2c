"""What of a step is waiting for other ranks' gradients: the same steps with none sent."""

import contextlib
from collections.abc import Iterator
from dataclasses import fields

from nsa.lab.measure.interleaved import turns
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer

ROUNDS, TURN = 3, 5  # steps of a turn


def communication_ms(trainer: Trainer) -> float:
    """ms that a step under DDP takes longer than one whose gradients stay on their rank.

    Both take turns, see `turns`. Less than 0 where it is smaller than what else differs between
    two turns. The ranks' weights differ afterwards; every rank must call it.
    """
    found = turns(trainer, lambda: unsynced(trainer), rounds=ROUNDS, steps=TURN, wall=True)
    return found.plain_ms * (1 - found.ratio)


@contextlib.contextmanager
def unsynced(trainer: Trainer) -> Iterator[None]:
    """The trainer's steps inside send no gradient."""
    kept = trainer.parallel
    trainer.parallel = _Unsynced(**{f.name: getattr(kept, f.name) for f in fields(kept) if f.init})
    try:
        yield
    finally:
        trainer.parallel = kept


class _Unsynced(Parallel):
    """None of its micro-batches is the last."""

    def micro(self, wrapped, last: bool):
        return super().micro(wrapped, False)
