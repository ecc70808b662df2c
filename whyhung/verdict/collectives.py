"""In which collective each rank is, which ranks it lacks, and whether it can ever end.

From the ranks' Flight Recorders where they could be read, else from their stacks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from whyhung.verdict.flights import (
    Pair,
    Pending,
    called_of,
    first_mismatch,
    name_of,
    pairs,
    pending,
)
from whyhung.verdict.graph import Collective, Node
from whyhung.watch.evidence import Evidence, Process, Snapshot

_DISTRIBUTED = "torch/distributed/"
# What gloo says where a peer sends more than there is room for.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PAIRS = ("send", "recv")  # which have numbers of their own
# In none of these does a thread wait for a collective, unless its stack says so.
_ELSEWHERE = ("pipe", "fifo", "file lock", "child", "terminal", "stopped", "disk", "polling")
# Functions of torch.distributed that wait for the other ranks, as stacks show them.
_WAITS = re.compile(
    r" (all_reduce|all_gather\w*|_?all_gather_base|reduce_scatter\w*|broadcast\w*|barrier|reduce|"
    r"scatter\w*|gather\w*|all_to_all\w*|monitored_barrier|all_reduce_coalesced|wait|send|recv)$"
)


def collectives(
    calls: Mapping[int, Pending | Pair], look: Snapshot, waits: Collection[Node] = ()
) -> dict[int, Collective]:
    """{rank: the collective that it is in}, of those that are in one.

    calls: as `open_calls` finds them. waits: threads that wait for their device, though they burn a
    processor.
    """
    seen = _seen(look)
    # A stack is surer than a record of who is in a send or a receive of gloo's.
    stacked = {rank: one for rank, one in seen.items() if one.partners}
    recorded = _recorded(calls, look, waits)
    precise = {rank for rank, one in recorded.items() if one.paired}
    return seen | recorded | {r: one for r, one in stacked.items() if r not in precise}


def open_calls(evidence: Evidence) -> dict[int, Pending | Pair]:
    """{rank: its oldest call that has not ended}, of its Flight Recorder."""
    flights = evidence.flights
    oldest: dict[int, tuple[float, Pending | Pair]] = {}
    for call in (*pending(flights, evidence.ranks()), *pairs(flights)):
        rows = call.entries if isinstance(call, Pending) else {call.rank: call.row}
        for rank, row in rows.items():
            made = row.get("created_ns") or float("inf")
            if row.get("state") != "completed" and (rank not in oldest or made < oldest[rank][0]):
                oldest[rank] = made, call
    return {rank: call for rank, (_, call) in oldest.items()}


def _recorded(
    calls: Mapping[int, Pending | Pair], look: Snapshot, waits: Collection[Node]
) -> dict[int, Collective]:
    """Collectives by the oldest call that has not ended, of each rank that waits."""
    found = {}
    for rank, call in calls.items():
        if _waits(look, rank, waits):
            if isinstance(call, Pair):
                one = _of_pair(call, calls.get(call.peer))
            else:
                one = _of_group(call, rank, look)
            if one is not None:
                found[rank] = one
    return found


def _of_group(call: Pending, rank: int, look: Snapshot) -> Collective | None:
    """The collective of a rank that has enqueued it; None where only its own device lacks."""
    told = {"group": call.group, "number": call.number, "source": "Flight Recorder"}
    op = name_of(call.entries[rank])
    if call.differs:
        others = tuple(other for other in call.entries if other != rank)
        return Collective(op, **told, mismatch=call.differs, others=others)
    # Of whom there is no record: it was stopped, or keeps the GIL, or is on another node.
    missing = tuple(sorted({*call.missing, *(r for r in call.unseen if look.of(r))}))
    if missing:
        return Collective(op, **told, missing=missing)
    here = set(call.entries) - set(call.completed)
    late = tuple(sorted(here - set(call.started))) if call.started else ()
    if rank in late or call.completed:
        return None
    return Collective(op, **told, missing=late, device=bool(late))


def _of_pair(call: Pair, beyond: Pending | Pair | None) -> Collective | None:
    """The rank's send or receive; None where nothing tells whether it has its other half.

    beyond: the oldest call that the peer is in: its half comes after that, if it is another one.
    """
    told = {"number": call.number, "source": "Flight Recorder", "paired": True}
    if call.peer is None or (call.matched is None and call.op != "recv"):
        return None
    if call.matched is False:
        return Collective(call.op, **told, missing=(call.peer,))
    meets = isinstance(beyond, Pair) and beyond.peer == call.rank and beyond.op != call.op
    # Of one that nothing tells, what had been sent before would have come.
    return Collective(call.op, **told, partners=() if meets else (call.peer,))


def _waits(look: Snapshot, rank: int, waits: Collection[Node]) -> bool:
    """Its main thread is asleep, or waits for its device."""
    process = look.of(rank)
    main = process.main() if process else None
    if main is None:
        return False
    if main.wait is not None and main.wait.kind in _ELSEWHERE:
        return bool(_call(process))
    return main.wait is not None or main.state == "S" or (process.pid, main.tid) in waits


def _seen(look: Snapshot) -> dict[int, Collective]:
    """By what the stacks show: of those that live, who is in none is missing.

    Who sends or receives waits for any of the others. One that has ended need not have been in the
    group, so only a record of it proves anything.
    """
    ranks = {p.rank: p for p in look.processes if p.rank is not None and p.main() is not None}
    mains = {rank: process.main() for rank, process in ranks.items()}
    calls = {rank: call for rank, process in ranks.items() if (call := _call(process))}
    missing = tuple(rank for rank in sorted(mains) if rank not in calls)
    found = {}
    for rank, call in calls.items():
        if call in _PAIRS:
            # A send and a receive may be one another's, and only slow to find each other.
            met = any(other in _PAIRS and other != call for other in calls.values())
            others = tuple(other for other in sorted(mains) if other != rank and not met)
            found[rank] = Collective(call, partners=others)
        else:
            found[rank] = Collective(call, missing=missing)
    return found


def _call(process: Process) -> str:
    """The outermost function of torch.distributed near the top of its stack; "" for none.

    DDP's gradients are averaged inside a backward: then a thread of gloo has a time limit to keep.
    """
    main, named = process.main(), ""
    for frame in main.frames[:8] if main else ():
        if _DISTRIBUTED in frame and (call := _WAITS.search(frame)):
            named = call[1]
    waits = (t.wait for t in process.threads if t.name == "pt_gloo_runloop" and t.wait)
    limited = any((wait.left_s or 0.0) > 1.0 for wait in waits)
    if not named and limited and main and any("_engine_run_backward" in f for f in main.frames[:4]):
        named = "all_reduce"
    return named


def unlike(evidence: Evidence) -> list[str]:
    """Sentences on collectives that did not match, of a trial that ended by them."""
    found = [said] if (said := first_mismatch(evidence.flights)) else []
    end = evidence.end
    if end is not None and (bytes_ := _TOO_LONG.search(f"{end.message}\n{end.traceback}")):
        who = "a rank" if end.first_rank is None else f"rank {end.first_rank}"
        sent, room = (int(number) for number in bytes_.groups())
        found.append(f"{who} was sent {sent:,} bytes where it has room for {room:,}: sizes differ")
        last = {rank: rows[-1] for rank, rows in sorted(evidence.flights.items()) if rows}
        if not said and last:
            told = ", ".join(f"rank {rank} {called_of(entry)}" for rank, entry in last.items())
            found.append(f"the last recorded: {told}")
    return found
