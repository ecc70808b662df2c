"""Oracles that create the subject again and compare: other ways to the same gradients, other sizes.

Each starts from the same seed, so that the changed setting is the only difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as every_module

from workbook.lab.oracles.steps import Result, Steps, broken, device_of, ok, unknown

Remake = Callable[[dict[str, Any]], Any]  # changes of the settings -> a subject
ByName = dict[str, Tensor]  # gradients

RECOMPUTED = 1e-5  # of a gradient's largest value; a recomputation rounds as the forward did
NOISE = 8.0  # multiple of the difference of two equal runs
BACKENDS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
QUADRATIC = 1.5  # half way between linear and quadratic
LEAST_BYTES = 2**16


def checkpointing(remake: Remake) -> Result:
    """Compare the first step's gradients with and without activation checkpointing.

    torch.utils.checkpoint itself is switched off, so no setting is needed.
    """
    with checkpoints() as calls:
        on = first_gradients(remake({}))
    if calls is None:
        return unknown("this torch's checkpointing cannot be switched off from outside")
    if not calls:
        return ok("nothing is checkpointed")
    with checkpoints(off=True):
        off = first_gradients(remake({}))
    ways = f"with {len(calls)} checkpoints and without"
    return _compared(on, off, remake, RECOMPUTED, "checkpoint-mismatch", ways)


def same_gradients(remake: Remake, settings: dict[str, Any], key: str, other: Any) -> Result:
    """Compare the first step's gradients with settings[key] as it is, and as `other`."""
    mine = settings.get(key)
    if mine == other:
        return unknown(f"{key}={other!r} is what runs: nothing to compare with")
    limit = BACKENDS.get(str(settings.get("dtype", "fp32")), 5e-2)
    found = first_gradients(remake({})), first_gradients(remake({key: other}))
    return _compared(*found, remake, limit, f"{key}-mismatch", f"{key}={mine!r} and {other!r}")


def quadratic(remake: Remake, settings: dict[str, Any], key: str = "tokens") -> Result:
    """Compare bytes kept for the backward, or a GPU's peak, at 1, 2 and 4 times settings[key].

    Quadratic growth is broken, with the module that keeps most of it; a constant is no growth. A
    block selection also grows quadratically until there are more blocks than it selects.
    """
    base = settings.get(key)
    if not isinstance(base, int) or base < 1:
        return unknown(f"settings[{key!r}] is {base!r}; a whole number can be doubled")
    # The first run, not used, allocates shared memory, such as a GPU library's workspace.
    kept = [kept_bytes(remake({key: times * base})) for times in (1, 1, 2, 4)][1:]
    totals = [sum(by_module.values()) for by_module in kept]
    if not totals[0]:
        return unknown("no tensor was kept for a backward")
    found = exponent(*totals)
    told = f"{' -> '.join(f'{t / 2**20:,.2f}' for t in totals)} MiB at {key} {base} x 1, 2, 4"
    if found is None:
        return ok(f"what is kept does not grow with {key}: {told}")
    grows = f"what is kept grows with {key} to the {found:.2f}"
    if found < QUADRATIC or totals[2] - totals[1] < LEAST_BYTES:
        return ok(f"{grows}: {told}")
    worst = max(kept[2], key=lambda name: kept[2][name] - kept[1].get(name, 0))
    return broken("quadratic", f"{grows}, most of it in {worst}: {told}", worst)


def exponent(small: float, middle: float, large: float) -> float | None:
    """Growth exponent of a quantity at n, 2 n and 4 n up to a constant: 1 linear, 2 quadratic.

    None if it does not grow.
    """
    near, far = middle - small, large - middle
    return math.log2(far / near) if near > 0 and far > 0 else None


@contextmanager
def checkpoints(off: bool = False) -> Iterator[list[None] | None]:
    """Yield a list that gets an item for each checkpoint inside; with `off` they are plain calls.

    Yields None if torch's two implementations, looked up by name in each call, have other names.
    """
    from torch.utils import checkpoint

    ways = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    generator, reentrant = (getattr(checkpoint, way, None) for way in ways)
    if generator is None or reentrant is None:
        yield None
        return
    calls: list[None] = []

    def generate(*args: Any, **options: Any) -> Iterator[None]:
        calls.append(None)
        # the caller runs the function between the first item and the end
        return iter([None]) if off else generator(*args, **options)

    class Function:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            calls.append(None)
            return function(*args) if off else reentrant.apply(function, preserve, *args)

    with ExitStack() as stack:
        for way, instead in zip(ways, (generate, Function), strict=True):
            stack.callback(setattr, checkpoint, way, getattr(checkpoint, way))
            setattr(checkpoint, way, instead)
        yield calls


def first_gradients(subject: Any) -> ByName:
    """Gradients of one step by parameter, taken as accumulation ends, on the CPU in fp32."""
    model = getattr(subject, "model", None)
    if model is None:
        return {}
    found: ByName = {}

    def keep(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            found[name] = parameter.grad.detach().float().cpu().clone()

    with ExitStack() as stack:
        stack.callback(getattr(subject, "close", lambda: None))
        for name, p in model.named_parameters():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(partial(keep, name))
                stack.enter_context(hook)
        subject.step(0)
    return found


def kept_bytes(subject: Any) -> dict[str, float]:
    """Bytes by module that are kept for the first backward of a step, each storage counted once.

    On a GPU one entry: the step's peak minus the memory allocated before it.
    """
    model = getattr(subject, "model", None)
    device = device_of(model)
    with ExitStack() as stack:
        stack.callback(getattr(subject, "close", lambda: None))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            subject.step(0)
        else:
            saved = _Saved(model)
            stack.enter_context(Steps([saved])).begin(0)
            with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
                subject.step(0)
            return saved.by_module
    return {"step": float(torch.cuda.max_memory_allocated(device) - before)}


class _Saved:
    """Bytes of storages saved until the first backward, by the innermost module that ran then."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names = {id(m): name for name, m in model.named_modules()} if model else {}
        self._seen = (
            {p.untyped_storage().data_ptr() for p in model.parameters()} if model else set()
        )
        self._stack = ["outside of modules"]
        self._held: list[Tensor] = []  # or a later tensor would get an earlier one's address
        self._over = False
        self.by_module: Counter[str] = Counter()
        self._hooks = [
            every_module.register_module_forward_pre_hook(self._enter),
            every_module.register_module_forward_hook(self._leave),
        ]

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        self._stack.append(self._names.get(id(module)) or type(module).__name__)

    def _leave(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not self._over and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._held.append(tensor.detach())
            self.by_module[self._stack[-1]] += storage.nbytes()
        return tensor

    def backward(self, roots: Any) -> None:
        self._over, self._held = True, []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _compared(
    mine: ByName, other: ByName, remake: Remake, limit: float, what: str, ways: str
) -> Result:
    if not mine:
        return unknown("the subject shows no model, or no gradient arrived in its first step")
    error, name = _apart(mine, other)
    if error <= limit:
        return ok(f"gradients {ways} agree to {max(error, 1e-16):.1g} of their largest value")
    noise, _ = _apart(mine, first_gradients(remake({})))
    if error <= NOISE * noise:
        return unknown(f"two equal runs differ by {noise:.2g} themselves")
    detail = f"gradients {ways} differ by {error:.2g} of their largest value, in {name}"
    return broken(what, detail, name)


def _apart(mine: ByName, other: ByName) -> tuple[float, str]:
    """Largest difference relative to the gradient's largest value, and its parameter."""
    worst, where = 0.0, next(iter(mine), "")
    for name in mine | other:
        a, b = mine.get(name), other.get(name)
        if a is None or b is None:
            return math.inf, name
        if not a.numel() or torch.equal(a, b):
            continue
        error = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        error = math.inf if math.isnan(error) else error
        if error > worst:
            worst, where = error, name
    return worst, where
