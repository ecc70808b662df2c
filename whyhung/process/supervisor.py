"""Supervise a trial: watch it from outside, decide when to end it, and record how it ended.

The code that waits for the processes calls the supervisor many times a second; it acts four times
a second.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whyhung.process import child, script
from whyhung.process.observer import Counted, Observer
from whyhung.process.trial import Outcome
from whyhung.watch import layout
from whyhung.watch.evidence import End, Evidence, Sample

START_S = 300.0  # for importing, building and the first batch together


class Supervisor(Observer):
    """Callable for `watch` of `trial.run_child`; fills `evidence` meanwhile.

    At the soft deadline the stacks are taken once, and again wherever progress rests. on_hang and
    on_stall, "report" or "kill", are the reactions to a certified hang and to a stall; a
    certificate is complete before anything is ended. At the deadline a trial that moves is ended;
    one that has just come to rest is looked at first.
    """

    def __init__(
        self,
        evidence: Evidence,
        folder: Path,
        ranks: int,
        *,
        stop: threading.Event | None = None,
        use: SimpleNamespace | None = None,
        on_hang: str = "report",
        on_stall: str = "report",
        tell: Callable[[dict[str, Any]], Any] = lambda report: None,
    ) -> None:
        self.folder, self._stop = folder, stop
        self._files = {rank: folder / f"progress-{rank}.bin" for rank in range(ranks)}
        super().__init__(evidence, self._counted, use=use, tell=tell)
        self.reason = self.message = ""  # why it was ended: one of evidence.REASONS, and in words
        self._kills = {"HANG": on_hang == "kill", "STALLED": on_stall == "kill"}
        self._soft_done = False

    def _counted(self) -> dict[int, Counted]:
        read = {rank: (layout.cells_of(file), file) for rank, file in self._files.items()}
        return {r: Counted(cells[layout.PID], file) for r, (cells, file) in read.items() if cells}

    def __call__(self, pid: int) -> str:
        """Return an empty string to go on, else the reason to end the trial."""
        if self._stop is not None and self._stop.is_set():
            return self._end("caller", "its caller asked for it")
        if not self.step():
            return ""
        if self.verdict is not None and self._kills.get(self.verdict.kind):
            return self._end(
                "stall", f"{self.verdict.label}, no progress for {self.rest_s():.1f} s"
            )
        late = self._late()
        if late and self.seen_enough():
            if not self._looks:
                self.look()
            return self._end("deadline", late)
        if not self._soft_done and self._worked_s() > (self.evidence.soft_s or float("inf")):
            self._soft_done = True
            self.look()
        return ""

    def close(self) -> None:
        """Record each rank's final progress and answers; call when all processes have ended."""
        self._collect()
        for rank, counted in self._counted().items():
            cells = layout.cells_of(counted.file)
            if cells is not None:
                self._note_beginning(cells)
                p, seen = layout.coordinate(cells), self.evidence.of(rank)
                if not seen or p != seen[-1].p:
                    cpu_s = seen[-1].cpu_s if seen else 0.0
                    last = Sample(self.t, rank, p, cells[layout.BEATS], cpu_s)
                    self.evidence.samples.append(last)
        moved = any(s.p != self.evidence.last(s.rank) for s in self.evidence.samples[-1:])
        for report in self.evidence.reports:
            if report["withdrawn"] is None and (moved or not self.reason):
                report["withdrawn"] = self.t

    def _worked_s(self) -> float:
        began = self.evidence.began_s
        return 0.0 if began is None else self.t - began

    def _late(self) -> str:
        """Return the reason to end it for the time it took, "" if there is none."""
        deadline_s = self.evidence.deadline_s
        if self.evidence.began_s is None:
            limit = max(START_S, deadline_s or 0.0)
            if script.is_script(self.evidence.spec["subject"]):  # it may have no steps at all
                limit = deadline_s or float("inf")
            return "" if self.t < limit else f"no step had begun after {limit:g} s"
        if deadline_s is None or self._worked_s() < deadline_s:
            return ""
        return f"still running after {deadline_s:g} s"

    def _end(self, reason: str, message: str) -> str:
        self.reason, self.message = reason, message
        with contextlib.suppress(OSError):
            self.sample()
        return message


_DEVICE = re.compile(r"OutOfMemoryError|CUDA|HIP|cublas|nccl", re.IGNORECASE)
_NAMED = re.compile(r"^([A-Za-z_][\w.]*): (.*)$", re.DOTALL)


def settle(
    evidence: Evidence,
    ended: Outcome | list[dict[str, Any]],
    supervisor: Supervisor,
    folder: Path,
    *,
    killed: bool,
    merge: Callable[[dict[int, dict[str, Any]]], dict[str, Any]] | None = None,
) -> None:
    """Complete the evidence of a trial that has ended; killed: by the kernel, for memory.

    merge: one result of each oracle from those by rank; by default the first rank's.
    """
    if isinstance(ended, Outcome):
        wrote = (folder / "result.json").is_file()
        end = _end(ended.status, ended.message, ended.evidence, ended.returncode, wrote=wrote)
        if end.how == "exit" and end.returncode == 0 and script.is_script(evidence.spec["subject"]):
            end = End("returned", 0)  # a script may call os._exit(0)
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
        _take(evidence, left, merge or _firsts)


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
    if not first["first"] and status != "timeout":  # it lost a rank, and none reports why
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
    """Return a "loss" result for the rank with the first loss that is not finite.

    Other ranks' follow from its gradients. Empty for rank 0: its losses are the evidence's.
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


def _firsts(by_rank: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return each oracle's result by name: that of a broken rank, else the first rank's."""
    found: dict[str, Any] = {}
    for results in by_rank.values():
        for name, one in results.items():
            if name not in found or (one["ok"] is False and found[name]["ok"] is not False):
                found[name] = one
    return found


def _take(
    evidence: Evidence,
    left: dict[int, dict[str, Any]],
    merge: Callable[[dict[int, dict[str, Any]]], dict[str, Any]],
) -> None:
    """Copy the ranks' records into the evidence."""
    evidence.losses = [float(loss) for loss in left.get(0, {}).get("losses", ())]
    evidence.witness = next((found["witness"] for found in left.values()), None)
    evidence.result = left.get(0, {}).get("result")
    evidence.notes += left.get(0, {}).get("notes") or []
    said = {rank: found["oracles"] for rank, found in left.items() if found["oracles"]}
    if said:
        evidence.oracles = merge(said)
    losses = {rank: found.get("losses", ()) for rank, found in left.items()}
    evidence.oracles |= _lost(losses) if len(left) > 1 else {}
    source = evidence.environment.get("source")
    for rank, found in left.items():
        if found.get("source") not in (None, source):
            evidence.preflight.append(f"rank {rank} ran another source than was there at the start")
