"""Ranks whose progress rests: since when, and what they did meanwhile, read from the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from nsa.lab.watch.evidence import Evidence, Look, P, Sample

OWN_GAPS = 3.0  # how much longer than its longest rest so far a rank must rest
LOOKS, APART_S = 3, 0.45
IDLE = 0.05  # of one core
GONE_S = 2.0
FEW = 5  # samples in a rest, below which too little was seen of it

# How a thread waits, by words in the kernel's wait channel and in native and Python frames.
_WAITS = {
    "collective": (
        "distributed_c10d.py", "torch/distributed/", "torch/nn/parallel/distributed.py", "gloo::",
        "c10d::", "nccl", "all_reduce", "allreduce", "all_gather", "broadcast_coalesced",
    ),
    "device": (
        "cudastreamsynchronize", "cudadevicesynchronize", "cudaeventsynchronize",
        "custreamsynchronize", "torch/cuda/__init__.py", "torch/cuda/streams.py",
    ),
    "timer": ("nanosleep", "pysleep", "time_sleep"),
    "pipe": ("pipe_read", "pipe_wait", "pipe_write"),
    "lock": (
        "futex", "pythread_acquire_lock", "lock_acquire", "pthread_cond", "pthread_mutex_lock",
        "lll_lock_wait", "sem_wait", "threading.py", "queue.py",
    ),
}  # fmt: skip


@dataclass
class Stall:
    """One rank whose P has not changed since `since`, for `seconds`, as its samples have it.

    bound: how long it must rest for that to count. cpu: share of one core that it used, None where
    that is not told. beats: of the thread that needs the GIL. state: that of all its samples, ""
    where they differ. looks: those taken in the rest, at the same P.
    """

    rank: int
    p: P
    since: float
    seconds: float
    bound: float
    cpu: float | None = None
    beats: int = 0
    alive: bool = False  # beats had ever risen
    state: str = ""
    seen: int = 0
    gone: bool = False  # it has ended, while others have not
    looks: list[Look] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def frozen(self) -> bool:
        """Longer than it may, and seen often enough."""
        return self.seconds > self.bound and self.seen >= FEW

    @property
    def idle(self) -> bool:
        """Nothing of the process computed."""
        return self.cpu is not None and self.cpu < IDLE

    @property
    def works(self) -> bool:
        """It computed, as far as that is told."""
        return self.cpu is None or self.cpu >= IDLE

    def three_looks(self) -> list[list[dict[str, Any]]]:
        """Threads at three or more moments half a second apart, by the best tool; [] if fewer."""
        for tool in ("py-spy", "native", "faulthandler"):
            found: list[Look] = []
            for look in self.looks:
                apart = not found or look.t - found[-1].t >= APART_S
                if look.tool == tool and look.threads and apart:
                    found.append(look)
            if len(found) >= LOOKS:
                return [look.threads for look in found]
        return []

    def tool(self) -> str:
        """By which `three_looks` were taken."""
        threads = self.three_looks()
        taken = [look.tool for look in self.looks if threads and look.threads is threads[-1]]
        return taken[0] if taken else ""

    def waits(self) -> str:
        """For what the main thread waits: a name of _WAITS, or "" where nothing tells."""
        words = [sample.wchan for sample in self.samples[-LOOKS:]]
        for look in self.looks:
            main = look.main()
            words.append((main or {}).get("wchan", ""))
            # Native frames, and the innermost of Python: outer ones say who called, not what waits.
            depth = 12 if look.tool == "native" else 4
            words += main["frames"][:depth] if main else []
        text = "\n".join(words).lower()
        return next((kind for kind, marks in _WAITS.items() if any(m in text for m in marks)), "")

    def place(self) -> str:
        """Phase, and the innermost function that is no library's: the same in another run."""
        for threads in reversed([look.threads for look in self.looks if look.threads]):
            named = place_of(at_work(threads)["frames"])
            if named:
                return f"{self.p.phase}, {named}"
        return self.p.phase


def stalls(evidence: Evidence) -> list[Stall]:
    """One for each rank that was sampled, as of its last sample alive."""
    latest = max((s.t for s in evidence.samples if s.state), default=0.0)
    return [_rest(evidence, rank, latest) for rank in evidence.ranks()]


def _rest(evidence: Evidence, rank: int, latest: float) -> Stall:
    samples = evidence.of(rank)
    samples = [s for s in samples if s.state] or samples  # what is read of the dead has no state
    last = samples[-1]
    begun = len(samples)
    while begun > 0 and samples[begun - 1].p == last.p:
        begun -= 1
    mine = samples[begun:]
    seconds = last.t - mine[0].t
    used = mine[-1].cpu_s - mine[0].cpu_s
    states = {sample.state for sample in mine[1:] or mine}
    looks = [
        look
        for look in evidence.looks
        if look.rank == rank and mine[0].t <= look.t <= last.t and look.p in (None, last.p)
    ]
    return Stall(
        rank=rank,
        p=last.p,
        since=mine[0].t,
        seconds=seconds,
        bound=_bound(evidence, samples[:begun]),
        cpu=used / seconds if seconds > 0 else None,
        beats=mine[-1].beats - mine[0].beats,
        alive=last.beats > 0,
        state=states.pop() if len(states) == 1 else "",
        seen=len(mine),
        gone=last.state == "Z" or last.t < latest - GONE_S,
        looks=looks,
        samples=mine,
    )


def _bound(evidence: Evidence, before: list[Sample]) -> float:
    """What was given, and more than this rank has rested before, the first step left out.

    A first step compiles and loads, so its rests tell nothing of later ones.
    """
    longest = max((b - a for a, b, p in _gaps(before) if p.step >= 1), default=0.0)
    return max(evidence.stall_s, OWN_GAPS * longest)


def _gaps(samples: list[Sample]) -> Iterator[tuple[float, float, P]]:
    """(first seen, last seen, P) of every P; thinned samples make a rest no longer than it was."""
    first: Sample | None = None
    before: Sample | None = None
    for sample in samples:
        if before is None or sample.p != before.p:
            if first is not None and before is not None:
                yield first.t, before.t, before.p
            first = sample
        before = sample
    if first is not None and before is not None:
        yield first.t, before.t, before.p


def step_s(evidence: Evidence) -> float:
    """What one step was predicted to take, observers included; 0.0 where nobody said."""
    steps = evidence.spec.get("steps") or 0
    if not evidence.predicted_s or not steps:
        return 0.0
    return evidence.predicted_s * evidence.factor / steps


def at_work(threads: list[dict[str, Any]]) -> dict[str, Any]:
    """The thread that has the GIL, else the main one: on a GPU a backward has its own thread."""
    holders = [thread for thread in threads if thread.get("gil")]
    mains = [thread for thread in threads if thread.get("main")]
    return (holders or mains or threads)[0]


def place_of(frames: list[str]) -> str:
    """`file.py function` of the innermost frame that is no library's, or of the innermost.

    Without the function's class, which not every tool tells.
    """
    named = [frame for frame in frames if ".py:" in frame]
    own = [frame for frame in named if not _library(frame)] or named
    if not own:
        return ""
    file, _, function = own[0].rpartition(" ")
    return f"{PurePath(file.rpartition(':')[0]).name} {function.rpartition('.')[2]}"


def _library(frame: str) -> bool:
    return any(
        mark in frame
        for mark in (
            "site-packages",
            "dist-packages",
            "/lib/python3",
            "<frozen",
            "nsa/lab/watch/",  # which stands between a module and whoever calls it
        )
    )


def functions(frames: list[str]) -> tuple[str, ...]:
    """The stack without its line numbers, which change inside a loop."""
    return tuple(
        f"{file.rpartition(':')[0]} {function}"
        for file, _, function in (frame.rpartition(" ") for frame in frames)
    )
