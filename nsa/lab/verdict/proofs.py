"""Proofs that a trial which rests cannot go on: a stack alone, or an idle core alone, is none."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.lab.verdict.stalls import LOOKS, Stall, at_work, functions, stalls, step_s
from nsa.lab.watch.evidence import Evidence

# Two times the bound for what could end by itself: somebody's sleep, a program that starts another,
# a first step that loads and compiles.
PATIENCE = 2.0
DEVICE_AT_WORK = 5.0  # percent


@dataclass(frozen=True)
class Proof:
    """what: the verdict's word. rest: of the rank that is to blame. because: what proves it."""

    what: str
    rest: Stall
    because: tuple[str, ...]


def find(evidence: Evidence) -> Proof | None:
    """The first proof that holds, of the rank to blame; None where nothing is proven."""
    seen = stalls(evidence)
    for rest in seen:
        if rest.frozen:
            proof = stopped(rest) or gil_held(evidence, rest) or python_spin(evidence, rest)
            if proof is not None:
                return proof
    seen = [rest for rest in seen if not rest.gone]
    if not seen or not all(rest.frozen for rest in seen):
        return None
    return collectives_disagree(evidence, seen) or blocked(evidence, seen)


def stopped(rest: Stall) -> Proof | None:
    """The kernel says so. A tracer's stop, "t", is one that lasts as long as a look."""
    if rest.state != "T":
        return None
    return Proof("stopped", rest, (f"the process was stopped (T) in all of {rest.seen} samples",))


def gil_held(evidence: Evidence, rest: Stall) -> Proof | None:
    """A thread that needs the GIL ten times a second did not get it once."""
    if not rest.alive or rest.beats > 0 or rest.state in ("T", "D"):
        return None
    asleep = rest.state == "S"  # the same of a process that was given no core says nothing
    if rest.seconds <= _patient(evidence, rest) or not (asleep or rest.works):
        return None
    owner = _innermost(rest)
    used = "" if rest.cpu is None else f", at {rest.cpu:.0%} of a core"
    return Proof(
        "gil-held",
        rest,
        (
            f"no beat in {rest.seconds:.1f} s: the GIL was never let go{used}",
            *((f"the stack was at {owner}",) if owner else ()),
        ),
    )


def python_spin(evidence: Evidence, rest: Stall) -> Proof | None:
    """Python code owns the GIL, in one function with the same callers at every look."""
    if rest.beats <= 0 or not rest.works or rest.seconds <= _patient(evidence, rest):
        return None
    threads = [at_work(look) for look in rest.three_looks()]
    if not threads or not all(thread.get("gil") for thread in threads):
        return None
    if len({functions(thread["frames"]) for thread in threads}) != 1:
        return None
    return Proof(
        "python-spin",
        rest,
        (
            f"{len(threads)} looks by {rest.tool()}, all at {threads[-1]['frames'][0]}, "
            "which had the GIL",
            *((f"at {rest.cpu:.0%} of a core",) if rest.cpu is not None else ()),
        ),
    )


def collectives_disagree(evidence: Evidence, seen: list[Stall]) -> Proof | None:
    """The ranks' recorders end at different collectives, and who is behind does not compute."""
    apart = sequences_apart(evidence) or _counts_apart(evidence, seen)
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
    at = _innermost(rest)
    where = f" of group {group}" if group not in ("", "0") else ""
    return Proof(
        "collective",
        rest,
        (
            f"the ranks' last collectives{where} differ: {said}",
            f"rank {behind} is behind, at rest" + (f" at {at}" if at else ""),
        ),
    )


def sequences_apart(evidence: Evidence) -> tuple[str, dict[int, tuple[int, str]]] | None:
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
        if len(last) < 2:
            continue
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


def blocked(evidence: Evidence, seen: list[Stall]) -> Proof | None:
    """No rank computes, no device does, and each waits for what computing alone could bring."""
    if not all(rest.idle and rest.state not in ("D", "R") for rest in seen):
        return None
    if any(_device_works(rest) for rest in seen):
        return None
    for rest in seen:
        kind = rest.waits()
        if kind in ("timer", "pipe"):
            if rest.seconds <= _patient(evidence, rest, PATIENCE):
                return None
        elif kind not in ("lock", "collective"):
            return None  # a network, a disk or another program may still answer
        if not _same_stack(rest):
            return None
    # Who waits for something else than the others is the one they wait for.
    order = {"timer": 0, "pipe": 0, "lock": 1, "collective": 2}
    guilty = min(seen, key=lambda rest: (order[rest.waits()], rest.p.key(), rest.rank))
    who = f"rank {guilty.rank} waits" if len(seen) > 1 else "it waits"
    words = {"timer": "in a sleep", "pipe": "for a pipe", "lock": "for a lock",
             "collective": "in a collective"}  # fmt: skip
    at = _innermost(guilty)
    everyone = "every rank" if len(seen) > 1 else "the process"
    return Proof(
        "blocked",
        guilty,
        (
            f"{everyone} used below 5 % of a core for {guilty.seconds:.1f} s",
            f"{who} {words[guilty.waits()]}" + (f", at {at}" if at else ""),
        ),
    )


def _patient(evidence: Evidence, rest: Stall, patience: float = 1.0) -> float:
    """How long what could end by itself must rest: never less than a step was predicted to take."""
    if rest.p.step < 1:
        patience = PATIENCE
    return max(patience * rest.bound, step_s(evidence))


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
    mains = [next((t for t in threads if t.get("main")), threads[0]) for threads in looks]
    return len({tuple(main["frames"]) for main in mains}) == 1


def _innermost(rest: Stall) -> str:
    for look in reversed(rest.looks):
        if look.threads:
            frames = at_work(look.threads)["frames"]
            named = [frame for frame in frames if ".py:" in frame]
            if named:
                return named[0]
    return ""
