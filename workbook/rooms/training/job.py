"""One training job: its complete settings as one value, and the loop that each rank runs."""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nsa.attention import witness
from nsa.model import data, parallel, saving
from nsa.model.config import ModelConfig
from nsa.model.data import Prefetch
from nsa.model.llama import LanguageModel, check_shareable
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer, check_capturable, check_shared, warmup_steps
from nsa.model.train_config import TrainConfig
from nsa.parallel.mesh import ContextParallel
from nsa.spelling import choice
from workbook.lab.observers import guard_rules, memory_snapshot, writers
from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.attention_stats import AttentionStats
from workbook.lab.observers.beat import Heartbeat
from workbook.lab.observers.ddp import BucketTrace
from workbook.lab.observers.guards import Guards, Stopped, explained, save, save_or_say
from workbook.lab.observers.module_order import ModuleOrder
from workbook.lab.observers.phases import PhaseTimes
from workbook.lab.observers.stacks_on_signal import stacks_on_signal
from workbook.lab.observers.trace import Ranges, StepTrace
from workbook.lab.observers.watchdog import Watchdog
from workbook.lab.options import Options
from workbook.rooms.training.speed import LEFT_OUT, Speed
from workbook.runs.files import write_atomically, write_json
from workbook.runs.store import find_machine

TASKS = ("copy", "needle", "recall")
OBSERVERS = ("csv", "tensorboard", "arrival", "buckets", "modules", "phases", "ranges", "stats")
CHUNK = 50  # steps between reads of the losses, each of which waits for the device once
EVALUATION_BATCHES = 8


@dataclass(frozen=True)
class Job(Options):
    """Request of `nsa train`, checked as far as possible without ranks. Raises ValueError for
    values that no rank can use; the message suggests valid ones."""

    model: ModelConfig
    train: TrainConfig  # with its number of steps

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata.get("least", 0)
            if isinstance(value, int) and value < least:
                raise ValueError(f"{one.name}={value} must be at least {least} step")
        if self.train.steps is None:
            raise ValueError("a training job needs its number of steps")
        parallel.check(self.kind, self.backend, **self._options())
        parallel.check_gathered(self.fsdp_gather, self.train.precision, self.train.compile)
        choice("watchdog", self.watchdog, ("report", "off"))
        guard_rules.levels(self.guard)
        for name in ("zero", "collapse"):
            if self.train.cuda_graph and self.guards(name):
                raise ValueError(
                    f"--guard {name} looks into a step, and a CUDA graph hides what is in it; "
                    f"{name}=off or no --cuda-graph would do"
                )
        for name in self.observe:
            if name not in OBSERVERS:
                raise ValueError(f"no observer {name!r}; there are {', '.join(OBSERVERS)}")
        if "buckets" in self.observe and self.kind != "ddp":
            raise ValueError(
                f"buckets are DDP's; parallel={self.kind!r} has none, parallel='ddp' would do"
            )
        self.snapshot(0)
        if "buckets" in self.observe and self.comm_hook != "none":
            raise ValueError(
                f"buckets are traced by a communication hook, and DDP takes one only; it has "
                f"comm_hook={self.comm_hook!r}, comm_hook='none' would do"
            )
        shared = {"cp": self.cp, "cp_method": self.cp_method}
        Parallel(self.kind, 0, self.ranks, **shared).rows(self.train.batch, self.train.accumulate)
        if self.cp > 1:
            self._check_shared()
        if self.kind != "none" or self.device == "cuda":
            parallel.devices(self.ranks, self.backend, self.device)
        if self.train.cuda_graph:
            where = torch.device(find_machine(self.device).where)
            check_capturable(self.train, where, Parallel(self.kind, **self._options()))
        if self.data != "fineweb-edu":  # which needs a download
            source_of(self).batch(0, 1, self.train.tokens)  # raises if T is longer than the data

    def _check_shared(self) -> None:
        """Raise ValueError for what sequences on several ranks do not have."""
        check_shared(self.train, self.cp, self.model.nsa.select_block)
        check_shareable(self.model, ContextParallel(ranks=self.cp, method=self.cp_method))
        if "stats" in self.observe or self.guards("collapse"):
            raise ValueError(
                f"--observe stats and --guard collapse look at whole sequences, and with --cp "
                f"{self.cp} each rank has a part; without them, or with --cp 1"
            )

    def profiled(self, first: int) -> range:
        """Return the steps that `profile` names, for a job whose first step is `first`; a number of
        them starts after the warm-up, or else is taken from the end. Raises ValueError for steps
        that it does not run, or in which a CUDA graph is warmed up and captured."""
        if not self.profile:
            return range(0)
        found, last = re.fullmatch(r"(\d+)(?::(\d+))?", self.profile, re.ASCII), self.train.steps
        if found and found[2]:
            steps = range(int(found[1]), int(found[2]))
        else:
            count = int(found[1]) if found else 0
            start = max(first, min(first + LEFT_OUT, last - count))
            steps = range(start, start + count)
        ready = first
        if self.train.cuda_graph:
            ready += warmup_steps(Parallel(self.kind, 0, self.ranks)) + 1
        if not steps or steps.start < ready or steps.stop > last:
            raise ValueError(
                f"profile={self.profile!r} is no stretch of steps {ready}:{last}"
                + ", before which a CUDA graph is captured" * (ready > first)
                + "; 20:23 takes three of them, and 3 as many after the warm-up"
            )
        return steps

    def snapshot(self, first: int) -> int | None:
        """Step that `memory_snapshot` names, if any, as `profiled` returns those of `profile`."""
        others = range(first, self.train.steps), self.profiled(first), self.train.cuda_graph
        return memory_snapshot.chosen(self.memory_snapshot, *others)

    def guards(self, name: str) -> bool:
        """Return True if this guard was requested, rather than on by default."""
        asked = any(text.partition("=")[0].strip() == name for text in self.guard)
        return asked and bool(guard_rules.levels(self.guard)[name])

    def join(self) -> Parallel:
        """Join the job and return this process's place in it; see nsa.model.parallel.start."""
        return parallel.start(
            self.kind, backend=self.backend, device=self.device, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        """Options of ranks, by their names in nsa.model.parallel."""
        names = ("static_graph", "bucket_mb", "comm_hook", "gradient_as_bucket_view")
        names += ("fsdp_blocks", "fsdp_reshard", "fsdp_gather", "cp", "cp_method")
        options = {name: getattr(self, name) for name in names}
        return options | {"find_unused_parameters": self.find_unused}

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, fit for JSON; `from_dict` restores the same job."""
        model, train = self.model.to_dict(), self.train.to_dict()
        lists = {"observe": list(self.observe), "guard": list(self.guard)}
        return asdict(self) | lists | {"model": model, "train": train}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Job":
        model = ModelConfig.from_dict(values["model"])
        train = TrainConfig.from_dict(values["train"])
        tuples = {name: tuple(values[name]) for name in ("observe", "guard")}
        return cls(**values | tuples | {"model": model, "train": train})


def source_of(job: Job) -> Any:
    """Return a job's data by its name, in nsa.model.train's protocol. Raises ValueError for a
    name that is neither known nor a file or folder."""
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
    folder = Path(job.data).expanduser()
    if (folder / "manifest.json").is_file() and (folder / "train.bin").is_file():
        return _trained_on(folder, job)
    return data.text(job.data, seed=job.seed)


def _trained_on(folder: Path, job: Job) -> Any:
    """The training split of text shards, as tokens if they have a tokenizer. ValueError if it is
    not for the model's vocabulary."""
    from nsa.model import shards, tokens

    found = shards.opened(folder)
    if "tokenizer" not in found.manifest:
        return found.text("train", job.seed)
    split = tokens.tokens(found, "train", job.seed)
    split.check(job.model.vocab)
    return split


@dataclass(frozen=True)
class HeldOut:
    """Stream without its first batches: an ordered text should not be read far ahead."""

    stream: Any

    def batch(self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"):
        return self.stream.batch(step + EVALUATION_BATCHES, batch, tokens, device)

    def record(self) -> dict[str, Any]:
        return self.stream.record()


def evaluation(source: Any) -> dict[str, Any]:
    """Arguments with which Trainer.evaluate uses batches that training never sees."""
    if isinstance(source, HeldOut):
        return {"data": source.stream, "first_step": 0}
    return {"data": source}


def run(job: Job, place: Parallel, folder: Path) -> dict[str, Any]:
    """Train this rank to the job's end; every rank of the job calls it with its own place. Rank 0
    writes losses.csv, evaluations.csv, checkpoints/ and result.json into `folder`. Returns the
    content of the last; after an orderly stop, `stop` has the reason, the same on every rank."""
    device = place.device if place.kind != "none" else find_machine(job.device).where
    stacks = folder / f"stacks{place.rank}.txt"
    source = source_of(job)
    with stacks_on_signal(stacks), Prefetch(source) as ahead, witness.recording() as seen:
        train = job.train.with_(nonfinite=job.train.nonfinite or "stop")
        trainer = Trainer(LanguageModel(job.model), ahead, train, device=device, parallel=place)
        if job.resume is not None:
            _resume(trainer, job.resume)
        halt_file, levels = Path(job.halt_file or folder / "HALT"), guard_rules.levels(job.guard)
        guards = Guards(halt_file, job.max_skips, levels)
        observers = observers_for(job, trainer, folder, guards)
        stalls = folder / f"stall-rank{place.rank}.txt"
        watchdog = Watchdog(stalls, place.rank, judges=job.watchdog == "report")
        try:
            trainer.observers = [watchdog, *observers.values()]
            speed = Speed(trainer, ahead, job.profiled(trainer.steps_done))
            result = _loop(job, trainer, guards, watchdog, folder, evaluation(source), speed)
            _write_rows(observers, place.rank, folder)
        finally:
            trainer.close()
        if place.rank == 0 and "profile" in observers and observers["profile"].done:
            observers["profile"].report().write(folder)
        result["attention"] = seen.record()  # what computed it, and what "auto" rejected
        result |= {"data": ahead.record(), **speed.result()}
    place.barrier()
    if place.rank == 0:
        write_json(folder / "result.json", result)
    return result


def _resume(trainer: Trainer, path: str) -> None:
    try:
        trainer.load(path)
    except FileNotFoundError as error:
        raise ValueError(f"--resume {path}: {error}") from None
    if trainer.steps_done >= trainer.config.steps:
        raise ValueError(
            f"--resume {path}: it has done {trainer.steps_done} steps and --steps "
            f"{trainer.config.steps} asks for no more; a larger number would do"
        )


def _loop(
    job: Job,
    trainer: Trainer,
    guards: Guards,
    watchdog: Watchdog,
    folder: Path,
    held_out: dict[str, Any],
    speed: Speed,
) -> dict[str, Any]:
    first_rank, steps = trainer.parallel.rank == 0, job.train.steps
    losses = _Table(folder / "losses.csv", "step,loss,grad_norm", first_rank)
    evaluated = _Table(folder / "evaluations.csv", "step,loss", first_rank)
    found: list[float] = []
    evaluated_loss = stop = None
    checkpoints, kept = folder / "checkpoints", None

    def put_losses() -> None:
        new = guards.take()
        losses.add(new)
        found.extend(loss for _, loss, _ in new)

    while (now := trainer.steps_done) < steps and stop is None:
        stops = [now - now % n + n for n in (job.save_every, job.eval_every) if n]
        try:
            with speed.stretch():
                trainer.run(min(steps, now + CHUNK, *stops, *speed.borders(now)) - now)
            guards.settle()
            put_losses()
            done = trainer.steps_done
            with watchdog.aside():
                if job.eval_every and (done % job.eval_every == 0 or done == steps):
                    evaluated_loss = trainer.evaluate(EVALUATION_BATCHES, **held_out)
                    evaluated.add([(done, evaluated_loss)])
                if job.save_every and (done % job.save_every == 0 or done == steps):
                    kept = save(trainer, checkpoints)
                elif job.weights and done == steps:
                    kept = save_or_say(trainer, checkpoints)
        except Stopped as stopped:
            with watchdog.aside():
                stop, kept = _ended(stopped, job, trainer, folder)
            put_losses()
    return {
        "steps": trainer.steps_done,
        "first_loss": found[0],
        "last_loss": found[-1],
        "evaluation": evaluated_loss,
        "skipped_steps": trainer.skipped_steps,
        "left_out_steps": guards.left_out,
        "warnings": guards.warnings,
        "stalls": watchdog.reports,
        "weights": kept,
    } | ({"stop": stop.record()} if stop is not None else {})


def _ended(
    stopped: Stopped, job: Job, trainer: Trainer, folder: Path
) -> tuple[Stopped, str | None]:
    """Return the stop with the knowledge of all ranks, and a checkpoint if the weights are good."""
    stop, checkpoints, kept = explained(stopped, trainer), folder / "checkpoints", None
    if (job.save_every or job.weights) and stop.reason != "non_finite":
        try:
            kept = save_or_say(trainer, checkpoints)
        except Stopped as worse:
            return _ended(worse, job, trainer, folder)
    if checkpoints.is_dir() and saving.checkpoints(checkpoints):
        stop.advice.append(f"--resume {folder}, which goes on from its last checkpoint")
    return stop, kept


class _Table:
    """CSV file of losses that is complete after every addition; only rank 0 writes one."""

    def __init__(self, path: Path, header: str, writes: bool) -> None:
        self._path, self._writes, self._lines = path, writes, [header]

    def add(self, rows: Iterable[tuple[float, ...]]) -> None:
        self._lines += [",".join(map(repr, row)) for row in rows]
        if self._writes:
            write_atomically(self._path, "\n".join(self._lines) + "\n")


def observers_for(job: Job, trainer: Trainer, folder: Path, guards: Guards) -> dict[str, Any]:
    """Make this rank's observers by name: always a heartbeat, printed by rank 0, and the guards.
    Arrival and modules sample the first step and every `observe_every`-th; only rank 0 has writers.
    """
    rank, model, every = trainer.parallel.rank, trainer.model, job.observe_every
    written = {
        "csv": lambda: writers.CsvWriter(folder / "observed.csv"),
        "tensorboard": lambda: writers.TensorBoardWriter(folder / "tensorboard"),
    }
    kept = {name: written[name]() for name in job.observe if name in written and rank == 0}
    watching = {
        "arrival": lambda: GradientArrival(model, every=every, keep=1),
        "buckets": lambda: BucketTrace(trainer.wrapped),
        "modules": lambda: ModuleOrder(model, every=every, keep=1),
        "phases": lambda: PhaseTimes(trainer.device),
        "ranges": lambda: Ranges(model, trainer.device),
        "stats": lambda: AttentionStats(model, writers=[*kept.values(), guards]),
    }
    out, beats = sys.stderr if rank == 0 else None, folder / f"beats{rank}.jsonl"
    beat = Heartbeat(out, file=beats, total_steps=job.train.steps, detail=guards.told)
    made: dict[str, Any] = {"heartbeat": beat}
    names = [*job.observe, *["stats"] * job.guards("collapse")]
    made |= {name: watching[name]() for name in names if name in watching}
    if steps := job.profiled(trainer.steps_done):
        file = folder / f"trace-rank{rank}.json.gz"
        made["profile"] = StepTrace(model, trainer.device, steps, file)
    if (step := job.snapshot(trainer.steps_done)) is not None:
        made["memory"] = memory_snapshot.MemorySnapshot(step, folder, rank)
    # writers late, since the others still write to them; guards last, because they may raise
    return made | kept | {"guards": guards}


def _write_rows(observers: Mapping[str, Any], rank: int, folder: Path) -> None:
    """Write <name>-rank<r>.json for observers that kept rows; if by step, of the last sampled."""
    for name, observer in observers.items():
        rows = getattr(observer, "rows", None) or getattr(observer, "table", None)
        if rows is not None:
            write_json(folder / f"{name}-rank{rank}.json", rows())
