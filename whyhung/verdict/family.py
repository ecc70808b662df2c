"""Processes and threads of a program as lines: the user's frames first, identical ones once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from whyhung.verdict.frames import folded, short, user_frames
from whyhung.verdict.picture import TIMED, WIDTH, clipped, seconds, spans
from whyhung.watch.evidence import Evidence, Process, Snapshot, Thread

LINES = 60
CALLERS = 3  # user frames around the innermost
STATES = {
    "R": "runs", "S": "sleeps", "D": "waits for a disk or a device", "T": "is stopped",
    "t": "is stopped by a debugger", "Z": "has ended, and nobody has collected it",
    "I": "idles", "X": "has ended",
}  # fmt: skip


def told(evidence: Evidence, most: int = LINES) -> list[str]:
    """Return lines on the last full snapshot, rare processes first; the rest is counted."""
    groups: dict[Hashable, list[tuple[Snapshot, Process]]] = {}
    for snapshot in _last(evidence.snapshots):
        for process in snapshot.processes:
            groups.setdefault(_alike(process), []).append((snapshot, process))
    # the groups stand in the order of their ranks already
    ordered = sorted(groups.values(), key=lambda group: (group[0][1].of < 0, len(group) > 2))
    lines: list[str] = []
    left = [0, 0]  # processes, threads
    for number, group in enumerate(ordered):
        snapshot, shown = group[0]
        before = _before(evidence.snapshots, snapshot, shown)
        room = most - 1 - len(lines)
        room = min(room, max(6, room // (len(ordered) - number)))  # large groups leave some
        blocks = [([_head(group, before)], 0), *_threads(shown, before)]
        for block, many in blocks:
            room -= len(block)
            if room >= 0:
                lines += block
            else:  # and then nothing more of these, lest a thread stands without its process
                left = [left[0] + (0 if many else len(group)), left[1] + many * len(group)]
    named = [_count(*each) for each in zip(left, ("process", "thread"), strict=True) if each[0]]
    return [*lines, f"... and {' with '.join(named)} more"] if named else lines


def _last(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return each rank's last snapshot with stacks, or with threads, reduced to that rank."""
    found: dict[int, tuple[int, Snapshot]] = {}
    for snapshot in snapshots:
        if not snapshot.full:
            continue
        for rank in {process.of for process in snapshot.processes}:
            mine = [process for process in snapshot.processes if process.of == rank]
            worth = max(_worth(process) for process in mine)
            if rank not in found or worth >= found[rank][0]:
                mine.sort(key=lambda process: (process.rank is None, process.pid))
                found[rank] = worth, replace(snapshot, processes=tuple(mine))
    ordered = sorted(found.items(), key=lambda item: (item[0] < 0, item[0]))  # strangers last
    return [snapshot for _, (_, snapshot) in ordered]


def _worth(process: Process) -> int:
    """Return how much is known of it; that a rank has ended counts more than its earlier state."""
    ended = process.rank is not None and process.state in ("X", "Z")
    return 3 if ended else 2 if any(t.frames for t in process.threads) else bool(process.threads)


@dataclass(frozen=True)
class Earlier:
    """A process some time before, the baseline for shares of a core."""

    process: Process
    ago_s: float

    def share(self, now_s: float, before_s: float) -> str:
        return f"{max(0.0, now_s - before_s) / self.ago_s:.0%} of a core"


def _before(snapshots: Sequence[Snapshot], now: Snapshot, process: Process) -> Earlier | None:
    for snapshot in reversed(snapshots):
        for other in snapshot.processes if snapshot.t <= now.t - 0.5 else ():
            same = (other.pid, other.started, other.of) == (
                process.pid,
                process.started,
                process.of,
            )
            if same and other.cpu_s:
                return Earlier(other, now.t - snapshot.t)
    return None


def _alike(process: Process) -> Hashable:
    """Return a key that is equal for processes that do the same, apart from numbers and times."""
    threads = {(t.main, _words(t.name), _same(t)) for t in process.threads if not t.ours}
    kind = process.rank is not None, _words(process.name), process.state, _words(process.message)
    return *kind, frozenset(threads)


def _same(thread: Thread) -> Hashable:
    waits = thread.wait.kind if thread.wait else thread.state
    return tuple(map(short, thread.frames)), waits, thread.wait and _words(thread.wait.text)


def _words(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _count(number: int, of: str) -> str:
    plural = of + ("es" if of.endswith("s") else "s")
    return f"{number:,} {of if number == 1 else plural}"


def _head(group: list[tuple[Snapshot, Process]], before: Earlier | None) -> str:
    processes = [process for _, process in group]
    first, name = processes[0], f" ({processes[0].name})" if processes[0].name else ""
    ranks = spans([process.of for process in processes])
    many = "s" if len({process.of for process in processes}) > 1 else ""
    if len(processes) > 1:
        whose = "" if first.rank is not None else f"{len(processes)} processes of "
        who = f"{whose}rank{many} {ranks}{name}, all alike; of the first:"
    elif first.rank is not None:
        who = f"rank {first.rank}{f', process {first.pid}' if first.pid else ''}{name}"
    else:
        whose = f" of rank {first.of}" if first.of >= 0 else ", not of this run"
        who = f"process {first.pid}{whose}{name}"
    facts = [STATES.get(first.state, first.state)]
    if before is not None:
        facts.append(before.share(first.cpu_s, before.process.cpu_s))
    if first.rss_mib:
        facts.append(f"{first.rss_mib:,.0f} MiB")
    shown = ", ".join(fact for fact in facts if fact)
    said = f"; cannot be read: {first.message}" if first.message and not first.threads else ""
    return clipped(f"{who}{'' if who.endswith(':') else ','} {shown}".rstrip(" ,") + said)


def _threads(process: Process, before: Earlier | None) -> Iterator[tuple[list[str], int]]:
    """Yield (lines, number of threads): the main one first, then those in the user's code."""

    def rank(thread: Thread) -> tuple[bool, ...]:
        return not thread.main, not user_frames(thread.frames)[0], not thread.frames

    groups: dict[Hashable, list[Thread]] = {}
    for thread in sorted((t for t in process.threads if not t.ours), key=rank):
        groups.setdefault((thread.main, _same(thread)), []).append(thread)
    for threads in groups.values():
        own, inside = user_frames(threads[0].frames)
        says = clipped(_thread(threads, before), 400)
        block = wrap(says, WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 8)
        block += [f"    {short(frame)}" for frame in own[:1]]
        if inside:
            within = "      inside it: " if own else "    "
            block.append(f"{within}{short(inside[0])} ({folded(inside)})")
        if native := threads[0].native:
            block.append(f"      native: {', '.join(native[:4])}")
        if callers := [f"from {short(frame)}" for frame in own[1 : 1 + CALLERS]]:
            more = len(own) - 1 - len(callers)
            block.append("    " + ", ".join([*callers, *([f"{more} more"] if more else [])]))
        yield [clipped(line, WIDTH - 2) for line in block], len(threads)


def _thread(threads: list[Thread], before: Earlier | None) -> str:
    """Return its name, and what it does or waits for."""
    thread, number = threads[0], f"{len(threads):,}"
    does = [thread.wait.text if thread.wait else STATES.get(thread.state, thread.state)]
    if thread.wait and thread.wait.left_s is not None and not TIMED.search(thread.wait.text):
        does.append(f"{seconds(thread.wait.left_s)} left")
    if thread.gil:
        does.append("holds Python's interpreter lock (GIL)")
    told = ", ".join(part for part in does if part)
    if len(threads) > 1 and not thread.frames and not thread.wait and thread.state in ("S", ""):
        return f"{number} threads that idle in native code"
    if len(threads) > 1:
        return (
            f"{number} threads alike, as {thread.name or thread.tid}: {told or 'nothing is told'}"
        )
    earlier = [t for t in before.process.threads if t.tid == thread.tid] if before else []
    if earlier and thread.cpu_s > earlier[0].cpu_s:
        told += ", " * bool(told) + before.share(thread.cpu_s, earlier[0].cpu_s)
    name = thread.name or f"thread {thread.tid}"
    return f"{name}: {told}" if told else name
