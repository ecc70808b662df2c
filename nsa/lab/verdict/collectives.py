"""In which collective each rank is, which ranks it lacks, and whether it can ever end.

From the ranks' Flight Recorders where they could be read, else from their stacks and counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nsa.lab.verdict.frames import short
from nsa.lab.verdict.graph import Collective
from nsa.lab.watch.evidence import Evidence, Process, Snapshot

_DISTRIBUTED = "torch/distributed/"
# What gloo says where a peer sends more than there is room for.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PAIRS = ("send", "recv")  # which have numbers of their own
_UNEVEN = ("gather", "scatter", "all_to_all", "alltoall")  # rightly of other sizes on each rank
# Functions of torch.distributed that wait for the other ranks, as stacks show them.
_WAITS = re.compile(
    r" (all_reduce|all_gather\w*|_?all_gather_base|reduce_scatter\w*|broadcast\w*|barrier|reduce|"
    r"scatter\w*|gather\w*|all_to_all\w*|monitored_barrier|all_reduce_coalesced|wait|send|recv)$"
)


def collectives(evidence: Evidence, look: Snapshot) -> dict[int, Collective]:
    """{rank: the collective that it is in}, of those that are in one."""
    seen = _seen(look)
    # A stack is surer than a record of who is in a send or a receive.
    pairs = {rank: one for rank, one in seen.items() if one.partners}
    return seen | _recorded(evidence, look) | pairs


def _recorded(evidence: Evidence, look: Snapshot) -> dict[int, Collective]:
    """By the last entry of each rank in each group that has not ended."""
    flights = {rank: rows for rank, rows in evidence.flights.items() if rows}
    if not flights:
        return {}
    ranks = sorted({*evidence.ranks(), *flights})
    found: dict[int, Collective] = {}
    for group in sorted({str(e.get("group", "")) for rows in flights.values() for e in rows}):
        last = {}
        for rank, rows in flights.items():
            mine = [e for e in rows if str(e.get("group", "")) == group]
            mine = [e for e in mine if e.get("seq") is not None and not e.get("p2p")]
            if mine:
                last[rank] = max(mine, key=lambda e: e["seq"])
        named = next((e["ranks"] for e in last.values() if e.get("ranks")), None)
        members = named or (ranks if group in ("", "0") else sorted(last))
        furthest = max((entry["seq"] for entry in last.values()), default=0)
        for rank, entry in last.items():
            number, op = entry["seq"], _name(entry)
            # gloo may never say that one has ended, but the others are beyond it
            over = entry.get("state") == "completed" or number < furthest
            if over or not _waits(look, rank):
                continue
            behind = [m for m in members if m != rank and last.get(m, {}).get("seq", 0) < number]
            beside = {m: last[m] for m in members if last.get(m, {}).get("seq") == number}
            wrong = _differ(beside) if not behind else ""
            found[rank] = Collective(op, group, number, tuple(behind), wrong, "Flight Recorder")
    return found


def _waits(look: Snapshot, rank: int) -> bool:
    """Whether the rank's main thread is asleep, or waits on its device."""
    process = look.of(rank)
    main = process.main() if process else None
    return main is not None and (main.wait is not None or bool(main.native) or main.state == "S")


def _differ(entries: Mapping[int, Mapping[str, Any]]) -> str:
    """How the ranks' calls of one number differ; "" where they match."""
    operations = {_name(entry) for entry in entries.values()}
    sizes = {str(entry.get("sizes")) for entry in entries.values()}
    uneven = all(name.startswith(_UNEVEN) or name.endswith(_UNEVEN) for name in operations)
    if len(operations) < 2 and (uneven or len(sizes) < 2):
        return ""
    return ", ".join(f"rank {rank} {_called(entry)}" for rank, entry in entries.items())


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
            others = tuple(other for other in sorted(mains) if other != rank)
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
    found = [said] if (said := mismatch(evidence.flights)) else []
    end = evidence.end
    if end is not None and (bytes_ := _TOO_LONG.search(f"{end.message}\n{end.traceback}")):
        who = "a rank" if end.first_rank is None else f"rank {end.first_rank}"
        sent, room = (int(number) for number in bytes_.groups())
        found.append(f"{who} was sent {sent:,} bytes where it has room for {room:,}: sizes differ")
        last = {rank: rows[-1] for rank, rows in sorted(evidence.flights.items()) if rows}
        if not said and last:
            told = ", ".join(f"rank {rank} {_called(entry)}" for rank, entry in last.items())
            found.append(f"the last recorded: {told}")
    return found


def mismatch(flights: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """ "rank 0 calls all_reduce of [3], rank 1 all_reduce of [5] at train.py:12", or "".

    The first number of a group that not all ranks gave to one operation of equal sizes.
    """
    calls: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for rank, entries in sorted(flights.items()):
        for entry in entries:
            if entry.get("seq") is not None and not any(x in _name(entry) for x in _PAIRS):
                calls.setdefault((str(entry.get("group")), entry["seq"]), {})[rank] = entry
    for (group, number), by_rank in sorted(calls.items()):
        if said := _differ(by_rank):
            of = f" of group {group}" if group not in ("", "0", "None") else ""
            return f"collective number {number}{of} does not match: {said}"
    return ""


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("op") or "?").rpartition(":")[2]


def _called(entry: Mapping[str, Any]) -> str:
    sizes = ", ".join(map(str, entry.get("sizes") or ()))
    frame = next(iter(entry.get("frames") or ()), "")
    return f"{_name(entry)} of {sizes or 'nothing'}{f' at {short(frame)}' if frame else ''}"
