"""Steps for a torch.nn.Module without its own step(i), where nothing needs to be guessed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = ("example_inputs", "example_input_array", "dummy_inputs")
TOKENS = ("tokens", "input_ids", "idx")
TARGETS = ("labels", "targets", "target")
BATCH, LENGTH = 2, 16


class DefaultStep:
    """Forward, backward and AdamW on `model`'s own example inputs, or on random tokens.

    The loss is the one that the model returns, else the mean square of its output. Raises
    ValueError if inputs would have to be guessed; the message has the lines to add.
    """

    def __init__(self, model: nn.Module, subject: str, settings: Mapping[str, Any]) -> None:
        self.model = model
        self._inputs = _inputs(model, settings)
        if self._inputs is None:
            raise ValueError(_what_to_add(model, subject))
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-3) if parameters else None
        self.notes = ["the subject is a module without step(i): it had a step made for it"]

    def step(self, i: int) -> Tensor:
        args, named = self._inputs
        loss = _loss(self.model(*args, **named))
        if loss is None:
            raise ValueError(f"{type(self.model).__name__} returned no tensor that has a gradient")
        if self._optimizer is not None:
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return loss.detach()


def _inputs(model: nn.Module, settings: Mapping[str, Any]) -> tuple[tuple, dict] | None:
    """Return the inputs as (positional, named), or None if they cannot be determined."""
    for name in EXAMPLES:
        given = getattr(model, name, None)
        given = given() if callable(given) else given
        if given is None:
            continue
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given) if isinstance(given, list | tuple) else (given,)), {}
    parameters = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tokens = next((name for name in parameters if name in TOKENS), None)
    targets = next((name for name in parameters if name in TARGETS), None)
    if tokens is None or not tables or not set(needed) <= {tokens, targets}:
        return None
    device = tables[0].weight.device
    # The first table is the vocabulary; the smallest, which may hold positions, bounds the length.
    shortest = min(table.num_embeddings for table in tables)
    size = (BATCH, min(int(settings.get("tokens", LENGTH)), shortest))
    ids = torch.randint(tables[0].num_embeddings, size, device=device)
    return (), {tokens: ids} | ({targets: ids} if targets else {})


def _loss(output: Any) -> Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named.mean()
    values = output.values() if isinstance(output, Mapping) else output
    tensors = [output] if isinstance(output, Tensor) else list(values or ())
    found = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in found if x.numel() == 1]
    if scalars:
        return scalars[0].mean()
    return found[0].float().square().mean() if found else None


def _what_to_add(model: nn.Module, subject: str) -> str:
    kind, module = type(model), subject.partition(":")[0]
    shape = ", ".join(inspect.signature(model.forward).parameters)
    there = f"    from {kind.__module__} import {kind.__name__}\n"
    known = "" if kind.__module__ == module else there
    return f"""{subject!r} is a {kind.__name__}, a torch.nn.Module without step(i), and nothing
tells what its forward({shape}) gets. Give it example_inputs; or add to {module}, with inputs of
yours, and name subject={module}:make

{known}    def make(settings, progress):
        from whyhung.process.subject import Steps
        model = {kind.__name__}(...)
        inputs = torch.randn(8, 16)
        return Steps(lambda i: model(inputs).square().mean().backward(), model)
"""


def made(found: Any, settings: Mapping[str, Any], subject: str) -> Any:
    """Return a module as is; call a class, or a factory without (settings, progress), by keyword.

    Raises ValueError if the settings do not fit the signature.
    """
    if isinstance(found, nn.Module):
        return found
    signature = inspect.signature(found)
    try:
        signature.bind(**settings)
    except TypeError as error:
        told = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "none"
        raise ValueError(
            f"{subject!r} is called as {found.__name__}{signature}; with settings {told}: {error}"
        ) from None
    return found(**settings)
