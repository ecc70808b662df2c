"""What the ranks' Flight Recorders say of collectives that do not match."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nsa.lab.watch.evidence import Evidence

# What gloo says where a peer sends more than there is room for.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PAIRS = ("send", "recv")  # which have numbers of their own
_UNEVEN = ("gather", "scatter", "all_to_all", "alltoall")  # rightly of other sizes on each rank


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
        operations = {_name(entry) for entry in by_rank.values()}
        sizes = {str(entry.get("sizes")) for entry in by_rank.values()}
        uneven = all(name.startswith(_UNEVEN) or name.endswith(_UNEVEN) for name in operations)
        if len(operations) > 1 or (len(sizes) > 1 and not uneven):
            said = ", ".join(f"rank {rank} {_called(entry)}" for rank, entry in by_rank.items())
            of = f" of group {group}" if group not in ("", "0", "None") else ""
            return f"collective number {number}{of} does not match: {said}"
    return ""


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("op") or "?").rpartition(":")[2]


def _called(entry: Mapping[str, Any]) -> str:
    sizes = ", ".join(map(str, entry.get("sizes") or ()))
    frame = next(iter(entry.get("frames") or ()), "")
    return f"{_name(entry)} of {sizes or 'nothing'}{f' at {frame}' if frame else ''}"
