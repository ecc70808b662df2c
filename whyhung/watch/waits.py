"""Wait of a sleeping thread, read from the system call in which it sleeps.

Anything that cannot be determined counts as an outside event that could end the wait, so nothing
is proven from missing observations.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace

from whyhung.watch import syscalls
from whyhung.watch.ends import Ends, least, outside, until
from whyhung.watch.evidence import Wait
from whyhung.watch.holders import fdinfo, file_name
from whyhung.watch.sockets import timeout_s
from whyhung.watch.syscalls import Call, Memory

_WALL_CLOCK = 256  # FUTEX_CLOCK_REALTIME
_WAITED = {0: "wait", 9: "wait until", 6: "own", 13: "own", 11: "wait until"}  # of futex
_LOCK_WAITS = (7, 38)  # F_SETLKW and F_OFD_SETLKW of fcntl
_BY_WCHAN = (
    ("futex", "lock"), ("pipe", "pipe"), ("wait_for_partner", "fifo"), ("nanosleep", "timer"),
    ("do_wait", "child"), ("locks_lock", "file lock"), ("sk_wait", "socket"), ("unix_", "socket"),
    ("tcp_", "socket"), ("inet_", "socket"), ("n_tty", "terminal"), ("eventfd", "event"),
    ("nv", "device"), ("io_schedule", "disk"), ("nfs", "disk"),
)  # fmt: skip
_FROZEN = ("do_freezer_trap", "__refrigerator")


class Reader:
    """Read the waits of one process; `children`: pids of its children."""

    def __init__(self, ends: Ends, children: tuple[int, ...] = ()) -> None:
        self.pid, self.ends, self.children = ends.pid, ends, children
        self.holders, self.memory = ends.holders, Memory(ends.pid)

    def wait(self, call: Call, state: str, wchan: str, source: str) -> Wait:
        """Wait of a thread that sleeps in `call`."""
        if wchan in _FROZEN:
            return Wait("stopped", "is frozen by its control group", source=source)
        method = _CALLS.get(call.name)
        try:
            found = method(self, call) if method else None
        except (OSError, ValueError, LookupError) as error:
            found = outside("other", f"is in {call.name}, which could not be read: {error}")
        if found is None or (state == "D" and found.kind not in ("child", "disk")):
            kind = "disk" if state == "D" else _kind_of(wchan)
            found = outside(kind, _in_words(call, state, wchan))
        return replace(found, source=source)

    # locks

    def futex(self, call: Call) -> Wait | None:
        address, flags, value, timeout = call.args[:4]
        command, private = flags & 0x7F, bool(flags & 0x80)
        if command not in _WAITED:
            return None
        left = None
        if timeout:
            left = self.memory.seconds(timeout)
            if command != 0:  # an absolute time, not a duration
                left = syscalls.left_s(0 if flags & _WALL_CLOCK or command == 6 else 1, left)
        if not private:
            return self._shared(address, value, left)
        owner = self._owner(address, command, value)
        if owner is not None:
            text = f"waits for a lock that thread {owner} holds"
            return Wait("lock", until(text, left, command == 0), ((self.pid, owner),), left_s=left)
        text = "waits for a lock or condition of its own process"
        return Wait("lock", until(text, left, command == 0), ((self.pid, 0),), left_s=left)

    def _owner(self, address: int, command: int, value: int) -> int | None:
        """Thread that holds a pthread mutex; None if it is no mutex or its owner is unknown."""
        if _WAITED[command] == "own":
            (owner,) = self.memory.unpack("=I", address)
        elif command == 0 and value & 0xFFFFFFFF == 2:  # only a mutex waits so
            state, _, owner = self.memory.unpack("=IiI", address)
            if state != 2:
                return None
        else:
            return None
        owner &= 0x3FFFFFFF
        return owner if owner and os.path.exists(f"/proc/{self.pid}/task/{owner}") else None

    def _shared(self, address: int, value: int, left: float | None) -> Wait:
        found = self.holders.mapped(self.pid, address)
        if found is None:
            return outside("semaphore", f"waits for a futex at {address:#x}, which is nowhere")
        flags, key, name = found
        if not flags.endswith("s"):  # seen by this process alone
            thread = value & 0xFFFFFFFF
            if os.path.exists(f"/proc/{self.pid}/task/{thread}"):
                text = until(f"joins thread {thread}", left)
                return Wait("event", text, ((self.pid, thread),), left_s=left)
            text = until("waits for a futex of its own process", left)
            return Wait("lock", text, ((self.pid, 0),), left_s=left)
        mappers = self.holders.mappers(key)
        what = file_name(name) or "shared memory"
        who = self.ends.names(mappers)
        text = f"waits for a lock or semaphore that {who} can release (in {what})"
        return self.ends.by("semaphore", until(text, left), mappers, left)

    def futex_many(self, call: Call) -> Wait:
        address, count, _, timeout, clock = call.args[:5]
        left = syscalls.left_s(clock, self.memory.seconds(timeout)) if timeout else None
        found = []
        for number in range(min(count, 128)):
            value, where, flags, _ = self.memory.unpack("=QQII", address + 24 * number)
            found.append(self._shared(where, value, None) if not flags & 0x80 else None)
        wakers = {(self.pid, 0)} | {waker for one in found if one for waker in one.wakers}
        outside = any(one.outside for one in found if one)
        text = until(f"waits for any of {count} futexes", left)
        return Wait("lock", text, tuple(sorted(wakers)), outside, left)

    def file_lock(self, call: Call) -> Wait | None:
        fd = call.signed(0)
        if call.name == "fcntl" and call.args[1] not in _LOCK_WAITS:
            return None
        name = self.ends.link(fd)
        owners = self.holders.lock(self.pid, os.stat(f"/proc/{self.pid}/fd/{fd}").st_ino)
        if not owners or -1 in owners:
            return outside("file lock", f"waits for the lock of {name}; its holder is not known")
        text = f"waits for the lock of {name}, which {self.ends.names(owners)} holds"
        return self.ends.by("file lock", text, owners)

    # files, pipes and sockets

    def descriptor(self, call: Call) -> Wait:
        fd, sends = call.signed(0), "write" in call.name or "send" in call.name
        found, left = self.ends.of(fd, "writes" if sends else "reads"), None
        if call.name == "recvmmsg" and call.args[4]:
            left = self.memory.seconds(call.args[4])
        elif stat.S_ISSOCK(os.stat(f"/proc/{self.pid}/fd/{fd}").st_mode):
            left = timeout_s(self.pid, fd, socket.SO_SNDTIMEO if sends else socket.SO_RCVTIMEO)
        left = least(found.left_s, left)
        text = until(found.text, left, True) if left != found.left_s else found.text
        return replace(found, text=text, left_s=left)

    def both_ends(self, call: Call) -> Wait:
        """Wait of a call that moves data: sendfile has the target first, the others the source."""
        fds = call.signed(0), call.signed(1 if call.name == "sendfile" else 2)
        return self.ends.union([self.ends.of(fd, "moves data by") for fd in fds])

    def connection(self, call: Call) -> Wait:
        """Wait for a connection, of a listening or a connecting socket."""
        found = self.ends.of(call.signed(0), "waits on")
        return replace(found, outside=True)

    def opens(self, call: Call) -> Wait | None:
        """Wait of open(): blocked by a FIFO whose other end is not open, or by a slow disk."""
        at = 0 if call.name == "open" else 1
        path = self.memory.text(call.args[at])
        if not path.startswith("/"):
            folder = call.signed(0) if at else -100
            base = "cwd" if folder == -100 else f"fd/{folder}"
            path = os.path.join(os.readlink(f"/proc/{self.pid}/{base}"), path)
        try:
            mode = os.stat(f"/proc/{self.pid}/root{path}").st_mode
        except OSError:
            mode = 0
        if stat.S_ISFIFO(mode):
            text = f"opens {path}, a FIFO that no process has opened at its other end"
            return outside("fifo", text)
        return outside("disk", f"opens {path}")

    def device(self, call: Call) -> Wait | None:
        link = self.ends.link(call.signed(0))
        if link.startswith("/dev/nvidia"):
            return outside("device", f"waits for the driver of {link}")
        return outside("other", f"is in ioctl of {link}")

    def disk(self, call: Call) -> Wait:
        named = call.name in ("fsync", "fdatasync", "syncfs")
        what = self.ends.link(call.signed(0)) if named else "a disk"
        return outside("disk", f"is in {call.name}: waits for {what}")

    def poll(self, call: Call) -> Wait:
        address, count, timeout = call.args[:3]
        left = self._poll_left(call, timeout)
        fds = []
        if count:
            packed = self.memory.read(address, 8 * min(count, 1024))
            fds = [int.from_bytes(packed[at : at + 4], "little", signed=True)
                   for at in range(0, len(packed), 8)]  # fmt: skip
        return self.ends.any_of([fd for fd in fds if fd >= 0], left, more=count > 1024)

    def select(self, call: Call) -> Wait:
        count, *sets, timeout = call.args[:5]
        unit = 1e6 if call.name == "select" else 1e9
        left = self.memory.seconds(timeout, unit) if timeout else None
        fds, size = set(), (min(count, 65536) + 63) // 64 * 8
        for address in sets:
            if address and size:
                bits = int.from_bytes(self.memory.read(address, size), "little")
                fds |= {fd for fd in range(min(count, 65536)) if bits >> fd & 1}
        return self.ends.any_of(sorted(fds), left)

    def epoll(self, call: Call) -> Wait:
        return self.ends.in_epoll(call.signed(0), self._poll_left(call, call.args[3]))

    def _poll_left(self, call: Call, timeout: int) -> float | None:
        if call.name in ("ppoll", "epoll_pwait2"):
            return self.memory.seconds(timeout) if timeout else None
        timeout &= 0xFFFFFFFF
        return None if timeout >= 2**31 else timeout / 1000

    # children, timers and the rest

    def child(self, call: Call) -> Wait:
        which, kind = call.signed(0), "any"
        if call.name == "waitid":
            kind, which = {1: "pid", 3: "pidfd"}.get(which, "any"), call.signed(1)
            if kind == "pidfd":
                which = int(fdinfo(self.pid, which)["Pid"][0])
        elif which > 0:
            kind = "pid"
        pids = list(self.children) if kind == "any" else [which]
        if not pids or not set(pids) <= set(self.children):
            return outside("child", "waits for a child that is not seen here")
        return self.ends.by("child", f"waits for the end of {self.ends.names(pids)}", pids)

    def new_child(self, call: Call) -> Wait:
        text = f"waits until {self.ends.names(self.children)} has begun its program"
        return self.ends.by("child", text, list(self.children))

    def nanosleep(self, call: Call) -> Wait:
        left = self.memory.seconds(call.args[0])
        return Wait("timer", f"sleeps for at most {left:.1f} s", left_s=left)

    def clock_nanosleep(self, call: Call) -> Wait:
        clock, flags, request = call.args[:3]
        seconds = self.memory.seconds(request)
        if not flags & 1:
            return Wait("timer", f"sleeps for at most {seconds:.1f} s", left_s=seconds)
        left = syscalls.left_s(clock, seconds)
        if left is None:
            return outside("timer", f"sleeps until clock {clock} shows a time")
        return Wait("timer", f"sleeps for another {left:.1f} s", left_s=left)

    def signal(self, call: Call) -> Wait:
        left = None
        if call.name == "rt_sigtimedwait" and call.args[2]:
            left = self.memory.seconds(call.args[2])
        return replace(outside("other", until("waits for a signal", left, True)), left_s=left)


def stopped(state: str, tracer: int) -> Wait:
    """Wait of a thread in state T, or t under a tracer."""
    if tracer:
        return outside("stopped", f"is held by process {tracer}, which traces it")
    return Wait("stopped", "is stopped by a signal, until a process sends SIGCONT")


def refused(wchan: str) -> Wait:
    """Wait of a thread of which only the wait channel may be read."""
    at = f" in {wchan}" if wchan else ""
    return outside(_kind_of(wchan), f"sleeps{at}; for what may not be read")


def _kind_of(wchan: str) -> str:
    return next((kind for part, kind in _BY_WCHAN if part in wchan), "other")


def _in_words(call: Call, state: str, wchan: str) -> str:
    text = f"is in {call.name}" if call.name else "sleeps outside of any system call"
    text += " and cannot be interrupted" if state == "D" else ""
    return text + (f" ({wchan})" if wchan else "")


_CALLS: dict[str, Callable[[Reader, Call], Wait | None]] = {
    "futex": Reader.futex,
    "futex_waitv": Reader.futex_many,
    "flock": Reader.file_lock,
    "fcntl": Reader.file_lock,
    "ioctl": Reader.device,
    "nanosleep": Reader.nanosleep,
    "clock_nanosleep": Reader.clock_nanosleep,
}
for _names, _method in (
    ("read write readv writev pread64 pwrite64 preadv pwritev recvfrom sendto recvmsg sendmsg "
     "recvmmsg sendmmsg", Reader.descriptor),
    ("sendfile splice copy_file_range", Reader.both_ends),
    ("accept accept4 connect", Reader.connection),
    ("open openat openat2", Reader.opens),
    ("fsync fdatasync sync syncfs io_getevents", Reader.disk),
    ("poll ppoll", Reader.poll),
    ("select pselect6", Reader.select),
    ("epoll_wait epoll_pwait epoll_pwait2", Reader.epoll),
    ("wait4 waitid", Reader.child),
    ("vfork clone clone3", Reader.new_child),
    ("pause rt_sigtimedwait rt_sigsuspend", Reader.signal),
):  # fmt: skip
    _CALLS |= dict.fromkeys(_names.split(), _method)
