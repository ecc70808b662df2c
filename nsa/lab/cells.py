"""What cells of every table check: a training run that could not be made is refused beforehand."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

DEVICES = ("cpu", "cuda")
DATA = ("text", "synthetic")


def check_whole(cell: Any, least: Mapping[str, int]) -> None:
    """ValueError unless these fields are whole numbers of at least so much."""
    for name, smallest in least.items():
        value = getattr(cell, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {smallest}")


def check_choices(cell: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """ValueError unless these fields are among what is known."""
    for name, known in choices.items():
        if getattr(cell, name) not in known:
            listed = ", ".join(known)
            raise ValueError(f"{name}={getattr(cell, name)!r} is unknown; known are {listed}")


def check_model(cell: Any, own: Iterable[str]) -> None:
    """ValueError unless the cell's config can be made and takes its tokens and data.

    own: fields of ModelConfig that the cell has itself, which its `changes` must not name.
    """
    if not isinstance(cell.changes, dict):
        raise ValueError(f"changes={cell.changes!r} must be a mapping of ModelConfig fields")
    twice = sorted(set(own) & set(cell.changes))
    if twice:
        raise ValueError(f"changes names {', '.join(twice)}, which the cell itself has")
    config = cell.config()
    if config.max_tokens is not None and cell.tokens > config.max_tokens:
        raise ValueError(f"tokens={cell.tokens} is more than max_tokens={config.max_tokens}")
    if cell.data == "text" and config.vocab < 256:
        raise ValueError(f"data='text' has 256 byte values, vocab={config.vocab} is too few")


def check_fields(cls: type, values: Mapping[str, Any], what: str, needed: Iterable[str]) -> None:
    """ValueError for a field that `what` does not have, naming the nearest, or one it needs."""
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"{what} has no field {name!r}; {hint}")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}")
