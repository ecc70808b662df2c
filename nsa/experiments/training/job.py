"""One training job: everything that decides it as one value, and the loop that each rank runs."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.experiments.training import observers as training_observers
from nsa.lab.observers.deferred import SAMPLED
from nsa.lab.observers.stacks_on_signal import stacks_on_signal
from nsa.model import data, parallel, saving
from nsa.model.config import ModelConfig
from nsa.model.data import Prefetch
from nsa.model.llama import LanguageModel
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from nsa.workbook.files import write_atomically, write_json
from nsa.workbook.store import find_machine

TASKS = ("copy", "needle", "recall")
CHUNK = 50  # steps between two looks at the losses, each of which waits for the device once
EVALUATION_BATCHES = 8
KEPT = 2  # checkpoints: the last good one, and the one before it


@dataclass(frozen=True)
class Job:
    """What `nsa train` was asked for, checked as far as no rank is needed to do so.

    Raises ValueError for values that no rank could use; the message says what would do.
    """

    model: ModelConfig
    train: TrainConfig  # with its number of steps
    data: str = "text"  # text, synthetic, copy, needle, recall, fineweb-edu, or a path
    seed: int = 1337  # of the weights and of the data
    device: str = "auto"
    ranks: int = 1
    kind: str = "none"
    backend: str | None = None
    static_graph: bool = False
    find_unused: bool = False
    bucket_mb: float = 25.0
    save_every: int | None = None
    eval_every: int | None = None
    resume: str | None = None
    observe: tuple[str, ...] = ()
    observe_every: int = SAMPLED  # of arrival and modules

    def __post_init__(self) -> None:
        for name in ("save_every", "eval_every", "observe_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1 step")
        if self.train.steps is None:
            raise ValueError("a training job needs its number of steps")
        parallel.check(self.kind, self.backend, self.static_graph, self.find_unused, self.bucket_mb)
        training_observers.check(self.observe, self.kind)
        Parallel(self.kind, 0, self.ranks).rows(self.train.batch, self.train.accumulate)
        if self.kind != "none" or self.device == "cuda":
            parallel.devices(self.ranks, self.backend, self.device)
        if self.data != "fineweb-edu":  # which costs a download
            source_of(self).batch(0, 1, self.train.tokens)  # T longer than the data

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same job back."""
        plain = asdict(self) | {"observe": list(self.observe)}
        return plain | {"model": self.model.to_dict(), "train": self.train.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Job":
        made = {
            "model": ModelConfig.from_dict(values["model"]),
            "train": TrainConfig.from_dict(values["train"]),
            "observe": tuple(values["observe"]),
        }
        return cls(**{**values, **made})


def source_of(job: Job) -> Any:
    """The data that a job's name for it means, of nsa.model.train's protocol.

    Raises ValueError for a name that is neither known nor a file or folder.
    """
    if job.data == "text":
        return data.text(seed=job.seed)
    if job.data == "synthetic":
        return data.synthetic(job.seed, job.model.vocab)
    if job.data in TASKS:
        from nsa.model import tasks

        return tasks.task(job.data, seed=job.seed)
    if job.data == "fineweb-edu":
        from nsa.model import streaming

        return HeldOut(streaming.stream(seed=job.seed))
    if not Path(job.data).expanduser().exists():
        raise ValueError(
            f"data={job.data!r} is no file or folder; known are text, synthetic, "
            f"{', '.join(TASKS)}, fineweb-edu"
        )
    return data.text(job.data, seed=job.seed)


@dataclass(frozen=True)
class HeldOut:
    """A stream without its first batches: text that has an order is not to be read far ahead."""

    stream: Any
    batches: int = EVALUATION_BATCHES

    def batch(self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"):
        """Batch `step + batches` of the stream."""
        return self.stream.batch(step + self.batches, batch, tokens, device)


def evaluation(source: Any) -> dict[str, Any]:
    """Where Trainer.evaluate finds batches that training never meets: what it is called with."""
    if isinstance(source, HeldOut):
        return {"data": source.stream, "first_step": 0}
    return {"data": source}


def run(job: Job, place: Parallel, folder: Path) -> dict[str, Any]:
    """Trains this rank to the job's end; every rank of the job calls it with its own place.

    Rank 0 writes losses.csv, evaluations.csv, checkpoints/ and result.json into `folder`, and
    returns what it wrote into the last.
    """
    device = place.device if place.kind != "none" else find_machine(job.device).where
    stacks = folder / f"stacks{place.rank}.txt"
    source = source_of(job)
    with stacks_on_signal(stacks), Prefetch(source) as ahead:
        trainer = Trainer(LanguageModel(job.model), ahead, job.train, device=device, parallel=place)
        if job.resume is not None:
            _resume(trainer, job.resume)
        observers = training_observers.make(job.observe, trainer, folder, job.observe_every)
        trainer.observers = observers.values()
        try:
            result = _loop(job, trainer, folder, evaluation(source))
            training_observers.write_rows(observers, place.rank, folder)
        finally:
            trainer.close()
        result["mean_wait_ms"] = 1e3 * ahead.waited_s / max(1, ahead.batches)
    place.barrier()
    if place.rank == 0:
        write_json(folder / "result.json", result)
    return result


def _resume(trainer: Trainer, path: str) -> None:
    place = Path(path)
    try:
        trainer.load(place / "checkpoints" if (place / "checkpoints").is_dir() else place)
    except FileNotFoundError as error:
        raise ValueError(f"--resume {path}: {error}") from None
    if trainer.steps_done >= trainer.config.steps:
        raise ValueError(
            f"--resume {path}: it has done {trainer.steps_done} steps and --steps "
            f"{trainer.config.steps} asks for no more; a larger number would do"
        )


def _loop(job: Job, trainer: Trainer, folder: Path, held_out: dict[str, Any]) -> dict[str, Any]:
    losses = _Table(folder / "losses.csv", "step,loss", trainer.parallel.rank == 0)
    evaluated = _Table(folder / "evaluations.csv", "step,loss", trainer.parallel.rank == 0)
    first_step = trainer.steps_done
    marks: list[tuple[int, float]] = []
    found: list[float] = []
    evaluated_loss = None
    while (now := trainer.steps_done) < job.train.steps:
        began = time.monotonic()
        found += trainer.run(_next_stop(job, now) - now)
        marks.append((trainer.steps_done - now, time.monotonic() - began))
        losses.add(zip(range(now, trainer.steps_done), found[now - first_step :], strict=True))
        done, last = trainer.steps_done, trainer.steps_done == job.train.steps
        if job.eval_every and (done % job.eval_every == 0 or last):
            evaluated_loss = trainer.evaluate(EVALUATION_BATCHES, **held_out)
            evaluated.add([(done, evaluated_loss)])
        if job.save_every and (done % job.save_every == 0 or last):
            trainer.save(folder / "checkpoints")
            if trainer.parallel.rank == 0:
                for old in saving.checkpoints(folder / "checkpoints")[:-KEPT]:
                    old.unlink()
    # the first stretch warms up, compiles and tunes
    steps, seconds = map(sum, zip(*(marks[1:] or marks), strict=True))
    return {
        "steps": trainer.steps_done,
        "first_loss": found[0],
        "last_loss": found[-1],
        "evaluation": evaluated_loss,
        "skipped_steps": trainer.skipped_steps,
        "tokens_per_s": job.train.batch * job.train.tokens * steps / seconds,
    }


def _next_stop(job: Job, now: int) -> int:
    stops = [job.train.steps, now + CHUNK]
    stops += [now - now % every + every for every in (job.save_every, job.eval_every) if every]
    return min(stops)


class _Table:
    """A CSV file that is whole after every addition; only rank 0 has one."""

    def __init__(self, path: Path, header: str, writes: bool) -> None:
        self._path, self._lines, self._writes = path, [header], writes

    def add(self, rows) -> None:
        self._lines += [f"{step},{value!r}" for step, value in rows]
        if self._writes:
            write_atomically(self._path, "\n".join(self._lines) + "\n")
