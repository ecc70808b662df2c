"""Waits that may still end: by a thread that works, a timer, a device, or a quiet peer.

Only threads that are waited for count: a heartbeat or a progress bar off that chain does not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from whyhung.verdict.activity import LOOKS, mains, repeats
from whyhung.verdict.chains import main_of, root_of, sentence, tells, works_at
from whyhung.verdict.frames import user_frames, user_line
from whyhung.verdict.graph import Graph, Node
from whyhung.verdict.known import named_causes
from whyhung.verdict.rests import Rest, Stall, bound_s
from whyhung.watch.evidence import GPU_BUSY, Snapshot

PATIENCE_S = 120.0  # a wait for a later timer is treated as one for a socket
SPUN_LONG_S = 8.0  # CPU time after which a repeating loop is reported as a stall
POLLS_S = 45.0  # after which a poll counts as a stall: its target may come late
# after which a wait for a device counts as a stall, if it is unknown whether that device works
UNTOLD_S = 120.0


@dataclass(frozen=True)
class Seen:
    """Looks at one rank's rest, the last one's graph, and the activity of threads in them."""

    looks: Sequence[Snapshot]
    graph: Graph
    main: Node
    rest: Rest
    works: set[Node]
    much: set[Node]  # works, enough for a thread that nothing is known to wait for
    hard: set[Node]  # much, by CPU time alone
    periodic: set[Node]
    device_waits: Collection[Node]  # wait for a device, even if that burns a processor

    def busy(self, chain: Sequence[Node]) -> list[Node]:
        """Return nodes of the chain that work: known to be waited for, or hard at work.

        A thread that burns a processor in a collective that others have not called does not work.
        """
        lacks = self.graph.lacking()
        return [
            node
            for node in chain
            if node not in lacks
            if self.graph.free.get(node) == "its progress moves"
            or node in self.much
            or (node in self.works and (self.graph.threads[node].main or node in self._named))
        ]

    @property
    def _named(self) -> set[Node]:
        """Threads that another waits for by their ID, or because only one could be meant."""
        waits = (thread.wait for thread in self.graph.threads.values() if thread.wait)
        return {waker for wait in waits for waker in wait.wakers if waker[1]}

    def device(self, node: Node) -> tuple[bool | None, str]:
        """Return (True if a rank's GPU works, None if unknown; a description of its activity)."""
        process = self.graph.process(node)
        rank = process.of if process else -1
        told = [look.devices[rank] for look in self.looks[-LOOKS:] if rank in look.devices]
        if told:
            works = [use["works"] for use in told]
            known = True if True in works else None if None in works else False
            return known, told[-1]["text"]
        percents = [s.gpu_percent for s in self.rest.samples if s.gpu_percent is not None]
        if percents and max(percents) <= GPU_BUSY:
            return False, f"the GPU was idle ({max(percents):.0f} %) all that time"
        return None, f"the GPU is {max(percents):.0f} % busy" if percents else ""


def open_wait(seen: Seen) -> Stall | None:
    """Return the stall of a wait that work, a timer or a quiet peer may end; None if too early."""
    graph, main, rest, looks = seen.graph, seen.main, seen.rest, seen.looks
    chain = [node for node in graph.reach(main) if node in graph.threads]
    root = root_of(graph, main)
    chain = list(dict.fromkeys([*chain, *_looked_for(seen, root)]))
    unknown = [p.message for p in graph.snapshot.processes if p.message]
    edges = [graph.edge(n) for n in chain if graph.threads[n].wait and tells(graph, main, n)][:12]
    told: dict[str, Any] = {"edges": edges, "unknown": list(dict.fromkeys(unknown))}
    if busy := seen.busy(chain):
        if busy == [main] and (used := repeats(mains(looks, rest.rank))) >= SPUN_LONG_S:
            same = f"in {used:.0f} s of a processor none of its variables changed"
            because = [works_at(graph, main), same]
            if rest.seconds >= bound_s(rest):
                return _stall(graph, main, "waiting", "loop", rest, because, **told)
        node = min(busy, key=lambda n: (not user_line(graph.threads[n].frames), chain.index(n)))
        because = [*_not_called(graph, main, node), works_at(graph, node)][:1]
        return _stall(graph, node, "busy", "uncounted", rest, because, **told)
    if found := _by_device(seen, chain, root, told):
        return found
    timed = [
        (graph.threads[n].wait.left_s, n)
        for n in chain
        if n not in seen.periodic and n in graph.free and graph.threads[n].wait
        and graph.threads[n].wait.left_s is not None
    ]  # fmt: skip
    near = [x for x in timed if x[0] <= PATIENCE_S and _lasts(graph, looks[-LOOKS], x[1])]
    near = [x for x in near if x[1] in (main, root) or _does_something(graph, main, x[1])]
    if near:
        left, node = min(near, key=lambda x: (x[1] not in (main, root), x[0]))
        because = [sentence(graph, node), f"that ends by itself, in {left:.0f} s at most"]
        return _stall(graph, node, "timer", "timer", rest, because, left_s=left, **told)
    wait = graph.threads[root].wait
    what = "polling" if root in seen.periodic else wait.kind if wait else "other"
    if rest.seconds < bound_s(rest, POLLS_S if what == "polling" and not rest.over else 0.0):
        return None
    if what == "timer" and (wait.left_s or 0.0) <= PATIENCE_S:  # the timer of a loop's next round
        what = graph.threads[main].wait.kind if graph.threads[main].wait else "polling"
    because = [sentence(graph, node) for node in dict.fromkeys((main, root))]
    because += named_causes(graph, chain)
    because.append("nobody of the run works, and nothing proves that it can never go on")
    return _stall(graph, root, "waiting", what, rest, because,
                  left_s=wait.left_s if wait else None, **told)  # fmt: skip


def _looked_for(seen: Seen, root: Node) -> list[Node]:
    """Return nodes that could bring what the rank's main thread, or the chain's end, polls for.

    If a library polls, as for a lock's file, threads of the same process count only by hard work.
    """
    graph, found = seen.graph, []
    for asks in dict.fromkeys((seen.main, root)):
        thread, process = graph.threads[asks], graph.process(asks)
        if thread.wait is not None and thread.wait.kind != "polling":
            continue
        of = None if asks == seen.main or process is None else process.of
        library = thread.wait is not None and bool(user_frames(thread.frames)[1])
        found += [
            node
            for node in graph.threads
            if (of is None or ((other := graph.process(node)) and other.of == of))
            and (not library or node[0] != asks[0] or node in seen.hard)
        ]
    return found


def _by_device(seen: Seen, chain: Sequence[Node], root: Node, told: dict[str, Any]) -> Stall | None:
    """Return the stall of a chain that ends at a device or in a collective that all have called."""
    graph, main, rest = seen.graph, seen.main, seen.rest
    waits = {node: wait for node in chain if (wait := graph.threads[node].wait)}
    ends = [n for n, w in waits.items() if w.kind == "device" or (n in seen.device_waits and (
        w.kind == "collective") and (n == root or not graph.everyone.get(n)))]  # fmt: skip
    if root not in ends:
        return None
    found = {node: seen.device(node) for node in ends}
    for node, (works, text) in found.items():
        if works:
            because = [f"the device of {graph.label(node)} works: {text}", sentence(graph, node)]
            return _stall(graph, node, "busy", "uncounted", rest, because, **told)
    if all(works is None for works, _ in found.values()):
        if rest.seconds < bound_s(rest, UNTOLD_S):
            because = [sentence(graph, root), "whether that device works is not known"]
            return _stall(graph, root, "busy", "uncounted", rest, because, **told)
    elif rest.seconds < bound_s(rest):
        return None
    because = [sentence(graph, node) for node in dict.fromkeys((main, root))]
    because += [text for _, text in found.values() if text][:4]
    because.append("nobody of the run works, and no device gets anywhere")
    return _stall(graph, root, "waiting", waits[root].kind, rest, because, **told)


def _not_called(graph: Graph, main: Node, node: Node) -> list[str]:
    """ "rank 1 has not called all_reduce number 61; it is in eval.py:12 evaluate, working"."""
    process, wait = graph.process(node), graph.threads[main].wait
    if process is None or wait is None or wait.kind != "collective" or process.rank is None:
        return []
    called = graph.collectives.get(graph.process(main).rank)
    if called is None or process.rank not in called.missing or called.device:
        return []
    number = "" if called.number is None else f" number {called.number}"
    at = user_line(graph.threads[node].frames)
    where = f"; it is in {at}, working" if at else ", and works"
    return [f"{graph.label(node)} has not called {called.op}{number}{where}"]


def _lasts(graph: Graph, earlier: Snapshot, node: Node) -> bool:
    """Return True if it was there at an earlier look: the sleep of a loop's next round was not."""
    process, was = graph.process(node), earlier.process(node[0])
    return process is not None and was is not None and was.started == process.started


def _does_something(graph: Graph, main: Node, node: Node) -> bool:
    """Return True for the user's code or another program, and not for an idle library thread."""
    thread = graph.threads[node]
    return bool(user_line(thread.frames)) or (node[0] != main[0] and thread.main)


def _stall(
    graph: Graph, node: Node, state: str, what: str, rest: Rest, because: list[str], **told: Any
) -> Stall:
    """Return the stall of one node, with its line, or that of the rank's main thread if none."""
    line = user_line(graph.threads[node].frames)
    if not line and (mine := main_of(graph, rest.rank)):
        line = user_line(graph.threads[mine].frames)
    return Stall(state, what, rest, because, line, where=graph.label(node), pid=node[0], **told)
