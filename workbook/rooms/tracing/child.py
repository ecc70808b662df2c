"""Rank side of distributed tracing: the trials of a launch, one after the other."""

import gc
import hashlib
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.model import parallel
from nsa.model.data import synthetic, text
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.parallel import Parallel
from nsa.model.train import Data, Trainer
from nsa.model.train_config import autocast
from whyhung.process.child import failure, put, standing
from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.ddp import BucketTrace
from workbook.lab.observers.module_order import ModuleOrder
from workbook.lab.search.planted import plant, without_gradient
from workbook.rooms.tracing.trials import COLUMNS, STEPS, Setup, Trial

COLLECTIVE_S = 600.0  # longer than any launch: the supervisor's deadline ends a rank, not NCCL's


def run(spec: dict) -> dict:
    """Run all trials of a launch; write trial-<number>-rank-<rank>.json for each to spec["folder"].

    A trial that the check of its options rejects is "refused" on every rank, and the next one
    follows. Any other error is recorded and ends this rank, since the state of the other ranks is
    then unknown.
    """
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    setup = Setup(**spec["setup"])
    everyone = parallel.start("ddp", backend=setup.communication, timeout_s=COLLECTIVE_S)
    if setup.device == "cuda" and everyone.device == "cpu":
        raise ValueError(f"device='cuda' needs a GPU for each of {setup.ranks} ranks on this host")
    for number, values in spec["trials"]:
        trial = Trial(**values)
        file = Path(spec["folder"], f"trial-{number}-rank-{everyone.rank}.json")
        place = _Place(f"trial {number}: {trial.name}")
        try:
            here = _parallel(setup, trial, everyone)
        except ValueError as error:
            put(file, {"status": "refused", "message": str(error), "place": place.place})
            continue
        try:
            record = {"status": "ok", "message": "", "result": trace_one(setup, trial, here, place)}
        except Exception as error:
            seen = failure(error)
            put(file, seen | {"evidence": seen["traceback"], "place": place.place})
            raise
        put(file, record | {"place": place.place})
        everyone.barrier()
        gc.collect()  # DDP's hooks and the model hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    everyone.close()
    return {}


def trace_one(setup: Setup, trial: Trial, here: Parallel, place: "_Place | None" = None) -> dict:
    """Trace three steps of one trial: losses, weights, arrivals, modules, buckets, gradients. Steps
    count from 1. `weights` is a fingerprint of all weights after the last step; `unreachable` lists
    parameters that the loss did not reach before the first backward, None if unknown."""
    spec = setup.spec(trial)
    config = spec.config()
    model = LanguageModel(config)
    expected = without_gradient(config, dict(model.named_parameters()))
    if trial.fault:
        plant(trial.fault, model, here.rank, here.ranks)
    data = text(seed=setup.seed) if setup.data == "text" else synthetic(setup.seed, config.vocab)
    trainer = Trainer(model, data, spec.training(), device=here.device, parallel=here)
    arrival, modules = GradientArrival(model, warn=False), ModuleOrder(model)
    buckets = BucketTrace(trainer.wrapped, range(STEPS), out=None) if here.kind == "ddp" else None
    first = _FirstGradients(model) if trial.compared else None
    trainer.observers = [x for x in (place, arrival, modules, buckets, first) if x is not None]
    losses = trainer.run(STEPS)
    found = {
        "losses": losses,
        "weights": fingerprint(model),
        "parameters": parameter_count(model),
        "unreachable": None if arrival.unreachable is None else list(arrival.unreachable),
        "arrivals": [
            _row("arrivals", row, parameter=row["name"],
                 expected="missing" if row["name"] in expected else "arrived")
            for step in range(STEPS) for row in arrival.rows(step)
        ],
        "modules": [_row("modules", row, module=row["name"])
                    for step in range(STEPS) for row in modules.rows(step)],
        "buckets": [_row("buckets", row) for row in (buckets.rows() if buckets else ())],
    }  # fmt: skip
    trainer.close()
    if first:
        found["gradients"] = beside_one_process(first.gradients, setup, trial, data, here)
    return found


def beside_one_process(
    gradients: dict[str, Tensor], setup: Setup, trial: Trial, data: Data, here: Parallel
) -> list[dict]:
    """Compare the ranks' gradients with those that this process alone computes for the batch.

    Returns rows of `way`, `error` and the `parameter` with the largest. error: largest difference
    over the gradient's largest value. way "rows": each rank's rows in sequence and their mean, the
    same sums except for the mean over ranks; "batch": all rows at once, with other rounding.
    """
    model = LanguageModel(setup.spec(trial).config())
    model.reset_parameters(setup.seed)  # before it moves, as in the trainer: devices draw otherwise
    model.to(here.device)
    inputs, targets = (x.to(here.device) for x in data.batch(0, setup.batch, setup.tokens))
    found = []
    for way, parts in (("rows", here.ranks), ("batch", 1)):
        model.zero_grad(set_to_none=True)
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with autocast(setup.precision, torch.device(here.device)):
                _, loss = model(x, y)
            (loss / parts).backward()
        errors = {n: _error(gradients.get(n), p.grad) for n, p in model.named_parameters()}
        worst = max(errors, key=errors.__getitem__)
        where = worst if errors[worst] else ""
        found.append({"way": way, "error": errors[worst], "parameter": where})
    return found


def fingerprint(model: nn.Module) -> str:
    """Hash of each parameter's sum and sum of absolute values in fp64; equal for equal weights.
    Under FSDP2 it gathers the whole weights, so every rank must call it."""
    sums = []
    for p in model.parameters():
        x = _whole(p.detach()).double()
        sums += [x.sum(), x.abs().sum()]
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()[:16]


class _Place:
    """Observer that reports each phase to the supervisor."""

    def __init__(self, trial: str) -> None:
        self.trial = trial
        self.place = f"{trial}, before step 1"
        standing(self.place)

    def on_phase(self, name: str, step: int) -> None:
        self.place = f"{self.trial}, step {step + 1}, {name}"
        standing(self.place)


class _FirstGradients:
    """Observer that keeps the full gradients of the first step, as passed to the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.gradients: dict[str, Tensor] = {}

    def on_phase(self, name: str, step: int) -> None:
        if name == "optimizer" and not self.gradients:
            for parameter, p in self._model.named_parameters():
                if p.grad is not None:
                    self.gradients[parameter] = _whole(p.grad).clone()


def _parallel(setup: Setup, trial: Trial, everyone: Parallel) -> Parallel:
    options = {"static_graph": trial.static_graph, "bucket_mb": setup.bucket_mb}
    options["find_unused_parameters"] = trial.find_unused
    parallel.check(trial.kind, setup.communication, **options)
    return replace(everyone, kind=trial.kind, **options)


def _row(kind: str, row: dict, **more: Any) -> dict:
    """Convert a row of an observer to COLUMNS, its step counted from 1."""
    row = row | more | {"step": row["step"] + 1}
    return {name: row[name] for name in COLUMNS[kind]}


def _error(mine: Tensor | None, alone: Tensor | None) -> float:
    if mine is None or alone is None:
        return 0.0 if mine is alone else float("inf")
    apart = float((mine - alone).abs().max())
    if not apart:
        return 0.0
    scale = float(alone.abs().max())
    return apart / scale if scale and isfinite(apart) else float("inf")


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
