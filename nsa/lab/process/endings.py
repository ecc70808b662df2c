"""How a trial's processes ended, as evidence: from what they wrote and what waited for them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa.lab.process.supervisor import Supervisor
from nsa.lab.process.trial import Outcome
from nsa.lab.watch.evidence import End, Evidence

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
    one = isinstance(ended, Outcome)
    evidence.end = _of_one(ended, folder) if one else _of_ranks(ended, killed)
    if evidence.end.how == "stopped by the supervisor":
        said = supervisor.message or evidence.end.message
        evidence.end = replace(evidence.end, type=supervisor.reason or "deadline", message=said)
    left = {rank: found for rank in range(_ranks(evidence)) if (found := _left(folder, rank))}
    if left:
        _take(evidence, left)
    if evidence.end.peak_mib is None:
        peak = max((s.rss_mib or 0.0 for s in evidence.samples), default=None)
        evidence.end = replace(evidence.end, peak_mib=peak)


def _of_one(outcome: Outcome, folder: Path) -> End:
    wrote = (folder / "result.json").is_file()
    return _end(outcome.status, outcome.message, outcome.evidence, outcome.returncode, wrote=wrote)


def _of_ranks(rows: list[dict[str, Any]], killed: bool) -> End:
    if all(row["status"] == "ok" for row in rows):
        return End("returned", 0)
    late = next((row for row in rows if row["status"] == "timeout"), None)
    first = next((row for row in rows if row["first"]), None)
    if first is None:
        first = late or next(row for row in rows if row["status"] != "ok")
    status = first["status"]
    if killed and status == "crash" and first["message"].endswith("SIGKILL"):
        status = "oom"
    end = _end(status, first["message"], first["evidence"], None, wrote=first["raised"])
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


def _ranks(evidence: Evidence) -> int:
    return int(evidence.spec["ranks"])


def _left(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        return json.loads((folder / f"left-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _take(evidence: Evidence, left: dict[int, dict[str, Any]]) -> None:
    """What the ranks wrote down."""
    evidence.losses = [float(loss) for loss in left.get(0, {}).get("losses", ())]
    evidence.witness = next((found["witness"] for found in left.values()), None)
    evidence.result = left.get(0, {}).get("result")
    said = {rank: found["oracles"] for rank, found in left.items() if found["oracles"]}
    if said:
        from nsa.lab import oracles

        evidence.oracles = oracles.merge(said)
    peaks = [found["peak_mib"] for found in left.values() if found["peak_mib"] is not None]
    evidence.end = replace(evidence.end, peak_mib=max(peaks, default=None))
    source = evidence.environment.get("source")
    for rank, found in left.items():
        if found.get("source") not in (None, source):
            evidence.preflight.append(f"rank {rank} ran another source than was there at the start")
