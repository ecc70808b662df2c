"""Numbers of the system calls in which a thread can sleep, and access to their arguments in memory.

`/proc/PID/task/TID/syscall` has the number and six arguments; pointers among them are read from
`/proc/PID/mem`. Both need permission to ptrace.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from typing import NamedTuple

# fmt: off
_X86_64 = {
    0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 2: "open", 23: "select", 34: "pause", 35: "nanosleep", 40: "sendfile",
    42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
    56: "clone", 58: "vfork", 61: "wait4", 65: "semop", 69: "msgsnd", 70: "msgrcv", 72: "fcntl",
    73: "flock", 74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend",
    162: "sync", 202: "futex", 208: "io_getevents", 219: "restart_syscall", 220: "semtimedop",
    230: "clock_nanosleep", 232: "epoll_wait", 242: "mq_timedsend", 243: "mq_timedreceive",
    247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 275: "splice", 281: "epoll_pwait",
    288: "accept4", 295: "preadv", 296: "pwritev", 299: "recvmmsg", 306: "syncfs", 307: "sendmmsg",
    326: "copy_file_range",
}
_AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat",
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64",
    69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6", 73: "ppoll", 76: "splice",
    81: "sync", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 128: "restart_syscall", 133: "rt_sigsuspend", 137: "rt_sigtimedwait",
    182: "mq_timedsend", 183: "mq_timedreceive", 188: "msgrcv", 189: "msgsnd", 192: "semtimedop",
    193: "semop", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
    212: "recvmsg", 220: "clone", 242: "accept4", 243: "recvmmsg", 260: "wait4", 267: "syncfs",
    269: "sendmmsg", 285: "copy_file_range",
}
_BOTH = {
    426: "io_uring_enter", 435: "clone3", 437: "openat2", 441: "epoll_pwait2", 449: "futex_waitv",
}
# fmt: on
NAMES = {"x86_64": _X86_64 | _BOTH, "aarch64": _AARCH64 | _BOTH}.get(platform.machine(), {})
# A thread that a tracer has briefly stopped goes on in restart_syscall, with its arguments.
_RESTARTED = (("futex", "futex"), ("nanosleep", "nanosleep"), ("poll", "poll"))
CLOCKS = {0: time.CLOCK_REALTIME, 1: time.CLOCK_MONOTONIC, 7: time.CLOCK_BOOTTIME}


class Call(NamedTuple):
    """System call in which a thread sleeps."""

    name: str  # "" if it sleeps outside of any, "syscall 455" if its number is unknown
    args: tuple[int, ...] = ()

    def signed(self, index: int) -> int:
        """Argument as a signed C int."""
        value = self.args[index] & 0xFFFFFFFF
        return value - 2**32 if value >= 2**31 else value


def call(text: str, wchan: str) -> Call | None:
    """Parse the text of /proc/PID/task/TID/syscall; None for a running thread."""
    words = text.split()
    if not words or words[0] == "running":
        return None
    if words[0] == "-1":
        return Call("")
    number, args = int(words[0]), tuple(int(word, 16) for word in words[1:7])
    name = NAMES.get(number, f"syscall {number}")
    if name == "restart_syscall":
        name = next((to for part, to in _RESTARTED if part in wchan), name)
        # Only one restarted call has a clock number, a zero and an address as arguments.
        if args[0] < 16 and args[1] == 0 and args[2] >= 2**31:
            name = "clock_nanosleep"
    return Call(name, args)


class Memory:
    """Memory of one process, read at addresses in its system calls' arguments. Raises OSError."""

    def __init__(self, pid: int) -> None:
        self._file = f"/proc/{pid}/mem"

    def read(self, address: int, size: int) -> bytes:
        """Read exactly `size` bytes."""
        if not 0 < address < 2**63 - size:
            raise OSError(f"no memory at {address:#x}")
        with open(self._file, "rb", buffering=0) as file:
            found = os.pread(file.fileno(), size, address)
        if len(found) != size:
            raise OSError(f"no memory at {address:#x}")
        return found

    def unpack(self, form: str, address: int) -> tuple[int, ...]:
        return struct.unpack(form, self.read(address, struct.calcsize(form)))

    def seconds(self, address: int, unit: float = 1e9) -> float:
        """Read a timespec, or a timeval with unit=1e6, in seconds."""
        whole, part = self.unpack("=qq", address)
        return whole + part / unit

    def text(self, address: int) -> str:
        """Read a null-terminated string."""
        with open(self._file, "rb", buffering=0) as file:
            found = os.pread(file.fileno(), 4096, address)  # fewer if memory ends before
        return found.split(b"\0")[0].decode(errors="replace")


def left_s(clock: int, until: float) -> float | None:
    """Seconds until a kernel clock reaches a time; None for a clock that cannot be read here."""
    known = CLOCKS.get(clock)
    return None if known is None else max(0.0, until - time.clock_gettime(known))
