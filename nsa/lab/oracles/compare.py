"""Oracles that make the subject anew and compare: another way to the same gradients, other lengths.

Each starts from the same seed, so that what differs is what was changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nsa.lab.oracles.steps import (
    Result,
    Steps,
    any_layer,
    broken,
    counted,
    device_of,
    exponent,
    ok,
    switched_off,
    unknown,
)

Remake = Callable[[dict[str, Any]], Any]  # changes of the settings -> a subject

RECOMPUTED = 1e-5  # of a gradient's largest value; a recomputation rounds as the forward did
NOISE = 8.0  # times what two equal runs differ by
BACKENDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
QUADRATIC = 1.5  # half way between linear and quadratic
LEAST_BYTES = 2**16


def checkpointing(remake: Remake, settings: dict[str, Any]) -> Result:
    """The first step's gradients with activation checkpointing and without it.

    Whoever checkpoints: torch.utils.checkpoint itself is switched off, no setting is needed.
    """
    with counted() as calls:
        on = first_gradients(remake({}))
    if not calls:
        return ok("nothing is checkpointed")
    with switched_off() as could:
        if not could:
            return unknown("this torch's checkpointing cannot be switched off from outside")
        off = first_gradients(remake({}))
    return _compared(
        on, off, RECOMPUTED, lambda: first_gradients(remake({})), "checkpoint-mismatch",
        f"with {len(calls)} checkpoints and without",
    )  # fmt: skip


def same_gradients(remake: Remake, settings: dict[str, Any], key: str, other: Any) -> Result:
    """The first step's gradients with settings[key] as it is, and as `other`."""
    mine = settings.get(key)
    if mine == other:
        return unknown(f"{key}={other!r} is what runs: nothing to compare with")
    limit = BACKENDS.get(str(settings.get("dtype", "fp32")), 5e-2)
    return _compared(
        first_gradients(remake({})), first_gradients(remake({key: other})), limit,
        lambda: first_gradients(remake({})), f"{key}-mismatch", f"{key}={mine!r} and {other!r}",
    )  # fmt: skip


def quadratic(remake: Remake, settings: dict[str, Any], key: str = "tokens") -> Result:
    """Bytes kept for the backward, or the peak on a GPU, at settings[key], twice and four times it.

    Quadratic growth is broken, with the module that keeps most of it; a constant is no growth. A
    selection of blocks also grows so until there are more blocks than it takes.
    """
    base = settings.get(key)
    if not isinstance(base, int) or base < 1:
        return unknown(f"settings[{key!r}] is {base!r}; a whole number can be doubled")
    # The first of all loads what every one uses, as a GPU's library its workspace.
    kept = [kept_bytes(remake({key: times * base})) for times in (1, 1, 2, 4)][1:]
    totals = [sum(by_module.values()) for by_module in kept]
    if not totals[0]:
        return unknown("no tensor was kept for a backward")
    found = exponent(*totals)
    told = f"{' -> '.join(f'{t / 2**20:,.2f}' for t in totals)} MiB at {key} {base} x 1, 2, 4"
    if found is None:
        return ok(f"what is kept does not grow with {key}: {told}")
    if found < QUADRATIC or totals[2] - totals[1] < LEAST_BYTES:
        return ok(f"what is kept grows with {key} to the {found:.2f}: {told}")
    growth = {name: kept[2][name] - kept[1].get(name, 0) for name in kept[2]}
    worst = max(growth, key=growth.__getitem__)
    detail = f"what is kept grows with {key} to the {found:.2f}, most of it in {worst}: {told}"
    return broken("quadratic", detail, any_layer(worst))


def first_gradients(subject: Any) -> dict[str, Tensor]:
    """Of one step: each parameter's gradient as its accumulation ended, on the CPU in fp32."""
    model = getattr(subject, "model", None)
    if model is None:
        return {}
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().float().cpu().clone()

        return arrived

    hooks = [
        p.register_post_accumulate_grad_hook(keep(name))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    try:
        subject.step(0)
    finally:
        for hook in hooks:
            hook.remove()
        _close(subject)
    return found


def kept_bytes(subject: Any) -> dict[str, float]:
    """Bytes of each module that the first backward of a step needs, each storage once.

    On a GPU one entry: what the step's peak was above what was there before it.
    """
    model = getattr(subject, "model", None)
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        subject.step(0)
        _close(subject)
        return {"step": float(torch.cuda.max_memory_allocated(device) - before)}
    saved = _Saved(model)
    steps = Steps([saved])
    steps.open()
    try:
        steps.begin(0)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            subject.step(0)
    finally:
        steps.close()
        _close(subject)
    return saved.by_module


class _Saved:
    """Storages saved until the first backward, by the innermost module that ran then."""

    def __init__(self, model: nn.Module | None) -> None:
        names = {id(m): name for name, m in model.named_modules()} if model is not None else {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()} if model else set()
        self._stack = ["outside of modules"]
        self._seen = own
        self._held: list[Tensor] = []  # or a later tensor would get an earlier one's address
        self._over = False
        self.by_module: dict[str, float] = {}
        hooks = nn.modules.module

        def enter(module: nn.Module, arguments: Any) -> None:
            self._stack.append(names.get(id(module)) or type(module).__name__)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if len(self._stack) > 1:
                self._stack.pop()

        self._hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave),
        ]

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not self._over and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._held.append(tensor.detach())
            here = self._stack[-1]
            self.by_module[here] = self.by_module.get(here, 0.0) + storage.nbytes()
        return tensor

    def backward(self, roots: Any) -> None:
        self._over = True
        self._held = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _compared(
    mine: dict[str, Tensor],
    other: dict[str, Tensor],
    limit: float,
    again: Callable[[], dict[str, Tensor]],
    what: str,
    ways: str,
) -> Result:
    if not mine:
        return unknown("the subject shows no model, or no gradient arrived in its first step")
    error, name = _apart(mine, other)
    if error > limit:  # is it more than what two equal runs differ by?
        noise, _ = _apart(mine, again())
        if error > NOISE * noise:
            detail = f"gradients {ways} differ by {error:.2g} of their largest value, in {name}"
            return broken(what, detail, any_layer(name))
        return unknown(f"two equal runs differ by {noise:.2g} themselves")
    return ok(f"gradients {ways} agree to {max(error, 1e-16):.1g} of their largest value")


def _apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference over a gradient's largest value, and the parameter."""
    worst, where = 0.0, next(iter(mine), "")
    for name in {**mine, **other}:
        a, b = mine.get(name), other.get(name)
        if a is None or b is None:
            return float("inf"), name
        if not a.numel() or torch.equal(a, b):
            continue
        error = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        error = error if error == error else float("inf")
        if error > worst:
            worst, where = error, name
    return worst, where


def _close(subject: Any) -> None:
    close = getattr(subject, "close", None)
    if close is not None:
        close()
