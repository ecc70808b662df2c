"""A process as Linux tells of it: state, processor time, where it sleeps. None outside Linux."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Seen:
    """One process at one moment; started tells it from a later one with its number."""

    state: str
    cpu_s: float
    wchan: str
    rss_mib: float
    started: int


def process(pid: int) -> Seen | None:
    """None where there is none; a zombie's state is Z."""
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        return Seen(
            state=fields[0],
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            wchan=_wchan(Path(f"/proc/{pid}")),
            rss_mib=int(fields[21]) * _PAGE / MIB,
            started=int(fields[19]),
        )
    except (OSError, IndexError, ValueError):
        return None


def threads(pid: int) -> list[dict[str, Any]]:
    """Each thread's name, state, wchan and cpu_s, the main one first; none of a process gone."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda f: int(f.name)):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _stat(folder / "stat")
                thread = {
                    "name": (folder / "comm").read_text(errors="replace").strip(),
                    "main": folder.name == str(pid),
                    "active": None,
                    "gil": None,
                    "frames": [],
                    "state": fields[0],
                    "wchan": _wchan(folder),
                    "cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS,
                }
                found.append(thread)
    return found


def _stat(file: Path) -> list[str]:
    # after "pid (name) ", where the name may hold anything
    return file.read_text(errors="replace").rpartition(")")[2].split()


def _wchan(folder: Path) -> str:
    try:
        name = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name
