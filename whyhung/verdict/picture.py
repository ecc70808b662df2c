"""Draw who waits for whom as a small picture: lines of text, or SVG without scripts.

An edge is a dict of a verdict: from, at, kind, text, to (names), left_s, outside, source.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from textwrap import wrap
from typing import Any

MOST = 12  # nodes that a picture shows
COLUMNS = 4
WIDTH = 100
DEVICE = "what its device executes"
OUTSIDE, NOBODY = "somebody who is not observed", "nobody else who was seen"
_WIDE, _HIGH, _GAP, _LETTERS = 280, 62, 46, 41  # size of a box, in SVG's units and in letters
_RANKS = re.compile(r" for ranks? \d+(?:(?:, | and |-)(?:ranks? )?\d+)*")
TIMED = re.compile(r"\d (?:ms|s|min|h)\b")  # a text that states a duration itself
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#1d2430}.n{font-weight:600}.w{fill:#5a6472}
rect{fill:#fff;stroke:#8a94a3}.p{fill:#f6f7f9;stroke:none}.o{stroke-dasharray:4 3}
path{fill:none;stroke:#5a6472;stroke-width:1.4}.b{stroke:#c0392b;stroke-dasharray:5 3}
.h{fill:#5a6472;stroke:none}@media (prefers-color-scheme:dark){text{fill:#e6e9ee}.w{fill:#aab3c0}
rect{fill:#20262f;stroke:#6d7887}.p{fill:#14181e}path{stroke:#aab3c0}.b{stroke:#ff8a7a}
.h{fill:#aab3c0}}""".replace("\n", "")


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
    names = {edge["from"]: _together(group) for group in members.values() for edge in group}
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


def svg(edges: Sequence[dict[str, Any]]) -> str:
    """Return a standalone SVG, for a light and a dark page: a column per step of waiting.

    An arrow that leads back, which closes a cycle, is red and dashed. "" for no edges.
    """
    nodes, more = picture(edges)
    if not nodes:
        return ""
    depth: dict[str, int] = {}
    for node in nodes:
        depth.setdefault(node.name, 0)
        for to in node.to:
            depth.setdefault(to, depth[node.name] + 1)
    counts = Counter(depth.values())
    tops = [0]  # top of each band of COLUMNS columns, in rows
    for first in range(0, max(counts) + 1, COLUMNS):
        tops.append(tops[-1] + max(counts[first + column] for column in range(COLUMNS)))
    place, rows = {}, Counter()
    for node in nodes:
        band, column = divmod(depth[node.name], COLUMNS)
        row = tops[band] + rows[depth[node.name]]
        rows[depth[node.name]] += 1
        place[node.name] = (16 + column * (_WIDE + _GAP), 16 + row * (_HIGH + 34))
    wide = 32 + min(max(counts) + 1, COLUMNS) * (_WIDE + _GAP) - _GAP
    high = 16 + tops[-1] * (_HIGH + 34) + (16 if more else 0)
    drawn = [
        _arrow(place[node.name], place[to], back=depth[to] <= depth[node.name])
        for node in nodes
        for to in node.to
    ]
    drawn += [_box(node, *place[node.name]) for node in nodes]
    if more:
        drawn.append(f'<text class="w" x="16" y="{high - 8}">and {more} more</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" aria-labelledby="t d"><title id="t">Who waits for '
        f'whom</title><desc id="d">{escape(described(edges))}</desc><style>{_STYLE}</style>'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="h" d="M0 0L8 4L0 8z"/></marker></defs>'
        f'<rect class="p" width="{wide}" height="{high}" rx="6"/>{"".join(drawn)}</svg>'
    )


def image(edges: Sequence[dict[str, Any]]) -> str:
    """Return the SVG in an <img>: notebooks and reports keep that and drop an inline one."""
    data = b64encode(svg(edges).encode()).decode()
    return f'<img alt="{escape(described(edges))}" src="data:image/svg+xml;base64,{data}">'


def described(edges: Sequence[dict[str, Any]]) -> str:
    """Return a description in one line, as alternative text."""
    nodes, more = picture(edges)
    told = []
    for node in nodes:
        to = [node.itself() if to == node.name else to for to in node.to]
        if to:
            told.append(f"{node.name} ({'; '.join(node.waits)}) waits for {', '.join(to)}")
    return clipped(". ".join([*told, *([f"And {more} more"] if more else [])]), 2000)


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


def _arrow(a: tuple[int, int], b: tuple[int, int], *, back: bool) -> str:
    (x, y), (to_x, to_y) = a, b
    if to_x > x:
        x, y, to_y = x + _WIDE, y + _HIGH // 2, to_y + _HIGH // 2
        middle = (x + to_x) // 2
        path = f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    else:  # below the boxes, or down to the next band
        x, to_x, y = x + _WIDE * 2 // 3, to_x + _WIDE // 3, y + _HIGH
        low = y + 30
        to_y += _HIGH if back else 0
        high = max(low, to_y + 30) if back else to_y - 30
        path = f"M{x} {y}C{x} {max(low, high) if back else low} {to_x} {high} {to_x} {to_y}"
    return f'<path class="{"b" if back else "f"}" d="{path}" marker-end="url(#a)"/>'


def _box(node: Node, x: int, y: int) -> str:
    lines = [(node.name, "n"), (node.at, ""), ("; ".join(node.waits), "w")]
    lines = [(line, kind) for line, kind in lines if line]
    told = "".join(
        f'<text class="{kind}" x="{x + 10}" y="{y + 19 + 17 * number}">'
        f"{escape(clipped(line, _LETTERS - 5 * (kind == 'n')))}</text>"
        for number, (line, kind) in enumerate(lines)
    )
    whole = escape("\n".join(clipped(line, 400) for line, _ in lines))
    outer = ' class="o"' if node.outer else ""
    box = f'<rect{outer} x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="6"/>'
    return f"<g><title>{whole}</title>{box}{told}</g>"
