"""Watches a trial from outside, says when to end it, and how its processes ended.

The supervisor reads the trial's counters and looks closer where they rest. The code that waits
for the processes calls it many times a second; it does something four times a second.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nsa.lab.process import child, procfs
from nsa.lab.process.trial import Outcome
from nsa.lab.verdict import judge
from nsa.lab.watch import looks, progress
from nsa.lab.watch.evidence import End, Evidence, Look, P, Sample, thinned

EVERY_S = 0.25
LOOKS, APART_S = 3, 0.5
AGAIN = 1.5  # after so many times as long a rest, it is looked at once more
START_STALL_S = 20.0  # importing and building move nothing for long
START_S = 300.0  # for all of it
FRESH_S = 1.0  # whoever moved so recently moves
FLIGHT_S = 3.0
KEPT = 4000  # samples; of more, every other one of the older half goes


class Supervisor:
    """What `trial.run_child` calls as its `watch`; `evidence` fills up meanwhile.

    At the soft deadline py-spy takes the stacks once. Where a rank's P rests for stall_s they are
    taken three times, at least half a second apart, with native stacks, /proc, the Flight Recorders
    and the device's memory; if P still rests and the verdict is HANG, the trial is ended at once.
    Else it goes on to its deadline, and is looked at again meanwhile. At the deadline a trial that
    moves is ended; one that has just come to rest is watched until it moves, or has rested for
    stall_s.
    """

    def __init__(
        self,
        evidence: Evidence,
        folder: Path,
        ranks: int,
        *,
        stop: threading.Event | None = None,
        use: SimpleNamespace | None = None,
    ) -> None:
        self.evidence, self.folder, self._stop, self._use = evidence, folder, stop, use
        self.reason = self.message = ""  # of its end: one of evidence.REASONS, and in words
        self.pids: dict[int, int] = {}  # of all ranks seen, with the time of their start
        self._files = {rank: folder / f"progress-{rank}.bin" for rank in range(ranks)}
        self._start = time.monotonic()
        self._next = 0.0
        self._live: dict[int, int] = {}  # rank: pid
        self._moved: dict[int, tuple[P, float]] = {}  # rank: P, and since when
        self._look_at: dict[int, float] = {}  # rank: the rest at which it is looked at next
        self._soft_done = False

    @property
    def t(self) -> float:
        return time.monotonic() - self._start

    def __call__(self, pid: int) -> str:
        """An empty string to go on, else why the trial is to be ended."""
        if self._stop is not None and self._stop.is_set():
            return self._end("caller", "its caller asked for it")
        if self.t < self._next:
            return ""
        self._next = self.t + EVERY_S
        self.sample()
        late = self._late()
        if self._at_rest() or (late and self._at_rest(looked=True)):
            self._look_closely()
            if self._at_rest(looked=True):
                proven = self._proven()
                self._look("native", self._live)  # last, for it may take seconds
                if not proven:
                    self.sample()
                    proven = self._at_rest(looked=True) and self._proven()
                if proven:
                    return self._end("stall", f"no progress for {self._rest_s():.1f} s")
                if late and self._at_rest(looked=True):
                    return self._end("deadline", late)
        elif late and self._rest_s() < FRESH_S:
            self._look_at_stacks()
            return self._end("deadline", late)
        elif self._worked_s() > (self.evidence.soft_s or float("inf")) and not self._soft_done:
            self._soft_done = True
            self._look("py-spy", self._live)  # by nothing that could end it
        return ""

    def sample(self) -> None:
        """One sample of every rank that lives, and of one that has just begun to."""
        samples = self.evidence.samples
        for rank, file in self._files.items():
            cells, t = progress.cells_of(file), self.t
            pid = cells[progress.PID] if cells else 0
            seen = procfs.process(pid) if pid else None
            self._live.pop(rank, None)
            if cells is None or seen is None:
                continue
            p = progress.coordinate(cells)
            if seen.lives:
                self._live[rank] = pid
            self.pids[pid] = seen.started
            if rank not in self._moved or self._moved[rank][0] != p:
                self._moved[rank] = (p, t)
                self._look_at[rank] = self._bound(p)
            self._note_beginning(cells)
            what = (cells[progress.BEATS], seen.cpu_s, seen.state, seen.wchan, seen.rss_mib)
            use = self._use.percent if self._use is not None else None
            samples.append(Sample(t, rank, p, *what, use))
        if len(samples) > KEPT:
            self.evidence.samples = thinned(samples[: KEPT // 2]) + samples[KEPT // 2 :]

    def close(self) -> None:
        """When all processes have ended: how far each had come, and what it still said."""
        self._collect()
        for rank, file in self._files.items():
            cells = progress.cells_of(file)
            if cells is not None:
                self._note_beginning(cells)
                p, seen = progress.coordinate(cells), self.evidence.of(rank)
                if not seen or p != seen[-1].p:
                    cpu_s = seen[-1].cpu_s if seen else 0.0
                    last = Sample(self.t, rank, p, cells[progress.BEATS], cpu_s)
                    self.evidence.samples.append(last)

    def _note_beginning(self, cells: tuple[int, ...]) -> None:
        began_ns = cells[progress.BEGAN_NS]
        if began_ns and self.evidence.began_s is None:
            self.evidence.began_s = max(0.0, began_ns / 1e9 - self._start)

    def _bound(self, p: P) -> float:
        stall_s = self.evidence.stall_s
        return stall_s if p.step >= 0 else max(stall_s, START_STALL_S)

    def _rests(self) -> dict[int, float]:
        return {rank: self.t - self._moved[rank][1] for rank in self._live}

    def _rest_s(self) -> float:
        """Of the rank that rests longest."""
        return max(self._rests().values(), default=self.t)

    def _at_rest(self, looked: bool = False) -> bool:
        """Whether a rank has rested so long that a look is due, or was when it was taken."""
        bounds = self._look_at
        if looked:
            bounds = {rank: self._bound(p) for rank, (p, _) in self._moved.items()}
        return any(rest >= bounds[rank] for rank, rest in self._rests().items())

    def _worked_s(self) -> float:
        began = self.evidence.began_s
        return 0.0 if began is None else self.t - began

    def _late(self) -> str:
        """Why it has to end for the time it took, "" while it need not."""
        if self.evidence.began_s is None:
            return "" if self.t < START_S else f"no step had begun after {START_S:g} s"
        deadline_s = self.evidence.deadline_s
        if deadline_s is None or self._worked_s() < deadline_s:
            return ""
        return f"still running after {deadline_s:g} s"

    def _end(self, reason: str, message: str) -> str:
        self.reason, self.message = reason, message
        with contextlib.suppress(OSError):
            self.sample()
        return message

    def _proven(self) -> bool:
        return judge(replace(self.evidence, seconds=self.t, end=None)).kind == "HANG"

    # what a closer look takes

    def _look_closely(self) -> None:
        asked = self._ask()
        for number in range(LOOKS):
            if number:
                self._pause(APART_S)
            self._look("proc", self._live)
            self._look_at_stacks()
        end = self.t + FLIGHT_S
        while self.t < end and not all(self._answer("flight", r).is_file() for r in asked):
            self._pause(EVERY_S)
        self._collect()
        self.sample()
        for rank, rest in self._rests().items():
            if rest >= self._look_at[rank]:
                self._look_at[rank] = AGAIN * rest

    def _pause(self, seconds: float) -> None:
        end = self.t + seconds
        while (left := end - self.t) > 0:
            time.sleep(min(EVERY_S, left))
            self.sample()

    def _look_at_stacks(self) -> None:
        """By py-spy; of ranks that it does not show, by faulthandler, which now and then ends one.

        In one of 180 dumps of a process with another thread at work (Python 3.11): it reads that
        thread's frames while they change.
        """
        seen = {look.rank for look in self._look("py-spy", self._live) if look.threads}
        self._look("faulthandler", {k: pid for k, pid in self._live.items() if k not in seen})

    def _look(self, tool: str, pids: dict[int, int]) -> list[Look]:
        """By one tool at these ranks, at all of them at once, P beside it."""
        with ThreadPoolExecutor(max(1, len(pids))) as pool:
            taken = [
                pool.submit(looks.look, tool, rank, pid, self._files[rank], self.t)
                for rank, pid in pids.items()
            ]
        found = [look for each in taken if (look := each.result())]
        self.evidence.looks += found
        return found

    def _ask(self) -> list[int]:
        """Asks for Flight Recorders and the device's memory, where there are any and it can answer.

        A process that is stopped, or keeps its GIL, cannot.
        """
        if len(self._files) == 1 and self._use is None:
            return []
        asked = []
        for rank in self._live:
            if not self._beats(rank):
                continue
            for name in ("flight", "memory"):
                self._answer(name, rank).unlink(missing_ok=True)
            with contextlib.suppress(OSError, ValueError):
                progress.ask(self._files[rank])
                asked.append(rank)
        return asked

    def _answer(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-{rank}.json"

    def _beats(self, rank: int) -> bool:
        """Whether it did in the last second and a half."""
        seen = [s.beats for s in self.evidence.samples[-6 * len(self._files) :] if s.rank == rank]
        return not seen or seen[-1] > seen[0]

    def _collect(self) -> None:
        """What the ranks have answered so far, also after they have ended."""
        for rank in self._files:
            if found := child.read(self._answer("flight", rank), {}).get("entries"):
                self.evidence.flights[rank] = found
            if held := child.read(self._answer("memory", rank)):
                self.evidence.memory = {**(self.evidence.memory or {}), str(rank): held}


_DEVICE = re.compile(r"OutOfMemoryError|CUDA|HIP|cublas|nccl", re.IGNORECASE)
_NAMED = re.compile(r"^([A-Za-z_][\w.]*): (.*)$", re.DOTALL)


def settle(
    evidence: Evidence,
    ended: Outcome | list[dict[str, Any]],
    supervisor: Supervisor,
    folder: Path,
    *,
    killed: bool,
) -> None:
    """Completes the evidence of a trial that has ended; killed: the kernel did so, for memory."""
    if isinstance(ended, Outcome):
        wrote = (folder / "result.json").is_file()
        end = _end(ended.status, ended.message, ended.evidence, ended.returncode, wrote=wrote)
    else:
        end = _of_ranks(ended, killed)
    if end.how == "stopped by the supervisor":
        said = supervisor.message or end.message
        end = replace(end, type=supervisor.reason or "deadline", message=said)
    every = {r: child.read(folder / f"left-{r}.json") for r in range(int(evidence.spec["ranks"]))}
    left = {rank: found for rank, found in every.items() if found}
    peaks = [found["peak_mib"] for found in left.values() if found["peak_mib"] is not None]
    peaks = peaks or [sample.rss_mib or 0.0 for sample in evidence.samples]
    evidence.end = replace(end, peak_mib=max(peaks, default=None))
    if left:
        _take(evidence, left)


def _of_ranks(rows: list[dict[str, Any]], killed: bool) -> End:
    bad = [row for row in rows if row["status"] != "ok"]
    if not bad:
        return End("returned", 0)
    late = [row for row in bad if row["status"] == "timeout"]
    said = [row for row in bad if row["raised"]]
    first = next((row for row in rows if row["first"]), (late or said or bad)[0])
    status = first["status"]
    if killed and status == "crash" and first["message"].endswith("SIGKILL"):
        status = "oom"
    message = first["message"]
    if not first["first"] and status != "timeout":  # it lost a rank, and none says why
        others = {"ok": "had returned", "ended": "was ended before it could say why"}
        told = [f"rank {r['rank']} {others[r['status']]}" for r in rows if r["status"] in others]
        message = "; ".join([message, *told])
    end = _end(status, message, first["evidence"], None, wrote=first["raised"])
    return replace(end, first_rank=first["rank"] if first["first"] else None)


def _end(status: str, message: str, evidence: str, code: int | None, *, wrote: bool) -> End:
    if status == "ok":
        return End("returned", code)
    if status == "timeout":
        return End("stopped by the supervisor", code, "", message, evidence)
    if status == "crash":
        return End("signal", code, message.removeprefix("ended by "), message, evidence)
    named = _NAMED.match(message)
    if status == "oom" and not wrote:
        return End("signal", code, "SIGKILL", message, evidence, out_of_memory="host")
    if not wrote or named is None or named[1] == "SystemExit":
        return End("exit", code, "SystemExit" if named else "", message, evidence)
    memory = ("device" if _DEVICE.search(message) else "host") if status == "oom" else ""
    return End("exception", code, named[1], named[2], evidence, out_of_memory=memory)


def _lost(losses: dict[int, Any]) -> dict[str, dict[str, Any]]:
    """The rank whose own loss was the first that is not finite; others' follow from its gradients.

    Nothing where that is rank 0's: its losses are the evidence's.
    """
    bad = [
        (step, rank, loss)
        for rank, mine in losses.items()
        for step, loss in enumerate(mine)
        if not math.isfinite(float(loss))
    ]
    step, rank, loss = min(bad, default=(0, 0, ""))
    if rank == 0:
        return {}
    told = f"rank {rank}: its loss of step {step} is {loss}, the first that is not finite"
    return {"loss": {"ok": False, "detail": told, "what": "nan-loss", "place": ""}}


def _take(evidence: Evidence, left: dict[int, dict[str, Any]]) -> None:
    """What the ranks wrote down."""
    evidence.losses = [float(loss) for loss in left.get(0, {}).get("losses", ())]
    evidence.witness = next((found["witness"] for found in left.values()), None)
    evidence.result = left.get(0, {}).get("result")
    said = {rank: found["oracles"] for rank, found in left.items() if found["oracles"]}
    if said:
        from nsa.lab import oracles

        evidence.oracles = oracles.merge(said)
    losses = {rank: found.get("losses", ()) for rank, found in left.items()}
    evidence.oracles |= _lost(losses) if len(left) > 1 else {}
    source = evidence.environment.get("source")
    for rank, found in left.items():
        if found.get("source") not in (None, source):
            evidence.preflight.append(f"rank {rank} ran another source than was there at the start")
