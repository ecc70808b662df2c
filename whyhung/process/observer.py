"""Watch a program's processes from outside: sample, look where progress rests, and report.

A trial's supervisor, `whyhung watch` and `whyhung attach` are observers. The program is not
changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whyhung.process import child, procfs
from whyhung.process.told import Told
from whyhung.verdict import Verdict, judge
from whyhung.verdict.activity import LOOKS, MUCH, TICK_S
from whyhung.verdict.rests import WAIT_S
from whyhung.watch import devices, kernel, layout, looks
from whyhung.watch.evidence import (
    OUTSIDE,
    Evidence,
    P,
    Process,
    Sample,
    Snapshot,
    thinned,
)

EVERY_S = 0.25
FAMILY_S = 1.0  # between two readings of all processes, while a rank rests
ASK_S = 6.0  # between two requests to the processes themselves
APART_S = 1.0  # between two looks, at least
START_STALL_S = 10.0  # importing and building move nothing for long
FRESH_S = 1.0  # a rank that moved so recently counts as moving
ANSWER_S = 1.5  # for a process to answer a request
KEPT, KEPT_LOOKS = 4000, 12
SAID = ("flight", "memory", "locks")  # records that a process writes on request
MOVED_BYTES = 4096  # per second, by a family that counts nothing: fewer are no work


@dataclass(frozen=True)
class Counted:
    """One rank's process, and the file with its progress counters (None: it counts none)."""

    pid: int
    file: Path | None = None


class Observer:
    """Observer of ranks: `step()` samples a few times a second; a rest of stall_s triggers looks.

    A look is a full snapshot: stacks and waits of every process of the family. The verdict is then
    reported through `tell` and in evidence.reports: see whyhung.process.told.

    A rank that counts nothing moves whenever its family works; with `works` False it always rests.
    No process is sent a signal.
    """

    def __init__(
        self,
        evidence: Evidence,
        ranks: Callable[[], Mapping[int, Counted]],
        *,
        cookie: str = "",
        use: SimpleNamespace | None = None,
        tell: Callable[[dict[str, Any]], Any] = lambda report: None,
        works: bool = True,
    ) -> None:
        self.evidence, self.pids = evidence, {}  # pid: start time, of all ranks seen
        self.verdict: Verdict | None = None  # from the last look, while that rest lasts
        self.use = use  # GPU use: `use.percent`; None if not measured
        self._ranks, self._cookie, self._told = ranks, cookie, Told(evidence, tell)
        self._works = works
        self._worked: dict[int, tuple[Any, ...]] = {}  # rank: P, when it worked last, its pid, ...
        self._start = time.monotonic()
        self._next = self._next_family = 0.0
        self._live: dict[int, Counted] = {}
        self._dead: dict[int, Process] = {}  # ranks that have ended
        self._moved: dict[int, tuple[P, float]] = {}  # rank: P, and since when
        self._family: list[Process] = []
        self._look_at = 0.0  # not before this time
        self._looks = 0  # in this rest
        self._asked: dict[int, P] = {}  # progress of the ranks at the last request
        self._ask_at = 0.0  # next request, if nothing has moved: a send counts nowhere
        self._blind = False  # py-spy showed no stacks at the last look

    @property
    def t(self) -> float:
        return time.monotonic() - self._start

    def step(self) -> bool:
        """Sample, and look if that is due; return False if called too soon to do anything."""
        if self.t < self._next:
            return False
        self.sample()
        if self._withdrawn():
            self._looks, self.verdict = 0, None
        if self._due():
            self.look()
            self._report()
        self._next = self.t + EVERY_S
        return True

    def sample(self) -> None:
        """Take one sample of every rank that has a process, zombies included."""
        samples, t = self.evidence.samples, self.t
        given = self._ranks()
        if t >= self._next_family and (self.rest_s() > FAMILY_S or not self._family):
            self._family = kernel.family({r: c.pid for r, c in given.items()}, self._cookie)
            self._next_family = self.t + FAMILY_S
        live: dict[int, Counted] = {}
        for rank, counted in given.items():
            cells = layout.cells_of(counted.file) if counted.file else None
            seen = procfs.process(counted.pid) if counted.pid else None
            if rank in self._moved and (seen is None or not seen.lives):
                self._dead[rank] = Process(counted.pid, of=rank, rank=rank, state="X")
            if seen is None:
                continue
            if seen.lives:
                live[rank] = counted
                self._dead.pop(rank, None)
            self.pids[counted.pid] = seen.started
            p, beats = (layout.coordinate(cells), cells[layout.BEATS]) if cells else (P(), 0)
            mine = [process for process in self._family if process.of == rank]
            family = sum(x.cpu_s for x in mine), sum(x.io_bytes for x in mine)
            what = (beats, seen.cpu_s, seen.state, seen.wchan, seen.rss_mib, self._percent())
            sample = Sample(t, rank, p, *what, *family)
            if cells:
                self._note_beginning(cells)
            else:
                sample = replace(sample, p=self._from_outside(sample, counted.pid))
            samples.append(sample)
            if rank not in self._moved or self._moved[rank][0] != sample.p:
                self._moved[rank] = (sample.p, t)
        self._live = live
        if len(samples) > KEPT:
            self.evidence.samples = thinned(samples[: KEPT // 2]) + samples[KEPT // 2 :]

    def _from_outside(self, now: Sample, pid: int) -> P:
        """Return P of a rank that counts nothing: one more event whenever it is seen to work.

        Work of its main thread or of other processes of its family counts, a heartbeat does not.
        """
        main_s = procfs.main_cpu_s(pid)
        others_s = max(0.0, now.family_cpu_s - now.cpu_s)
        worked = (main_s, others_s, now.io_bytes)
        p, since, was, before = self._worked.get(now.rank, (P(phase=OUTSIDE), now.t, pid, worked))
        used = max(worked[0] - before[0], worked[1] - before[1])
        moved = abs(worked[2] - before[2]) >= MOVED_BYTES * max(1.0, now.t - since)
        if used >= max(2.5 * TICK_S, MUCH * (now.t - since)) or used < 0 or moved or was != pid:
            p = replace(p, events=p.events + self._works)
            since, before = now.t, worked
        self._worked[now.rank] = p, since, pid, before
        return p

    def look(self, *, native: bool = False) -> Snapshot:
        """Take a full snapshot of the family, with stacks; kept in evidence.snapshots."""
        ranks = {rank: counted.pid for rank, counted in self._live.items()}
        p = {rank: self._moved[rank][0] for rank in ranks if rank in self._moved}
        again = not self._looks or self._blind or self.t >= self._ask_at or p != self._asked
        asked = self._ask() if again else []
        if again:
            self._asked, self._ask_at = p, self.t + ASK_S
        starved = any(not self._beats(rank) for rank in self._live)
        native = native or (self._looks % 3 == 1 and (self.use is not None or starved))
        taken = kernel.snapshot(ranks, self._cookie, self.t, p)
        taken = looks.with_stacks(taken, native=native)
        dead = [process for rank, process in self._dead.items() if rank not in ranks]
        gone = {process.pid for process in dead}
        others = [process for process in taken.processes if process.pid not in gone]
        taken = replace(taken, processes=(*others, *dead), gpu_percent=self._percent(),
                        devices=self._devices(ranks))  # fmt: skip
        end = self.t + ANSWER_S
        while self.t < end and not all(file.is_file() for file in asked):
            time.sleep(0.05)
        taken = self._collect(taken)
        self._blind = any(p.rank is not None and p.message for p in taken.processes)
        self.sample()
        kept = self.evidence.snapshots
        kept.append(taken)
        if len(kept) > KEPT_LOOKS:
            del kept[2]
        self._looks += 1
        wait_s = self.evidence.wait_s or WAIT_S
        until_slow_s = self._told.slow_s - self.rest_s()
        next_s = max(APART_S, min(0.15 * self.rest_s(), until_slow_s))
        left_s = wait_s - self.rest_s()
        self._look_at = self.t + (left_s if APART_S / 2 < left_s < next_s + APART_S else next_s)
        return taken

    def judged(self) -> Verdict:
        """Return the verdict as of now."""
        return judge(replace(self.evidence, seconds=self.t, end=None))

    def seen_enough(self) -> bool:
        """Return True if ending now can be told from a stall: it just moved, or was looked at."""
        rest_s, looked = self.rest_s(), self._looks >= LOOKS
        return rest_s < FRESH_S or (looked and (self.verdict is not None or rest_s > WAIT_S + 2))

    def standing(self) -> dict[int, tuple[P, float]]:
        """Return each live rank's progress, and for how many seconds it has rested there."""
        return {r: (p, self.t - since) for r, (p, since) in self._moved.items() if r in self._live}

    def _report(self) -> None:
        now = self.judged()
        self.verdict = now if now.kind in ("STALLED", "HANG", "SLOW") else None
        self._told.report(self.t, self.rest_s(), now)

    def _withdrawn(self) -> bool:
        """Return True if progress came after a rest that was looked at; withdraw its reports."""
        if not self._looks or self.rest_s() >= self.evidence.stall_s:
            return False
        self._told.moves(self.t)
        return True

    def _due(self) -> bool:
        return bool(self._live) and self.t >= self._look_at and self.rest_s() >= self._bound()

    def _bound(self) -> float:
        began = any(p.step >= 0 or p.phase == OUTSIDE for p, _ in self._moved.values())
        return self.evidence.stall_s if began else max(self.evidence.stall_s, START_STALL_S)

    def rest_s(self) -> float:
        """Return the seconds of rest of the rank that rests longest."""
        return max((rest_s for _, rest_s in self.standing().values()), default=0.0)

    def _percent(self) -> float | None:
        return self.use.percent if self.use is not None else None

    def _devices(self, ranks: Mapping[int, int]) -> dict[int, dict[str, Any]]:
        """Return {rank: its GPU's activity}; a note records once why that is incomplete."""
        if self.use is None:
            return {}
        note = f"performance counters of GPUs: {self.use.missing}"
        if self.use.missing and note not in self.evidence.notes:
            self.evidence.notes.append(note)
        return devices.of_ranks(self.use.gpus, ranks)

    def _beats(self, rank: int) -> bool:
        """Return True if the heartbeat advanced recently, or if this rank never sent one."""
        seen = [s.beats for s in self.evidence.samples[-400:] if s.rank == rank][-12:]
        return not seen or not seen[-1] or seen[-1] > seen[0]

    def _note_beginning(self, cells: tuple[int, ...]) -> None:
        began_ns = cells[layout.BEGAN_NS]
        if began_ns and self.evidence.began_s is None:
            self.evidence.began_s = max(0.0, began_ns / 1e9 - self._start)

    def _ask(self) -> list[Path]:
        """Request the processes' own records; return the files in which they will answer.

        A process that is stopped, or whose GIL is held, cannot answer.
        """
        answers = []
        for rank, counted in self._live.items():
            # Answers in an earlier rest do not apply to this one.
            self.evidence.flights.pop(rank, None)
            self.evidence.locks.pop(counted.pid, None)
            if counted.file is None or not self._beats(rank):
                continue
            for name in SAID:
                _answer(counted.file, name).unlink(missing_ok=True)
            if not self._looks:  # once in a rest
                _answer(counted.file, "memory").with_suffix(".pickle").unlink(missing_ok=True)
            with contextlib.suppress(OSError, ValueError):
                layout.ask(counted.file)
                answers.append(_answer(counted.file, SAID[-1]))
        return answers

    def _collect(self, taken: Snapshot | None = None) -> Snapshot | None:
        """Collect the ranks' answers so far, also after they have ended.

        The snapshot gets the stacks in these answers where py-spy showed none.
        """
        for rank, counted in self._ranks().items():
            if counted.file is None:
                continue
            told = child.read(_answer(counted.file, "flight"))
            if told is not None and "entries" in told:
                self.evidence.flights[rank] = told["entries"]  # none: it has called nothing
            if held := child.read(_answer(counted.file, "memory")):
                self.evidence.memory = {**(self.evidence.memory or {}), str(rank): held}
            told = child.read(_answer(counted.file, "locks"), {})
            if told.get("waits"):
                self.evidence.locks[counted.pid] = told["waits"]
            if taken is not None and told.get("stacks"):
                taken = _with_stacks(taken, counted.pid, told["stacks"])
        return taken


def _with_stacks(taken: Snapshot, pid: int, stacks: Mapping[str, list[str]]) -> Snapshot:
    found = taken.process(pid)
    if found is None or any(thread.frames for thread in found.threads):
        return taken
    frames = {thread.tid: tuple(stacks.get(str(thread.tid), ())) for thread in found.threads}
    threads = tuple(replace(thread, frames=frames[thread.tid]) for thread in found.threads)
    given = replace(found, threads=threads)
    return replace(taken, processes=tuple(given if p is found else p for p in taken.processes))


def _answer(file: Path, name: str) -> Path:
    return file.with_name(f"{name}-{file.stem.partition('-')[2]}.json")
