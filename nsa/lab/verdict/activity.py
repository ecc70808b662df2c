"""Who works and who only goes round, told by comparing looks at the same threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from nsa.lab.verdict.frames import is_users
from nsa.lab.verdict.graph import Node
from nsa.lab.watch.evidence import HIDDEN, Snapshot, Thread

LOOKS = 3  # full snapshots that must agree
TICK_S = 0.01  # as fine as the kernel tells processor time
WORKS = 0.01  # of a core
# Threads that carry what other ranks send, ask 100 times a second, and work from then on.
CARRIERS, CARRIES = ("gloo_tcp_loop",), 0.05
MADE_BY_LOOKS = 8  # py-spy stops a thread two or three times
SPUN_S = 3.0  # of processor time, after which an unchanged closed loop is certified


def at_work(looks: Sequence[Snapshot]) -> set[Node]:
    """Threads that used a processor, wanted one at most looks, or whose process moved bytes."""
    first, last, found = looks[0], looks[-1], set()
    for process in last.processes:
        before = first.process(process.pid)
        if before is not None and before.started != process.started:
            before = None  # another one with its number
        seen = [p for look in looks if (p := look.process(process.pid))]
        moved = sum(a.io_bytes != b.io_bytes for a, b in pairwise(seen)) >= 2
        earlier = {thread.tid: thread for thread in before.threads} if before else {}
        for thread in process.threads:
            was = earlier.get(thread.tid)
            used = thread.cpu_s - (was.cpu_s if was else 0.0)
            share = CARRIES if thread.name in CARRIERS else WORKS
            least = max(2.5 * TICK_S, share * (last.t - first.t))
            mine = [t for p in seen for t in p.threads if t.tid == thread.tid]
            wants = sum(t.state in "RD" for t in mine) > len(mine) / 2
            wants = wants and thread.name not in CARRIERS
            kind = thread.wait.kind if thread.wait else ""
            carries = moved and kind in ("", "pipe", "socket", "fifo", "disk", "other")
            if used >= least or wants or carries or _changes(mine):
                found.add((process.pid, thread.tid))
    return found


def wakes(looks: Sequence[Snapshot]) -> set[Node]:
    """Threads that gave up their processor more often between two looks than looks make them."""
    found, before = set(), {}
    for look in looks:
        for process in look.processes:
            for thread in process.threads:
                node = process.pid, thread.tid
                was, now = before.get(node), thread.switches
                if was is not None and now is not None and now > was + MADE_BY_LOOKS:
                    found.add(node)
                before[node] = now
    return found


def _changes(seen: Sequence[Thread]) -> bool:
    """Whether the state of a user's own code changed between looks, or the code itself."""
    own = [t for t in seen if any(is_users(frame) for frame in t.frames)]
    states = {(t.frames, t.visible) for t in own if t.visible}
    return len(own) == len(seen) and len(states) > 1


def asks_again(looks: Sequence[Snapshot]) -> set[Node]:
    """Threads whose timer was set anew between two looks, and nothing else of them changed.

    That such a timer ends brings nothing; a back-off that sleeps twice as long each time is not so.
    """
    found, before = set(), {}
    for look in looks:
        for process in look.processes:
            for thread in process.threads:
                if thread.wait is None or thread.wait.left_s is None:
                    continue
                node, ends = (process.pid, thread.tid), look.t + thread.wait.left_s
                state = thread.frames, thread.visible
                was, switches, seen = before.get(node, (ends, None, state))
                slept = switches is not None and switches == thread.switches
                if seen != state:
                    found.discard(node)
                elif ends > was + 0.3 and not slept:
                    found.add(node)
                before[node] = (was if slept else ends), thread.switches, state
    return found


def spins(looks: Sequence[Snapshot], rank: int) -> list[Thread]:
    """Its main thread at the last looks, if in a loop that its own locals alone could end, and
    those stayed as they were while it used seconds of a processor; else nothing.
    """
    mine = [t for look in looks if (p := look.of(rank)) and (t := p.main())]
    last = mine[-1] if mine else None
    same = list(takewhile(lambda t: last and _place(t) == _place(last), reversed(mine)))[::-1]
    if len(same) <= LOOKS or not all(_endless(t) for t in same):
        return []
    return same if same[-1].cpu_s - same[0].cpu_s >= SPUN_S else []


def repeats(mine: Sequence[Thread]) -> float:
    """Seconds of a processor in which Python code went round in a few states, seen before."""
    states = [(t.frames[0].rpartition(":")[0], t.visible) if t.visible else None for t in mine]
    lines = {t.frames[0] for t in mine if t.frames}
    half = len(states) // 2
    known = set(states[:half])
    if half < LOOKS or None in known or len(lines) < 2 or not set(states[half:]) <= known:
        return 0.0
    return mine[-1].cpu_s - mine[0].cpu_s


def _place(thread: Thread) -> tuple[Any, ...]:
    """Its state as far as it is seen, and its functions without their lines."""
    return thread.visible, tuple(frame.rpartition(":")[0] for frame in thread.frames)


def _endless(thread: Thread) -> bool:
    return thread.wait is None and bool(thread.visible) and not thread.visible.endswith(HIDDEN)
