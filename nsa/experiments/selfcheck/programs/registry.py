"""Which programs there are, and what a careful engineer would say of each after seeing it run."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nsa.experiments.selfcheck.programs import common
from nsa.spelling import nearest

FILES = (
    *("compute", "data", "outside", "threads", "reads", "ranks", "ends"),
    *("frozen_healthy", "frozen_ranks", "frozen_hangs"),
)


@dataclass(frozen=True)
class Program:
    """A generator over training steps, in one or more forms; each form's step yields its loss."""

    name: str
    group: str  # "healthy", "hang", "slow" or "fails"
    text: str
    run: Callable[[int], Iterator[float]]
    due: str = "PASS"  # "HANG:lock or STALLED:lock": any of these is right, the first is best
    forms: int = 2
    ranks: int = 1
    steps: int = 6
    seconds: tuple[float, float] = (0.0, 0.0)  # its longest quiet, least and most over the forms
    certifiable: bool = False  # could anybody prove from outside that it can never go on?
    line: str = ""  # the user's function that a report must name; several: "bleu or auc"
    rank: int | None = None  # the one to blame, None where none or all are
    batch: str = "first"  # or "frozen": written after the rules were frozen
    load_sensitive: bool = False  # a busy machine changes what it is, not only how long it takes

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of verdict that are right, best first."""
        return tuple(each.partition(":")[0] for each in self.due.split(" or "))


_found: dict[str, Program] = {}


def program(group: str, at: int | None = None, **told: Any) -> Callable[[Callable], Callable]:
    """Enters a function of `form` under its own name; its docstring is the program's text.

    It is a generator of losses; or, with `at`, what happens once in an ordinary training, after
    that step.
    """

    def enter(function: Callable) -> Callable:
        name = function.__name__
        assert name not in _found, f"two programs are called {name}"
        run = function if at is None else partial(common.training_with, function, at)
        if group in ("hang", "slow"):
            told.setdefault("line", name)
        _found[name] = Program(name, group, function.__doc__ or "", run, **told)
        return function

    return enter


def __getattr__(name: str) -> Any:
    """PROGRAMS, once all files are loaded: they import this module themselves."""
    if name != "PROGRAMS":
        raise AttributeError(name)
    for file in FILES:
        importlib.import_module(f"nsa.experiments.selfcheck.programs.{file}")
    return tuple(_found.values())


def chosen(names: Iterable[str] = ()) -> tuple[Program, ...]:
    """Those of these names, in the registry's order; all without a name.

    Raises ValueError for a name that there is not, with the nearest.
    """
    programs, wanted = __getattr__("PROGRAMS"), list(names)
    for name in wanted:
        if name not in _found:
            raise ValueError(f"no program {name!r}; {nearest(name, list(_found), 0)}")
    return tuple(each for each in programs if not wanted or each.name in wanted)


class Running:
    """A program as a trial's subject. settings: program, its name; form (0)."""

    def __init__(self, settings: dict[str, Any], progress: Any = None) -> None:
        (program,) = chosen([settings["program"]])
        form = settings.get("form", 0)
        if form not in range(program.forms):
            raise ValueError(f"form={form!r}: {program.name} has forms 0 to {program.forms - 1}")
        self.losses = iter(program.run(form))

    def step(self, step: int) -> float:
        """The next step's loss."""
        return next(self.losses)

    def close(self) -> None:
        """Comes to the program's own end, then leaves the process group, if it joined one."""
        for _ in self.losses:
            pass
        common.leave()


make = Running
