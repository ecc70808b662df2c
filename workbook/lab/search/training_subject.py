"""This package's training step as a trial subject, built from a plan's factors."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.attention import witness
from nsa.attention.api import nsa_attention
from nsa.model import layer, parallel, rotary
from nsa.model.presets import preset
from nsa.model.train import TrainConfig, Trainer
from nsa.reference.nsa import BRANCHES
from whyhung.process.subject import rank_and_ranks
from whyhung.watch import Progress
from workbook.lab.measure.steps import further_steps
from workbook.lab.observers.anomaly import named_anomalies
from workbook.lab.search.factors import CONSERVATIVE, TRAINING_SUBJECT, known
from workbook.lab.search.planted import plant_root, without_gradient
from workbook.lab.training import trainer_at

OF_DDP = (
    "static_graph", "find_unused_parameters", "bucket_mb", "comm_hook", "gradient_as_bucket_view",
)  # fmt: skip
_BACKENDS = {"cmp": "compressed_backend", "slc": "selected_backend", "win": "window_backend"}


class TrainingSubject:
    """Subject whose step(i) trains on batch i; `model` is the bare model, `trainer` its Trainer.

    `settings` are named as in workbook.lab.search.factors; missing ones have their defaults, and
    those used by the trial alone (attempt, ...) are ignored. close() restores state changed in this
    process, and leaves the process group. ValueError for a name or a value that is not legal.
    """

    def __init__(self, settings: dict[str, Any], progress: Progress) -> None:
        self.settings = settings = {
            name: factor.check(settings.get(name, factor.default))
            for name, factor in known(TRAINING_SUBJECT).items()
        }
        if settings["conservative"]:
            settings |= CONSERVATIVE
        sizes = {name: settings[name] for name in ("layers", "dim") if settings[name] is not None}
        config = preset(
            settings["preset"],
            **sizes,
            **{name: settings[name] for name in ("backend", "checkpoint", "strict")},
            force_branch=None if settings["branch"] == "all" else settings["branch"],
            **settings["changes"],
        )
        training = TrainConfig(
            **{n: settings[n] for n in ("batch", "tokens", "compile", "seed", "warmup_steps")},
            lr=float(settings["lr"]),
            precision=settings["dtype"],
        )
        backends = {branch: settings[name] for branch, name in _BACKENDS.items()}
        with contextlib.ExitStack() as opened:
            if settings["threads"]:
                torch.set_num_threads(settings["threads"])
            if settings["deterministic"]:
                torch.use_deterministic_algorithms(True)
                opened.callback(torch.use_deterministic_algorithms, False)
            if settings["anomaly"]:
                opened.enter_context(torch.autograd.set_detect_anomaly(True))
            opened.enter_context(branchwise(backends, safe_packing=settings["safe_packing"]))
            self.trainer = opened.enter_context(
                trainer_at(_place(settings), config, training, settings["data"], settings["seed"])
            )
            self.model = self.trainer.model
            if settings["conservative"]:
                opened.callback(setattr, rotary, "has_kernel", rotary.has_kernel)
                rotary.has_kernel = lambda x: False
                for group in self.trainer.optimizer.param_groups:  # which took no step yet
                    group |= {"fused": False, "foreach": False}
            if settings["weights"] == "bf16":  # bypasses the Trainer, which rejects them
                self.model.to(torch.bfloat16)
            if settings["planted"] == "root":
                plant_root(self.model)
            names = [name for name, _ in self.model.named_parameters()]
            self.without_gradient = without_gradient(config, names)  # expected by the oracles
            self.observers = _observers(settings, self.trainer)
            self.trainer.observers = (progress, *self.observers.values())
            self._seen = opened.enter_context(witness.recording())
            self.close = opened.pop_all().close

    def step(self, i: int) -> Tensor:
        """Train on batch i; return the loss, fp32, on its device."""
        if not self.settings["anomaly"]:
            return self.trainer.step(i)
        with named_anomalies():
            return self.trainer.step(i)

    def result(self) -> dict[str, Any]:
        """{"updates": rows of workbook.lab.observers.updates} if tracing is "updates", else {}."""
        seen = self.observers.get("updates")
        return {} if seen is None else {"updates": seen.rows()}

    def witness(self) -> dict[str, Any]:
        """Return the implementations used per branch, with counts, and the model's wrapper."""
        return self._seen.record() | {
            "wrapped": type(self.trainer.wrapped).__name__,
            "compiled": self.trainer.config.compile,
            "packing": "safe" if self.settings["safe_packing"] else "unsafe",
        }

    def measured(self, *, count: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return measurements of further steps, and results of oracles for one of them."""
        return further_steps(self.trainer, self, count=count)


make = TrainingSubject


def _place(settings: dict[str, Any]) -> parallel.Parallel:
    device, backend = settings["device"], settings["communication"]
    if rank_and_ranks()[1] == 1:
        gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return replace(parallel.SINGLE, device="cuda" if gpu else "cpu")
    return parallel.start(
        settings["parallel"],
        backend=None if backend == "auto" else backend,
        timeout_s=3600,  # the supervisor ends a trial, not the group's timeout
        **{name: settings[name] for name in ("device", *OF_DDP)},
    )


def _observers(settings: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    from workbook.lab.observers import arrival, attention_stats, ddp, module_order, updates

    tracing, found = settings["tracing"], {}
    if settings["aux_stats"]:
        found["aux_stats"] = attention_stats.AttentionStats(trainer.model, every=1, keep=2)
    if tracing in ("arrival", "all"):
        found["arrival"] = arrival.GradientArrival(trainer.model, keep=2, warn=False)
    if tracing in ("modules", "all"):
        found["modules"] = module_order.ModuleOrder(trainer.model, keep=2)
    if tracing == "updates":
        found["updates"] = updates.Updates(trainer.model)
    if tracing == "buckets" or (tracing == "all" and trainer.parallel.kind == "ddp"):
        found["buckets"] = ddp.BucketTrace(trainer.wrapped)
    return found


@contextlib.contextmanager
def branchwise(backends: Mapping[str, str | None], *, safe_packing: bool = True) -> Iterator[None]:
    """Make every NSAAttention of this process call `by_branches` inside the context.

    Nothing changes if no branch has its own backend and packing is safe.
    """
    own = {branch: name for branch, name in backends.items() if name is not None}
    if not own and safe_packing:
        yield
        return
    before = layer.nsa_attention
    ours = partial(by_branches, backends=own, safe_packing=safe_packing)
    layer.nsa_attention = ours
    try:
        yield
    finally:
        if layer.nsa_attention is ours:  # an unclosed context ends when it is collected
            layer.nsa_attention = before


def by_branches(
    q: Tensor,
    k: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    gates: Tensor,
    config: Any,
    *,
    backends: Mapping[str, str],
    backend: str = "auto",
    branches: Sequence[str] = BRANCHES,
    safe_packing: bool = True,
    **options: Any,
) -> Tensor:
    """Compute `nsa_attention` as a sum of calls per branch, with `backends[branch]` or `backend`.

    safe_packing=False is a deliberate bug: the branches' outputs are copied into a tensor through
    `.data`, bypassing autograd, so that no gradient reaches anything before them.
    """
    outputs = [
        nsa_attention(
            q,
            # "slc" needs the compressed keys to score its blocks.
            {name: k[name] for name in (branch, "cmp") if name in k and branch in (name, "slc")},
            {branch: v[branch]},
            gates,
            config,
            backend=backends.get(branch, backend),
            branches=(branch,),
            **options,
        )
        for branch in branches
    ]
    if safe_packing:
        return sum(outputs[1:], outputs[0])
    packed = torch.empty_like(outputs[0])[None].repeat(len(outputs), 1, 1, 1, 1)
    for place, o in zip(packed, outputs, strict=True):
        place.data.copy_(o.data)
    return packed.sum(0)
