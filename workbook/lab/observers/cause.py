"""Locate where a step stops being finite, by running it once more with all values checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import witness
from nsa.attention.api import nsa_attention
from nsa.model.layer import NSAAttention
from nsa.model.train import Trainer
from nsa.reference.nsa import BRANCHES
from workbook.lab.measure.recorders import changed, local


def cause(trainer: Trainer, step: int) -> dict[str, Any]:
    """Run step number `step` again on this rank, and return where it is not finite. The rerun uses
    no compiled blocks, CUDA graph or loss scaling, and changes no weight.

    rank; loss, of its share; weight, the first parameter in the model's order with a non-finite
    value; output, the first module with a non-finite output; layer and branch of the first of these
    faults; gradient, the first parameter with a non-finite gradient, last_gradient, the last one,
    which the backward reached first, and bad_gradients, their number out of `parameters`;
    largest_weight and largest_gradient as (magnitude, name). Finite quantities are None.

    DDP's ranks check their own gradients, FSDP2's ranks their shards of the mean; under FSDP2, and
    where ranks share sequences, every rank must call it. Costs the time and memory of a step.
    """
    named = list(trainer.model.named_parameters())
    found: dict[str, Any] = {"rank": trainer.parallel.rank, "parameters": len(named)}
    found |= _summary("weight", ((name, local(p.detach())) for name, p in named))
    if trainer._captured is not None:
        trainer._captured.release()
    with warnings.catch_warnings(), witness.where(step=step), _as_it_is(trainer.model) as seen:
        warnings.simplefilter("ignore")  # the witness has warned already
        share, total, gradients = trainer._share(trainer.data, step), 0.0, {}
        for part in share.micro():
            loss = trainer._loss(*part)
            total += float(loss)
            for name, gradient in _gradients(trainer, loss, named):
                norm = torch.linalg.vector_norm(gradient, ord=math.inf)
                gradients[name] = gradients.get(name, 0.0) + norm
    found |= {"loss": total, "output": None} | seen | _summary("gradient", gradients.items())
    begins = found["weight"] or found["output"] or found["last_gradient"]
    return _place(begins or "") | found


def _place(name: str) -> dict[str, Any]:
    """Layer and branch to which a module or parameter belongs; None if it belongs to none."""
    words = name.split(".")
    return {
        "layer": next((int(word) for word in words if word.isdigit()), None),
        "branch": next((word for word in words if word in BRANCHES), None),
    }


def _gradients(trainer: Trainer, loss: Tensor, named: list) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient) of each parameter that has one: under FSDP2 its shard."""
    if trainer.parallel.kind != "fsdp":
        # not .backward(), in which DDP would wait for other ranks
        of = [(name, p) for name, p in named if p.requires_grad]
        found = torch.autograd.grad(loss, [p for _, p in of], allow_unused=True)
        yield from ((name, g) for (name, _), g in zip(of, found, strict=True) if g is not None)
        return
    with trainer.parallel.micro(trainer.wrapped, last=True):
        loss.backward()
    yield from ((name, local(p.grad)) for name, p in named if p.grad is not None)
    trainer._drop_gradients()


def _summary(what: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """First, last and number of the tensors that are not finite, and the others' largest value."""
    named = [(name, x) for name, x in tensors if x.numel()]  # a rank's shard may be empty
    norms = [torch.linalg.vector_norm(x, ord=math.inf).double() for _, x in named]
    values = torch.stack(norms).tolist() if norms else []
    bad = [name for (name, _), x in zip(named, values, strict=True) if not math.isfinite(x)]
    good = [(x, name) for (name, _), x in zip(named, values, strict=True) if math.isfinite(x)]
    found = {what: bad[0] if bad else None, f"largest_{what}": max(good, default=None)}
    return found | {f"last_{what}": bad[-1] if bad else None, f"bad_{what}s": len(bad)}


@contextmanager
def _as_it_is(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Disable the model's compiled code; record the first non-finite output in the mapping."""
    seen: dict[str, Any] = {}
    with ExitStack() as undone:
        for name, module in model.named_modules():
            if module._compiled_call_impl:
                undone.enter_context(changed(module, "_compiled_call_impl", None))
            if name:  # the model itself returns the loss too
                look = partial(_look, seen, name)
                undone.enter_context(module.register_forward_hook(look, with_kwargs=True))
        yield seen


def _look(seen: dict, name: str, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
    outputs = [
        x.detach() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)
    ]
    if not seen and not all(bool(x.isfinite().all()) for x in outputs):
        seen["output"] = name
    # The input of o_proj is the branches' gated sum: find the branch, unless other ranks, which may
    # see nothing wrong, would have to join in.
    whole = isinstance(module, NSAAttention) and module.context is None
    if whole and seen.get("output") == f"{name}.o_proj":
        with torch.no_grad():
            arguments = module.arguments(*args, **kwargs)
            try:
                nsa_attention(**arguments, backend=module.config.backend, strict=True)
            except FloatingPointError as error:
                text = str(error)
                branch = next((b for b in BRANCHES if f"branch {b!r}" in text), None)
                seen |= {"branch": branch, "output": name, "attention": text}
