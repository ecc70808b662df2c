"""Read a folder of a job's Flight Recorder dumps as plain data.

torch writes one file per rank, pickled or JSON, when a collective times out: `_dump_7`,
`nccl_trace_rank_7`. No class or function named in a pickle is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from whyhung.watch import flight_recorder

Rows = list[dict[str, Any]]
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin|dump|trace))?$")
SOON_S, STILL_S = 5.0, 0.5  # torch needs about a second to notice an error and to write
KNOWN = "1", "2"  # major versions


@dataclass
class Dumps:
    """Calls, files and notes from a folder of dumps."""

    flights: dict[int, Rows] = field(default_factory=dict)  # {rank: its calls, oldest first}
    files: dict[int, Path] = field(default_factory=dict)  # {rank: file that they were read from}
    world: tuple[int, ...] = ()  # all ranks of the job that the dumps mention
    refused: dict[Path, str] = field(default_factory=dict)  # {file: why it could not be read}
    unread: tuple[int, ...] = ()  # ranks whose only file was refused
    moving: bool = False  # the job was still running when they were written
    notes: list[str] = field(default_factory=list)

    def said(self) -> list[str]:
        """Sentences on files that were not read and ranks without a dump, and the notes."""
        told = [f"{file} is not read: {why}" for file, why in self.refused.items()]
        absent = [r for r in self.world if r not in self.flights and r not in self.unread]
        told += [f"no dump of rank {', '.join(map(str, absent))}"] if absent else []
        return told + self.notes


def read(folder: Path) -> Dumps:
    """Read every dump in a folder and its subfolders whose name ends in a rank's number.

    If one rank has two dumps, the newer one is used. Raises ValueError if none can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one in which the dumps lie")
    found, held = Dumps(), {}
    names = {file: _RANK.search(file.name) for file in sorted(folder.rglob("*")) if file.is_file()}
    for file, rank in ((file, int(name[1])) for file, name in names.items() if name):
        try:
            dumped = flight_recorder.loads(file.read_bytes())
            rows = _rows(dumped)
        except (ValueError, OSError) as error:
            found.refused[file] = str(error) if file.stat().st_size else "it is empty"
            continue
        if rank not in found.files or _newer((file, rows), (found.files[rank], held[rank][0])):
            file, found.files[rank] = found.files.get(rank), file
            held[rank] = rows, dumped
        if file is not None:
            found.notes.append(f"{file} is left out: {found.files[rank]} of rank {rank} is newer")
    if not held:
        why = "; ".join(f"{file.name}: {why}" for file, why in list(found.refused.items())[:3])
        raise ValueError(f"{folder} holds no dump that can be read{f' ({why})' if why else ''}")
    found.flights = {rank: rows for rank, (rows, _) in sorted(held.items())}
    found.unread = tuple(
        sorted({int(_RANK.search(file.name)[1]) for file in found.refused} - held.keys())
    )
    calls = [row for rows in found.flights.values() for row in rows]
    ranks = {rank for row in calls for rank in row.get("ranks") or ()}
    told = {rank for _, dumped in held.values() for rank in flight_recorder.everybody(dumped)}
    found.world = tuple(sorted({*ranks, *told, *held}))
    for rank, (_, dumped) in sorted(held.items()):
        version = str(dumped.get("version", "not told"))
        if version.partition(".")[0] not in KNOWN:
            found.notes.append(
                f"rank {rank}'s dump is of version {version}, and read as one of 2.x"
            )
    after_s = min(file.stat().st_mtime for file in found.files.values()) - _last_s(held.values())
    found.moving = 0 <= after_s < STILL_S
    if 0 <= after_s < SOON_S:
        found.notes.append(f"the first dump was written {after_s:.1f} s after the last call")
    _drained(found.flights, {rank: dumped for rank, (_, dumped) in held.items()})
    return found


def _rows(dumped: Mapping[str, Any]) -> Rows:
    """Rows of a dump. Raises ValueError if its entries are not in torch's format."""
    try:
        rows = flight_recorder.entries(dumped)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        version = dumped.get("version", "not told")
        raise ValueError(f"its entries cannot be read, version {version}: {error!r}") from None
    if not ({"entries", "pg_status", "pg_config"} & dumped.keys()):
        raise ValueError("it holds no calls, as a recorder of torch has them")
    if rows and not any(row["op"] and row["state"] for row in rows):
        raise ValueError("none of its entries has the name and the state of a call")
    return rows


def _last_s(held: Iterable[tuple[Rows, Mapping[str, Any]]]) -> float:
    """Time of the last recorded event, in seconds since the epoch."""
    times = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
    entries = [entry for _, dumped in held for entry in dumped.get("entries") or ()]
    return max((entry.get(name) or 0 for entry in entries for name in times), default=0) / 1e9


def _newer(one: tuple[Path, Rows], other: tuple[Path, Rows]) -> bool:
    """Compare the last calls, since copies lose a file's mtime; compare mtimes if one has none."""
    last = [max((row["created_ns"] or 0 for row in rows), default=0) for _, rows in (one, other)]
    if all(last) and last[0] != last[1]:
        return last[0] > last[1]
    return one[0].stat().st_mtime_ns > other[0].stat().st_mtime_ns


def _drained(flights: dict[int, Rows], dumps: Mapping[int, Mapping[str, Any]]) -> None:
    """Add the last call of ranks that completed all calls of a group where others have not.

    A dump of open calls alone then has no call of that group, as if its rank had never reached it.
    Its status has the last sequence number of each group, but under keys local to that process, so
    one of them is this group's. If some numbers are at or past a peer's open call, no later than
    that peer's last call, and none is just before the open call, the group's number is among them.
    """
    first: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, rows in flights.items():
        keys = {str(e["process_group"][0]): e.get("pg_id") for e in dumps[rank].get("entries", ())}
        mine: dict[str, Rows] = {}
        for row in rows:
            if row["seq"] is not None and row.get("ranks") and not row["p2p"]:
                mine.setdefault(row["group"], []).append(row)
        for group, calls in mine.items():
            status = dumps[rank].get("pg_status", {}).get(str(keys[group]), {})
            # else its recorder has dropped the oldest open calls
            if status.get("last_completed_collective") == calls[0]["seq"] - 1:
                first.setdefault(group, []).append((calls[0]["seq"], calls[-1]))
    for rank, rows in flights.items():
        told = (dumps[rank].get("pg_status") or {}).values()
        numbers = [(one.get("last_enqueued_collective"), one.get("last_completed_collective"))
                   for one in told]  # fmt: skip
        ends = {called for called, ended in numbers if called == ended and called is not None}
        here = {row["group"] for row in rows}
        for group, peers in first.items():
            begin = min(n for n, _ in peers)
            last = max((row for _, row in peers), key=itemgetter("seq"))
            beyond = [n for n in ends if begin <= n <= last["seq"]]
            if group not in here and rank in last["ranks"] and beyond and begin - 1 not in ends:
                bare = {"sizes": None, "out_sizes": None, "dtypes": None, "frames": [], "id": None}
                rows.append({**last, **bare, "seq": max(beyond), "state": "completed"})
