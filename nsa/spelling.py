"""Parsing of user input: names that may be misspelt, and name=value pairs."""

import ast
import difflib
from collections.abc import Collection, Iterable
from typing import Any

FEW = 4  # up to this many names are listed in full


def nearest(name: object, known: Iterable[object], cutoff: float = 0.6) -> str:
    """Error text for an unknown name: the nearest known one, or all if there are few.

    cutoff: minimum similarity of the nearest, from 0 (anything) to 1 (the same), see difflib.
    """
    names = [str(one) for one in known if one is not None]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    if near and len(names) > FEW:
        return f"the nearest is {near[0]!r}"
    return f"known are {', '.join(names)}"


def pair(text: str, example: str, signs: str = "=") -> tuple[str, str]:
    """Split `name=value` at any of `signs`, without surrounding whitespace.

    A colon is for parameters of notebooks: papermill cannot read a line with two equals signs.

    ValueError if there is no sign, or nothing before it; the message has the example.
    """
    sign = next((letter for letter in text if letter in signs), None)
    name, _, value = (part.strip() for part in text.partition(sign or signs[0]))
    if sign is None or not name:
        raise ValueError(f"{text!r} is not of the form name{signs[0]}value, as in {example}")
    return name, value


def settings(texts: Iterable[str], example: str, *, last: bool = False) -> dict[str, Any]:
    """Parse `name=value` pairs to a mapping; values of "env." names stay text, as in a shell.

    Values are Python literals, and true, false and none in any case; anything else is text.
    ValueError for a text that is no pair, and for a repeated name unless `last` (the last counts).
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, value = pair(text, example)
        if name in found and not last:
            raise ValueError(f"{name} is given twice")
        found[name] = value if name.startswith("env.") else _literal(value)
    return found


def _literal(text: str) -> Any:
    names = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in names:
        return names[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def choice(name: str, given: object, known: Collection[object]) -> None:
    """Raise ValueError unless `given` is one of `known`."""
    if given not in known:
        raise ValueError(f"{name}={given!r} is unknown; {nearest(given, known)}")
