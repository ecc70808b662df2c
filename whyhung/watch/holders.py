"""Who holds what on this machine: ends of pipes, files, sockets, memory that is shared, locks.

Each list is read once for a snapshot, where somebody first asks for it. A process that may not be
read is remembered as one that could hold anything.
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
    """What the processes of this machine held at one moment; `family` are those that matter."""

    def __init__(self, family: Collection[int]) -> None:
        self.family = set(family)
        self.refused: set[int] = set()  # whose descriptors may not be read

    @cached_property
    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]

    @cached_property
    def _links(self) -> dict[str, list[Holder]]:
        """What a descriptor leads to, as "pipe:[12]": who has it open."""
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
        """Who has open what a descriptor's link names: "pipe:[12]", "socket:[34]"."""
        return self._links.get(link, [])

    def has_open(self, pid: int, beginnings: tuple[str, ...]) -> bool:
        """Whether a process has anything open whose link begins so."""
        return any(
            link.startswith(beginnings) and any(holder == pid for holder, _ in holders)
            for link, holders in self._links.items()
        )

    def of_file(self, device: int, inode: int) -> list[Holder]:
        """Who has a file open that may go by several names."""
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
        """(flags, "dev inode", name) of the mapping of a process that holds an address.

        Raises OSError where its mappings may not be read.
        """
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                span, flags, _, device, inode, *name = line.split(maxsplit=5)
                low, high = (int(end, 16) for end in span.split("-"))
                if low <= address < high:
                    return flags, f"{device} {inode}", name[0].strip() if name else ""
        return None

    def mappers(self, key: str) -> list[int]:
        """The processes that have a file mapped, or memory that is shared without a name."""
        return [pid for pid, text in self._maps.items() if f" {key} " in text]

    def lock(self, pid: int, inode: int) -> list[int]:
        """Who holds the lock of a file for which a process waits; -1: the kernel does not say who.

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
        """FLOCK and OFD locks live as long as any descriptor that shares the open file."""
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
        """Of the family, those whose descriptors or memory may not be read."""
        return self.refused & self.family


def fdinfo(pid: int, fd: int) -> dict[str, list[str]]:
    """What /proc tells of a descriptor: name of a line and what follows, {} where it is refused."""
    found: dict[str, list[str]] = defaultdict(list)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}") as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name].append(rest.strip())
    return dict(found)


def access(pid: int, fd: int) -> int | None:
    """os.O_RDONLY, O_WRONLY or O_RDWR as the descriptor was opened, None where not told."""
    told = fdinfo(pid, fd).get("flags")
    return int(told[0], 8) & os.O_ACCMODE if told else None


def file_name(link: str) -> str:
    """A link of a descriptor, as a reader wants it."""
    return re.sub(r"\s*\(deleted\)$", "", link) if link.endswith(_DELETED) else link
