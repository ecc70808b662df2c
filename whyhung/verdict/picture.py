"""Draw who waits for whom as a small picture, in lines of text.

An edge is a dict of a verdict: from, at, kind, text, to (names), left_s, outside, source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import wrap
from typing import Any

MOST = 12  # nodes that a picture shows
WIDTH = 100
DEVICE = "what its device executes"
OUTSIDE, NOBODY = "somebody who is not observed", "nobody else who was seen"
_RANKS = re.compile(r" for ranks? \d+(?:(?:, | and |-)(?:ranks? )?\d+)*")
TIMED = re.compile(r"\d (?:ms|s|min|h)\b")  # a text that states a duration itself
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Node:
    """One that waits, several that wait alike, or one that is waited for."""

    name: str
    at: str = ""  # the user's line
    waits: list[str] = field(default_factory=list)  # in words
    to: list[str] = field(default_factory=list)  # names of others
    outer: bool = False  # no process or thread: a timer, the outside, nobody
    many: bool = False
    kind: str = ""  # kind of its wait

    def itself(self) -> str:
        return "one another" if self.many else "itself"


def picture(edges: Sequence[dict[str, Any]]) -> tuple[list[Node], int]:
    """Return (at most MOST nodes, waiting ones before those waited for; number left out)."""
    members: dict[Any, list[dict[str, Any]]] = {}
    crowd = len({edge["from"] for edge in edges}) > MOST
    for edge in edges:
        alike = (edge.get("kind"), edge.get("at"), _RANKS.sub("", edge.get("text") or ""))
        merges = crowd or edge.get("kind") == "collective"
        members.setdefault(alike if merges else edge["from"], []).append(edge)
    named = [(group, _together(group)) for group in members.values()]
    names = {edge["from"]: name for group, name in named for edge in group}
    found: dict[str, Node] = {}
    for edge in edges:
        name, said = names[edge["from"]], edge.get("text") or edge.get("kind") or ""
        node = found.setdefault(name, Node(name, edge.get("at") or ""))
        node.kind, node.many = edge.get("kind") or "", node.many or name != edge["from"]
        if node.kind == "collective" and edge.get("to"):
            said = _RANKS.sub("", said)  # the arrows show for whom
        node.waits += [] if said in node.waits else [said]
        ends = [names.get(to, to) for to in edge.get("to") or ()]
        if edge.get("left_s") is not None:
            ends.append(f"a timer: {seconds(edge['left_s'])} left")
        elif edge.get("outside"):
            ends.append(DEVICE if node.kind == "device" else OUTSIDE)
        if not ends and node.kind not in ("collective", "other"):
            ends = [NOBODY]
        node.to = list(dict.fromkeys([*node.to, *ends]))
    for node in found.values():
        if node.many and len(node.to) > 1:  # for each other as well, which says less
            node.to = [to for to in node.to if to != node.name]
    known = {edge["from"] for edge in edges} | {to for edge in edges for to in edge.get("to") or ()}
    for name in [to for node in found.values() for to in node.to]:
        found.setdefault(name, Node(name, outer=name not in known))
    ordered = _walked(found)
    shown = {name: found[name] for name in ordered[:MOST]}
    for node in shown.values():
        node.to = [to for to in node.to if to in shown]
    return list(shown.values()), len(ordered) - len(shown)


def text(edges: Sequence[dict[str, Any]], width: int = WIDTH) -> list[str]:
    """Return lines: under each node its waits, then an arrow to each node that could end them."""
    nodes, more = picture(edges)
    found, lines, told = {node.name: node for node in nodes}, [], set()

    def draw(name: str, first: str, rest: str, above: tuple[str, ...]) -> None:
        node = found[name]
        said = f"{name}, at {node.at}" if node.at else name
        if name in above:
            said = f"{name}: round again" if above[-1] != name else node.itself()
        elif name in told and node.to:
            said = f"{name} (see there)"
        lines.append(clipped(first + said, width))
        if name in above or name in told:
            return
        told.add(name)
        bar = "│ " if node.to else "  "
        said = (part for waits in node.waits for part in wrap(clipped(waits, 400), width - 50))
        lines.extend(clipped(rest + bar + part, width) for part in said)
        for to in node.to:
            last = to == node.to[-1]
            draw(to, rest + ("└─▶ " if last else "├─▶ "), rest + ("    " if last else "│   "),
                 (*above, name))  # fmt: skip

    for node in nodes:
        if node.name not in told:
            draw(node.name, "", "", ())
    return [*lines, f"and {more} more"] if more else lines


def seconds(s: float) -> str:
    """Return "9 s", "4 min", "3.5 h"."""
    return f"{s:.0f} s" if s < 120 else f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def clipped(line: str, width: int = WIDTH) -> str:
    """Return a line of at most `width`, without control codes of a terminal or XML."""
    line = "".join(c if c.isprintable() else " " for c in _COLOURS.sub("", line))
    return line if len(line) <= width else line[: width - 1] + "…"


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: "0-2, 4, 6-63"."""
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs(numbers))


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers in order, each with those that follow it without a gap."""
    ordered = enumerate(sorted(set(numbers)))
    return [[n for _, n in run] for _, run in groupby(ordered, key=lambda pair: pair[1] - pair[0])]


def _together(group: list[dict[str, Any]]) -> str:
    """Return one name for all that wait alike."""
    names = list(dict.fromkeys(edge["from"] for edge in group))
    if len(names) == 1:
        return names[0]
    ranks = [re.fullmatch(r"rank (\d+)", name) for name in names]
    if all(ranks):
        return f"ranks {spans([int(rank[1]) for rank in ranks])}"
    return f"{names[0]} and {len(names) - 1} alike"


def _walked(found: dict[str, Node]) -> list[str]:
    """Return names in order: those nobody waits for, then those they wait for; cycles as found."""
    wanted = {to for node in found.values() for to in node.to if to != node.name}
    ordered: dict[str, None] = {}
    for start in [*(name for name in found if name not in wanted), *found]:
        queue = [start]
        while queue:
            name = queue.pop(0)
            if name not in ordered:
                ordered[name] = None
                queue += found[name].to
    return list(ordered)
