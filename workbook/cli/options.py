"""Shared by the commands: exit codes, options, and parsing of words on the command line."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from whyhung import cli as hung
from whyhung.cli import BAD_INPUT, FAILED, GOOD, duration
from workbook.runs import places

__all__ = ["BAD_INPUT", "FAILED", "GOOD", "duration"]
SEVERAL: dict[str, Any] = {"action": "append", "default": []}  # an option that may be repeated


def words(text: str) -> list[str]:
    """`a,b` as ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


# Options of several commands. A callable default is evaluated when a parser is made.
SHARED: dict[str, dict[str, Any]] = {
    "--runs": {"default": partial(places.beside, "runs"), "help": "where runs are kept"},
    "--trials": {"default": partial(places.beside, "trials"), "help": "where trials are kept"},
    "--notebooks": {"default": places.notebooks, "help": "where they lie"},
    "--again": {"action": "store_true", "help": "run it though it is there; that is kept, as ID-1"},
    "--evidence": {
        "action": "store_true",
        "help": "notebooks are to be committed: refused unless all source is in a commit",
    },
    "--json": {"action": "store_true", "help": "print JSON instead of a table"},
    "--budget": {"type": duration, "metavar": "TIME", "help": "90, 90s, 20m or 2h"},
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "where"},
    "run": {"metavar": "RUN", "help": "id, its beginning, a path, or latest"},
    "plan": {"metavar": "PLAN", "help": "YAML file: factors, settings, steps, ..."},
}


def command(
    commands, function: Callable[[argparse.Namespace], int], *shared: str, under: str = ""
) -> argparse.ArgumentParser:
    """Parser for `nsa NAME`, which calls the function of that name; its result is the exit code.

    The function's docstring is the help. `shared` names options of SHARED to add. With `under`, the
    command is `nsa THAT NAME` and is listed in the help of that one.
    """
    if under:
        # argparse cannot tell a sub-command from a positional argument of `nsa trial`
        text = " ".join((function.__doc__ or "").split())
        made = commands.add_parser(f"{under} {function.__name__}", description=text)
        made.set_defaults(command=function)
        commands.choices[under].add_argument_group(made.prog, text)
    else:
        made = hung.command(commands, function)
    share(made, *shared)
    return made


def share(made: argparse.ArgumentParser, *names: str) -> None:
    """Add options of SHARED."""
    for name in names:
        given = dict(SHARED[name])
        if callable(place := given.get("default")):
            text = f"{given['help']}; default: %(default)s"
            given |= {"default": place(), "metavar": "DIR", "help": text}
        made.add_argument(name, **given)


def of_fields(made: argparse.ArgumentParser, owner: type, **changes: dict[str, Any]) -> None:
    """Add an option for each field of a dataclass whose metadata has its "help", by
    workbook.lab.training.setting; it is stored under the field's name.

    Its type, default and choices are the field's, the rest of the metadata is argparse's.
    changes: other keywords for some fields, by name.
    """
    for one in fields(owner):
        told = {n: x for n, x in one.metadata.items() if n != "least"}
        option = told.pop("option", "--" + one.name.replace("_", "-"))
        given = {"dest": one.name, "default": one.default} | told
        kind = next(k for k in (*get_args(one.type), one.type) if k is not NoneType)
        if isinstance(one.default, bool):
            given["action"] = "store_false" if one.default else "store_true"
        elif isinstance(one.default, tuple):
            given["default"] = []
            given |= {} if "action" in told else {"type": words}
        else:
            given["type"] = kind
        made.add_argument(option, **given | changes.get(one.name, {}))


def check_json(file: str | None) -> None:
    """Raise ValueError if the file of --json is not writable, before any rows are measured."""
    if file and not Path(file).resolve().parent.is_dir():
        raise ValueError(f"--json {file}: its folder does not exist; make it first")
    if file and Path(file).is_dir():
        raise ValueError(f"--json {file} is a folder; name a file")


def place_of(option: str, name: str, runs: str) -> Path:
    """Path of that name, else the folder of the run so named. ValueError if there is neither."""
    from workbook.runs.store import Store

    if Path(name).exists():
        return Path(name)
    try:
        return Store(runs).find(name)
    except ValueError as error:
        why = f"there is no such file or folder, and {error}"
        raise ValueError(f"{option} {name}: {why}") from None


def has_gpu(device: str, instead: str) -> bool:
    """True if --device is a GPU that torch finds. ValueError for one that it does not find."""
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ValueError(f"--device cuda: torch finds no GPU; --device cpu {instead}")
    return found and device != "cpu"


def of_model(given: Mapping[str, Any], said: str = "") -> dict[str, Any]:
    """Nest `name` as fields of ModelConfig, `nsa.name` below "nsa". ValueError for another dot; its
    message has `said` before the name."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        outer, dot, inner = name.partition(".")
        if dot and outer != "nsa":
            raise ValueError(f"{said}{name}: only nsa has fields below it, e.g. nsa.window=64")
        below = changes.setdefault("nsa", {}) if dot else changes
        below[inner or outer] = value
    return changes


def provenance() -> dict[str, Any]:
    """Columns of rows in a file for their machine, source and date."""
    from workbook.runs import environment

    return environment.provenance(environment.snapshot()) | {"date": environment.utc_now()}


def import_from_here() -> None:
    """Put the current folder on sys.path, as `python -m nsa` does and `nsa` does not."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
