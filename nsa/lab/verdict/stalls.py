"""Ranks whose progress rests, and proofs that they cannot go on.

A stack alone, or an idle core alone, is no proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any

from nsa.lab.watch.evidence import Evidence, Look, P, Sample, at_last_p

OWN_GAPS = 3.0  # how much longer than its longest rest so far a rank must rest
LOOKS, APART_S = 3, 0.45
IDLE = 0.05  # of one core
GONE_S = 2.0
FEW = 5  # samples in a rest, below which too little was seen of it
# Two times the bound for what could end by itself: somebody's sleep, a program that starts another,
# a first step that loads and compiles.
PATIENCE = 2.0
DEVICE_AT_WORK = 5.0  # percent
# What stands in the frames of a library, or between a module and whoever calls it.
_NOT_OWN = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "nsa/lab/watch/")
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


@dataclass(frozen=True)
class Stall:
    """One rank whose P has not changed, as its samples have it."""

    rank: int
    p: P
    since: float
    seconds: float
    bound: float  # how long it must rest for that to count
    cpu: float | None  # share of one core that it used, None where that is not told
    beats: int  # of the thread that needs the GIL
    alive: bool  # beats had ever risen
    state: str  # that of all its samples, "" where they differ
    gone: bool  # it has ended, while others have not
    looks: list[Look]  # taken in the rest, at the same P
    samples: list[Sample]  # of the rest

    @property
    def frozen(self) -> bool:
        """Longer than it may, and seen often enough."""
        return self.seconds > self.bound and len(self.samples) >= FEW

    @property
    def idle(self) -> bool:
        """Nothing of the process computed, as far as that is told."""
        return self.cpu is not None and self.cpu < IDLE

    def three_looks(self) -> list[Look]:
        """At three or more moments half a second apart, by the best tool; [] if fewer."""
        for tool in ("py-spy", "native", "faulthandler"):
            found: list[Look] = []
            for look in self.looks:
                apart = not found or look.t - found[-1].t >= APART_S
                if look.tool == tool and look.threads and apart:
                    found.append(look)
            if len(found) >= LOOKS:
                return found
        return []

    def waits(self) -> str:
        """For what the main thread waits: a name of _WAITS, or "" where nothing tells."""
        words = [sample.wchan for sample in self.samples[-LOOKS:]]
        for look in self.looks:
            if main := look.main():
                # Native frames, and the innermost of Python: outer ones say who called, not what
                # waits.
                depth = 12 if look.tool == "native" else 4
                words += [main.get("wchan", ""), *main["frames"][:depth]]
        text = "\n".join(words).lower()
        return next((kind for kind, marks in _WAITS.items() if any(m in text for m in marks)), "")

    def place(self) -> str:
        """Phase, and the innermost function that is no library's: the same in another run."""
        seen = [place_of(at_work(x.threads)["frames"]) for x in self.looks if x.threads]
        return ", ".join([self.p.phase, *[named for named in seen if named][-1:]])

    def innermost(self) -> str:
        """The innermost Python frame of the thread at work, as it was seen last; "" for none."""
        for look in reversed(self.looks):
            for frame in at_work(look.threads)["frames"] if look.threads else ():
                if ".py:" in frame:
                    return frame
        return ""


def stalls(evidence: Evidence) -> list[Stall]:
    """One for each rank that was sampled, as of its last sample alive."""
    latest = max((s.t for s in evidence.samples if s.state), default=0.0)
    return [_rest(evidence, rank, latest) for rank in evidence.ranks()]


def _rest(evidence: Evidence, rank: int, latest: float) -> Stall:
    samples = evidence.of(rank)
    samples = [s for s in samples if s.state] or samples  # what is read of the dead has no state
    last = samples[-1]
    mine = at_last_p(samples)
    first, seconds = mine[0], last.t - mine[0].t
    states = {sample.state for sample in mine[1:] or mine}
    return Stall(
        rank=rank,
        p=last.p,
        since=first.t,
        seconds=seconds,
        bound=_bound(evidence, samples[: -len(mine)]),
        cpu=(last.cpu_s - first.cpu_s) / seconds if seconds > 0 else None,
        beats=last.beats - first.beats,
        alive=last.beats > 0,
        state=states.pop() if len(states) == 1 else "",
        gone=last.state == "Z" or last.t < latest - GONE_S,
        looks=[
            look
            for look in evidence.looks
            if look.rank == rank and first.t <= look.t <= last.t and look.p in (None, last.p)
        ],
        samples=mine,
    )


def _bound(evidence: Evidence, before: list[Sample]) -> float:
    """What was given, and more than this rank has rested before, the first step left out.

    A first step compiles and loads, so its rests tell nothing of later ones. Thinned samples make a
    rest no longer than it was.
    """
    rests = [[s.t for s in same] for p, same in groupby(before, lambda s: s.p) if p.step >= 1]
    longest = max((times[-1] - times[0] for times in rests), default=0.0)
    return max(evidence.stall_s, OWN_GAPS * longest)


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
    own = [frame for frame in named if not any(mark in frame for mark in _NOT_OWN)] or named
    if not own:
        return ""
    file, _, function = own[0].rpartition(" ")
    return f"{PurePath(file.rpartition(':')[0]).name} {function.rpartition('.')[2]}"


@dataclass(frozen=True)
class Proof:
    """what: the verdict's word. rest: of the rank that is to blame. because: what proves it."""

    what: str
    rest: Stall
    because: list[str]


def proven(evidence: Evidence) -> Proof | None:
    """The first proof that holds, of the rank to blame; None where nothing is proven."""
    seen = stalls(evidence)
    for rest in seen:
        if rest.frozen:
            proof = _stopped(rest) or _gil_held(evidence, rest) or _python_spin(evidence, rest)
            if proof is not None:
                return proof
    seen = [rest for rest in seen if not rest.gone]
    if not seen or not all(rest.frozen for rest in seen):
        return None
    return _collectives_disagree(evidence, seen) or _blocked(evidence, seen)


def _stopped(rest: Stall) -> Proof | None:
    """The kernel says so. A tracer's stop, "t", is one that lasts as long as a look."""
    if rest.state != "T":
        return None
    why = f"the process was stopped (T) in all of {len(rest.samples)} samples"
    return Proof("stopped", rest, [why])


def _gil_held(evidence: Evidence, rest: Stall) -> Proof | None:
    """A thread that needs the GIL ten times a second did not get it once."""
    if not rest.alive or rest.beats > 0 or rest.state in ("T", "D"):
        return None
    asleep = rest.state == "S"  # the same of a process that was given no core says nothing
    if rest.seconds <= _patient(evidence, rest) or (rest.idle and not asleep):
        return None
    used = "" if rest.cpu is None else f", at {rest.cpu:.0%} of a core"
    because = [f"no beat in {rest.seconds:.1f} s: the GIL was never let go{used}"]
    if owner := rest.innermost():
        because.append(f"the stack was at {owner}")
    return Proof("gil-held", rest, because)


def _python_spin(evidence: Evidence, rest: Stall) -> Proof | None:
    """Python code owns the GIL, in one function with the same callers at every look."""
    if rest.beats <= 0 or rest.idle or rest.seconds <= _patient(evidence, rest):
        return None
    looks = rest.three_looks()
    threads = [at_work(look.threads) for look in looks]
    if not threads or not all(thread.get("gil") for thread in threads):
        return None
    if len({_functions(thread["frames"]) for thread in threads}) != 1:
        return None
    at = threads[-1]["frames"][0]
    because = [f"{len(looks)} looks by {looks[0].tool}, all at {at}, which had the GIL"]
    if rest.cpu is not None:
        because.append(f"at {rest.cpu:.0%} of a core")
    return Proof("python-spin", rest, because)


def _functions(frames: list[str]) -> tuple[str, ...]:
    """The stack without its line numbers, which change inside a loop."""
    parts = (frame.rpartition(" ") for frame in frames)
    return tuple(f"{file.rpartition(':')[0]} {function}" for file, _, function in parts)


def _collectives_disagree(evidence: Evidence, seen: list[Stall]) -> Proof | None:
    """The ranks' recorders end at different collectives, and who is behind does not compute."""
    apart = _sequences_apart(evidence) or _counts_apart(evidence, seen)
    if apart is None:
        return None
    group, by_rank = apart
    behind = min(by_rank, key=lambda rank: by_rank[rank][0])
    rest = next((rest for rest in seen if rest.rank == behind), None)
    if rest is None:
        return None
    waits = rest.waits()
    if waits not in ("collective", "device") and not rest.idle:
        return None
    late = waits not in ("collective", "device", "lock")  # with its data, perhaps
    if late and rest.seconds <= _patient(evidence, rest, PATIENCE):
        return None
    said = ", ".join(f"rank {r} at {op} number {n}" for r, (n, op) in sorted(by_rank.items()))
    where = f" of group {group}" if group not in ("", "0") else ""
    because = [f"the ranks' last collectives{where} differ: {said}"]
    because.append(f"rank {behind} is behind, at rest{_at(rest, ' at ')}")
    return Proof("collective", rest, because)


def _sequences_apart(evidence: Evidence) -> tuple[str, dict[int, tuple[int, str]]] | None:
    """(group, {rank: (number, operation)}) of the last collectives where those differ, else None.

    One number with different operations or sizes differs as well.
    """
    groups = {e["group"] for rows in evidence.flights.values() for e in rows if "group" in e}
    for group in sorted(groups, key=str):
        last = {}
        for rank, rows in evidence.flights.items():
            mine = [e for e in rows if e.get("group") == group and e.get("seq") is not None]
            if mine:
                last[rank] = max(mine, key=lambda e: e["seq"])
        if len({(e["seq"], e.get("op"), str(e.get("sizes"))) for e in last.values()}) > 1:
            return str(group), {rank: (e["seq"], str(e.get("op"))) for rank, e in last.items()}
    return None


def _counts_apart(
    evidence: Evidence, seen: list[Stall]
) -> tuple[str, dict[int, tuple[int, str]]] | None:
    """The same from the ranks' own counts, where there is no record of all of them."""
    counts = {rest.rank: rest.p.collectives for rest in seen}
    if len(evidence.flights) > 1 or len(set(counts.values())) < 2 or not all(r.idle for r in seen):
        return None
    return "", {rank: (count, "its collective") for rank, count in counts.items()}


def _blocked(evidence: Evidence, seen: list[Stall]) -> Proof | None:
    """No rank computes, no device does, and each waits for what computing alone could bring."""
    if not all(rest.idle and rest.state not in ("D", "R") for rest in seen):
        return None
    if any(_device_works(rest) for rest in seen):
        return None
    # The rank that waits for something else than the others is the one they wait for.
    words = {"timer": (0, "in a sleep"), "pipe": (0, "for a pipe"), "lock": (1, "for a lock"),
             "collective": (2, "in a collective")}  # fmt: skip
    for rest in seen:
        kind = rest.waits()
        if kind not in words or not _same_stack(rest):
            return None  # a network, a disk or another program may still answer
        ends = kind in ("timer", "pipe")  # by itself, perhaps
        if ends and rest.seconds <= _patient(evidence, rest, PATIENCE):
            return None
    guilty = min(seen, key=lambda rest: (words[rest.waits()][0], rest.p.key(), rest.rank))
    who, everyone = "it waits", "the process"
    if len(seen) > 1:
        who, everyone = f"rank {guilty.rank} waits", "every rank"
    because = [f"{everyone} used below 5 % of a core for {guilty.seconds:.1f} s"]
    because.append(f"{who} {words[guilty.waits()][1]}{_at(guilty, ', at ')}")
    return Proof("blocked", guilty, because)


def _patient(evidence: Evidence, rest: Stall, patience: float = 1.0) -> float:
    """How long what could end by itself must rest: never less than a step was predicted to take."""
    steps = evidence.spec.get("steps") or 0
    step_s = (evidence.predicted_s or 0.0) * evidence.factor / steps if steps else 0.0
    return max((PATIENCE if rest.p.step < 1 else patience) * rest.bound, step_s)


def _device_works(rest: Stall) -> bool:
    told = [s.gpu_percent for s in rest.samples if s.gpu_percent is not None]
    waiting = rest.waits() != "collective"  # NCCL's kernels spin while they wait
    return waiting and any(percent > DEVICE_AT_WORK for percent in told)


def _same_stack(rest: Stall) -> bool:
    """At three looks; without any the kernel's wait channel is the witness."""
    looks = rest.three_looks()
    if not looks:
        tail = {sample.wchan for sample in rest.samples[-LOOKS:]}
        return len(tail) == 1 and tail.isdisjoint({"", "0"})
    return len({tuple((look.main() or look.threads[0])["frames"]) for look in looks}) == 1


def _at(rest: Stall, before: str) -> str:
    at = rest.innermost()
    return f"{before}{at}" if at else ""
