"""Other ends of sockets: TCP from /proc/net, Unix sockets by netlink's sock_diag."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import ip_address

LISTEN = 10
_STATES = {1: "established", 2: "connecting", 3: "connecting", 8: "closed by its peer"}
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
_REQUEST, _DUMP = 1, 0x300
_DONE, _ERROR = 3, 2
_SHOW_NAME, _SHOW_PEER = 1, 4
_NAME, _PEER = 0, 2  # attributes of an answer


@dataclass(frozen=True)
class Socket:
    """Socket of this machine."""

    inode: int
    what: str  # "TCP", "UDP" or "Unix"
    state: int = 0  # the kernel's number; 10 is listening
    local: str = ""
    remote: str = ""
    peer: int = 0  # inode of the other end, 0 if unknown or on another machine
    listener: int = 0  # inode of the socket that has not yet accepted this connection's other end

    @property
    def state_name(self) -> str:
        return _STATES.get(self.state, f"state {self.state}")


class Sockets:
    """Sockets of the network namespace of `pid`, by inode."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def get(self, inode: int) -> Socket | None:
        """Socket of an inode; None if it is of another kind, or the kernel does not list it."""
        return self._inet.get(inode) or self._unix.get(inode)

    @cached_property
    def _inet(self) -> dict[int, Socket]:
        rows = [
            row
            for name in ("tcp", "tcp6", "udp", "udp6")
            for row in _table(f"/proc/{self._pid}/net/{name}", name[:3].upper())
        ]
        ends = {(row.local, row.remote): row for row in rows if row.what == "TCP"}
        listening = {row.local.rpartition(":")[2]: row.inode for row in rows if row.state == LISTEN}
        found = {}
        for row in rows:
            other = ends.get((row.remote, row.local)) if row.what == "TCP" else None
            if other is not None and other.inode:
                row = replace(row, peer=other.inode)
            elif other is not None:  # in the listener's queue
                waiting = listening.get(row.remote.rpartition(":")[2], 0)
                row = replace(row, listener=waiting)
            if row.inode:
                found[row.inode] = row
        return found

    @cached_property
    def _unix(self) -> dict[int, Socket]:
        with contextlib.suppress(OSError):
            mine, theirs = (os.stat(f"/proc/{who}/ns/net").st_ino for who in ("self", self._pid))
            if mine == theirs:
                return unix_sockets()
        return {}


def timeout_s(pid: int, fd: int, option: int) -> float | None:
    """Timeout of calls on another process's socket in seconds, None without one.

    option: socket.SO_RCVTIMEO or SO_SNDTIMEO. The socket is duplicated for the query, since only
    its owner may query it. Raises OSError if that is refused.
    """
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=copy) as copied:
        whole, part = struct.unpack("@ll", copied.getsockopt(socket.SOL_SOCKET, option, 16))
    return whole + part / 1e6 or None


def _table(file: str, what: str) -> list[Socket]:
    found = []
    with contextlib.suppress(OSError), open(file) as lines:
        next(lines, None)
        for line in lines:
            words = line.split()
            local, remote = _address(words[1]), _address(words[2])
            found.append(Socket(int(words[9]), what, int(words[3], 16), local, remote))
    return found


def _address(text: str) -> str:
    """Decode 0100007F:0050 to 127.0.0.1:80; an IPv4-mapped IPv6 address to the IPv4 one."""
    digits, port = text.split(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    address = ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"


def unix_sockets() -> dict[int, Socket]:
    """Unix sockets of this process's network namespace, by inode. Raises OSError."""
    found: dict[int, Socket] = {}
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0,
                       _SHOW_NAME | _SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)  # fmt: skip
    head = struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(1.0)
        asked.send(head + body)
        while True:
            answer = asked.recv(1 << 16)
            while len(answer) >= 16:
                size, kind = struct.unpack_from("=IH", answer)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError("the kernel does not tell of Unix sockets")
                one = _unix_socket(answer[16:size])
                found[one.inode] = one
                answer = answer[(size + 3) & ~3 :]


def _unix_socket(message: bytes) -> Socket:
    _, _, state, _, inode = struct.unpack_from("=BBBBI", message)
    name, peer, rest = "", 0, message[16:]
    while len(rest) >= 4:
        size, kind = struct.unpack_from("=HH", rest)
        if size < 4:
            break
        if kind == _PEER:
            (peer,) = struct.unpack_from("=I", rest, 4)
        elif kind == _NAME:
            name = rest[4:size].rstrip(b"\0").replace(b"\0", b"@").decode(errors="replace")
        rest = rest[(size + 3) & ~3 :]
    return Socket(inode, "Unix", state, name, "", peer)
