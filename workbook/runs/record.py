"""record.json: manifest of a run, kept correct while it runs and after."""

import contextlib
import hashlib
import os
import platform
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whyhung.process import procfs
from workbook.runs.environment import utc_now
from workbook.runs.files import read_object, write_json

SCHEMA = 1
STATUS_OF = {  # before its end a run is "running", or "lost" if its runner is gone
    "ok": "ok",
    "error": "failed",
    "timeout": "timeout",
    "kernel_died": "killed",
    "rank_died": "failed",
    "terminated": "killed",
    "interrupted": "interrupted",
    "halted": "ok",  # ended in order at a user's request
    # a guard ended a training in order
    "non_finite": "failed",
    "memory": "failed",
    "flat": "failed",
    "gate_collapse": "failed",
    "zero_gradient": "failed",
}
LOST_AFTER_S = 120.0


class Record:
    """Manifest, written as `running` when made; a thread renews its heartbeat until `close`."""

    def __init__(
        self,
        folder: Path,
        notebook: str,
        question: str,
        beat_s: float = 15.0,
        evidence: bool = False,
        **facts: Any,
    ):
        self.path = Path(folder) / "record.json"
        self._done = threading.Event()
        self._began = time.monotonic()
        self.content = {
            "schema": SCHEMA,
            "run_id": Path(folder).name,
            "notebook": notebook,
            "question": question,
            "evidence": evidence,  # made from a clean commit, to be kept
            "status": "running",
            "stop_reason": None,
            "started": utc_now(),
            "ended": None,
            "seconds": None,
            "heartbeat": utc_now(),
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
            "machine": machine(),
            **facts,
        }
        self._write()
        self._thread = threading.Thread(target=self._beat, args=(beat_s,), daemon=True)
        self._thread.start()

    def close(self, stop_reason: str, message: str = "") -> dict:
        """Write the final state: status from the stop reason, the end and the duration."""
        self._done.set()
        self._thread.join()
        self.content.update(
            status=STATUS_OF[stop_reason],
            stop_reason=stop_reason,
            ended=utc_now(),
            heartbeat=utc_now(),
            seconds=round(time.monotonic() - self._began, 2),
        )
        if message:
            self.content["message"] = message
        self._write()
        return self.content

    def _beat(self, beat_s: float) -> None:
        while not self._done.wait(beat_s):
            self.content["heartbeat"] = utc_now()
            # a full disk must not end the run; the next beat tries again
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        write_json(self.path, self.content)


def close_lost(folder: Path, message: str) -> None:
    """Write the final state of a run whose runner is gone, with the reason as far as known."""
    content = load(folder)
    content.update(status="lost", stop_reason="lost", ended=utc_now(), message=message)
    write_json(Path(folder) / "record.json", content)


def status_now(record: dict) -> str:
    """Stored status, but `lost` for a run whose runner is gone: at once if it ran on this machine,
    else once its heartbeat is old. A live runner is never lost, however old its heartbeat (a
    suspended laptop)."""
    if record.get("status") != "running":
        return record.get("status", "lost")
    began = record.get("pid_started")
    if began and record.get("machine") == machine() and process_start(os.getpid()):
        # compared, since the system reuses pids of ended processes
        return "running" if process_start(record.get("pid") or -1) == began else "lost"
    try:
        beat = datetime.fromisoformat(record["heartbeat"])
        age_s = (datetime.now(UTC) - beat).total_seconds()
    except (KeyError, ValueError, TypeError):
        age_s = float("inf")
    return "running" if age_s <= LOST_AFTER_S else "lost"


def process_start(pid: int) -> int | None:
    """Start of a process, in clock ticks since the boot; None if no process has this pid, and for a
    zombie, which only waits to be reaped. Outside Linux always None."""
    seen = procfs.process(pid) if pid > 0 else None
    return seen.started if seen and seen.lives else None


def machine() -> str:
    """Anonymous id that differs between machines, boots and containers with their own processes."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def load(folder: Path) -> dict:
    """Read the record; empty if there is none, or it is not readable."""
    return read_object(Path(folder) / "record.json")
