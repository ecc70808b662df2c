"""The ways to compute the one operation, and which of them takes given inputs."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from nsa.attention.inputs import Inputs

Note = Callable[[str, str], None]  # (branch, implementation): what served it


class Declined(ValueError):
    """The backend that was named does not take these inputs; the message says why."""


@dataclass(frozen=True)
class Backend:
    """One implementation of the three branches.

    `run(inputs, note)` returns {branch: o [B, T, HQ, DV]} for the branches asked for, never packed;
    `why_not(inputs)` lists the reasons it can't take them, empty when it can. `fused(inputs, note)`
    returns their gated sum, packed or not, for a backend that can do without the branches' outputs.
    """

    name: str
    run: Callable[[Inputs, Note], dict[str, Tensor]]
    why_not: Callable[[Inputs], list[str]]
    summary: str
    quadratic: bool  # holds a T x T tensor per head
    # Reasons for which `auto` passes over it although it would run.
    not_for_auto: Callable[[Inputs], list[str]] = lambda inputs: []
    fused: Callable[[Inputs, Note], Tensor] | None = None


# The order in which `auto` prefers them.
_MODULES = ("flash", "flex", "packed", "gather", "sdpa", "masked", "sequential")


def backends() -> tuple[Backend, ...]:
    """Every backend, in the order in which `auto` prefers them."""
    return tuple(import_module(f"nsa.attention.backends.{m}").BACKEND for m in _MODULES)


def names() -> list[str]:
    """The backends' names, in order of preference."""
    return list(_MODULES)


def check_name(name: str) -> str:
    """`name` if it is "auto" or a backend; else a ValueError that names the nearest."""
    known = ["auto", *names()]
    if name in known:
        return name
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"backend {name!r} is unknown; known are {', '.join(known)}{hint}")


def get(name: str) -> Backend:
    """The backend of that name; ValueError for any other, "auto" included."""
    check_name(name)
    if name == "auto":
        raise ValueError("'auto' is a choice between backends; use choose(inputs)")
    return import_module(f"nsa.attention.backends.{name}").BACKEND


@dataclass(frozen=True)
class Choice:
    """What `auto` took and why it passed over those it prefers."""

    backend: Backend
    declined: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"auto takes {self.backend.name}: {self.backend.summary}"]
        lines += [f"  {name} declined: {'; '.join(why)}" for name, why in self.declined.items()]
        return "\n".join(lines)


def choose(inputs: Inputs) -> Choice:
    """The first backend in order of preference that takes the inputs, with the others' reasons."""
    declined: dict[str, list[str]] = {}
    for backend in backends():
        reasons = [*backend.why_not(inputs), *backend.not_for_auto(inputs)]
        if not reasons:
            return Choice(backend, declined)
        declined[backend.name] = reasons
    listed = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in declined.items())
    raise ValueError(f"no backend takes these inputs:\n{listed}")
