"""Wait-for graph of a snapshot: who waits for whom, and who can never go on.

A thread goes on by itself if it runs, if a timer ends its wait, or if something outside the
observed processes may; else if any thread that could wake it goes on. A rank in a collective goes
on only if every rank that the collective lacks does. All others can never go on, provided that the
waits were read correctly: that is the certificate of a hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from whyhung.verdict.frames import is_in, short, user_frames, user_line
from whyhung.watch.evidence import Process, Snapshot, Thread, Wait

Node = tuple[int, int]  # pid, tid
SHORT_S = 0.02  # a wait for the GIL is renewed every 5 ms
# Library functions that poll for data written by other processes only: neither a thread of their
# own process nor a timer ends such a wait.
_FROM_OTHERS = (
    ("torch/utils/data/dataloader.py", "_try_get_data"),
    ("torch/utils/data/_utils/pin_memory.py", "do_one_step"),
    ("multiprocessing/pool.py", "_handle_results"),
)
_TIMER = re.compile(r", for (?:at most )?another [\d.]+ s")
_PINS = "torch/utils/data/_utils/pin_memory.py"
# Threads of libraries that wake up now and then, and never do anything for the program.
_HOUSEKEEPERS = ("tqdm/_monitor.py", "ipykernel/heartbeat.py", "wandb/sdk/internal/system")
# C threads of torch and CUDA that only serve requests, or watch.
_SERVICES = "pt_tcpstore", "pt_nccl_watchdg", "pt_nccl_heartbt", "cuda-EvtHandlr"


@dataclass(frozen=True)
class Collective:
    """Collective that a rank is in and that has not ended."""

    op: str
    group: str = ""
    number: int | None = None
    missing: tuple[int, ...] = ()  # ranks that are not in it
    mismatch: str = ""  # how the ranks' calls differ, so that it can never end
    source: str = "stacks"
    partners: tuple[int, ...] = ()  # any of them could end it: a send or a receive
    paired: bool = False  # the peer of a send or a receive is recorded
    device: bool = False  # the missing have called it, but their devices have not begun it
    others: tuple[int, ...] = ()  # ranks that called another one of its number


@dataclass
class Graph:
    """Snapshot whose waits are made as exact as all that is known of them allows."""

    snapshot: Snapshot
    threads: dict[Node, Thread] = field(default_factory=dict)
    everyone: dict[Node, list[Node]] = field(default_factory=dict)  # all of these must go on
    anyone: dict[Node, list[Node]] = field(default_factory=dict)  # one of these is enough
    free: dict[Node, str] = field(default_factory=dict)  # goes on by itself: why
    beside: dict[Node, list[Node]] = field(default_factory=dict)  # in a call that does not match
    collectives: Mapping[int, Collective] = field(default_factory=dict)  # rank: what it is in

    @cached_property
    def can(self) -> set[Node]:
        """Nodes that can go on, by themselves or by others; valid once the graph is complete."""
        found = set(self.free)
        while True:
            more = {
                node
                for node in self.threads
                if node not in found
                and (
                    any(other in found for other in self.anyone.get(node, ()))
                    or (self.everyone.get(node) and all(o in found for o in self.everyone[node]))
                )
            }
            if not more:
                return found
            found |= more

    def reach(self, start: Node) -> list[Node]:
        """Return `start` and all that it waits for, nearest first."""
        found, seen = [start], {start}
        for node in found:  # grows meanwhile
            new = [other for other in self.others(node) if other not in seen]
            found += new
            seen.update(new)
        return found

    def others(self, node: Node) -> list[Node]:
        """Return nodes that it waits for, or shares a mismatched call with; each once."""
        every = (self.everyone, self.anyone, self.beside)
        return list(dict.fromkeys(other for one in every for other in one.get(node, ())))

    def label(self, node: Node) -> str:
        """Return "rank 0", ..., for a node; with the thread unless it is the main one."""
        process, thread = self.process(node), self.threads.get(node)
        named = name_of(process) if process else f"process {node[0]}"
        if thread is None or thread.main or not thread.tid:
            return named
        return f"{named}, thread {thread.name or thread.tid}"

    def lacking(self) -> set[Node]:
        """Return main threads in a collective that others have not called or do not match."""
        calls = [(rank, c) for rank, c in self.collectives.items() if c.missing or c.mismatch]
        ranks = [process for rank, _ in calls if (process := self.snapshot.of(rank))]
        return {(p.pid, main.tid) for p in ranks if (main := p.main())}

    def process(self, node: Node) -> Process | None:
        return self.snapshot.process(node[0])

    def edge(self, node: Node) -> dict[str, Any]:
        """Return an edge of the picture: who waits, where, for what, and for whom."""
        thread = self.threads[node]
        wait = thread.wait or Wait("other", self.free.get(node, "what it waits for is unknown"))
        others = self.others(node)
        own = [other for other in others if other[0] == node[0]]
        to = [self.label(other) for other in others if len(own) < 2 or other not in own]
        if len(own) > 1:
            to.insert(0, f"any of the {len(own)} other threads of {self.label(node)}")
        return {
            "from": self.label(node),
            "at": user_line(thread.frames),
            "kind": wait.kind,
            "text": wait.text,
            "to": list(dict.fromkeys(to)),
            "left_s": wait.left_s,
            "outside": wait.outside,
            "source": wait.source,
        }


def untimed(text: str) -> str:
    """Return a wait's text without the time left of its timer."""
    return _TIMER.sub("", text)


def name_of(process: Process) -> str:
    """Return a short name of the process."""
    if process.rank is not None:
        return f"rank {process.rank}"
    if process.of < 0:
        return f"process {process.pid} ({process.name}), not of this run"
    return f"process {process.pid} ({process.name or 'no name'}) of rank {process.of}"


def build(
    snapshot: Snapshot,
    *,
    collectives: Mapping[int, Collective] | None = None,
    locks: Mapping[int, list[dict[str, Any]]] | None = None,
    works: Iterable[Node] = (),
    moving: Iterable[int] = (),
    periodic: Iterable[Node] = (),
    wakes: Iterable[Node] = (),
    waits: Mapping[Node, Wait] | None = None,
) -> Graph:
    """Build the graph. collectives: {rank: its collective}. locks: {pid: its own report of locks}.

    waits: of threads, more reliable than the kernel's: for a device, or by polling.

    works: threads that used a processor or moved bytes since an earlier snapshot. moving: ranks
    whose progress moves. periodic: threads whose timers only poll. wakes: threads that went on
    between two looks, whatever they wait for at each.
    """
    graph = Graph(snapshot, collectives=collectives or {})
    works, periodic, wakes = set(works), set(periodic), set(wakes)
    mains = {}
    for process in snapshot.processes:
        told = {row["tid"]: row for row in (locks or {}).get(process.pid, ())}
        owner = next((thread for thread in process.threads if thread.gil), None)
        threads = process.threads or (Thread(0, main=True, state=process.state),)
        for thread in threads:
            node = process.pid, thread.tid
            if thread.ours or _keeps_house(thread):
                continue
            thread = _exact(process, thread, owner, told.get(thread.tid))
            if waits and node in waits:
                thread = replace(thread, wait=waits[node])
            graph.threads[node] = thread
            if thread.main:
                mains[process.pid] = node
            if why := _free(process, thread, node in works, node in periodic):
                graph.free[node] = why
            elif node in wakes and thread.wait is not None and thread.wait.kind != "GIL":
                graph.free[node] = "it goes on now and then"
        if process.rank in set(moving) and process.pid in mains:
            graph.free[mains[process.pid]] = "its progress moves"
    for rank, collective in (collectives or {}).items():
        process = snapshot.of(rank)
        if process is not None and process.pid in mains:
            _in_collective(graph, mains, mains[process.pid], collective)
    for node, thread in graph.threads.items():
        known = node in graph.everyone or node in graph.anyone
        if not known and thread.wait is not None and thread.wait.kind != "collective":
            graph.anyone[node] = [o for w in thread.wait.wakers for o in _wakers(graph, node, w)]
    return graph


def _exact(
    process: Process, thread: Thread, owner: Thread | None, told: Mapping[str, Any] | None
) -> Thread:
    """Return a thread with its wait, and the owner of the GIL or of the lock if known."""
    wait = thread.wait
    if wait is None:
        return thread
    brief = wait.left_s is not None and wait.left_s <= SHORT_S
    if owner is not None and owner.tid != thread.tid and wait.kind == "lock":
        asks = any("take_gil" in name for name in thread.native)
        if asks or (brief and thread.frames):
            text = f"waits for the GIL, which thread {owner.name or owner.tid} holds"
            to = ((process.pid, owner.tid),)
            return replace(thread, wait=Wait("GIL", text, to, source="py-spy"))
    if told is not None and wait.kind == "lock" and wait.left_s is None:
        text = f"waits for {told.get('what') or 'a lock'} {told.get('name', '')}".rstrip()
        if not (told.get("sure") and told.get("holders")):
            return replace(thread, wait=replace(wait, text=text))
        if told.get("held_at") and told["held_at"][0]:
            text += f", held at {short(told['held_at'][0])}"
        to = tuple((process.pid, tid) for tid in told["holders"])
        return replace(thread, wait=Wait("lock", text, to, source=told.get("by", "the process")))
    if wait.kind == "socket" and any("asyncio/base_events.py" in f for f in thread.frames):
        wait = replace(wait, kind="event", text=f"its event loop has nothing to do: {wait.text}")
        thread = replace(thread, wait=wait)
    inside = user_frames(thread.frames)[1]
    others = any(is_in(inside, *place) for place in _FROM_OTHERS)
    if others and wait.wakers and wait.kind in ("pipe", "lock", "semaphore", "socket"):
        pins = [t.tid for t in process.threads if any(_PINS in frame for frame in t.frames)]
        own = [(process.pid, tid) for tid in pins if tid != thread.tid]
        beyond = [waker for waker in wait.wakers if waker[0] != process.pid]
        if beyond or own:
            wait = replace(wait, text=untimed(wait.text), wakers=(*beyond, *own), left_s=None)
            return replace(thread, wait=wait)
    return thread


def _keeps_house(thread: Thread) -> bool:
    if thread.name.startswith(_SERVICES):
        return True
    starts = is_in(thread.frames, "multiprocessing/pool.py", "_handle_workers")
    return starts or any(mark in frame for frame in thread.frames for mark in _HOUSEKEEPERS)


def _free(process: Process, thread: Thread, works: bool, periodic: bool) -> str:
    """Return why it goes on by itself; "" if it does not."""
    wait = thread.wait
    if process.state in ("Z", "X"):
        return ""
    if wait is not None and wait.kind == "stopped":
        return "whoever stopped it may let it go on"
    if works:
        return "it works"
    if wait is None:
        return "it runs" if thread.state == "R" else "what it waits for is unknown"
    if wait.left_s is not None:
        return "its timer only asks again" if periodic else "a timer ends its wait"
    return "something outside may end its wait" if wait.outside else ""


def _wakers(graph: Graph, node: Node, waker: tuple[int, int]) -> list[Node]:
    pid, tid = waker
    if tid and waker not in graph.threads:  # it has ended, or does nothing for the program
        graph.free.setdefault(node, f"thread {tid} of process {pid} was not seen")
    if tid:
        return [waker]
    every = [other for other in graph.threads if other[0] == pid and other != node]
    if not every and graph.snapshot.process(pid) is None:
        graph.free.setdefault(node, f"process {pid} was not seen")
    return every


def _in_collective(
    graph: Graph, mains: Mapping[int, Node], node: Node, collective: Collective
) -> None:
    number = "" if collective.number is None else f" number {collective.number}"
    group = f" of group {collective.group}" if collective.group not in ("", "0") else ""
    text = f"waits in {collective.op}{number}{group}"
    if collective.mismatch:
        text += f", which can never end: {collective.mismatch}"
    if collective.device:
        text += f", which has not begun on the device{'s' * (len(collective.missing) > 1)} of"
    beside = [graph.snapshot.of(rank) for rank in collective.others]
    graph.beside[node] = [mains[one.pid] for one in beside if one and one.pid in mains]
    named = collective.missing or collective.partners
    others = [process for rank in named if (process := graph.snapshot.of(rank))]
    if named:
        word = " or " if collective.partners else ", "
        text += " for " * (not collective.device) + " " * collective.device
        text += word.join(f"rank {rank}" for rank in named)
    free = graph.free.pop(node, "")
    wait = Wait("collective", text, source=collective.source)
    graph.threads[node] = replace(graph.threads[node], wait=wait)
    if collective.partners and others:
        # C threads only carry data for others.
        graph.anyone[node] = [
            other
            for process in others
            for other, thread in graph.threads.items()
            if other[0] == process.pid
            and (thread.main or thread.frames or graph.free.get(other) == "it works")
        ]
    elif others and len(others) == len(named):
        graph.everyone[node] = [mains.get(one.pid, (one.pid, 0)) for one in others]
    elif not collective.mismatch:
        graph.free[node] = free or "the collective may still end"
