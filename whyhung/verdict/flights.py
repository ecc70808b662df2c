"""Find collectives that did not end in ranks' Flight Recorders, who entered them, and who did not.

Rows are those of whyhung.watch.flight_recorder.entries, {rank: its rows, oldest first}; a rank with
no rows has a recorder that was read and is empty. Numbers count within a group and a library, since
a group of "cpu:gloo,cuda:nccl" counts twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from whyhung.verdict.frames import nearest
from whyhung.verdict.picture import runs

Row = Mapping[str, Any]
Flights = Mapping[int, Sequence[Row]]
Key = tuple[str, str, tuple[int, ...]]  # name, library, members if recorded
DEFAULT = ("", "0", "None")  # names of the group of all ranks
_PEER = re.compile(r"\b(send|recv)\b(?: (\d+)(?:->|<-)(\d+))?")
# Sizes that must be equal on all ranks, by operation: each input, or the total of one side.
_EACH = re.compile(r"all_?reduce|broadcast|barrier|^_?reduce(?!_?scatter)")
_OUTPUTS = re.compile(r"all_?gather")
_INPUTS = re.compile(r"reduce_?scatter")
_EXCHANGE = re.compile(r"all_?to_?all")
_SIDES = "sizes", "out_sizes"
_BUFFER = 2**20  # elements that a library may buffer before they are received


@dataclass(frozen=True, eq=False)
class Pending:
    """Collective of a group that some rank enqueued and did not complete."""

    group: str
    library: str  # "nccl", "gloo"
    desc: str  # purpose of the group, "" if not recorded
    number: int
    op: str  # "all_reduce"; that of most ranks
    members: tuple[int, ...]
    entries: dict[int, Row]  # rows of the ranks that have enqueued it
    missing: tuple[int, ...]  # members that were read and have not enqueued it
    unseen: tuple[int, ...]  # members without a record
    completed: tuple[int, ...]  # members for which it is over
    started: tuple[int, ...]  # ranks whose device was in it, and may still be
    differs: str = ""  # "rank 0 calls all_reduce of [3], rank 1 all_reduce of [5] at train.py:9 f"
    odd: tuple[int, ...] = ()  # the ranks that differ from most, where most agree


@dataclass(frozen=True, eq=False)
class Pair:
    """Send or receive that is not completed."""

    rank: int
    peer: int | None  # None if not recorded
    op: str  # "send" or "recv"
    number: int | None  # among the rank's sends and receives in the group
    group: str
    row: Row
    matched: bool | None  # the peer has enqueued the other half; None if unknown


def pending(flights: Flights, world: Iterable[int] = ()) -> list[Pending]:
    """Return the oldest collective of each named group that is not over for all its members.

    world: every rank of the job, for a group of all that does not name them; else those read.
    """
    oldest: dict[tuple[Any, ...], Pending] = {}
    for one in opened(flights, world):
        key = one.group, one.library, one.members
        if key not in oldest or one.library == "gloo":  # gloo may never record that one is over
            oldest[key] = one
    return list(oldest.values())


def opened(flights: Flights, world: Iterable[int] = ()) -> list[Pending]:
    """Return every collective that is not over for all, by group, oldest first."""
    found = []
    for key, calls in sorted(_groups(flights).items()):
        members = key[2] or _members(key, calls, {*flights, *world})
        unfinished = {n for rows in calls.values() for n, row in rows.items() if not _over(row)}
        found += [_at(key, number, calls, members, flights) for number in sorted(unfinished)]
    return found


def first_mismatch(flights: Flights) -> str:
    """Return "collective number 2 does not match: rank 0 calls all_reduce of [3], ...", or "".

    It is the first number of a group, completed or not, for which the ranks' operations, sizes or
    types do not fit.
    """
    for key, calls in sorted(_groups(flights).items()):
        members = key[2] or _members(key, calls, flights)
        for number in sorted({n for rows in calls.values() for n in rows}):
            at = {rank: rows[number] for rank, rows in sorted(calls.items()) if number in rows}
            if said := _differs(at, members)[0]:
                of = "" if key[0] in DEFAULT else f" of group {key[0]}"
                return f"collective number {number}{of} does not match: {said}"
    return ""


def pairs(flights: Flights) -> list[Pair]:
    """Return the sends and receives that are not completed, by rank and in their order."""
    lines: dict[tuple[Any, ...], list[Row]] = {}  # (group, library, sender, receiver, "send")
    found = []
    for rank, rows in sorted(flights.items()):
        for row in rows:
            if _is_pair(row) and (told := _PEER.search(name_of(row))):
                peer = _peer(rank, row, told)
                ends = (rank, peer) if told[1] == "send" else (peer, rank)
                line = lines.setdefault((*_named(row), *ends, told[1]), [])
                line.append(row)
                if not _over(row):
                    found.append((rank, peer, told[1], row, line, len(line)))
    made = []
    for rank, peer, op, row, line, count in found:
        other = None
        if peer in flights:
            ends = (rank, peer) if op == "send" else (peer, rank)
            opposite = "recv" if op == "send" else "send"
            other = lines.get((*_named(row), *ends, opposite), [])
        whole = peer in flights and all(
            _from_start(flights[one], _named(row)[1]) for one in (rank, peer)
        )
        matched = None if other is None else _has(other, line, count, whole)
        number = row.get("p2p_seq")
        made.append(Pair(rank, peer, op, number, str(row.get("group", "")), row, matched))
    return made


def line_of(row: Row) -> str:
    """Return the program's line that made the call, "train.py:9 step"; "" if not recorded."""
    return nearest(row.get("frames") or ())


def ranks_said(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 2 and 5 to 9"."""
    told = []
    for run in runs(ranks):
        told += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    all_but = ", ".join(told[:-1])
    return f"rank{'s' * (len(ranks) > 1)} {all_but}{' and ' * bool(all_but)}{told[-1]}"


def _groups(flights: Flights) -> dict[Key, dict[int, dict[int, Row]]]:
    """Return {group: {rank: {number: its call}}} of the collectives."""
    members: dict[int, tuple[int, ...]] = {}  # by the list that all rows of a group share
    told: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for row in (row for rows in flights.values() for row in rows):
        if row.get("ranks") and id(row["ranks"]) not in members:
            members[id(row["ranks"])] = tuple(row["ranks"])
            told.setdefault(_named(row), set()).add(members[id(row["ranks"])])
    found: dict[Key, dict[int, dict[int, Row]]] = {}
    for rank, rows in flights.items():
        keys: dict[tuple[str, str, int], Key] = {}
        for row in rows:
            if row.get("seq") is None or _is_pair(row):
                continue
            named, given = _named(row), id(row.get("ranks"))
            if (*named, given) not in keys:
                # two groups of one name are distinguished by their members
                known = [members[given]] if given in members else told.get(named, ())
                fit = [ranks for ranks in known if rank in ranks]
                keys[*named, given] = (*named, fit[0] if len(fit) == 1 else ())
            calls = found.setdefault(keys[*named, given], {}).setdefault(rank, {})
            calls[row["seq"]] = _together(calls.get(row["seq"]), row)
    return found


def _together(before: Row | None, row: Row) -> Row:
    """Merge calls that were made as one; the last one recorded represents them all."""
    if before is None:
        return row
    merged = dict(row)
    for name in ("sizes", "out_sizes", "dtypes"):
        merged[name] = [*(before.get(name) or ()), *(row.get(name) or ())]
    merged["frames"] = before.get("frames") or row.get("frames")
    if "coalesced" in name_of(row):
        merged["op"] = before.get("op")
    return merged


def _members(key: Key, calls: Mapping[int, Any], ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*ranks, *calls} if key[0] in DEFAULT else calls))


def _at(
    key: Key,
    number: int,
    calls: Mapping[int, Mapping[int, Row]],
    members: tuple[int, ...],
    flights: Flights,
) -> Pending:
    entries = {rank: rows[number] for rank, rows in sorted(calls.items()) if number in rows}
    missing, unseen, completed = [], [], []
    for rank in members:
        numbers = calls.get(rank, {})
        if rank in entries:
            completed += [rank] * _over(entries[rank])
        elif numbers and min(numbers) > number:
            completed.append(rank)  # a record keeps the oldest that is not completed
        elif rank in flights and not _dropped(flights[rank], entries, key[1]):
            missing += [rank] * (not numbers or max(numbers) < number)
        else:
            unseen.append(rank)
    differs, odd = _differs(entries, members)
    first = next(iter(entries.values()))
    names = [name_of(row) for row in entries.values()]
    return Pending(
        group=key[0],
        library=key[1],
        desc=str(first.get("desc") or ""),
        number=number,
        op=Counter(names).most_common(1)[0][0],
        members=members,
        entries=entries,
        missing=tuple(missing),
        unseen=tuple(unseen),
        completed=tuple(completed),
        started=tuple(r for r, row in entries.items() if row.get("state") == "started"),
        differs=differs,
        odd=odd,
    )


def _dropped(rows: Sequence[Row], entries: Mapping[int, Row], library: str) -> bool:
    """Return True if a recorder that keeps completed calls began after others made this one."""
    made = [row["created_ns"] for row in entries.values() if row.get("created_ns")]
    began = next((row.get("created_ns") for row in rows if _named(row)[1] == library), None)
    if not made or not began or _from_start(rows, library):
        return False
    return any(_over(row) for row in rows) and began > min(made)


def _differs(entries: Mapping[int, Row], members: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return (difference of the ranks' calls of one number, "" for none; ranks unlike most)."""
    names = {rank: name_of(row) for rank, row in entries.items()}
    types = {rank: _types(row) for rank, row in entries.items() if row.get("dtypes")}
    for values in (names, *_measures(entries, next(iter(names.values()), "")), types):
        kinds = list(values.values())
        if any(kind != kinds[0] for kind in kinds):
            most = max(kinds, key=kinds.count)
            sure = kinds.count(most) * 2 > len(kinds)
            odd = tuple(rank for rank, kind in values.items() if kind != most) if sure else ()
            return _told(entries, with_types=values is types), odd
    if _EXCHANGE.search(next(iter(names.values()), "")) and entries.keys() >= set(members):
        sent, taken = (sum(_total(row, side) or 0 for row in entries.values()) for side in _SIDES)
        if sent != taken and all(_total(row, s) for row in entries.values() for s in _SIDES):
            return f"{sent:,} elements are sent and {taken:,} received: {_told(entries)}", ()
    return "", ()


def _measures(entries: Mapping[int, Row], name: str) -> list[dict[int, Any]]:
    """Return sizes that must be equal on all ranks, as dicts by rank."""
    if _EXCHANGE.search(name):
        return []
    for pattern, side in ((_OUTPUTS, "out_sizes"), (_INPUTS, "sizes")):
        if pattern.search(name):
            totals = {rank: _total(row, side) for rank, row in entries.items()}
            return [{rank: total for rank, total in totals.items() if total is not None}]
    if _EACH.search(name):
        given = {rank: row["sizes"] for rank, row in entries.items() if row.get("sizes")}
        return [{rank: [prod(size) for size in sizes] for rank, sizes in given.items()}]
    return []


def _total(row: Row, side: str) -> int | None:
    sizes = row.get(side)
    return sum(prod(size) for size in sizes) if sizes else None


def _types(row: Row) -> list[str]:
    return sorted({str(dtype) for dtype in row["dtypes"]})


def _told(entries: Mapping[int, Row], with_types: bool = False) -> str:
    """Return each distinct call once, with all the ranks that made it; rare ones first."""
    alike: dict[str, list[int]] = {}
    for rank, row in entries.items():
        called = called_of(row)
        if with_types and row.get("dtypes"):
            called = called.replace(" of ", f" of {' and '.join(_types(row))} ", 1)
        alike.setdefault(called, []).append(rank)
    (called, first), *others = sorted(alike.items(), key=lambda one: (len(one[1]), one[1]))
    told = [f"{ranks_said(first)} {'call' if len(first) > 1 else 'calls'} {called}"]
    return ", ".join(told + [f"{ranks_said(ranks)} {called}" for called, ranks in others])


def called_of(row: Row) -> str:
    """Return "all_reduce of [3] at train.py:9 step"."""
    sizes = ", ".join(map(str, row.get("sizes") or ()))
    line = line_of(row)
    return f"{name_of(row)} of {sizes or 'nothing'}{f' at {line}' if line else ''}"


def group_said(call: Pending | Pair) -> str:
    """Return "TENSOR_MODEL_PARALLEL_GROUP (40)", "all ranks", "group 5"."""
    desc = str(call.row.get("desc") or "") if isinstance(call, Pair) else call.desc
    if call.group in DEFAULT:
        return "all ranks"
    return f"group {call.group}" if desc in ("", "undefined") else f"{desc} ({call.group})"


def call_said(call: Pending | Pair) -> str:
    """Return "all_reduce number 61 of all ranks", "recv from rank 3, number 9 of group 5"."""
    if isinstance(call, Pair):
        to = "to" if call.op == "send" else "from"
        return f"{call.op} {to} rank {call.peer}, number {call.number} of {group_said(call)}"
    return f"{call.op} number {call.number} of {group_said(call)}"


def line_said(call: Pending | Pair) -> str:
    """Return the program's line that made the call on some rank; "" if none is recorded."""
    rows = [call.row] if isinstance(call, Pair) else call.entries.values()
    return next(filter(None, map(line_of, rows)), "")


def _peer(rank: int, row: Row, told: re.Match[str]) -> int | None:
    """Return the other rank of a send or a receive, whose name counts within the group."""
    if told[3] is None:
        return None
    members = list(row.get("ranks") or ())
    if not members:
        return int(told[3]) if str(row.get("group", "")) in DEFAULT else None
    return members[int(told[3])] if int(told[3]) < len(members) else None


def _has(other: Sequence[Row], line: Sequence[Row], count: int, whole: bool) -> bool | None:
    """Return True if the peer has the other half of a line's `count`-th call, from the start or
    among open ones; None if a small one may have been sent before it was received."""
    if whole:
        return len(other) >= count
    before = sum(not _over(row) for row in line[:count])
    if sum(not _over(row) for row in other) >= before:
        return True
    buffered = (
        any(_over(row) for row in other) and (_total(line[count - 1], "sizes") or 0) < _BUFFER
    )
    return None if buffered else False


def _from_start(rows: Sequence[Row], library: str) -> bool:
    """Return True if nothing has been dropped since the library's recorder began."""
    return next((row.get("id") for row in rows if _named(row)[1] == library), None) == 0


def _named(row: Row) -> tuple[str, str]:
    library, colon, _ = str(row.get("op") or "").partition(":")
    return str(row.get("group", "")), library if colon else ""


def _is_pair(row: Row) -> bool:
    return bool(row.get("p2p")) or name_of(row).startswith(("send", "recv"))


def _over(row: Row) -> bool:
    return row.get("state") == "completed"


def name_of(row: Row) -> str:
    """Return the operation without its library, "all_reduce"."""
    return str(row.get("op") or "?").rpartition(":")[2]
