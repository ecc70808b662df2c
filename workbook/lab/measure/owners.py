"""Owners of tensors: modules of a model, an optimizer, or any named object holding them."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from whyhung.verdict.frames import is_code
from workbook.lab.measure.lines import calling, shown
from workbook.lab.measure.recorders import by_category, local
from workbook.lab.oracles.steps import anywhere

# Limits of the owner search for tensors that existed before the step: each costs a comparison with
# every Python object.
LOOKED_AT, MOST_LOOKED_AT = 0.002, 40  # minimum share, and number of tensors
DEPTH, MOST_LISTED = 4, 100_000  # search depth, and maximum length of a list
BEFORE = "before the step"


@dataclass(frozen=True)
class Owner:
    """Owner of a block: the module with layers merged, the line, or the operator."""

    module: str = ""
    line: str = ""
    operator: str = ""
    phase: str = BEFORE


NOBODY = Owner()


class Parts:
    """Tensors of a training by category, and their owners: parameters, buffers and gradients of
    models, and optimizer state. Models and optimizers may be added while a user's step runs."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.models: list[nn.Module] = [] if model is None else [model]
        self.optimizers: list[Any] = []

    def watched(self) -> dict[str, list[Tensor]]:
        return by_category(self._parameters(), (value for _, value in self._states()))

    def owners(self) -> dict[int, Owner]:
        """Return owners by address; the line is that of the owning class."""
        found: dict[int, Owner] = {}
        named = self._parameters()
        for p, owner in named.items():
            for tensor in (p, p.grad):
                if tensor is not None:
                    found[local(tensor).untyped_storage().data_ptr()] = owner
        for p, value in self._states():
            found[local(value).untyped_storage().data_ptr()] = named.get(p, NOBODY)
        for model in self.models:
            for name, buffer in model.named_buffers():
                owner = _owner(model, name)
                found.setdefault(local(buffer).untyped_storage().data_ptr(), owner)
        return found

    def _parameters(self) -> dict[Tensor, Owner]:
        found: dict[Tensor, Owner] = {}
        for model in self.models:
            for name, p in model.named_parameters():
                found.setdefault(p, _owner(model, name))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    found.setdefault(p, NOBODY)
        return found

    def _states(self) -> Iterator[tuple[Tensor, Tensor]]:
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                for value in state.values() if isinstance(state, Mapping) else ():
                    for one in value if isinstance(value, list | tuple) else [value]:
                        if isinstance(one, Tensor):
                            yield p, one


def _owner(model: nn.Module, name: str) -> Owner:
    """Return the owner of a parameter or buffer: its module, and the line of the innermost
    enclosing class in user code."""
    path, line = name.split(".")[:-1], ""
    for depth in range(len(path), -1, -1):
        inside = ".".join(path[:depth])
        if line := _class_line(type(model.get_submodule(inside))):
            break
    return Owner(anywhere(".".join(path)) or type(model).__name__, line)


@lru_cache(maxsize=1024)
def _class_line(kind: type) -> str:
    try:
        file = inspect.getsourcefile(kind) or ""
        if not is_code(f"{file}:1 {kind.__name__}"):
            return ""
        return f"{shown(file)}:{inspect.getsourcelines(kind)[1]} {kind.__qualname__}"
    except (OSError, TypeError):
        return ""


def local_names() -> dict[int, str]:
    """Return names such as "x in main (train.py:53)" of tensors held now by user functions."""
    found, frame = {}, None if sys.gettrace() else sys._getframe()  # clearing would harm a tracer
    while frame is not None:
        line = calling(frame)
        if is_code(f"{frame.f_code.co_filename}:1 {frame.f_code.co_name}"):
            place, _, function = line.partition(" ")
            names = frame.f_locals
            for name, value in names.items():
                if type(value) is Tensor:
                    found[id(value)] = f"{name} in {function} ({place})"
            if isinstance(names, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                names.clear()  # a copy that the frame would keep alive with its tensors
        frame = frame.f_back
    return found


def holders(tensors: list[Tensor]) -> dict[int, str]:
    """Return "package.module.NAME" or "package.module.Class.name" of each tensor's referrer, by
    id, with [...] for a list or mapping in between. Tensors without a name are left out."""
    found: dict[int, str] = {}
    # Objects searched for; for each tensor in one, the rest of its path: if the object is the
    # __dict__ of another, and if it is a value.
    wanted: dict[int, tuple[Any, dict[int, tuple[str, str]]]]
    wanted = {id(t): (t, {id(t): ("", "")}) for t in tensors}
    for _ in range(DEPTH):
        reached: dict[int, tuple[Any, dict[int, tuple[str, str]]]] = {}
        own = {id(tensors), *map(id, wanted.values())}
        # One scan of all Python objects for all of them.
        for outer in gc.get_referrers(*(thing for thing, _ in wanted.values())) if wanted else ():
            if id(outer) in own:
                continue
            names = outer if isinstance(outer, dict) else getattr(outer, "__dict__", None)
            kind = type(outer)
            module = isinstance(outer, ModuleType)
            whose = outer.__name__ if module else f"{kind.__module__}.{kind.__qualname__}"
            if names is not outer and id(names) in wanted:
                for tensor, (way, _) in wanted[id(names)][1].items():
                    found.setdefault(tensor, whose + way)
                continue
            if isinstance(outer, FunctionType) and id(outer.__closure__) in wanted:
                for tensor in wanted[id(outer.__closure__)][1]:
                    found.setdefault(tensor, f"{outer.__module__}.{outer.__qualname__}'s closure")
                continue
            listed = isinstance(outer, list | tuple | CellType)
            items = names.items() if isinstance(names, dict) else ()
            if isinstance(outer, CellType):
                items = [("", outer.cell_contents)]
            elif listed and len(outer) <= MOST_LISTED:
                items = enumerate(outer)
            for key, value in list(items):
                for tensor, (_, way) in wanted.get(id(value), (None, {}))[1].items():
                    if names is not outer and not listed:
                        found.setdefault(tensor, f"{whose}.{key}{way}")
                    elif not listed and "__spec__" in outer:  # the names of a module
                        found.setdefault(tensor, f"{outer['__name__']}.{key}{way}")
                    else:
                        inside = reached.setdefault(id(outer), (outer, {}))[1]
                        inside.setdefault(tensor, (f".{key}{way}", "[...]"))
        wanted = {
            key: (thing, rest)
            for key, (thing, inside) in reached.items()
            if (rest := {t: ways for t, ways in inside.items() if t not in found})
        }
        wanted = dict(islice(wanted.items(), MOST_LOOKED_AT))
    return found
