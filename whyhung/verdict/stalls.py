"""Classify ranks whose progress rests: as busy, waiting, or certified never to end.

Busy: a thread that the rank waits for uses a processor, moves bytes, or runs on the device.
Waiting: all are quiet, and what is waited for may still come. Certified: the wait-for graph is
closed, at every look: nobody is left who could end the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whyhung.verdict.activity import (
    LOOKS,
    MUCH,
    asks_again,
    at_work,
    device_waits,
    polls,
    spins,
    wakes,
)
from whyhung.verdict.chains import cycle_from, main_of, root_of, sentence, tells
from whyhung.verdict.collectives import collectives, open_calls
from whyhung.verdict.flights import Pair, Pending
from whyhung.verdict.frames import nearest, user_line
from whyhung.verdict.graph import Graph, Node, build
from whyhung.verdict.known import named_causes, waits_after_fork
from whyhung.verdict.opened import Seen, open_wait
from whyhung.verdict.rests import Rest, Stall, rests
from whyhung.watch.evidence import Evidence, Thread

RECENT = 4  # looks among which somebody must have worked to count as busy


def stall(evidence: Evidence) -> Stall | None:
    """Return the stall of the rank to blame: certificates win, then work; None if a rank moves."""
    live = [rest for rest in rests(evidence) if not rest.gone]
    quiet = [rest for rest in live if rest.seconds >= evidence.stall_s]
    calls = open_calls(evidence) if quiet else {}
    found = [one for rest in quiet if (one := _of(evidence, rest, live, calls)) is not None]
    order = {"certified": 0, "busy": 1, "timer": 2, "waiting": 3}
    found.sort(
        key=lambda x: (
            order[x.state],
            x.what in ("collective", "device"),
            x.rest.p.key(),
            x.rest.rank,
        )
    )
    if not found or (found[0].state != "certified" and len(quiet) < len(live)):
        return None
    return found[0]


def _of(
    evidence: Evidence, rest: Rest, live: Sequence[Rest], calls: Mapping[int, Pending | Pair]
) -> Stall | None:
    looks = [s for s in evidence.snapshots if s.full and s.t >= rest.since and s.of(rest.rank)]
    looks = [s for s in looks if s.p.get(rest.rank, rest.p) == rest.p]
    if len(looks) < LOOKS:
        return None
    moving = [other.rank for other in live if other.seconds < min(2.0, evidence.stall_s)]
    recent, periodic = looks[-RECENT:], asks_again(looks)
    by_device = device_waits(looks[-LOOKS:])
    waits = polls(looks, periodic) | by_device
    works = at_work(recent) - waits.keys()
    options = {"works": works, "moving": moving, "periodic": periodic, "locks": evidence.locks}
    options |= {"wakes": wakes(looks[-LOOKS:]) - waits.keys(), "waits": waits}
    graphs = [
        build(look, collectives=collectives(calls, look, waits), **options)
        for look in looks[-LOOKS:]
    ]
    last = graphs[-1]
    main = main_of(last, rest.rank)
    if main is None:
        return None
    if spun := spins(looks, rest.rank):
        return _spin(last, main, rest, spun)
    if all(_stuck(graph, rest.rank) for graph in graphs) and len(set(map(_waits, graphs))) == 1:
        return _certified(last, main, rest)
    much, hard = at_work(recent, MUCH), at_work(recent, MUCH, moves=False)
    idle = waits.keys()
    seen = Seen(looks, last, main, rest, works, much - idle, hard - idle, periodic, by_device)
    return open_wait(seen)


def _stuck(graph: Graph, rank: int) -> bool:
    main = main_of(graph, rank)
    return main is not None and main not in graph.can


def _waits(graph: Graph) -> tuple[Any, ...]:
    """Return the waits that must be the same at every look."""
    stuck = set(graph.threads) - graph.can
    rows = ((n, graph.threads[n].wait, graph.threads[n].frames) for n in sorted(stuck))
    return tuple((n, w and (w.kind, w.text), frames) for n, w, frames in rows)


def _spin(graph: Graph, main: Node, rest: Rest, mine: Sequence[Thread]) -> Stall:
    used, line = mine[-1].cpu_s - mine[0].cpu_s, user_line(mine[-1].frames)
    because = [
        f"a loop at {line} that only its own variables could end",
        f"they were the same at {len(mine)} looks, while it used {used:.1f} s of a processor",
    ]
    return Stall("certified", "loop", rest, because, line, where=graph.label(main), pid=main[0])


def _certified(graph: Graph, main: Node, rest: Rest) -> Stall:
    chain = [node for node in graph.reach(main) if node in graph.threads]
    root = root_of(graph, main)
    waits = {node: wait for node in chain if (wait := graph.threads[node].wait)}
    of = main if waits[main].kind != "collective" else root
    ends = graph.process(root)
    if root in waits and ends is not None and waits_after_fork(ends, graph.threads[root]):
        of = root
    what = waits[of].kind if of in waits else "ended"
    for node in chain:
        process = graph.process(node)
        if process is not None and process.state in ("Z", "X") and node != main:
            what = "collective" if waits[main].kind == "collective" else "ended"
    if any("can never end" in wait.text for wait in waits.values()):
        what = "collective"
    cycle = cycle_from(graph, main)
    shown = cycle or [node for node in chain if node in waits and tells(graph, main, node)][:12]
    if main not in shown:
        shown = [main, *shown]
    because = [sentence(graph, node) for node in shown[:4] if node in waits]
    if cycle:
        many = f"{len(cycle)} threads wait for each other in a circle"
        because.append(many if len(cycle) > 1 else "it holds itself what it waits for")
    ended = [graph.label(n) for n in chain if (p := graph.process(n)) and p.state in ("Z", "X")]
    because += [f"{name} has ended" for name in dict.fromkeys(ended)]
    because += named_causes(graph, chain)
    threads = f"{len(chain)} thread{'s' * (len(chain) != 1)}"
    because.append(f"nobody is left who could end this: {threads}, at {LOOKS} looks")
    edges = [graph.edge(node) for node in shown if node in waits]
    line = user_line(graph.threads[root].frames) or user_line(graph.threads[main].frames)
    where = graph.label(root)
    return Stall("certified", what, rest, because, line, None, edges, where=where, pid=root[0])


def place_of(frames: Sequence[str]) -> str:
    """Return `file.py function` of the user's innermost frame, or of the innermost."""
    line = nearest(frames)
    return named(line) if ".py:" in line else ""


def named(line: str) -> str:
    """Return `file.py function` of "file.py:31 function": the same if lines were added above it."""
    file, _, function = line.rpartition(" ")
    name = file.rpartition(":")[0].rpartition("/")[2]
    return f"{name} {function.rpartition('.')[2]}" if name else ""
