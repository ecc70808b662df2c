"""Map a program's processes to its ranks, for programs that were started unmodified."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from whyhung.process import procfs
from whyhung.process.observer import Counted
from whyhung.watch import inside, kernel
from whyhung.watch.evidence import Process

RANKS = "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"
_EVERY_S, _SHARE = 2.0, 0.002  # seconds between scans, and the share of a core they may use


def variables(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it may not be read."""
    entries = filter(None, kernel.environ(pid))
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def is_python(pid: int) -> bool:
    """Return True for a Python process, by its executable, or by its name if that is unreadable."""
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        try:
            name = Path(f"/proc/{pid}/comm").read_text(errors="replace")
        except OSError:
            return False
    return name.startswith(("python", "pypy", "pt_main_thread", "pt_data_worker"))


def ranks_of(processes: Sequence[Process]) -> dict[int, int]:
    """Return {rank: pid} of the Python processes with a rank of their own in their environment.

    Workers inherit their parent's; a launcher may have its node's number, but no LOCAL_RANK.
    """
    known = {process.pid: process for process in processes}
    places = {pid: place(variables(pid)) for pid in known if is_python(pid)}

    def inherits(pid: int) -> bool:
        above = known[pid].parent
        while above in known and above not in places:
            above = known[above].parent
        return above in places and places[above] == places[pid]

    own = [pid for pid, (rank, _) in places.items() if rank.isdecimal() and not inherits(pid)]
    if any(places[pid][1] for pid in own):
        own = [pid for pid in own if places[pid][1]]
    own.sort(key=lambda pid: -known[pid].started)  # the older of two wins
    return {int(places[pid][0]): pid for pid in own}


def place(told: dict[str, str]) -> tuple[str, str]:
    """Return RANK, under any name, and LOCAL_RANK of a process's variables; "" if not set."""
    return next((told[name] for name in RANKS if told.get(name)), ""), told.get("LOCAL_RANK", "")


def first_of(processes: Sequence[Process], root: int) -> int:
    """Return the Python process nearest to the root; the root if there is none."""
    found = sorted((process.started, process.pid) for process in processes if process.pid != root)
    return next((pid for pid in (root, *(pid for _, pid in found)) if is_python(pid)), root)


class Members:
    """Callable that returns {rank: Counted} of the processes below `root`, ended ones included.

    Processes that count in `folder` record their rank there; others are mapped by environment.
    Without either, rank 0 is the first Python process, or the root itself.
    """

    def __init__(self, root: int, folder: Path | None = None, cookie: str = "") -> None:
        self.root, self.folder, self.cookie = root, folder, cookie
        self._told: dict[int, int] = {}  # by the environment
        self._first, self._next = root, 0.0
        self._started: dict[int, int] = {}

    def __call__(self) -> dict[int, Counted]:
        counted = self._counted() if self.folder is not None else {}
        if time.monotonic() >= self._next:
            began = time.monotonic()
            self._look_around()
            now = time.monotonic()
            self._next = now + max(_EVERY_S, (now - began) / _SHARE)
        pids = {one.pid for one in counted.values()}
        told = {rank: self._one(pid) for rank, pid in self._told.items() if pid not in pids}
        return told | counted or {0: self._one(self._first)}

    def _counted(self) -> dict[int, Counted]:
        def lives(pid: int) -> bool:
            seen = procfs.process(pid)
            return seen is not None and seen.lives

        found = {}
        for rank, who in inside.ranks(self.folder, lives).items():
            pid, started = who["pid"], self._started_at(who["pid"])
            if started is not None and who["started"] not in (0, started):
                pid = 0  # the PID has been reused
            found[rank] = Counted(pid, self.folder / f"progress-{who['pid']}.bin")
        return found

    def _look_around(self) -> None:
        processes = kernel.family({0: self.root}, self.cookie)
        living = [process for process in processes if process.state not in ("Z", "X")]
        self._told |= ranks_of(living)
        self._first = first_of(living, self.root)

    def _one(self, pid: int) -> Counted:
        now, before = self._started_at(pid), self._started.get(pid)
        if before is None and now is not None:
            self._started[pid] = before = now
        return Counted(pid if now is None or now == before else 0)

    def _started_at(self, pid: int) -> int | None:
        seen = procfs.process(pid)
        return None if seen is None else seen.started
