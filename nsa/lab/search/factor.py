"""One thing that a trial can vary: its legal values, its default; and what goes together.

COMMON is there for every subject.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa.spelling import nearest


@dataclass(frozen=True)
class Factor:
    """One thing that a trial can vary.

    legal: raises ValueError or says what would do, "" for a legal value. place: "settings", which
    the subject gets, or "spec", "deadline": the trial itself. env: variables that a value needs set
    before Python starts. slows: how much longer a step may take at another value than the default;
    above 1 it is an observer, which is no part of what is trained.
    """

    name: str
    default: Any
    legal: Callable[[Any], str]
    help: str
    choices: tuple[Any, ...] = ()
    place: str = "settings"
    env: Callable[[Any], dict[str, str]] = field(default=lambda value: {})
    slows: float = 1.0

    def check(self, value: Any) -> Any:
        """The value; ValueError where it is not legal, with what would do."""
        if wrong := self.legal(value):
            raise ValueError(f"{self.name}={value!r}: {wrong}")
        return value


@dataclass(frozen=True)
class Rule:
    """What does not go together: `why(values)` of the factors `names`, "" where it does."""

    names: tuple[str, ...]
    why: Callable[..., str]

    def broken(self, settings: Mapping[str, Any]) -> str:
        """Why these cannot be run; "" too while one of the names is missing."""
        if not all(name in settings for name in self.names):
            return ""
        return self.why(*(settings[name] for name in self.names))


def whole(least: int) -> Callable[[Any], str]:
    def legal(value: Any) -> str:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if good else f"must be a whole number of at least {least}"

    return legal


def or_none(legal: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else legal(value)


def switch(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def text(value: Any) -> str:
    return "" if isinstance(value, str) else "must be text; put it in quotes"


def positive(value: Any) -> str:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
    return "" if good else "must be a number greater than 0"


def one_of(*choices: str) -> Callable[[Any], str]:
    def legal(value: Any) -> str:
        if value in choices:
            return ""
        return f"is unknown; {nearest(value, choices)}"

    return legal


def _interpreter(value: Any) -> str:
    if value is None:
        return ""
    found = shutil.which(value) if isinstance(value, str) else None
    if found and os.access(found, os.X_OK):
        return ""
    return "must be the path of a Python interpreter that can be run"


def choice(name: str, default: str, choices: tuple[str, ...], help: str, **more: Any) -> Factor:
    return Factor(name, default, one_of(*choices), help, choices, **more)


def on_off(name: str, default: bool, help: str, **more: Any) -> Factor:
    return Factor(name, default, switch, help, (default, not default), **more)


def by_name(*factors: Factor) -> dict[str, Factor]:
    return {factor.name: factor for factor in factors}


COMMON = by_name(
    Factor("ranks", 1, whole(1), "processes, started by torchrun when there are several",
           place="spec"),
    Factor("seed", 1337, whole(0), "of weights and data", place="spec"),
    Factor("python", None, _interpreter, "another interpreter, with its own torch", place="spec"),
    Factor("deadline_factor", 1.0, positive, "times the plan's deadline_s", place="deadline"),
)  # fmt: skip
