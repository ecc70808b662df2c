"""Simulated jobs of several groups, with a fault, and the Flight Recorder dumps that they leave.

A rank's host calls ahead of its device, and waits for it at every "sync"; a device ends its calls
in their order, a collective when all members' devices are at it. With `loose`, sends and gradients'
collectives are waited for by later calls of their group alone. A job runs until nothing moves.
"""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass, field

BEGAN = 1_700_000_000_000_000_000
AHEAD = 40  # calls that a host is at most ahead of its device


@dataclass
class Group:
    name: str
    desc: str
    ranks: list[int]


@dataclass
class Call:
    """One row of a recorder, and how it stands."""

    op: str
    group: Group | None
    size: list[int]
    peer: int | None = None  # of a send or a receive
    seq: int = 0
    p2p_seq: int = 0
    made: int = 0
    id: int = 0
    state: str = "scheduled"
    ended: bool = False  # on the device, though that may not be reported

    def line(self) -> tuple:
        return self.group.name, self.op, self.peer


@dataclass
class Rank:
    program: list[Call]
    at: int = 0  # the host's place in its program
    calls: list[Call] = field(default_factory=list)
    seqs: dict[tuple[str, bool], int] = field(default_factory=dict)
    stops_at: int | None = None  # the host makes no call from this place on
    breaks_at: int | None = None  # its device never reports an end from this call on
    gives: int = 1  # and gives its part to so many of these
    sleeps_at: int | None = None  # its device never begins this call
    dies_at: int | None = None  # all of it ends here, and it leaves no dump

    def struck(self) -> bool:
        """Tells that it came to its fault; who was stuck before is a victim like others."""
        host = [place for place in (self.stops_at, self.dies_at) if place is not None]
        device = [place for place in (self.breaks_at, self.sleeps_at) if place is not None]
        ended = next((n for n, call in enumerate(self.calls) if not call.ended), len(self.calls))
        came = [self.at >= place for place in host] + [ended >= place for place in device]
        return any(came) or not came or any(call.state == "given" for call in self.calls)

    def waits(self) -> int:
        """Calls whose end its host has not seen."""
        return sum(call.state != "completed" for call in self.calls)

    def fronts(self, loose: bool) -> list[Call]:
        """The calls that its device is in."""
        if self.dies_at is not None and self.at >= self.dies_at:
            return []
        ends = [n for n in (self.sleeps_at, self.breaks_at and self.breaks_at + self.gives) if n]
        found, lines = [], set()
        for call in self.calls[: min(ends, default=None)]:
            if call.ended:
                continue
            if call.line() not in lines:
                found.append(call)
            lines.add(call.line())
            if not (loose and (call.op == "send" or call.group.desc == "DATA")):
                break
        return found


class Job:
    """A random layout of tensor, pipeline and data parallel ranks, and their programs."""

    ring, batched = 2000, False  # rows that a recorder keeps; sends and receives are made as one

    def __init__(self, seed: int, steps: int = 3, loose: bool = False) -> None:
        self.random, self.loose = random.Random(seed), loose
        sizes = [(2, 2, 2), (2, 4, 2), (1, 1, 4), (1, 1, 8), (4, 1, 2), (1, 4, 2), (2, 1, 1)]
        self.tp, self.pp, self.dp = self.random.choice(sizes)
        self.world = self.tp * self.pp * self.dp
        self.groups: dict[str, list[Group]] = {}
        self.clock = 0
        self._make_groups()
        self.ranks = [Rank(self._program(rank, steps)) for rank in range(self.world)]
        first = self.random.randrange(5, 60000)  # calls of each group in earlier steps
        for rank in self.ranks:
            rank.seqs = {(group.name, False): first for group in self._all()}

    def _place(self, rank: int) -> tuple[int, int, int]:
        """(tensor, data, pipeline), tensor fastest."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def _make_groups(self) -> None:
        everybody = range(self.world)
        kinds = {
            "default_pg": lambda place: (),
            "TENSOR": lambda place: place[1:],
            "PIPELINE": lambda place: place[:2],
            "DATA": lambda place: (place[0], place[2]),
            "EXPERT": lambda place: place[2:],
        }
        name = 0
        for desc, of in kinds.items():
            same: dict[tuple[int, ...], list[int]] = {}
            for rank in everybody:
                same.setdefault(of(self._place(rank)), []).append(rank)
            for ranks in same.values():
                self.groups.setdefault(desc, []).append(Group(str(name), desc, ranks))
                name += 1

    def _all(self) -> list[Group]:
        return [group for groups in self.groups.values() for group in groups]

    def of(self, desc: str, rank: int) -> Group:
        return next(group for group in self.groups[desc] if rank in group.ranks)

    def _program(self, rank: int, steps: int) -> list[Call]:
        stage = self._place(rank)[2]
        line = self.of("PIPELINE", rank)
        layer = []
        if self.tp > 1:
            group = self.of("TENSOR", rank)
            layer += [Call("_all_gather_base", group, [64]), Call("all_reduce", group, [128])]
        if self.dp * self.tp > 1:
            layer += [Call("all_to_all", self.of("EXPERT", rank), [96])]

        def copies(calls: list[Call]) -> list[Call]:
            return [Call(call.op, call.group, list(call.size), call.peer) for call in calls]

        def passed(op: str, to: int) -> list[Call]:
            there = 0 <= stage + to < self.pp
            return [Call(op, line, [4096, 4096], line.ranks[stage + to])] if there else []

        program: list[Call] = []
        for _ in range(steps):
            for _ in range(2):
                program += [*passed("recv", -1), *copies(layer * 2), *passed("send", 1)]
            for _ in range(2):
                program += [*passed("recv", 1), *copies(layer * 2), *passed("send", -1)]
            if self.dp > 1:
                group = self.of("DATA", rank)
                program += [Call("all_reduce", group, [1000 + n]) for n in range(3)]
            program += [
                Call("all_reduce", self.groups["default_pg"][0], [1]),
                Call("sync", None, []),
            ]
        return program

    def run(self, turns: int | None = None) -> None:
        """Moves hosts and devices until nothing moves, or for so many turns."""
        ranks = list(range(self.world))
        moved = True
        while moved and turns != 0:
            turns = None if turns is None else turns - 1
            self.random.shuffle(ranks)
            moved = False
            for rank in ranks:
                for _ in range(self.random.randrange(1, 6)):
                    moved |= self._host(self.ranks[rank])
                moved |= self._device(rank)

    def finished(self) -> bool:
        """Every rank has made all of its calls, and seen their ends."""
        return all(rank.at == len(rank.program) and not rank.waits() for rank in self.ranks)

    def _host(self, rank: Rank) -> bool:
        if rank.at >= len(rank.program) or rank.at in (rank.stops_at, rank.dies_at):
            return False
        call, waits = rank.program[rank.at], rank.waits()
        if waits and (call.op == "sync" or waits >= AHEAD):
            return False
        rank.at += 1
        if call.op == "sync":
            return True
        pair = call.peer is not None
        key = call.group.name, pair
        rank.seqs[key] = rank.seqs.get(key, 0) + 1
        call.seq = rank.seqs.get((call.group.name, False), 0)
        call.p2p_seq = rank.seqs[key] if pair else 0
        self.clock += self.random.randrange(1000, 90000)
        call.made, call.id = BEGAN + self.clock, len(rank.calls)
        rank.calls.append(call)
        return True

    def _device(self, rank: int) -> bool:
        moved = False
        for call in self.ranks[rank].fronts(self.loose):
            others = {call.peer} if call.peer is not None else {*call.group.ranks} - {rank}
            call.state = "started"
            met = {other: self._met(call, rank, other) for other in others}
            if all(met.values()):
                for one, its in {**met, rank: call}.items():
                    mine = self.ranks[one]
                    broken = mine.breaks_at is not None and its.id >= mine.breaks_at
                    its.state, its.ended, moved = "given" if broken else "completed", True, True
        return moved

    def _met(self, call: Call, rank: int, other: int) -> Call | None:
        """Matching call that the other rank is in."""
        fronts = self.ranks[other].fronts(self.loose)
        return next((front for front in fronts if self._meets(call, rank, front)), None)

    @staticmethod
    def _meets(call: Call, rank: int, front: Call) -> bool:
        if front.group is not call.group or front.size != call.size:
            return False
        if call.peer is not None:
            return front.peer == rank and front.op != call.op
        return (front.seq, front.op, front.peer) == (call.seq, call.op, None)

    def dump(self, folder, active: bool, timed: bool, nodes: int = 1) -> None:
        """One file a rank, those of each node in a folder of its own."""
        for rank, mine in enumerate(self.ranks):
            if mine.dies_at is not None and mine.at >= mine.dies_at:
                continue
            place = folder / f"node{rank * nodes // self.world}" if nodes > 1 else folder
            place.mkdir(exist_ok=True, parents=True)
            dumped = self._dumped(rank, active, timed)
            if rank % 5 == 4:
                (place / f"nccl_trace_rank_{rank}").write_text(json.dumps(dumped))
            else:
                (place / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dumped))

    def _dumped(self, rank: int, active: bool, timed: bool) -> dict:
        mine = self.ranks[rank]
        own = [group for group in self._all() if rank in group.ranks]
        local = {group.name: number for number, group in enumerate(own)}
        status, offset = {}, mine.seqs
        for group in own:
            calls = [call for call in mine.calls if call.group is group and call.peer is None]
            ended = [call.seq for call in calls if call.state == "completed"]
            last = offset.get((group.name, False), 0)
            status[str(local[group.name])] = {
                "last_enqueued_collective": last,
                "last_started_collective": -1,
                "last_completed_collective": max(ended, default=last - len(calls)),
            }
        kept = mine.calls[-self.ring :]
        kept = [call for call in kept if not (active and call.state == "completed")]
        config = {g.name: {"name": g.name, "desc": g.desc, "ranks": str(g.ranks)} for g in own}
        entries: list[dict] = []
        for call in kept:
            entry = self._entry(rank, call, local, timed)
            if self.batched and call.peer is not None:
                told = {"state": "scheduled", "retired": False, "record_id": 2 * call.id}
                entries.append({**entry, **told})
                whole = {"profiling_name": "nccl:coalesced", "input_sizes": [], "input_dtypes": []}
                entry |= {**whole, "output_sizes": [], "output_dtypes": []}
            entries.append({**entry, "record_id": 2 * call.id + 1})
        return {"version": "2.9", "pg_config": config, "pg_status": status, "entries": entries}

    def _entry(self, rank: int, call: Call, local: dict[str, int], timed: bool) -> dict:
        op, group = call.op, call.group
        if call.peer is not None:
            mine, other = group.ranks.index(rank), group.ranks.index(call.peer)
            op += f" {mine}{'->' if op == 'send' else '<-'}{other}"
        state = {"given": "started"}.get(call.state, call.state)
        if state == "started" and not timed:
            state = "scheduled"
        return {
            "record_id": call.id, "pg_id": local[group.name],
            "process_group": (group.name, group.desc), "collective_seq_id": call.seq,
            "p2p_seq_id": call.p2p_seq, "profiling_name": f"nccl:{op}",
            "time_created_ns": call.made, "input_sizes": [call.size], "input_dtypes": ["Float"],
            "output_sizes": [call.size], "output_dtypes": ["Float"], "state": state,
            "time_discovered_started_ns": call.made if state != "scheduled" else None,
            "time_discovered_completed_ns": call.made if state == "completed" else None,
            "retired": state == "completed", "timeout_ms": 600000,
            "is_p2p": call.peer is not None,
            "frames": [{"name": "step", "filename": "/me/train.py", "line": 40}],
        }  # fmt: skip
