"""Processes that could make another process's descriptor ready: other ends of pipes and sockets.

Anything that cannot be determined counts as an outside event that could end the wait, so nothing
is proven from missing observations.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from whyhung.watch.evidence import Wait
from whyhung.watch.holders import Holders, access, fdinfo, file_name
from whyhung.watch.sockets import LISTEN, Sockets

# Drivers that may set an eventfd besides processes.
_DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/infiniband", "/dev/vfio", "anon_inode:[io_uring]")
_TEXT = 3  # descriptors of a poll that are described one by one


@dataclass(frozen=True)
class Ends:
    """Other ends of one process's descriptors; `name` describes a pid in words."""

    pid: int
    holders: Holders
    sockets: Sockets
    name: Callable[[int], str] = str

    def any_of(self, fds: list[int], left: float | None, more: bool = False) -> Wait:
        """Wait until any of `fds` is ready or `left` s are over; more: others unseen are polled."""
        if not fds and not more:
            if left is not None:
                return Wait("timer", f"sleeps for at most {left:.1f} s", left_s=left)
            return outside("other", "waits for a signal")
        found = self.union([self.of(fd, "waits for") for fd in fds])
        unseen, left = found.outside or more, least(left, found.left_s)
        return replace(found, text=until(found.text, left, True), outside=unseen, left_s=left)

    def union(self, found: list[Wait]) -> Wait:
        """Wait that ends when any of these waits ends."""
        if not found:
            return Wait("other", "waits for descriptors that could not be read", outside=True)
        # An event that a process sends itself is the least informative.
        found = sorted(found, key=lambda one: one.kind in ("event", "other"))
        said = [one.text for one in found]
        text = "; or ".join(said[:_TEXT])
        text += f"; or {len(said) - _TEXT} others" if len(said) > _TEXT else ""
        wakers = tuple(sorted({waker for one in found for waker in one.wakers}))
        unseen = any(one.outside for one in found)
        return Wait(found[0].kind, text, wakers, unseen, least(*(one.left_s for one in found)))

    def in_epoll(self, fd: int, left: float | None) -> Wait:
        """Wait until any of the descriptors that an epoll watches is ready."""
        fds, strange = self._watched(fd)
        if not fds and not strange and left is None:
            text = "waits for an epoll to which nothing has been added"
            return Wait("event", text, ((self.pid, 0),))
        return self.any_of(fds, left, more=strange)

    def _watched(self, fd: int) -> tuple[list[int], bool]:
        """Descriptors that an epoll watches, and True if it watches others that were not read."""
        lines = fdinfo(self.pid, fd)
        if not lines:
            return [], True
        fds, strange = [], False
        for line in lines.get("tfd", ()):
            number, _, rest = line.partition(" ")
            events, inode = re.search(r"events:\s*(\w+)", rest), re.search(r"ino:(\w+)", rest)
            if events and int(events[1], 16) & 0xFFFF == 0:
                continue
            try:
                link = self.link(int(number))
            except OSError:
                link = ""
            told = re.match(r"(?:pipe|socket):\[(\d+)\]", link)
            if not link or (told and inode and int(told[1]) != int(inode[1], 16)):
                strange = True  # closed here, and still open in another process
            else:
                fds.append(int(number))
        return fds, strange

    def link(self, fd: int) -> str:
        """Link of a descriptor: "pipe:[12]" or a path. Raises OSError."""
        return os.readlink(f"/proc/{self.pid}/fd/{fd}")

    def of(self, fd: int, verb: str) -> Wait:
        """Wait for a descriptor, with the processes that could make it ready."""
        try:
            link = self.link(fd)
            mode = os.stat(f"/proc/{self.pid}/fd/{fd}").st_mode
        except OSError:
            return outside("other", f"{verb} descriptor {fd}, which could not be read")
        if stat.S_ISFIFO(mode):
            return self._pipe(fd, link, verb)
        if stat.S_ISSOCK(mode):
            return self._socket(link, verb)
        if link.startswith("anon_inode:"):
            return self._anonymous(fd, link.removeprefix("anon_inode:").strip("[]"), verb)
        if re.match(r"/dev/(tty|pts/|console)", link):
            return outside("terminal", f"{verb} the terminal {link}")
        if stat.S_ISCHR(mode):
            kind = "device" if link.startswith("/dev/nvidia") else "other"
            return outside(kind, f"{verb} the device {link}")
        return outside("disk", f"{verb} the file {file_name(link)}")

    def _pipe(self, fd: int, link: str, verb: str) -> Wait:
        mine = access(self.pid, fd)
        if link.startswith("pipe:"):
            kind, holders = "pipe", self.holders.of(link)
        else:
            told = os.stat(f"/proc/{self.pid}/fd/{fd}")
            kind, holders = "fifo", self.holders.of_file(told.st_dev, told.st_ino)
        other = {os.O_RDONLY: os.O_WRONLY, os.O_WRONLY: os.O_RDONLY}.get(mine)
        pids = set()
        for pid, number in holders:
            theirs = access(pid, number)
            if other is None or theirs is None or theirs in (other, os.O_RDWR):
                pids.add(pid)
        what = f"the FIFO {link}" if kind == "fifo" else f"pipe {link[6:-1]}"
        text = f"{verb} {what}, whose other end is held by {self.names(pids)}"
        found = self.by(kind, text, sorted(pids))
        # Any process with permission could open a named FIFO.
        return replace(found, outside=True) if kind == "fifo" else found

    def _socket(self, link: str, verb: str) -> Wait:
        found = self.sockets.get(int(link[8:-1]))
        if found is None:
            return outside("socket", f"{verb} {link}, of which the kernel does not tell")
        named = f"{found.what} socket"
        if found.state == LISTEN:
            return outside("socket", f"{verb} a connection to {named} {found.local}".rstrip())
        remote = f" to {found.remote}" if found.remote else ""
        if found.peer:
            pids = sorted({pid for pid, _ in self.holders.of(f"socket:[{found.peer}]")})
            text = f"{verb} a {named}{remote}, whose other end is held by {self.names(pids)}"
            return self.by("socket", text, pids)
        if found.listener:
            pids = sorted({pid for pid, _ in self.holders.of(f"socket:[{found.listener}]")})
            text = f"{verb} a {named}{remote}, which {self.names(pids)} has not accepted"
            return self.by("socket", text, pids)
        where = f"{remote} ({found.state_name})" if found.what == "TCP" else remote
        return outside("socket", f"{verb} a {named}{where}, whose other end is not seen here")

    def _anonymous(self, fd: int, what: str, verb: str) -> Wait:
        lines = fdinfo(self.pid, fd)
        if what == "eventfd":
            same, told = {self.pid}, lines.get("eventfd-id")
            for pid, number in self.holders.of("anon_inode:[eventfd]"):
                if pid != self.pid and fdinfo(pid, number).get("eventfd-id") == told:
                    same.add(pid)
            pids = sorted(same)
            found = self.by("event", f"{verb} an event of {self.names(pids)} (eventfd)", pids)
            if not any(self.holders.has_open(other, _DRIVERS) for other in pids):
                return found
            return replace(found, text=f"{found.text} or of a driver", outside=True)
        if what == "timerfd":
            told = re.search(r"\((\d+), (\d+)\)", " ".join(lines.get("it_value", ())))
            left = int(told[1]) + int(told[2]) / 1e9 if told else 0.0
            if left:
                return Wait("timer", f"{verb} a timer (timerfd)", ((self.pid, 0),), left_s=left)
            return Wait("event", f"{verb} a timer that is not set", ((self.pid, 0),))
        if what == "pidfd":
            pid = int((lines.get("Pid") or ["-1"])[0])
            return self.by("child", f"{verb} the end of {self.names([pid])}", [pid] * (pid > 0))
        if what == "eventpoll":
            return self.in_epoll(fd, None)
        return outside("other", f"{verb} {what}")

    def by(self, kind: str, text: str, pids: Iterable[int], left: float | None = None) -> Wait:
        """Wait that these processes could end, in the family or not."""
        wakers = tuple((pid, 0) for pid in sorted(set(pids)))
        unseen = not wakers or not set(pids) <= self.holders.family
        if kind not in ("child", "file lock") and self.holders.unread():
            unseen, text = True, f"{text}; others of the family may not be read, and could hold it"
        return Wait(kind, text, wakers, unseen, left)

    def names(self, pids: Iterable[int]) -> str:
        """Describe processes in words."""
        pids = sorted(set(pids))
        if not pids:
            return "nobody that is seen here"
        if pids == [self.pid]:
            return "its own process"
        said = ["its own process" if pid == self.pid else self.name(pid) for pid in pids[:4]]
        more = f" and {len(pids) - 4} others" if len(pids) > 4 else ""
        return ", ".join(said) + more


def outside(kind: str, text: str) -> Wait:
    """Wait that something unobserved could end."""
    return Wait(kind, text, outside=True)


def until(text: str, left: float | None, most: bool = False) -> str:
    """Append the time that is left (exactly or at most) to the text; unchanged without a timer."""
    if left is None:
        return text
    return f"{text}, for {'at most ' if most else ''}another {left:.1f} s"


def least(*seconds: float | None) -> float | None:
    """Minimum of the values that are not None; None if there are none."""
    return min((x for x in seconds if x is not None), default=None)
