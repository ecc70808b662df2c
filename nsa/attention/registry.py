"""The ways to compute the one operation, and which of them takes given inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from nsa.attention import measured, transforms
from nsa.attention.inputs import Inputs
from nsa.spelling import nearest

Note = Callable[[str, str], None]  # (branch, implementation): what served it
# By branch: o [B, T, HQ, DV] and its lse [B, T, HQ], natural log, if `Inputs.needs_lse`, else None.
Branches = dict[str, tuple[Tensor, Tensor | None]]


class Declined(ValueError):
    """The backend that was named does not take these inputs; the message says why."""


@dataclass(frozen=True)
class Backend:
    """One implementation of the three branches.

    `run(inputs, note)` returns the branches asked for, never packed, and lse is of keys alone;
    `why_not(inputs)` lists the reasons it can't take them, empty when it can. `fused(inputs, note)`
    returns (their gated sum, {branch: lse} if `return_lse`), packed or not, for a backend that can
    do without the branches' outputs; such a one puts sinks into all that it returns itself.
    """

    name: str
    run: Callable[[Inputs, Note], Branches]
    summary: str
    quadratic: bool  # holds a T x T tensor per head
    why_not: Callable[[Inputs], list[str]] = lambda inputs: []
    # Reasons for which `auto` passes over it although it would run.
    not_for_auto: Callable[[Inputs], list[str]] = lambda inputs: []
    fused: Callable[[Inputs, Note], tuple[Tensor, dict[str, Tensor]]] | None = None
    # What strict mode asks before it computes: raises where this device computes something else.
    first_use: Callable[[Inputs], None] = lambda inputs: None
    transforms: frozenset[str] = frozenset()  # those of torch.func that it has

    def declines(self, inputs: Inputs) -> list[str]:
        """Every reason for which it can't compute a call, where torch.func transforms it too."""
        if lacking := sorted(transforms.active() - self.transforms):
            able = [one.name for one in backends() if one.transforms >= transforms.active()]
            named = ", ".join(lacking)
            return [f"has no {named} of torch.func; {', '.join(map(repr, able))} can"]
        return self.why_not(inputs)


# The order in which `auto` prefers them where nothing was measured.
_MODULES = ("triton", "flash", "flex", "packed", "gather", "sdpa", "masked", "sequential")


def backends() -> tuple[Backend, ...]:
    """Every backend, in the order in which `auto` prefers them."""
    return tuple(_load(name) for name in _MODULES)


def names() -> list[str]:
    """The backends' names, in order of preference."""
    return list(_MODULES)


def check_name(name: str) -> str:
    """`name` if it is "auto", a backend or a variant of one, as "sdpa:math"; else a ValueError that
    names the nearest."""
    backends()
    known = ["auto", *_loaded]
    if name in known:
        return name
    raise ValueError(f"backend {name!r} is unknown; {nearest(name, known)}")


def get(name: str) -> Backend:
    """The backend of that name; ValueError for any other, "auto" included."""
    check_name(name)
    if name == "auto":
        raise ValueError("'auto' is a choice between backends; use choose(inputs)")
    return _load(name)


_loaded: dict[str, Backend] = {}


def _load(name: str) -> Backend:
    if name not in _loaded:
        module = import_module(f"nsa.attention.backends.{name}")
        for backend in (module.BACKEND, *getattr(module, "VARIANTS", ())):
            _loaded[backend.name] = backend
    return _loaded[name]


@dataclass(frozen=True)
class Choice:
    """What `auto` took, why it passed over those it prefers, and the measurement it went by."""

    backend: Backend
    declined: dict[str, list[str]]
    ranking: measured.Ranking | None = None

    def __str__(self) -> str:
        lines = [f"auto takes {self.backend.name}: {self.backend.summary}"]
        lines += [f"  {self.ranking}"] if self.ranking else []
        lines += [f"  {name} declined: {'; '.join(why)}" for name, why in self.declined.items()]
        return "\n".join(lines)


def choose(inputs: Inputs) -> Choice:
    """The first backend in order of preference that takes the inputs, with the others' reasons.

    Where a shape near this one was measured on such a GPU, those measured change places by speed.
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
