"""Find the collective that each rank is in, the ranks it lacks, and whether it can ever end.

Reads the ranks' Flight Recorders if possible, else their stacks.
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
# Error of gloo if a peer sends more than there is room for.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PAIRS = ("send", "recv")  # numbered separately
# Waits that are not for a collective, unless the stack shows one.
_ELSEWHERE = ("pipe", "fifo", "file lock", "child", "terminal", "stopped", "disk", "polling")
# Functions of torch.distributed that wait for the other ranks, as stacks show them.
_WAITS = re.compile(
    r" (all_reduce|all_gather\w*|_?all_gather_base|reduce_scatter\w*|broadcast\w*|barrier|reduce|"
    r"scatter\w*|gather\w*|all_to_all\w*|monitored_barrier|all_reduce_coalesced|wait|send|recv)$"
)


def collectives(
    calls: Mapping[int, Pending | Pair], look: Snapshot, waits: Collection[Node] = ()
) -> dict[int, Collective]:
    """Return {rank: the collective that it is in}, for ranks that are in one.

    calls: from `open_calls`. waits: threads that wait for their device, even if they burn a
    processor.
    """
    seen = _seen(look)
    # A stack is more reliable than a record for a send or a receive of gloo's.
    stacked = {rank: one for rank, one in seen.items() if one.partners}
    recorded = _recorded(calls, look, waits)
    precise = {rank for rank, one in recorded.items() if one.paired}
    return seen | recorded | {r: one for r, one in stacked.items() if r not in precise}


def open_calls(evidence: Evidence) -> dict[int, Pending | Pair]:
    """Return {rank: its oldest call that has not ended}, from its Flight Recorder."""
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
    """Return collectives by the oldest call that has not ended, for each rank that waits."""
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
    """Return the collective of a rank that has enqueued it; None if only its own device lags."""
    told = {"group": call.group, "number": call.number, "source": "Flight Recorder"}
    op = name_of(call.entries[rank])
    if call.differs:
        others = tuple(other for other in call.entries if other != rank)
        return Collective(op, **told, mismatch=call.differs, others=others)
    # Ranks without a record were stopped, or hold the GIL, or are on another node.
    missing = tuple(sorted({*call.missing, *(r for r in call.unseen if look.of(r))}))
    if missing:
        return Collective(op, **told, missing=missing)
    here = set(call.entries) - set(call.completed)
    late = tuple(sorted(here - set(call.started))) if call.started else ()
    if rank in late or call.completed:
        return None
    return Collective(op, **told, missing=late, device=bool(late))


def _of_pair(call: Pair, beyond: Pending | Pair | None) -> Collective | None:
    """Return the rank's send or receive; None if it is unknown whether it has its other half.

    beyond: the oldest call that the peer is in: its half comes after that, if it is another one.
    """
    told = {"number": call.number, "source": "Flight Recorder", "paired": True}
    if call.peer is None or (call.matched is None and call.op != "recv"):
        return None
    if call.matched is False:
        return Collective(call.op, **told, missing=(call.peer,))
    meets = isinstance(beyond, Pair) and beyond.peer == call.rank and beyond.op != call.op
    # For an unrecorded peer: anything sent before would have arrived.
    return Collective(call.op, **told, partners=() if meets else (call.peer,))


def _waits(look: Snapshot, rank: int, waits: Collection[Node]) -> bool:
    """Return True if its main thread is asleep, or waits for its device."""
    process = look.of(rank)
    main = process.main() if process else None
    if main is None:
        return False
    if main.wait is not None and main.wait.kind in _ELSEWHERE:
        return bool(_call(process))
    return main.wait is not None or main.state == "S" or (process.pid, main.tid) in waits


def _seen(look: Snapshot) -> dict[int, Collective]:
    """Return collectives as the stacks show them: live ranks that are in none are missing.

    A sender or receiver waits for any of the others. A rank that has ended need not have been in
    the group, so only its record proves anything.
    """
    ranks = {p.rank: p for p in look.processes if p.rank is not None and p.main() is not None}
    mains = {rank: process.main() for rank, process in ranks.items()}
    calls = {rank: call for rank, process in ranks.items() if (call := _call(process))}
    missing = tuple(rank for rank in sorted(mains) if rank not in calls)
    found = {}
    for rank, call in calls.items():
        if call in _PAIRS:
            # A send and a receive may match each other, and only be slow to meet.
            met = any(other in _PAIRS and other != call for other in calls.values())
            others = tuple(other for other in sorted(mains) if other != rank and not met)
            found[rank] = Collective(call, partners=others)
        else:
            found[rank] = Collective(call, missing=missing)
    return found


def _call(process: Process) -> str:
    """Return the outermost function of torch.distributed near the top of its stack; "" for none.

    DDP averages gradients inside a backward; a gloo thread then has a time limit.
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
    """Return sentences on mismatched collectives, for a trial that ended by them."""
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
