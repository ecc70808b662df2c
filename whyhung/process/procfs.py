"""Process information from Linux: state, CPU time, wait channel, out-of-memory kills.

None outside Linux.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from whyhung.process.family import stat

MIB = 2**20
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Seen:
    """One process at one moment; `started` distinguishes it from a later one with the same PID."""

    state: str
    cpu_s: float
    wchan: str
    rss_mib: float
    started: int

    @property
    def lives(self) -> bool:
        """False for a zombie."""
        return self.state not in "ZX"


def process(pid: int) -> Seen | None:
    """Return the process as of now, or None if there is none; a zombie's state is Z."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = stat(folder)
        rss_mib, started = int(fields[21]) * _PAGE / MIB, int(fields[19])
        return Seen(fields[0], cpu_s(fields), wchan(folder), rss_mib, started)
    except (OSError, IndexError, ValueError):
        return None


def main_cpu_s(pid: int) -> float:
    """Return the CPU seconds of the main thread; 0 if there is none."""
    try:
        return cpu_s(stat(Path(f"/proc/{pid}/task/{pid}")))
    except (OSError, IndexError, ValueError):
        return 0.0


def lives(pid: int, started: int) -> bool:
    """Return True if the process that began at `started` still runs."""
    seen = process(pid)
    return seen is not None and seen.started == started and seen.lives


def cpu_s(fields: list[str]) -> float:
    """Return the CPU seconds of a process or thread, from the fields of `family.stat`."""
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wchan(folder: Path) -> str:
    """Return the kernel function it sleeps in; "" if it does not sleep, or if unreadable."""
    try:
        name = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def kernel_kills(
    root: str | Path = "/sys/fs/cgroup", membership: str | Path = "/proc/self/cgroup"
) -> int | None:
    """Return the number of out-of-memory kills in this process's control group (v1 or v2).

    None if unknown, as outside Linux.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = Path(root), "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = Path(root, "memory"), "memory.oom_control"
        else:
            continue
        # A container may see its own group as the root of the mount.
        for place in (folder / path.lstrip("/") / name, folder / name):
            with contextlib.suppress(OSError, KeyError, ValueError):
                told = dict(line.split(maxsplit=1) for line in place.read_text().splitlines())
                return int(told["oom_kill"])
    return None
