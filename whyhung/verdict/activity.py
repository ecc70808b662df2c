"""Threads that work, that wait while they burn a processor, or that only poll."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from whyhung.verdict.frames import is_users, user_frames
from whyhung.verdict.graph import Node
from whyhung.watch.evidence import HIDDEN, Process, Snapshot, Thread, Wait

LOOKS = 3  # full snapshots that must agree
TICK_S = 0.01  # resolution of the kernel's CPU times
WORKS = 0.01  # share of a core
# share of a core, for a thread that nothing is known to wait for: a heartbeat, a progress bar or
# the refresher of a cache uses less
MUCH = 0.1
POLLS = 0.25  # share of a core that a poll uses at most
LONG_S = 120.0  # a timer that is set for longer ends nothing soon
BACK_OFF = 1.5  # a polling wait that grows by this factor comes to an end
# Functions in which a thread waits for its device, in C or Python, and that compile for one.
_DEVICE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSync",
           "cuEventSync", "cuCtxSynchronize", "cuMemcpyDtoH", "cudaMemcpy", "hipStreamSynchronize",
           "hipDeviceSynchronize", "libcuda.so", "torch/cuda/streams.py:",
           "torch/cuda/__init__.py:")  # fmt: skip
_COMPILES = ("ptxjit", "nvrtc", "nvvm", "LLVM", "llvm", "nvJitLink", "cuModuleLoad", "cuLink")
_CARRYING = ("", "pipe", "socket", "fifo", "disk", "other")  # waits between which bytes move
# Threads that carry what other ranks send; they poll 100 times a second, and work above that.
CARRIERS, CARRIES = ("gloo_tcp_loop",), 0.05
MADE_BY_LOOKS = 8  # py-spy stops a thread two or three times
SPUN_S = 3.0  # CPU time after which an unchanged closed loop is certified


def at_work(looks: Sequence[Snapshot], share: float = WORKS, *, moves: bool = True) -> set[Node]:
    """Return threads that used a processor, or wanted one at most looks.

    share: of a core, from which a thread counts as using one. moves: also count threads whose
    process moved bytes, or in which the state of the user's own code changed.
    """
    first, last, found = looks[0], looks[-1], set()
    for process in last.processes:
        before = first.process(process.pid)
        if before is not None and before.started != process.started:
            before = None  # another one with its PID
        seen = [p for look in looks if (p := look.process(process.pid))]
        moved = _moved([p.io_bytes for p in seen])
        earlier = {thread.tid: thread for thread in before.threads} if before else {}
        times: dict[int, list[Thread]] = {}
        for thread in (thread for p in seen for thread in p.threads):
            times.setdefault(thread.tid, []).append(thread)
        for thread in process.threads:
            was = earlier.get(thread.tid)
            used = thread.cpu_s - (was.cpu_s if was else 0.0)
            asked = max(share, CARRIES) if thread.name in CARRIERS else share
            least = max(2.5 * TICK_S, asked * (last.t - first.t))
            mine = times[thread.tid]
            wants = sum(t.state in "RD" for t in mine) > len(mine) / 2
            wants = wants and thread.name not in CARRIERS
            kind = thread.wait.kind if thread.wait else ""
            own = [t.io_bytes for t in mine if t.io_bytes is not None]
            carries = (_moved(own) if own else moved) and kind in _CARRYING
            if used >= least or wants or (moves and (carries or _changes(mine))):
                found.add((process.pid, thread.tid))
    return found


def _moved(io_bytes: Sequence[int]) -> bool:
    """Return True if bytes were read or written between looks, at least twice."""
    return sum(a != b for a, b in pairwise(io_bytes)) >= 2


def wakes(looks: Sequence[Snapshot]) -> set[Node]:
    """Return threads that gave up their processor more often between two looks than looks cause."""
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
    """Return True if the state of the user's own code changed between looks, or the code itself."""
    own = [t for t in seen if any(is_users(frame) for frame in t.frames)]
    states = {(t.frames, t.visible) for t in own if t.visible}
    return len(own) == len(seen) and len(states) > 1


def asks_again(looks: Sequence[Snapshot]) -> set[Node]:
    """Return threads whose timer was set anew between two looks, while nothing else changed.

    The end of such a timer brings nothing; a back-off, which sleeps longer each time, is excluded.
    """
    found, before, longest = set(), {}, {}
    for number, look in enumerate(looks):
        for process in look.processes:
            for thread in process.threads:
                if thread.wait is None or not 0 <= (thread.wait.left_s or -1.0) <= LONG_S:
                    continue
                node, ends = (process.pid, thread.tid), look.t + thread.wait.left_s
                state = _state(thread)
                was, switches, seen = before.get(node, (ends, None, state))
                slept = switches is not None and switches == thread.switches
                if seen != state:
                    found.discard(node)
                elif ends > was + 0.3 and not slept:
                    found.add(node)
                before[node] = (was if slept else ends), thread.switches, state
                half = longest.setdefault(node, [0.0, 0.0])
                late = 2 * number >= len(looks)
                half[late] = max(half[late], thread.wait.left_s)
    return {node for node in found if longest[node][1] <= BACK_OFF * longest[node][0] + 0.2}


def polls(looks: Sequence[Snapshot], periodic: set[Node]) -> dict[Node, Wait]:
    """Return the ranks' main threads that sleep, poll the same thing, and sleep again, with waits.

    periodic: from `asks_again`. A thread that also waits to be woken by another, as a queue with a
    timeout does, waits for that; one that uses much of a core does more than poll.
    """
    found = {}
    for process in looks[-1].processes if looks else ():
        main = process.main()
        node = (process.pid, main.tid) if main else None
        if node not in periodic or process.rank is None:
            continue
        mine = [t for look in looks if (p := look.process(process.pid)) and (t := p.main())]
        asleep = [t.wait for t in mine if t.wait is not None and t.wait.left_s is not None]
        used, took = mine[-1].cpu_s - mine[0].cpu_s, looks[-1].t - looks[0].t
        alone = asleep and all(wait.kind == "timer" for wait in asleep)
        if alone and len({_state(t) for t in mine}) == 1 and used < POLLS * took:
            asked = next((t.polled for t in reversed(mine) if t.polled), "")
            text = f"asks again and again for {asked}" if asked else "asks again and again"
            found[node] = Wait("polling", text, outside=True, source=asleep[-1].source)
    return found


def device_waits(looks: Sequence[Snapshot]) -> dict[Node, Wait]:
    """Return waits of ranks' threads for their device, even if the wait burns a processor.

    Such a thread is at the same place at every look, without the GIL and with unchanged locals, and
    inside a function that waits for a device, by its C stack, or its Python stack without one.
    """
    found = {}
    for process in looks[-1].processes if len(looks) >= LOOKS else ():
        if process.rank is None:
            continue
        for thread in process.threads:
            mine = [t for look in looks if (t := _again(look, process, thread.tid))]
            places = {(t.frames, t.visible) for t in mine}
            if len(mine) < len(looks) or len(places) > 1 or any(t.gil for t in mine):
                continue
            if all(t.wait is None or t.wait.kind in ("device", "other") for t in mine):
                called = next((t.native for t in reversed(mine) if t.native), ())
                if at := _at_device(called[:16], thread):
                    text = f"waits for its device, in {at}"
                    found[process.pid, thread.tid] = Wait("device", text, outside=True)
    return found


def _again(look: Snapshot, process: Process, tid: int) -> Thread | None:
    seen = look.process(process.pid)
    same = seen is not None and seen.started == process.started
    return next((t for t in seen.threads if t.tid == tid), None) if same else None


def _at_device(called: Sequence[str], thread: Thread) -> str:
    """Return the function in which it waits for a device; "" if none, or if it compiles for one."""
    if any(mark in name for name in called for mark in _COMPILES):
        return ""
    if found := [name for name in called for mark in _DEVICE if mark in name]:
        return next((name for name in found if ".so" not in name), "its driver")
    if called:
        return ""
    inside = any(mark in frame for frame in thread.frames[:3] for mark in _DEVICE)
    return thread.frames[0].rpartition(" ")[2] if inside else ""


def spins(looks: Sequence[Snapshot], rank: int) -> list[Thread]:
    """Return its main thread at the last looks, if in a loop that only its own locals could end and
    those stayed as they were while it used seconds of a processor; else []."""
    mine = mains(looks, rank)
    last = mine[-1] if mine else None
    same = list(takewhile(lambda t: last and _place(t) == _place(last), reversed(mine)))[::-1]
    if len(same) <= LOOKS or not all(_endless(t) for t in same):
        return []
    return same if same[-1].cpu_s - same[0].cpu_s >= SPUN_S else []


def repeats(mine: Sequence[Thread]) -> float:
    """Return the CPU seconds in which Python code cycled through a few states, seen before."""
    states = [(t.frames[0].rpartition(":")[0], t.visible) if t.visible else None for t in mine]
    lines = {t.frames[0] for t in mine if t.frames}
    half = len(states) // 2
    known = set(states[:half])
    if half < LOOKS or None in known or len(lines) < 2 or not set(states[half:]) <= known:
        return 0.0
    return mine[-1].cpu_s - mine[0].cpu_s


def mains(looks: Sequence[Snapshot], rank: int) -> list[Thread]:
    """Return the rank's main thread at each look that has it."""
    return [t for look in looks if (p := look.of(rank)) and (t := p.main())]


def _state(thread: Thread) -> tuple[Any, ...]:
    """Return the user's frames with their locals; all frames if none is the user's."""
    return tuple(user_frames(thread.frames)[0]) or thread.frames, thread.visible


def _place(thread: Thread) -> tuple[Any, ...]:
    """Return its state as far as it is visible, and its functions without their lines."""
    return thread.visible, tuple(frame.rpartition(":")[0] for frame in thread.frames)


def _endless(thread: Thread) -> bool:
    return thread.wait is None and bool(thread.visible) and not thread.visible.endswith(HIDDEN)
