"""Holders of this machine's resources: pipe ends, files, sockets, shared memory, locks.

Each list is read once per snapshot, on first access. A process that may not be read is recorded as
one that could hold anything.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Collection
from functools import cached_property

Holder = tuple[int, int]  # pid and file descriptor
_DELETED = " (deleted)"


class Holders:
    """Resources that this machine's processes held at one moment; `family`: the relevant pids."""

    def __init__(self, family: Collection[int]) -> None:
        self.family = set(family)
        self.refused: set[int] = set()  # pids whose descriptors or mappings may not be read

    @cached_property
    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]

    @cached_property
    def _links(self) -> dict[str, list[Holder]]:
        """{link of a descriptor, such as "pipe:[12]": holders that have it open}."""
        found = defaultdict(list)
        for pid in self.pids:
            folder = f"/proc/{pid}/fd"
            try:
                numbers = os.listdir(folder)
            except PermissionError:
                self.refused.add(pid)
                continue
            except OSError:
                continue
            for number in numbers:
                with contextlib.suppress(OSError):
                    found[os.readlink(f"{folder}/{number}")].append((pid, int(number)))
        return found

    def of(self, link: str) -> list[Holder]:
        """Holders of the object that a descriptor's link names: "pipe:[12]", "socket:[34]"."""
        return self._links.get(link, [])

    def has_open(self, pid: int, beginnings: tuple[str, ...]) -> bool:
        """True if a process has a descriptor open whose link starts with one of `beginnings`."""
        return any(
            link.startswith(beginnings) and any(holder == pid for holder, _ in holders)
            for link, holders in self._links.items()
        )

    def of_file(self, device: int, inode: int) -> list[Holder]:
        """Holders of an open file, found by inode since it may have several names."""
        return self._files.get((device, inode), [])

    @cached_property
    def _files(self) -> dict[tuple[int, int], list[Holder]]:
        found = defaultdict(list)
        for link, holders in self._links.items():
            if not link.startswith("/") or link == "/dev/null":
                continue
            for pid, fd in holders:
                with contextlib.suppress(OSError):
                    told = os.stat(f"/proc/{pid}/fd/{fd}")
                    found[told.st_dev, told.st_ino].append((pid, fd))
        return found

    @cached_property
    def _maps(self) -> dict[int, str]:
        found = {}
        for pid in self.pids:
            try:
                with open(f"/proc/{pid}/maps", errors="replace") as file:
                    found[pid] = file.read()
            except PermissionError:
                self.refused.add(pid)
            except OSError:
                continue
        return found

    def mapped(self, pid: int, address: int) -> tuple[str, str, str] | None:
        """(flags, "dev inode", name) of the mapping of a process that contains an address.

        Raises OSError if its mappings may not be read.
        """
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                span, flags, _, device, inode, *name = line.split(maxsplit=5)
                low, high = (int(end, 16) for end in span.split("-"))
                if low <= address < high:
                    return flags, f"{device} {inode}", name[0].strip() if name else ""
        return None

    def mappers(self, key: str) -> list[int]:
        """Processes that map a file or anonymous shared memory with this "dev inode"."""
        return [pid for pid, text in self._maps.items() if f" {key} " in text]

    def lock(self, pid: int, inode: int) -> list[int]:
        """Pids that hold the file lock for which a process waits; -1: the kernel names no holder.

        Raises OSError.
        """
        holder, found = {}, set()
        with open("/proc/locks") as file:
            for line in file:
                number, *words = line.split()
                if words[0] != "->":
                    holder.setdefault(number, words)
                elif int(words[4]) == pid and int(words[5].split(":")[2]) == inode:
                    found |= set(self._lockers(holder[number]))
        return sorted(found)

    def _lockers(self, words: list[str]) -> list[int]:
        """Pids that hold a lock; FLOCK and OFD locks belong to all that share the open file."""
        kind, pid, inode = words[0], int(words[3]), int(words[4].split(":")[2])
        if kind == "POSIX":
            return [pid if pid > 0 else -1]
        sharing = set()
        for (_, number), holders in self._files.items():
            if number != inode:
                continue
            for other, fd in holders:
                lines = fdinfo(other, fd)
                if any(words[4] in line and kind in line for line in lines.get("lock", ())):
                    sharing.add(other)
        return sorted(sharing) or [pid if pid in self.pids else -1]

    def unread(self) -> set[int]:
        """Pids of the family whose descriptors or memory may not be read."""
        return self.refused & self.family


def fdinfo(pid: int, fd: int) -> dict[str, list[str]]:
    """Lines of a descriptor's fdinfo in /proc, {name: values}; {} if it may not be read."""
    found: dict[str, list[str]] = defaultdict(list)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}") as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name].append(rest.strip())
    return dict(found)


def access(pid: int, fd: int) -> int | None:
    """Access mode of a descriptor: os.O_RDONLY, O_WRONLY or O_RDWR; None if unknown."""
    told = fdinfo(pid, fd).get("flags")
    return int(told[0], 8) & os.O_ACCMODE if told else None


def file_name(link: str) -> str:
    """Link of a descriptor, without " (deleted)"."""
    return re.sub(r"\s*\(deleted\)$", "", link) if link.endswith(_DELETED) else link
