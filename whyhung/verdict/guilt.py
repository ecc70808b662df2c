"""Find the ranks that hold the others up, from the Flight Recorders of a job that is gone.

A rank waits for ranks that have not made its call, that left no record, or that are still in an
earlier call than its own oldest open one. Ranks at the end of these waits, which wait for nobody,
are guilty. So is a rank that never reported the end of a call that its peers saw end, since it had
given its part; and one that called something else than its peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from whyhung.verdict.flights import (
    Flights,
    Pair,
    Pending,
    Row,
    call_said,
    called_of,
    group_said,
    line_said,
    opened,
    pairs,
    ranks_said,
)

MISSING, BEHIND, UNREAD, IDLE = "missing", "behind", "unread", "idle device"
# Some ranks may see the end of these while another's part is still to come.
_ONE_SIDED = ("broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter")

Open = Pending | Pair
Sign = tuple[Any, ...]


@dataclass(frozen=True)
class Wait:
    """Wait of a rank that cannot go on before another does."""

    rank: int
    peer: int
    how: str  # the peer's state in the call: one of MISSING, BEHIND, UNREAD, IDLE
    call: Open


@dataclass(frozen=True)
class Blame:
    """Rank that holds others up, and the reason."""

    rank: int
    kind: str  # "behind", "absent", "device", "another call", "order"
    why: str  # a sentence
    call: Open
    waiting: tuple[int, ...] = ()  # ranks that wait for it in that call


@dataclass(frozen=True)
class Found:
    """Result of the records of all ranks together."""

    guilty: tuple[Blame, ...]
    suspects: tuple[str, ...]  # sentences on open calls that nobody can be blamed for
    waits: tuple[Wait, ...]
    calls: tuple[Pending, ...]  # open calls, by group, oldest first
    pairs: tuple[Pair, ...]


class _Job:
    """Open calls, and the waits of ranks for one another in them."""

    def __init__(self, flights: Flights, world: Iterable[int]) -> None:
        self.flights, self._signs = flights, {}
        self.world = sorted({*world, *flights})
        self.calls, self.pairs = opened(flights, world), pairs(flights)
        self.open: dict[int, list[tuple[int, Open]]] = {}
        for call in self.calls:
            for rank in call.entries.keys() - set(call.completed):
                self._add(rank, call.entries[rank], call)
        for pair in self.pairs:
            self._add(pair.rank, pair.row, pair)
        self.front = {rank: _front(mine) for rank, mine in self.open.items()}
        self.blamed = self._unlike() | self._unreported()
        self.waits = list(self._first())
        self.next: dict[int, set[int]] = {rank: set() for rank in self.open}
        self.of: dict[int, list[Wait]] = {}  # waits for a rank
        for wait in self.waits:
            self.of.setdefault(wait.peer, []).append(wait)
            self.next.setdefault(wait.rank, set()).add(wait.peer)
            self.next.setdefault(wait.peer, set())

    def _add(self, rank: int, row: Mapping[str, Any], call: Open) -> None:
        order = row.get("id")
        order = row.get("created_ns") if order is None else order
        self.open.setdefault(rank, []).append((order or 0, call))

    def _unlike(self) -> dict[int, Blame]:
        """Return blames of ranks whose call differs from most; of all callers if none has most."""
        found: dict[int, Blame] = {}
        for call in self.calls:
            if call.differs:
                why = f"collective number {call.number} of {group_said(call)} does not match: "
                why += call.differs
                for rank in call.odd or call.entries:
                    found.setdefault(rank, Blame(rank, "another call", why, call))
        return found

    def _unreported(self) -> dict[int, Blame]:
        """Return blames of ranks that never saw the end of a call that ended with their part."""
        found: dict[int, Blame] = {}
        for call in self.calls:
            if not call.completed or call.op in _ONE_SIDED:
                continue
            still = [rank for rank in call.entries if rank not in call.completed]
            before = [rank for rank in still if call not in self.front[rank]]
            for rank in before or still:  # ranks at it wait for those that are not
                why = (
                    f"rank {rank} gave its part to {call_said(call)}, and {_ended(call)}: its own "
                    f"device never reported that{_at(call)}"
                )
                found.setdefault(rank, Blame(rank, "device", why, call))
        return found

    def _first(self) -> Iterable[Wait]:
        """Yield waits of one rank for another in the oldest call only, one for each reason."""
        seen: set[tuple[int, int, str]] = set()
        for rank, peer, how, call in self._waits():
            if (rank, peer, how) not in seen and rank not in self.blamed:
                seen.add((rank, peer, how))
                yield Wait(rank, peer, how, call)

    def _waits(self) -> Iterable[tuple[int, int, str, Open]]:
        for call in self.calls:
            for rank in call.entries.keys() - set(call.completed):
                yield from ((rank, peer, MISSING, call) for peer in call.missing)
                yield from ((rank, peer, UNREAD, call) for peer in call.unseen)
        for pair in self.pairs:
            if pair.peer is not None and pair.matched is not True:
                yield pair.rank, pair.peer, UNREAD if pair.matched is None else MISSING, pair
        for rank, front in self.front.items():
            for call in front:
                yield from self._behind(rank, call)

    def _behind(self, rank: int, call: Open) -> Iterable[tuple[int, int, str, Open]]:
        """Yield waits in a rank's oldest open call for others that called it and are not at it."""
        if isinstance(call, Pair):
            if call.peer in self.front and call.matched:
                ahead = [p for p in self.front[call.peer] if isinstance(p, Pair)]
                meets = [p for p in ahead if p.peer == rank and p.op != call.op]
                if not meets:
                    yield rank, call.peer, BEHIND, call
                elif _began(call) and not any(map(_began, meets)):
                    yield rank, call.peer, IDLE, call
            return
        for peer in call.entries.keys() - {rank} - set(call.completed):
            if call not in self.front[peer]:
                yield rank, peer, BEHIND, call
            elif rank in call.started and peer not in call.started:
                yield rank, peer, IDLE, call

    def ends(self) -> list[set[int]]:
        """Return sets of ranks that wait for nobody outside: single ones, and cycles of several."""
        left = set(self.next)
        back: dict[int, set[int]] = {}
        for rank, peers in self.next.items():
            for peer in peers:
                back.setdefault(peer, set()).add(rank)
        found: list[set[int]] = [{rank} for rank in sorted(left) if not self.next[rank]]
        for end in found:
            left -= _reached(end, back)
        while left:
            round_ = _reached({min(left)}, self.next)
            while out := next((r for r in round_ if round_ - _reached({r}, self.next)), None):
                round_ = _reached({out}, self.next)
            found.append(round_)
            left -= _reached(round_, back)
        return found

    def signs(self, rank: int) -> set[Sign]:
        """Return a rank's open calls, in a form equal for ranks with the same part in a job."""
        if rank not in self._signs:
            self._signs[rank] = {_sign(call) for _, call in self.open.get(rank, ())}
        return self._signs[rank]

    def went_on(self, rank: int, other: int) -> bool:
        """Return True if a rank is stuck where another is, lacks no less, and called more."""
        fronts = [{_sign(call) for call in self.front.get(r, ())} for r in (rank, other)]
        return fronts[0] >= fronts[1] and self.signs(other) <= self.signs(rank)

    def lagging(self) -> dict[int, Blame]:
        """Return blames of ranks that called less than every peer in a call, and saw as many ends.

        They had no more reason than their peers to wait, so something else holds them too.
        Excluded: the first and last rank, which often wait for their device to print a number;
        several at one place; and ranks behind only by the call or two that fit into a queue.
        """
        found: dict[int, Blame] = {}
        for call in self.calls:
            peers = [r for r in call.entries if r not in call.completed and r not in self.blamed]
            for rank in call.missing if peers else ():
                mine = self.signs(rank)
                inner = rank not in (self.world[0], self.world[-1]) and self.next.get(rank)
                if not inner or rank in found:
                    continue
                if not all(self.went_on(r, rank) and len(self.signs(r) - mine) > 2 for r in peers):
                    continue
                why = f"rank {rank} has not called {call_said(call)}, though it had seen as much "
                why += f"end as {ranks_said(peers)}, which called more{_at(call)}"
                found[rank] = Blame(rank, "behind", why, call, tuple(peers))
        newest = {r: max(self.open[r], key=itemgetter(0))[1] for r in found if r in self.open}
        places = {rank: _sign(call) for rank, call in newest.items()}
        count = Counter(places.values())
        return {r: one for r, one in found.items() if r not in places or count[places[r]] == 1}


def blame(
    flights: Flights,
    world: Iterable[int] = (),
    unread: Collection[int] = (),
    moving: bool = False,
) -> Found:
    """Return the ranks of a job that are guilty of the calls open in its records, with reasons.

    world: all ranks, where known. unread: ranks whose dumps exist and could not be read: these
    are not blamed for their absence. moving: the job still ran when its records were taken; then
    nobody is blamed, since in every job that runs some rank is behind.
    """
    job = _Job(flights, world)
    guilty, suspects = dict(job.blamed), []
    ends = job.ends()
    alone = {rank for end in ends if len(end) == 1 for rank in end}
    for end in ends:
        if end & guilty.keys():
            continue
        for found in _of_end(job, end, alone, set(unread)):
            if isinstance(found, Blame):
                guilty[found.rank] = found
            elif found not in suspects:
                suspects.append(found)
    for rank, one in job.lagging().items():
        guilty.setdefault(rank, one)
    in_order = tuple(guilty[rank] for rank in sorted(guilty))
    if moving:
        in_order, suspects = (), [*dict.fromkeys(one.why for one in in_order), *suspects]
    return Found(in_order, tuple(suspects), tuple(job.waits), tuple(job.calls), tuple(job.pairs))


def _of_end(job: _Job, end: set[int], alone: set[int], unread: set[int]) -> list[Blame | str]:
    """Return blames of ranks that wait for nobody else, or sentences on why none can be blamed."""
    if len(end) > 1:
        return _of_round(job, end)
    (rank,) = end
    mine = job.of.get(rank, [])
    if rank not in job.flights and rank in unread:
        return [f"rank {rank}'s dump cannot be read, and others wait for it"]
    for call in job.front.get(rank, ()):
        if isinstance(call, Pair):
            there = {rank, *([call.peer] if call.peer in alone else [])}
        else:
            there = {r for r in call.entries if r in alone and call in job.front.get(r, ())}
        if len(there) > 1:
            said = f"{ranks_said(sorted(there))} are in {call_said(call)}: all have called it, and "
            return [said + "it ended on none; it may be the device of any, or the way between"]
    if not mine:
        call = job.front[rank][0]
        return [f"rank {rank} is in {call_said(call)}, and waits for nobody who was read"]
    return [_blame(job, rank, mine)]


def _blame(job: _Job, rank: int, mine: list[Wait]) -> Blame:
    """Return the blame with the strongest reason, in the call in which most wait for the rank."""
    order = (IDLE, MISSING, UNREAD, BEHIND)
    kind = min((wait.how for wait in mine), key=order.index)
    mine = [wait for wait in mine if wait.how == kind]
    each = {wait.call: wait for wait in mine}
    calls = {call: _waiting(job, wait) for call, wait in each.items()}
    call = min(calls, key=lambda one: (isinstance(one, Pair), -len(calls[one])))
    waiting = calls[call]
    there = f"{ranks_said(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for it{_at(call)}"
    said = call_said(call)
    if kind == IDLE:
        why = f"rank {rank}'s device has not begun {said}, in which {there}"
        return Blame(rank, "device", why, call, waiting)
    if rank not in job.flights:
        why = f"rank {rank} left no dump, and {there} in {said}"
        return Blame(rank, "absent", why, call, waiting)
    if kind == BEHIND:
        stuck = call_said(job.front[rank][0])
        why = f"rank {rank} is alone in {stuck}, and never came to {said}, in which {there}"
        return Blame(rank, "device", why, call, waiting)
    if isinstance(call, Pair):
        half = f"recv from rank {call.rank}" if call.op == "send" else f"send to rank {call.rank}"
        why = f"rank {rank} has not called {half}, which waits for it{_at(call)} in {said}"
    else:
        why = f"rank {rank} has not called {said}, in which {there}"
    return Blame(rank, "behind", why + _last(job.flights[rank]), call, waiting)


def _waiting(job: _Job, wait: Wait) -> tuple[int, ...]:
    """Return the ranks that wait for the same one in the same call."""
    if isinstance(wait.call, Pair) or wait.how in (IDLE, BEHIND):
        return tuple(sorted({w.rank for w in job.of[wait.peer] if w.call is wait.call}))
    still = wait.call.entries.keys() - {*wait.call.completed, *job.blamed}
    return tuple(sorted(still))


def _last(rows: Sequence[Row]) -> str:
    """Return the last call of a rank, in words; "" if it is not recorded."""
    row = next((row for row in reversed(rows) if row.get("id") is not None), None)
    return f"; the last that it called was {called_of(row)}" if row else ""


def _of_round(job: _Job, end: set[int]) -> list[Blame | str]:
    """Return blames of ranks that wait for each other in a cycle.

    A rank that called less than a peer, and saw the end of all that the peer saw end, had no reason
    to wait. Else calls come in another order on some rank: the one in mutual waits with most ranks,
    and of several such ranks the one that most wait for in that call.
    """
    inside = [wait for wait in job.waits if {wait.rank, wait.peer} <= end]
    less: dict[int, list[Wait]] = {}
    for wait in inside:
        if wait.how == MISSING and job.went_on(wait.rank, wait.peer):
            less.setdefault(wait.peer, []).append(wait)
    if less:
        return [_blame(job, rank, mine) for rank, mine in less.items()]
    faces = {r: {p for p in job.next[r] & end if r in job.next[p]} for r in end}
    score = {}
    for rank in (r for r in sorted(end) if faces[r]):
        calls = [w.call for w in inside if w.peer == rank and w.rank in faces[rank]]
        there = {w.rank for w in job.of[rank] if w.call in calls}
        score[rank] = len(faces[rank]), len(there)
    if not score:
        told = f"{ranks_said(sorted(end))} wait for each other in a round"
        return [told + ", and none of them is known to have begun it"]
    found: list[Blame | str] = []
    for rank in (r for r in score if score[r] == max(score.values())):
        own = job.front[rank][0] if job.front.get(rank) else None
        wait = min((w for w in inside if w.peer == rank and w.rank in faces[rank]), key=_made)
        there = ranks_said(sorted(faces[rank]))
        why = f"rank {rank} is in {call_said(own)} while {there} " if own else f"rank {rank} "
        why += f"wait{'s' * (len(faces[rank]) == 1)} for it in {call_said(wait.call)}: "
        why += "their calls come in different orders"
        found.append(Blame(rank, "order", why, wait.call, tuple(sorted(faces[rank]))))
    return found


def _front(mine: list[tuple[int, Open]]) -> list[Open]:
    """Return a rank's oldest open call, with all sends and receives made as one with it."""
    _, first = min(mine, key=itemgetter(0))
    if not isinstance(first, Pair):
        return [first]
    return [
        call
        for _, call in mine
        if isinstance(call, Pair) and (call.group, call.number) == (first.group, first.number)
    ]


def _began(pair: Pair) -> bool:
    return pair.row.get("state") == "started"


def _sign(call: Open) -> Sign:
    desc = call.row.get("desc") if isinstance(call, Pair) else call.desc
    return desc or call.group, call.op, call.number


def _reached(start: set[int], edges: Mapping[int, Collection[int]]) -> set[int]:
    found, new = set(start), list(start)
    while new:
        more = set(edges.get(new.pop(), ())) - found
        found |= more
        new += more
    return found


def _made(wait: Wait) -> int:
    """Return the time at which the waiting rank made the call, in ns."""
    row = wait.call.row if isinstance(wait.call, Pair) else wait.call.entries.get(wait.rank, {})
    return row.get("created_ns") or 0


def _ended(call: Pending) -> str:
    others = call.completed
    return f"{ranks_said(others)} saw it end" if len(others) > 1 else f"rank {others[0]} saw it end"


def _at(call: Open) -> str:
    line = line_said(call)
    return f" at {line}" if line else ""
