"""Backends of the operation, and the choice of one that accepts given inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from nsa.attention import known, measured, transforms
from nsa.attention.inputs import Inputs
from nsa.spelling import nearest

Note = Callable[[str, str], None]  # (branch, implementation that ran it)
# By branch: o [B, T, HQ, DV] and its lse [B, T, HQ], natural log, if `Inputs.needs_lse`, else None.
Branches = dict[str, tuple[Tensor, Tensor | None]]
# Keys [B, C, HKV, D] and values [B, C, HKV, DV]; None for one that is not requested.
Compressed = tuple[Tensor | None, Tensor | None]
Compress = Callable[[Inputs], Compressed]
# Blocks [B, T, HKV, n] int32, packed or not, and what they were scored by.
Score = Callable[[Inputs, Note], tuple[Tensor, Compressed]]


class Declined(ValueError):
    """The named backend does not accept these inputs; the message gives the reasons."""


@dataclass(frozen=True)
class Backend:
    """One implementation of the three branches.

    `run(inputs, note)` returns the requested branches, never packed, with the lse of keys alone;
    `why_not(inputs)` returns the reasons it cannot compute them, empty if it can. `fused(inputs,
    note)` returns (their gated sum, {branch: lse} if `return_lse`, the blocks that it scored if
    `return_blocks`), packed or not, for a backend that does not need the branches' outputs; it
    applies sinks itself to all that it returns.
    """

    name: str
    run: Callable[[Inputs, Note], Branches]
    summary: str
    quadratic: bool  # holds a T x T tensor per head
    why_not: Callable[[Inputs], list[str]] = lambda inputs: []
    # Reasons why `auto` skips it although it would run.
    not_for_auto: Callable[[Inputs], list[str]] = lambda inputs: []
    fused: Callable[[Inputs, Note], tuple[Tensor, dict, Tensor | None]] | None = None
    compress: Compress | None = None  # if another than `branches.compressed` makes them
    score: Score | None = None  # if another than `branches.scored` selects the blocks
    # Strict mode's check before a call: raises if kernels are wrong on this device.
    first_use: Callable[[Inputs], None] = lambda inputs: None
    transforms: frozenset[str] = frozenset()  # torch.func transforms it supports

    def declines(self, inputs: Inputs) -> list[str]:
        """All reasons why it cannot compute a call, missing torch.func transforms included."""
        if lacking := sorted(transforms.active() - self.transforms):
            able = [one.name for one in backends() if one.transforms >= transforms.active()]
            named = ", ".join(lacking)
            return [f"has no {named} of torch.func; {', '.join(map(repr, able))} can"]
        return self.why_not(inputs)


def backends() -> tuple[Backend, ...]:
    """Every backend, in the order in which `auto` prefers them."""
    return tuple(_load(name) for name in known.MODULES)


def names() -> list[str]:
    """The backends' names, in order of preference."""
    return list(known.MODULES)


def check_name(name: str) -> str:
    """Return `name` if it is "auto", a backend or a variant such as "sdpa:math"; else ValueError
    with the nearest name."""
    backends()
    every = ["auto", *_loaded]
    if name in every:
        return name
    raise ValueError(f"backend {name!r} is unknown; {nearest(name, every)}")


def get(name: str) -> Backend:
    """Return the backend of that name; ValueError for any other, "auto" included."""
    check_name(name)
    if name == "auto":
        raise ValueError("'auto' is a choice between backends; use choose(inputs)")
    return _load(name)


_loaded: dict[str, Backend] = {}


def _load(name: str) -> Backend:
    return _loaded[name] if name in _loaded else load(name)


def load(name: str) -> Backend:
    """Import a known backend's module, and return the backend."""
    module = import_module(known.MODULES[name])
    for backend in (module.BACKEND, *getattr(module, "VARIANTS", ())):
        _loaded[backend.name] = backend
    return _loaded[name]


@dataclass(frozen=True)
class Choice:
    """Backend that `auto` chose, why preferred ones declined, and the measurement used."""

    backend: Backend
    declined: dict[str, list[str]]
    ranking: measured.Ranking | None = None

    def __str__(self) -> str:
        lines = [f"auto takes {self.backend.name}: {self.backend.summary}"]
        lines += [f"  {self.ranking}"] if self.ranking else []
        lines += [f"  {name} declined: {'; '.join(why)}" for name, why in self.declined.items()]
        return "\n".join(lines)


def taken(name: str, inputs: Inputs) -> Backend:
    """Return the backend of that name, for "auto" the one that `choose` takes. A named one is not
    asked whether it declines."""
    return choose(inputs).backend if name == "auto" else get(name)


def choose(inputs: Inputs) -> Choice:
    """Choose the first backend in order of preference that accepts the inputs.

    If a shape near this one was measured on such a GPU, the measured backends are sorted by speed.
    """
    declined: dict[str, list[str]] = {}
    preferred, ranking = backends(), measured.ranking(inputs)
    if ranking is not None:
        by_name = {backend.name: backend for backend in preferred}
        preferred = [by_name[name] for name in ranking.order(list(by_name))]
    for backend in preferred:
        reasons = [*backend.declines(inputs), *backend.not_for_auto(inputs)]
        if not reasons:
            return Choice(backend, declined, ranking)
        declined[backend.name] = reasons
    listed = "".join(f"\n  {name}: {'; '.join(why)}" for name, why in declined.items())
    raise ValueError(f"no backend takes these inputs:{listed}")
