"""Guards that end a training cleanly: for a non-finite step, a halt file, or a user's limit."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.model import saving
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from workbook.lab.measure.recorders import MIB, local, resident_mib
from workbook.lab.observers.cause import cause
from workbook.lab.observers.deferred import Deferred
from workbook.lab.observers.guard_rules import (
    BOUND,
    KINDS,
    Level,
    check_memory,
    flat,
    flat_told,
    ram_mib,
    shown_mib,
)

LAG = 2  # steps that the host may be ahead of a GPU, so that no step waits for its own numbers
EVERY = 50  # steps from one check of each parameter's gradient to the next
GROWN = 100.0  # weights of a healthy training are far smaller
TEXT = 1000  # characters of a halt file that are kept
KEPT = 2  # checkpoints: the last good one, and the one before it


class Stopped(Exception):
    """Clean end of a training, on all ranks after the same step. `reason` is the record's word for
    it, the message one sentence, `facts` the evidence, `advice` a list of remedies."""

    def __init__(self, reason: str, message: str, step: int, **facts: Any) -> None:
        super().__init__(message)
        self.reason, self.step, self.facts = reason, step, facts
        self.advice: list[str] = []

    def record(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        told = {"reason": self.reason, "message": str(self), "step": self.step}
        return told | {"advice": self.advice} | self.facts


class Guards:
    """Observer that ends a Trainer's run by raising Stopped, after the same step on all ranks.

    The trainer's config sets the action for a non-finite step ("stop" or "skip"); with "skip", more
    than `bound` of them in a row end the run. The checked values are the loss of the whole batch
    and the gradient's norm before clipping. Under fp16 a norm counts only at a loss scale of 1 or
    less: above it, overflow of the scaled gradient is normal, and the scaler skips the step.

    `levels` of `guard_rules.levels` add limits. flat: number of steps in which the loss did not
    fall beyond its noise. collapse: share of a layer's gates, `write`n by an AttentionStats, that
    have nearly all of their sum in one branch. zero: number of consecutive checks, EVERY steps
    apart, in which a parameter's gradient was exactly 0. memory: peak of the GPU's allocator, or on
    a CPU the process's resident memory. A reached limit warns once (`warnings`) or ends the run.

    Cost: on a GPU a copy of 16 bytes per step; the host is never more than LAG steps ahead. With
    several ranks one collective of 8 bytes per step, issued by the trainer.
    """

    def __init__(
        self,
        halt_file: Path | None = None,
        bound: int = BOUND,
        levels: Mapping[str, Sequence[Level]] | None = None,
    ) -> None:
        self.levels = {name: tuple((levels or {}).get(name, ())) for name in KINDS}
        self.warnings: list[dict[str, Any]] = []
        self._told: set[tuple[str, Level]] = set()
        longest = max((int(level.limit) for level in self.levels["flat"]), default=1)
        self._losses: deque[float] = deque(maxlen=longest)
        self._norms = Deferred()
        self._zero: Counter[str] = Counter()
        self.halt_file, self.bound = halt_file, bound
        self.left_out = 0  # steps that were not finite
        self._in_a_row = 0
        self._rows: list[tuple[int, float, float]] = []
        self._last: tuple[float, float] | None = None
        self._arriving = Deferred()
        self._wish = ("", "")  # this rank's reason and message, not yet sent to the others

    def on_start(self, trainer: Trainer) -> None:
        if trainer.config.nonfinite is None:
            raise ValueError("guards need a TrainConfig with nonfinite='stop' or 'skip'")
        self._trainer = trainer
        self._on_gpu = trainer.device.type == "cuda"
        self._lag = LAG if self._on_gpu else 0
        where, total = "this machine", ram_mib()
        if self._on_gpu:
            device = torch.cuda.get_device_properties(trainer.device)
            where, total = device.name, device.total_memory / MIB
        check_memory(self.levels["memory"], total, where)

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self._look_for_halt()
        elif name == "optimizer" and self.levels["zero"] and step % EVERY == 0:
            self._look_at_gradients(step)

    def on_step(self, step: int, loss: Tensor) -> None:
        self._arriving.put(step, self._trainer.vitals)
        if self.levels["memory"]:
            self._see("memory", step, *self._memory())
        if self.levels["zero"]:
            self._judge_gradients()
        alone = self._trainer.parallel.ranks == 1
        self._judge(0 if self._wish[0] and alone else self._lag)
        if alone and self._wish[0]:
            raise Stopped(*self._wish, step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Check the statistics of an AttentionStats that has this as a writer."""
        if self._trainer.model.config.force_branch:
            return  # gates are 1 and 0 by configuration
        shares = {k: v for k, v in values.items() if k.endswith("/collapse_share")}
        name, share = max(shares.items(), key=lambda each: each[1], default=("", 0.0))
        text = f"{share:.0%} of the gates of {name.partition('/')[0]} are nearly all in one branch"
        self._see("collapse", step, share, text)

    def settle(self) -> None:
        """Check every step taken so far. Waits for the device."""
        self._judge(0)

    def take(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the steps checked since the last call; losses are means
        over ranks, norms are of the whole model before clipping."""
        rows, self._rows = self._rows, []
        return rows

    def told(self) -> str:
        """Newest gradient norm and number of skipped steps, as text for a heartbeat's line."""
        parts = ["no gradient yet" if self._last is None else f"grad norm {self._last[1]:.3g}"]
        if self.left_out:
            parts.append(f"{self.left_out} step(s) left out")
        return " · ".join(parts)

    def _judge(self, behind: int) -> None:
        for step, vitals in self._arriving.all(behind):
            loss, norm, scale, votes = vitals.tolist()
            self._rows.append((step, loss, norm))
            self._last = (loss, norm)
            if not math.isfinite(loss) or (not math.isfinite(norm) and scale <= 1.0):
                self._left_out(step, loss, norm)
            else:
                self._in_a_row = 0
            self._look_at_loss(step, loss)
            if votes > 0.0:
                raise Stopped(*self._wish, self._trainer.steps_done - 1)

    def _look_at_loss(self, step: int, loss: float) -> None:
        """Check for a flat loss every quarter of a limit, since trends do not change in a step."""
        if math.isfinite(loss):
            self._losses.append(loss)
        for level in self.levels["flat"]:
            count = int(level.limit)
            if len(self._losses) < count or (step + 1) % max(1, count // 4):
                continue
            if middles := flat(list(self._losses)[-count:]):
                vocab = self._trainer.model.config.vocab
                self._see("flat", step, count, flat_told(*middles, count, vocab))

    def _memory(self) -> tuple[float, str]:
        if self._on_gpu:
            held = torch.cuda.max_memory_allocated(self._trainer.device) / MIB
            return held, f"the GPU's allocator has handed out {shown_mib(held)} at most"
        held = resident_mib()
        return held, f"the process holds {shown_mib(held)}"

    def _look_at_gradients(self, step: int) -> None:
        named = [(n, p.grad) for n, p in self._trainer.model.named_parameters()]
        named = [(name, gradient) for name, gradient in named if gradient is not None]
        norms = torch.stack([local(gradient).detach().norm().float() for _, gradient in named])
        if self._trainer.parallel.kind == "fsdp":  # a shard may be 0 where the whole is not
            norms = self._trainer.parallel.mean(norms)
        self._norms.put((step, [name for name, _ in named]), norms)

    def _judge_gradients(self) -> None:
        for (step, names), norms in self._norms.ready():
            zero = [n for n, norm in zip(names, norms.tolist(), strict=True) if norm == 0.0]
            self._zero = Counter({name: self._zero[name] + 1 for name in zero})
            name, looks = max(self._zero.items(), key=lambda each: each[1], default=("", 0))
            text = f"the gradient of {name} was exactly 0 in the last {looks} looks"
            self._see("zero", step, looks, f"{text}, {EVERY} steps apart")

    def _see(self, name: str, step: int, value: float, text: str) -> None:
        """Warn, or request the end of the run, at each limit that `value` first reaches."""
        for level in self.levels[name]:
            if value < level.limit or (name, level) in self._told:
                continue
            self._told.add((name, level))
            limit = shown_mib(level.limit) if name == "memory" else f"{level.limit:g}"
            rank = self._trainer.parallel.rank
            message = f"rank {rank}: " * (self._trainer.parallel.ranks > 1) + text
            message += f" (guard {name}={limit}:{level.action})"
            if level.action == "stop":
                self._ask(KINDS[name].reason, message)
                continue
            self.warnings.append({"step": step, "rank": rank, "guard": name, "message": message})
            print(f"nsa: warning: step {step}: {message}", file=sys.stderr, flush=True)

    def _left_out(self, step: int, loss: float, norm: float) -> None:
        self._in_a_row += 1
        self.left_out += 1
        what, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
        stops = self._trainer.config.nonfinite == "stop"
        if stops or self._in_a_row > self.bound:
            row = "" if stops else f", as were {self.bound} steps in a row before it"
            facts = {"quantity": what, "value": str(value)}
            raise Stopped("non_finite", f"step {step}: the {what} is {value}{row}", step, **facts)
        if self._trainer.parallel.rank == 0:
            text = f"nsa: step {step} left out: its {what} is {value}"
            print(text, file=sys.stderr, flush=True)

    def _look_for_halt(self) -> None:
        file = self.halt_file
        if file is None or self._trainer.parallel.rank != 0 or not os.path.lexists(file):
            return
        try:
            text = " ".join(file.read_text(encoding="utf-8", errors="replace")[:TEXT].split())
            said = f"asked for it: {text}" if text else "asked for it"
        except OSError as error:
            said = f"is there, and cannot be read ({error.strerror})"
        self._ask("halted", f"the halt file {file} {said}")

    def _ask(self, reason: str, message: str) -> None:
        """End the run after this step; with several ranks, once all have received the vote."""
        if not self._wish[0]:
            self._wish = (reason, message)
            self._trainer.vote()


def explained(stopped: Stopped, trainer: Trainer) -> Stopped:
    """Extend `stopped` by the findings of all ranks, equal on each. All ranks must call it."""
    place = trainer.parallel
    if stopped.reason != "non_finite":
        wishes = _of_all(place, (stopped.reason, str(stopped)))
        reason, message = next(wish for wish in wishes if wish[0])
        return Stopped(reason, f"after step {stopped.step}: {message}", stopped.step)
    try:
        mine = cause(trainer, stopped.step)
    except Exception as error:  # the run ends for its step, not for an error in this search
        mine = {"rank": place.rank, "error": f"{type(error).__name__}: {error}"}
    causes = _of_all(place, mine)
    told = f"{stopped}; {place_of(causes)}"
    found = Stopped(stopped.reason, told, stopped.step, **stopped.facts, causes=causes)
    found.advice = advice(causes, trainer.config, stopped.step)
    return found


def place_of(causes: list[dict[str, Any]]) -> str:
    """Describe in words where the fault began, from the causes that all ranks found."""

    def first(name: str) -> dict[str, Any] | None:
        return next((c for c in causes if c.get(name) is not None), None)

    def on(c: dict[str, Any]) -> str:
        return f" on rank {c['rank']}" if len(causes) > 1 else ""

    def at(c: dict[str, Any]) -> str:
        named = [f"{name} {c[name]}" for name in ("layer", "branch") if c[name] is not None]
        return f" ({', '.join(named)})" if named else ""

    if c := first("error"):
        return f"why{on(c)} is not known, for running the step again failed ({c['error']})"
    if c := first("weight"):
        where = f"parameter {c['weight']}{on(c)} already holds what is not finite{at(c)}"
    elif c := first("output"):
        where = f"the output of {c['output']}{on(c)} is the first that is not finite{at(c)}"
    elif c := next((c for c in causes if not math.isfinite(c["loss"])), None):
        where = f"every output{on(c)} is finite, and the loss of them is not"
    elif c := first("gradient"):
        where = f"loss and outputs are finite, and the backward{on(c)} is not{at(c)}"
    else:
        c = max(causes, key=lambda c: c["largest_gradient"] or (0.0, ""))
        value, name = c["largest_gradient"] or (0.0, "none")
        if value**2 * c["parameters"] < torch.finfo(torch.float32).max:
            return (
                "run again, without compiled code, CUDA graph and loss scale, the same step is "
                "finite on every rank"
            )
        where = f"every gradient is finite; the square of the largest, {value:.3g}, is not"
        return f"{where} ({name}{on(c)})"
    c = first("gradient") or c
    if c["gradient"] is None:
        return where
    count = f"{c['bad_gradients']} of {c['parameters']} parameters"
    return (
        f"{where}; gradients of {count} are not, of which {c['gradient']} is the model's first and "
        f"{c['last_gradient']} the first that the backward reached"
    )


def advice(causes: list[dict[str, Any]], config: TrainConfig, step: int) -> list[str]:
    """Remedies to try, most likely first."""
    weights = [c["largest_weight"] for c in causes if c.get("largest_weight")]
    value, name = max(weights, default=(0.0, ""))
    grown = value > GROWN
    rate = f"a smaller learning rate (--lr, now {config.lr:g})"
    found = [f"{rate}: the largest weight is {value:.3g} ({name})"] if grown else []
    if config.precision == "fp16":
        found.append("--precision bf16, which has the range of fp32")
    if not grown:
        found += [f"a look at the batch of step {step}", rate]
    if config.nonfinite == "stop":
        found.append("--nonfinite skip, which leaves such steps out and counts them")
    return found


def _of_all(place: Parallel, mine: Any) -> list[Any]:
    """Gather `mine` of each rank, in rank order."""
    if place.ranks == 1:
        return [mine]
    everyone: list[Any] = [None] * place.ranks
    dist.all_gather_object(everyone, mine)
    return everyone


def check_weights(trainer: Trainer) -> None:
    """Raise Stopped on all ranks if a weight is not finite. Waits for the device."""
    bad = [(~local(p.detach()).isfinite()).any() for p in trainer.parameters]
    if float(trainer.parallel.mean(torch.stack(bad).any().float())) > 0.0:
        facts, step = {"quantity": "weights", "value": "not finite"}, trainer.steps_done - 1
        message = f"step {step} left weights that are not finite"
        raise Stopped("non_finite", message, step, **facts)


def save(trainer: Trainer, folder: Path) -> str:
    """Save a checkpoint, and return its path in the run. Raises Stopped if its weights are not
    finite, and keeps the previous one."""
    check_weights(trainer)
    trainer.save(folder)
    if trainer.parallel.rank == 0:
        for old in saving.checkpoints(folder)[:-KEPT]:
            old.unlink()
    return f"{folder.name}/{saving.file_of(folder, trainer.steps_done).name}"


def save_or_say(trainer: Trainer, folder: Path) -> str:
    """Call `save`, but return a message on OSError: a full disk must not end the measurement."""
    try:
        return save(trainer, folder)
    except OSError as error:  # on rank 0, the only one that writes; the others wait for it
        trainer.parallel.barrier()
        return f"not kept: {error.strerror or error}"
