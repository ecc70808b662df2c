"""Ranks whose progress rests: whether somebody works, what is waited for, or why it can never end.

Busy: somebody whom the rank waits for uses a processor, moves bytes, or runs on the device.
Waiting: all are quiet, and what is waited for may still come. Certified: the wait-for graph is
closed, at every look: nobody is left who could end the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nsa.lab.verdict.activity import LOOKS, asks_again, at_work, repeats, spins, wakes
from nsa.lab.verdict.collectives import collectives
from nsa.lab.verdict.frames import nearest, user_line
from nsa.lab.verdict.graph import Graph, Node, build
from nsa.lab.watch.evidence import OUTSIDE, Evidence, P, Sample, Snapshot, Thread, at_last_p

RECENT = 4  # among which somebody must have worked to count as busy
WAIT_S = 17.0  # how long all must be quiet before a wait is told as a stall
OWN_GAPS = 2.0  # or so many times the longest rest of the run so far, if that is longer
PATIENCE_S = 120.0  # a timer that ends later is waited for no more than a socket
SPUN_LONG_S = 8.0  # after which one that asks something else is told as a stall
DEVICE_WORKS = 5.0  # percent
GONE_S = 2.0
_DEVICE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSync",
           "cuEventSync", "cuCtxSynchronize", "cuMemcpyDtoH", "torch/cuda/streams.py",
           "torch/cuda/__init__.py")  # fmt: skip


@dataclass(frozen=True)
class Rest:
    """One rank since its progress changed last."""

    rank: int
    p: P
    since: float
    seconds: float
    longest: float  # it had rested before, its first step left out
    gone: bool
    samples: list[Sample]
    wait_s: float | None = None  # how long all must be quiet; None: see bound_s


@dataclass
class Stall:
    """What stands still and why, as of the last look."""

    state: str  # "busy", "waiting" or "certified"
    what: str
    rest: Rest
    because: list[str]
    line: str = ""
    left_s: float | None = None
    edges: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    where: str = ""  # who: "rank 0", "process 12 (sleep 15) of rank 0"
    pid: int = 0


def rests(evidence: Evidence) -> list[Rest]:
    """One for each rank that was sampled, as of its last sample alive."""
    latest = max((s.t for s in evidence.samples if s.state), default=0.0)
    found = []
    for rank in evidence.ranks():
        samples = evidence.of(rank)
        samples = [s for s in samples if s.state] or samples  # what is read of the dead has none
        last, mine = samples[-1], at_last_p(samples)
        before = samples[: -len(mine)]
        times = [[s.t for s in same] for p, same in groupby(before, lambda s: s.p) if _counts(p)]
        longest = max((t[-1] - t[0] for t in times), default=0.0)
        gone = last.state == "Z" or last.t < latest - GONE_S
        seconds, wait_s = last.t - mine[0].t, evidence.wait_s
        found.append(Rest(rank, last.p, mine[0].t, seconds, longest, gone, mine, wait_s))
    return found


def _counts(p: P) -> bool:
    """Whether a rest there tells how long this run rests: a first step may take far longer."""
    return p.step >= 1 or p.phase == OUTSIDE


def bound_s(rest: Rest) -> float:
    """How long all must be quiet before this rank's wait counts as a stall."""
    return rest.wait_s if rest.wait_s is not None else max(WAIT_S, OWN_GAPS * rest.longest)


def stall(evidence: Evidence) -> Stall | None:
    """Of the rank to blame: a certificate wins, then whoever works; None while a rank moves."""
    live = [rest for rest in rests(evidence) if not rest.gone]
    quiet = [rest for rest in live if rest.seconds >= evidence.stall_s]
    found = [one for rest in quiet if (one := _of(evidence, rest, live)) is not None]
    order = {"certified": 0, "busy": 1, "timer": 2, "waiting": 3}
    found.sort(key=lambda x: (order[x.state], x.what == "collective", x.rest.p.key(), x.rest.rank))
    if not found or (found[0].state != "certified" and len(quiet) < len(live)):
        return None
    return found[0]


def _of(evidence: Evidence, rest: Rest, live: Sequence[Rest]) -> Stall | None:
    looks = [s for s in evidence.snapshots if s.full and s.t >= rest.since and s.of(rest.rank)]
    looks = [s for s in looks if s.p.get(rest.rank, rest.p) == rest.p]
    if len(looks) < LOOKS:
        return None
    moving = [other.rank for other in live if other.seconds < min(2.0, evidence.stall_s)]
    works, periodic = at_work(looks[-RECENT:]), asks_again(looks)
    options = {"works": works, "moving": moving, "periodic": periodic, "locks": evidence.locks}
    options["wakes"] = wakes(looks[-LOOKS:])
    graphs = [
        build(look, collectives=collectives(evidence, look), **options) for look in looks[-LOOKS:]
    ]
    last = graphs[-1]
    main = _main(last, rest.rank)
    if main is None:
        return None
    if spun := spins(looks, rest.rank):
        return _spin(last, main, rest, spun)
    if all(_stuck(graph, rest.rank) for graph in graphs) and len(set(map(_waits, graphs))) == 1:
        return _certified(last, main, rest)
    return _open(looks, last, main, rest, bound_s(rest), works, periodic)


def _main(graph: Graph, rank: int) -> Node | None:
    process = graph.snapshot.of(rank)
    nodes = [] if process is None else [(process.pid, t.tid) for t in process.threads if t.main]
    return nodes[0] if nodes and nodes[0] in graph.threads else None


def _stuck(graph: Graph, rank: int) -> bool:
    main = _main(graph, rank)
    return main is not None and main not in graph.can


def _waits(graph: Graph) -> tuple[Any, ...]:
    """What must be the same at every look."""
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
    root = _root(graph, main)
    waits = {node: wait for node in chain if (wait := graph.threads[node].wait)}
    of = main if waits[main].kind != "collective" else root
    what = waits[of].kind if of in waits else "ended"
    for node in chain:
        process = graph.process(node)
        if process is not None and process.state in ("Z", "X") and node != main:
            what = "collective" if waits[main].kind == "collective" else "ended"
    if any("can never end" in wait.text for wait in waits.values()):
        what = "collective"
    cycle = _cycle(graph, main)
    shown = cycle or [node for node in chain if node in waits and _tells(graph, main, node)][:12]
    if main not in shown:
        shown = [main, *shown]
    because = [_sentence(graph, node) for node in shown[:4] if node in waits]
    if cycle:
        many = f"{len(cycle)} threads wait for each other in a circle"
        because.append(many if len(cycle) > 1 else "it holds itself what it waits for")
    ended = [graph.label(n) for n in chain if (p := graph.process(n)) and p.state in ("Z", "X")]
    because += [f"{name} has ended" for name in dict.fromkeys(ended)]
    threads = f"{len(chain)} thread{'s' * (len(chain) != 1)}"
    because.append(f"nobody is left who could end this: {threads}, at {LOOKS} looks")
    edges = [graph.edge(node) for node in shown if node in waits]
    line = user_line(graph.threads[root].frames) or user_line(graph.threads[main].frames)
    where = graph.label(root)
    return Stall("certified", what, rest, because, line, None, edges, where=where, pid=root[0])


def _cycle(graph: Graph, start: Node) -> list[Node]:
    """The circle of known owners that `start` leads into; [] where owners are not known."""
    path, node = [], start
    while node not in path:
        path.append(node)
        others = [*graph.everyone.get(node, ()), *graph.anyone.get(node, ())]
        wait = graph.threads[node].wait if node in graph.threads else None
        any_thread = wait is not None and any(not tid for _, tid in wait.wakers)
        if len(others) != 1 or (any_thread and node not in graph.everyone):
            return []
        node = others[0]
    return path[path.index(node) :]


def _root(graph: Graph, main: Node) -> Node:
    """Whom the others wait for in the end: followed from process to process."""
    seen, node = {main[0]}, main
    while True:
        others = [*graph.everyone.get(node, ()), *graph.anyone.get(node, ())]
        beyond = [other for other in others if other[0] not in seen]
        if not beyond:
            return node
        pid = beyond[0][0]
        seen.add(pid)
        mains = [n for n, t in graph.threads.items() if n[0] == pid and t.main]
        node = next((other for other in beyond if other[0] == pid and other in mains), beyond[0])


def _open(
    looks: Sequence[Snapshot],
    graph: Graph,
    main: Node,
    rest: Rest,
    allowed_s: float,
    works: set[Node],
    periodic: set[Node],
) -> Stall | None:
    """Somebody may still end it: who works, whose timer ends, or who is only waited for."""
    chain = [node for node in graph.reach(main) if node in graph.threads]
    if main in periodic or graph.threads[main].wait is None:
        chain += [node for node in graph.threads if node not in chain]  # it looks for anything
    unknown = [p.message for p in graph.snapshot.processes if p.message]
    edges = [graph.edge(n) for n in chain if graph.threads[n].wait and _tells(graph, main, n)][:12]
    told: dict[str, Any] = {"edges": edges, "unknown": list(dict.fromkeys(unknown))}
    mine = [t for look in looks if (p := look.of(rest.rank)) and (t := p.main())]
    device, percent = _on_device(graph.threads[main]), _device_percent(rest)
    busy = [n for n in chain if n in works or graph.free.get(n) == "its progress moves"]
    if device and percent is not None:
        busy = [node for node in busy if node != main]
        if percent > DEVICE_WORKS:
            because = [f"the GPU works ({percent:.0f} %), and {graph.label(main)} waits for it"]
            return _stall(graph, main, "busy", "uncounted", rest, because, **told)
    if busy:
        if busy == [main] and (used := repeats(mine)) >= SPUN_LONG_S:
            line = _works(graph, main)
            because = [line, f"in {used:.0f} s of a processor none of its variables changed"]
            if rest.seconds >= allowed_s:
                return _stall(graph, main, "waiting", "loop", rest, because, **told)
        node = min(busy, key=lambda n: (not user_line(graph.threads[n].frames), chain.index(n)))
        return _stall(graph, node, "busy", "uncounted", rest, [_works(graph, node)], **told)
    timed = [
        (graph.threads[n].wait.left_s, n)
        for n in chain
        if n not in periodic and n in graph.free and graph.threads[n].wait
        and graph.threads[n].wait.left_s is not None
    ]  # fmt: skip
    root = _root(graph, main)
    near = [x for x in timed if x[0] <= PATIENCE_S and _lasts(graph, looks[-LOOKS], x[1])]
    near = [x for x in near if x[1] in (main, root) or _does_something(graph, main, x[1])]
    if near:
        left, node = min(near, key=lambda x: (x[1] not in (main, root), x[0]))
        because = [_sentence(graph, node), f"that ends by itself, in {left:.0f} s at most"]
        return _stall(graph, node, "timer", "timer", rest, because, left_s=left, **told)
    if rest.seconds < allowed_s:
        return None
    wait = graph.threads[root].wait
    what = "polling" if root in periodic else wait.kind if wait else "other"
    if what == "timer" and (wait.left_s or 0.0) <= PATIENCE_S:  # that of a loop's next round
        what = graph.threads[main].wait.kind if graph.threads[main].wait else "polling"
    what = "device" if device else what
    because = [_sentence(graph, node) for node in dict.fromkeys((main, root))]
    if device and percent is not None:
        because.append(f"the GPU was idle ({percent:.0f} %) all that time")
    because.append("nobody of the run works, and nothing proves that it can never go on")
    return _stall(graph, root, "waiting", what, rest, because,
                  left_s=wait.left_s if wait else None, **told)  # fmt: skip


def _lasts(graph: Graph, earlier: Snapshot, node: Node) -> bool:
    """Whether it was there at an earlier look: the sleep of a loop's next round was not."""
    process, was = graph.process(node), earlier.process(node[0])
    return process is not None and was is not None and was.started == process.started


def _does_something(graph: Graph, main: Node, node: Node) -> bool:
    """Whether it could: the user's code, or another program, and no idle thread of a library."""
    thread = graph.threads[node]
    return bool(user_line(thread.frames)) or (node[0] != main[0] and thread.main)


def _stall(
    graph: Graph, node: Node, state: str, what: str, rest: Rest, because: list[str], **told: Any
) -> Stall:
    """Of one node: its line, or that of whoever started it where it has none of the user's."""
    line = user_line(graph.threads[node].frames)
    if not line and (mine := _main(graph, rest.rank)):
        line = user_line(graph.threads[mine].frames)
    return Stall(state, what, rest, because, line, where=graph.label(node), pid=node[0], **told)


def _tells(graph: Graph, main: Node, node: Node) -> bool:
    """Whether a node belongs into the picture: one of many idle threads does not."""
    thread = graph.threads[node]
    beyond = node[0] != main[0] and (thread.main or node == _root(graph, main))
    return node == main or beyond or bool(user_line(thread.frames))


def _on_device(thread: Thread) -> bool:
    told = (*thread.native[:12], *thread.frames[:3])
    return any(mark in name for name in told for mark in _DEVICE)


def _device_percent(rest: Rest) -> float | None:
    told = [s.gpu_percent for s in rest.samples if s.gpu_percent is not None]
    return max(told, default=None)


def _works(graph: Graph, node: Node) -> str:
    thread, process = graph.threads[node], graph.process(node)
    at = user_line(thread.frames)
    if graph.free.get(node) == "its progress moves":
        return f"{graph.label(node)} makes progress, and is waited for"
    how = "works in native code" if thread.native and not thread.frames else "works"
    if process is not None and thread.wait is not None and thread.wait.kind in ("pipe", "socket"):
        how = "reads or writes"
    return f"{graph.label(node)} {how}" + (f", at {at}" if at else "")


def _sentence(graph: Graph, node: Node) -> str:
    thread = graph.threads[node]
    at = user_line(thread.frames)
    wait = thread.wait.text if thread.wait else "sleeps, and nothing tells for what"
    left = thread.wait.left_s if thread.wait else None
    more = "" if left is None else f" ({left:.0f} s left)"
    return f"{graph.label(node)} {wait}{more}" + (f", at {at}" if at else "")


def place_of(frames: Sequence[str]) -> str:
    """`file.py function` of the user's innermost frame, or of the innermost."""
    line = nearest(frames)
    return named(line) if ".py:" in line else ""


def named(line: str) -> str:
    """`file.py function` of "file.py:31 function": the same when lines were added above it."""
    file, _, function = line.rpartition(" ")
    name = file.rpartition(":")[0].rpartition("/")[2]
    return f"{name} {function.rpartition('.')[2]}" if name else ""
