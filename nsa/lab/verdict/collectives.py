"""In which collective each rank is, which ranks it lacks, and whether it can ever end.

From the ranks' Flight Recorders where they could be read, else from their stacks and counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nsa.lab.verdict.frames import short
from nsa.lab.verdict.graph import Collective
from nsa.lab.watch.evidence import Evidence, Snapshot, Thread

_DISTRIBUTED = "torch/distributed/"
_PLAIN = re.compile(r"^\w+:")  # gloo:all_reduce
# Functions of torch.distributed that wait for the other ranks, as stacks show them.
_WAITS = re.compile(
    r" (all_reduce|all_gather\w*|_?all_gather_base|reduce_scatter\w*|broadcast\w*|barrier|reduce|"
    r"scatter\w*|gather\w*|all_to_all\w*|monitored_barrier|all_reduce_coalesced|wait)$"
)


def collectives(evidence: Evidence, look: Snapshot) -> dict[int, Collective]:
    """{rank: the collective that it is in}, of those that are in one."""
    return _recorded(evidence, look) or _seen(look)


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


def _differ(entries: Mapping[int, dict[str, Any]]) -> str:
    """How the ranks' calls of one number differ; "" where they match."""
    told = {}
    for rank, entry in entries.items():
        sizes = entry.get("sizes")
        told[rank] = f"{_name(entry)} of {_plain(sizes)}" if sizes is not None else _name(entry)
    if len(set(told.values())) < 2:
        return ""
    at = {rank: next(iter(entries[rank].get("frames") or []), "") for rank in told}
    where = {rank: f" at {short(frame)}" if frame else "" for rank, frame in at.items()}
    return ", ".join(f"rank {rank} {call}{where[rank]}" for rank, call in told.items())


def _name(entry: Mapping[str, Any]) -> str:
    return _PLAIN.sub("", str(entry.get("op") or "a collective"))


def _plain(sizes: Any) -> str:
    one = sizes[0] if isinstance(sizes, list) and len(sizes) == 1 else sizes
    return str(one).replace(" ", "")


def _seen(look: Snapshot) -> dict[int, Collective]:
    """By what the main threads' stacks show: who is in none is missing."""
    mains = {p.rank: p.main() for p in look.processes if p.rank is not None}
    calls = {rank: call for rank, main in mains.items() if main and (call := _call(main))}
    missing = tuple(rank for rank in sorted(mains) if rank not in calls)
    if not calls or not missing:
        return {}
    return {rank: Collective(call, missing=missing) for rank, call in calls.items()}


def _call(main: Thread) -> str:
    """The outermost function of torch.distributed near the top of the stack; "" for none."""
    named = ""
    for frame in main.frames[:8]:
        if _DISTRIBUTED in frame and (call := _WAITS.search(frame)):
            named = call[1]
    return named
