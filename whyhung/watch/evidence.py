"""Observations of a trial: plain, JSON-serializable data from which a verdict is judged.

Judging needs no process and no torch, so a verdict can be tested, and judged again later.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

OUTSIDE = "seen from outside"  # phase of a rank that counts nothing: events are its observed work
PHASES = ("start", "data", "forward", "backward", "optimizer", "end", "other")
GPU_BUSY = 5.0  # percent of the time with a running kernel, from which a GPU counts as busy
ENDS = ("returned", "exception", "signal", "exit", "stopped by the supervisor")
REASONS = ("stall", "deadline", "caller")  # for which the supervisor stops a trial
TOOLS = ("py-spy", "faulthandler", "native", "proc")
HIDDEN = "~"  # at the end of `Thread.visible`: the thread could change state that is not shown
WAITS = (
    "lock", "semaphore", "pipe", "fifo", "socket", "file lock", "child", "timer", "terminal",
    "event", "device", "collective", "GIL", "disk", "stopped", "polling", "other",
)  # fmt: skip


@dataclass(frozen=True)
class P:
    """Progress coordinate of a rank."""

    step: int = -1  # current step, -1 before the first
    phase: str = "start"
    modules: int = 0  # whose forward ended in this step
    fired: int = 0  # autograd nodes that ran in this step
    total: int = 0  # nodes of its backwards, 0 if unknown
    events: int = 0  # passed since the start, by the device or as the loop itself reported
    collectives: int = 0  # enqueued since the start
    phases: int = 0  # entered since the start
    # Autograd nodes that the main thread had made when it last looked: an increase is progress,
    # but not a position in a step.
    made: int = 0

    def key(self) -> tuple[int, ...]:
        """Sort key that grows with everything a run does, in this and other runs of its spec."""
        order = PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)
        device = self.events + self.collectives
        return (self.step, self.modules + self.fired, device, self.phases, order)

    def __str__(self) -> str:
        if self.phase == OUTSIDE:
            return f"seen from outside alone, {self.events} times at work"
        more = f", node {self.fired} of {self.total}" if self.total else ""
        more += f", {self.events} events" if self.events else ""
        more += f", {self.collectives} collectives" if self.collectives else ""
        return f"step {self.step} {self.phase}, {self.modules} modules{more}"


@dataclass(frozen=True)
class Sample:
    """One observation from outside, taken a few times per second."""

    t: float  # seconds since the trial's start
    rank: int
    p: P
    beats: int = 0  # of a thread that needs the GIL
    cpu_s: float = 0.0  # CPU time of the process, all threads
    state: str = ""  # R, S, D, T or Z as in /proc, "" if unknown or the process is gone
    wchan: str = ""  # where the main thread sleeps in the kernel, "" if unknown
    rss_mib: float | None = None
    gpu_percent: float | None = None  # of the last second with any kernel running, even a spinning
    family_cpu_s: float = 0.0  # of the process and its descendants
    io_bytes: int = 0  # that these read and wrote, by any call


@dataclass(frozen=True)
class Wait:
    """Wait of a thread: its object, and the threads that could end it."""

    kind: str  # one of WAITS
    text: str  # "reads pipe 505254, whose other end is held by process 1234"
    # (pid, tid) of observed threads that could end it; tid 0: any thread of pid
    wakers: tuple[tuple[int, int], ...] = ()
    outside: bool = False  # something that is not observed could end it, such as another host
    left_s: float | None = None  # until a timer ends it; None: no timer, or unknown
    source: str = ""  # where that was read: "/proc/12/task/14/syscall"


@dataclass(frozen=True)
class Thread:
    """State of one thread at one moment."""

    tid: int
    name: str = ""
    main: bool = False
    state: str = ""  # as in /proc, "" if unknown
    cpu_s: float = 0.0
    wchan: str = ""
    wait: Wait | None = None  # None: it runs, or its wait is unknown
    frames: tuple[str, ...] = ()  # of Python, innermost first: "file:line function"
    native: tuple[str, ...] = ()  # functions of C above Python's innermost, innermost first
    gil: bool | None = None  # True if it holds the GIL, None if unknown
    visible: str = ""  # digest of the locals of its frames, as visible.digest makes it
    ours: bool = False  # it belongs to this project, and does no work of the program
    switches: int | None = None  # context switches: unchanged, it slept all along
    io_bytes: int | None = None  # that it read and wrote by any call, None if unknown
    polled: str = ""  # what it polls, if it sleeps between two queries


@dataclass(frozen=True)
class Process:
    """State of one process of a program's family at one moment."""

    pid: int
    parent: int = 0
    started: int = 0  # distinguishes it from a later process with the same pid
    of: int = 0  # the rank to whose family it belongs
    rank: int | None = None  # its own, None for a worker or another child
    name: str = ""  # short name of the program: "python train.py", "sleep 15"
    state: str = ""
    cpu_s: float = 0.0  # all threads
    io_bytes: int = 0  # that it read and wrote by any call: disks, pipes, sockets
    rss_mib: float = 0.0
    threads: tuple[Thread, ...] = ()
    message: str = ""  # what could not be read, why, and what would help

    def main(self) -> Thread | None:
        """Main thread; None if it was not seen."""
        return next((thread for thread in self.threads if thread.main), None)


@dataclass(frozen=True)
class Snapshot:
    """Every process and thread of a family at one moment, with what each waits for."""

    t: float  # seconds since the start
    processes: tuple[Process, ...] = ()
    p: dict[int, P] = field(default_factory=dict)  # rank: its coordinate at that moment
    tool: str = "py-spy"  # of the stacks: one of TOOLS
    full: bool = True  # with stacks and waits; else numbers of processes alone
    gpu_percent: float | None = None
    # rank: use of its GPU: works (None: unknown) and text, as in devices.Use
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)

    def process(self, pid: int) -> Process | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def of(self, rank: int) -> Process | None:
        """Process that is this rank; None if it was not seen."""
        return next((process for process in self.processes if process.rank == rank), None)


@dataclass(frozen=True)
class End:
    """End of a trial."""

    how: str  # one of ENDS
    returncode: int | None = None
    type: str = ""  # the exception's class, the signal's name, or one of REASONS
    message: str = ""
    traceback: str = ""
    first_rank: int | None = None  # the first to fail, None if none did or it is unknown
    out_of_memory: str = ""  # "", "device" or "host"
    peak_mib: float | None = None  # of the device, or of the host if none is used


@dataclass
class Evidence:
    """Complete record of one trial: what ran, where, what was observed, how it ended."""

    spec: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    preflight: list[str] = field(default_factory=list)  # reasons not to trust it
    seconds: float = 0.0  # from its start to its end, start-up included
    began_s: float | None = None  # when its first step began, None if it never did
    predicted_s: float | None = None  # estimated time of its steps, None without an estimate
    factor: float = 1.0  # by which its observers slow it
    soft_s: float | None = None  # when looks are taken first, counted from began_s
    deadline_s: float | None = None  # when it has to end, counted from began_s
    stall_s: float = 5.0  # how long P may rest
    wait_s: float | None = None  # quiet time of all before a report; None: as in the rules
    samples: list[Sample] = field(default_factory=list)  # in order of time, of all ranks
    snapshots: list[Snapshot] = field(default_factory=list)  # likewise, if looks were taken
    end: End | None = None  # None while it runs
    oracles: dict[str, dict[str, Any]] = field(default_factory=dict)  # name: {"ok", "detail"}
    flights: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # Flight Recorders
    locks: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # pid: see watch.locks
    reports: list[dict[str, Any]] = field(default_factory=list)  # stalls as they were reported
    losses: list[float] = field(default_factory=list)  # of rank 0
    witness: dict[str, Any] | None = None  # which implementations ran, None if not recorded
    memory: dict[str, Any] | None = None  # at a stall on a GPU
    result: dict[str, Any] | None = None  # result of rank 0's subject
    again: Evidence | None = None  # the rerun at twice the deadline
    notes: list[str] = field(default_factory=list)  # what else a reader should know
    output: list[str] = field(default_factory=list)  # the last lines that it printed

    def ranks(self) -> list[int]:
        """Ranks with at least one sample."""
        return sorted({sample.rank for sample in self.samples})

    def of(self, rank: int) -> list[Sample]:
        """Samples of one rank, in order of time."""
        return [sample for sample in self.samples if sample.rank == rank]

    def last(self, rank: int = 0) -> P:
        """Progress coordinate of the rank's last sample; P() without one."""
        seen = self.of(rank)
        return seen[-1].p if seen else P()

    def frozen_s(self, rank: int = 0) -> float:
        """Seconds that the rank's P had rested at its last sample."""
        resting = at_last_p(self.of(rank))
        return resting[-1].t - resting[0].t if resting else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no NaN: non-finite losses become strings ("nan")."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Evidence:
        """Restore from the output of `to_dict`, also after JSON. Unknown names are ignored."""
        looks = [_of_a_look(look) for look in found.get("looks", ())]
        return _restored(cls, {**found, "snapshots": [*found.get("snapshots", ()), *looks]})


def at_last_p(samples: list[Sample]) -> list[Sample]:
    """Last samples of one rank, among which its P did not change."""
    return list(takewhile(lambda sample: sample.p == samples[-1].p, reversed(samples)))[::-1]


def thinned(samples: list[Sample]) -> list[Sample]:
    """Drop about half: keep every other sample of each rank, and those where P or state changed."""
    kept, before, odd = [], {}, {}
    for sample in samples:
        last = before.get(sample.rank)
        changed = last is None or (last.p, last.state) != (sample.p, sample.state)
        odd[sample.rank] = not odd.get(sample.rank, False)
        if odd[sample.rank] or (changed and len(kept) < len(samples) * 3 // 4):
            kept.append(sample)
        before[sample.rank] = sample
    return kept


def _of_a_look(found: dict[str, Any]) -> dict[str, Any]:
    """Convert a look of one rank, which evidence before December 2026 has instead of a snapshot."""
    rank, p = found.get("rank", 0), found.get("p")
    names = ("name", "state", "wchan", "cpu_s", "gil", "main", "frames")
    threads = [
        {"tid": tid, **{name: thread[name] for name in names if name in thread}}
        for tid, thread in enumerate(found.get("threads", ()))
    ]
    process = {"pid": 0, "of": rank, "rank": rank, "threads": threads}
    process["message"] = found.get("message", "")
    kept = {name: found[name] for name in ("t", "tool") if name in found}
    return {"t": 0.0, **kept, "processes": [process], "p": {} if p is None else {rank: p}}


_hints = lru_cache(get_type_hints)


def _restored(kind: Any, found: Any) -> Any:
    """Restore a value of this type from plain data; unknown names of a dataclass are ignored."""
    inner = get_args(kind)
    if found is None or kind is Any:
        return found
    if isinstance(kind, UnionType):  # "... | None"
        return _restored(inner[0], found)
    if dataclasses.is_dataclass(kind):
        names = {name: one for name, one in _hints(kind).items() if name in found}
        return kind(**{name: _restored(one, found[name]) for name, one in names.items()})
    if get_origin(kind) is dict:
        return {_restored(inner[0], key): _restored(inner[1], x) for key, x in found.items()}
    if inner:
        return get_origin(kind)(_restored(inner[0], x) for x in found)
    return kind(found) if isinstance(found, str) else found  # keys of JSON, and "nan"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
