"""A program's processes and threads as reported by the kernel, with the wait of each thread.

Read from /proc, from outside, and without the program's help. If a process ends meanwhile, belongs
to another user, or may not be read, its `message` says what is missing and what would help.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from whyhung.process import procfs
from whyhung.process.family import COOKIE, stat
from whyhung.watch.ends import Ends
from whyhung.watch.evidence import P, Process, Snapshot, Thread, Wait
from whyhung.watch.holders import Holders
from whyhung.watch.sockets import Sockets
from whyhung.watch.syscalls import call
from whyhung.watch.waits import Reader, refused, stopped

# Names of this project's own threads in a program.
OURS = ("nsa:progress", "nsa:device use", "nsa:SIGUSR1", "nsa:heartbeat")
STRANGER = -1  # `of` for a process outside the family that it waits for, or was started by
MOST = 256  # threads of a process whose waits are read
SYSCALL = "syscall"  # next to stat, if the kernel was built with it
TRIAL = "the trial's process"
_ALARMS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_YOUNG_S = 10.0  # a younger process may still exec another program, with another environment
_NAME = 60
_MIB = 2**20
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE")
HELP = (
    "run as root, with CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE), or, for programs of the "
    "same user, after `sysctl kernel.yama.ptrace_scope=0`"
)
_carries: dict[tuple[int, int, str], bool] = {}  # True if a process has a cookie: it never changes


def family(ranks: dict[int, int], cookie: str = "") -> list[Process]:
    """Processes of these ranks (rank: pid) and their descendants, without their threads.

    With a cookie of `process.family`, also processes that carry it and have lost their parent; the
    one that started the ranks is included, with `of` = STRANGER. This process never is.
    """
    seen = _listing()
    parents = {pid: int(fields[1]) for pid, fields in seen.items()}
    own = {pid: rank for rank, pid in ranks.items()}
    owners = {pid: rank for pid, rank in own.items() if pid in seen}
    if cookie:
        above = {pid for start in owners for pid in _above(start, parents)}
        lost = _carriers(cookie, seen) - owners.keys() - {os.getpid()}
        for pid in lost:
            owners.setdefault(pid, STRANGER if pid in above else _rank_of(pid, ranks))
    roots, found = dict(owners), {}
    for pid in seen:
        line = [pid, *_above(pid, parents)]
        # The nearest rank above; else the nearest that carries the cookie.
        root = next((x for x in line if x in own and x in roots), None)
        root = root or next((x for x in line if x in roots), None)
        if root is not None and pid != os.getpid():
            found[pid] = roots[root]
    made = {pid: _process(pid, seen[pid], of, own.get(pid)) for pid, of in sorted(found.items())}
    for pid, process in made.items():
        parent = made.get(process.parent)
        if parent is not None and process.name and process.name == parent.name:
            made[pid] = replace(process, name=f"{process.name} (forked)")
    return list(made.values())


def snapshot(
    ranks: dict[int, int],
    cookie: str = "",
    t: float = 0.0,
    p: dict[int, P] | None = None,
) -> Snapshot:
    """Snapshot of the family with all threads and waits; `looks.with_stacks` adds the stacks.

    Processes outside the family that it waits for are included, with `of` = STRANGER. All waits
    held at the same moment: the wait of a thread that went on meanwhile is marked as `outside`.
    """
    listed = family(ranks, cookie)
    holders = Holders([process.pid for process in listed])
    names = {process.pid: process.name for process in listed}
    reading = _Reading(holders, names, {p.pid: p.parent for p in listed})
    found = [reading.complete(process) for process in listed]
    named = {
        pid
        for process in found
        for thread in process.threads
        if thread.wait is not None
        for pid, _ in thread.wait.wakers
    }
    for pid in sorted(named - {process.pid for process in listed}):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(
                reading.complete(_process(pid, stat(Path(f"/proc/{pid}")), STRANGER, None))
            )
    found = [reading.settled(process) for process in found]
    return Snapshot(t, tuple(found), dict(p or {}), "proc")


class _Reading:
    """Data shared by the processes of one snapshot."""

    def __init__(
        self,
        holders: Holders,
        names: dict[int, str],
        parents: dict[int, int],
    ) -> None:
        self._holders, self._names = holders, names
        self._parents, self._sockets = parents, {}
        self._switches: dict[tuple[int, int], str] = {}  # context switches when it was read

    def complete(self, process: Process) -> Process:
        """Process with its threads; state "" and a message if it ended while it was read."""
        if process.state in ("Z", ""):
            return process
        pid, said = process.pid, []
        children = tuple(child for child, parent in self._parents.items() if parent == pid)
        ends = Ends(pid, self._holders, self._sockets_of(pid), self._name)
        reader, threads = Reader(ends, children), []
        for tid in _tids(pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                told = self._switches[pid, tid] = _switches(pid, tid)
                deep = len(threads) < MOST
                threads.append(_thread(reader, tid, said, deep, told))
        # It is unknown when an alarm will fire, and which process may send a signal.
        if what := _catches(pid, ours=process.name.startswith(TRIAL)):
            threads = [_could_go_on(x, f"{what} of its program could end that") for x in threads]
        if not procfs.lives(pid, process.started):
            return replace(process, message="it ended while it was looked at", state="")
        if len(threads) > MOST:
            said.append(f"it has {len(threads)} threads: the waits of {MOST} were read")
        message = "; ".join(dict.fromkeys(said))
        moved = process.io_bytes
        if any(thread.ours for thread in threads):  # their writes are no work of the program
            others = [thread.tid for thread in threads if not thread.ours]
            moved = sum(_io_bytes(f"{pid}/task/{tid}") for tid in others)
        return replace(process, threads=tuple(threads), message=message, io_bytes=moved)

    def settled(self, process: Process) -> Process:
        """Mark waits of threads that went on since they were read; call after reading all."""
        threads = list(process.threads)
        for at, thread in enumerate(threads):
            key = process.pid, thread.tid
            if thread.wait is not None and _switches(*key) != self._switches[key]:
                threads[at] = _could_go_on(thread, "it went on while the others were looked at")
        return replace(process, threads=tuple(threads))

    def _name(self, pid: int) -> str:
        if pid not in self._names:
            self._names[pid] = _named(pid, "")
        return f"process {pid} ({self._names[pid]})" if self._names[pid] else f"process {pid}"

    def _sockets_of(self, pid: int) -> Sockets:
        """Sockets of a process, shared by all processes of its network namespace."""
        try:
            space = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            space = str(pid)
        return self._sockets.setdefault(space, Sockets(pid))


def _thread(reader: Reader, tid: int, said: list[str], deep: bool, switches: str) -> Thread:
    folder = Path(f"/proc/{reader.pid}/task/{tid}")
    name = (folder / "comm").read_text(errors="replace").strip()
    fields, wchan = stat(folder), procfs.wchan(folder)
    wait: Wait | None = None
    if deep and fields[0] in "SDTtI":
        wait = _wait(reader, folder, fields[0], wchan, said)
        fields, wchan = stat(folder), procfs.wchan(folder)
    cpu_s = procfs.cpu_s(fields)
    if fields[0] == "R":
        wait = None
    slept = re.search(r"(?<!non)voluntary_ctxt_switches:\s*(\d+)", switches)
    known = {"ours": name in OURS, "switches": int(slept[1]) if slept else None}
    known["io_bytes"] = _io_bytes(f"{reader.pid}/task/{tid}") or None
    return Thread(tid, name, tid == reader.pid, fields[0], cpu_s, wchan, wait, **known)


def _wait(reader: Reader, folder: Path, state: str, wchan: str, said: list[str]) -> Wait | None:
    """Wait of a thread; None if it went on while it was read."""
    if state in "Tt":
        status = (folder / "status").read_text(errors="replace")
        tracer = re.search(r"TracerPid:\s*(\d+)", status)
        return replace(stopped(state, int(tracer[1]) if tracer else 0), source=f"{folder}/stat")
    source = f"{folder}/{SYSCALL}"
    for _ in range(3):
        try:
            before = Path(source).read_text()
            asleep = call(before, wchan)
            if asleep is None:
                if stat(folder)[0] == "R":
                    return None
                wchan = procfs.wchan(folder)
                continue
            found = reader.wait(asleep, state, wchan, source)
            if Path(source).read_text() == before:
                return found
        except PermissionError:
            said.append(f"for what its threads wait may not be read: {HELP}")
            return replace(refused(wchan), source=f"{folder}/wchan")
        except FileNotFoundError:
            if not folder.exists():
                raise
            said.append("this kernel does not tell in which system calls threads wait")
            return replace(refused(wchan), source=f"{folder}/wchan")
        wchan = procfs.wchan(folder)
    return None


def _listing() -> dict[int, list[str]]:
    """{pid: fields of /proc/PID/stat} of every process of this machine that has not ended."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                file = os.open(f"/proc/{name}/stat", os.O_RDONLY)  # a third of the time of open()
                try:
                    fields = os.read(file, 2048).rpartition(b")")[2].decode().split()
                finally:
                    os.close(file)
                if len(fields) > 21 and fields[0] != "X":
                    found[int(name)] = fields
    return found


def _above(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """Ancestors of a process, the nearest first."""
    while (pid := parents.get(pid, 0)) > 0:
        yield pid


def _carriers(cookie: str, seen: dict[int, list[str]]) -> set[int]:
    mark, found = f"{COOKIE}={cookie}/".encode(), set()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid, fields in seen.items():
        key = (pid, int(fields[19]), cookie)
        has = _carries.get(key)
        if has is None:
            has = any((entry + b"/").startswith(mark) for entry in environ(pid))
            if has or uptime - int(fields[19]) / _TICKS > _YOUNG_S:
                _carries[key] = has
        if has:
            found.add(pid)
    for key in [key for key in _carries if key[0] not in seen]:
        del _carries[key]
    return found


def _rank_of(pid: int, ranks: dict[int, int]) -> int:
    told = next((e[5:] for e in environ(pid) if e.startswith(b"RANK=")), b"")
    rank = int(told) if told.isdigit() else STRANGER
    return rank if rank in ranks else min(ranks, default=STRANGER)


def environ(pid: int) -> list[bytes]:
    """Initial environment of a process as NAME=VALUE entries; empty if it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _process(pid: int, fields: list[str], of: int, rank: int | None) -> Process:
    cpu_s = procfs.cpu_s(fields)
    rss_mib = int(fields[21]) * _PAGE / _MIB
    name, message = _named(pid, fields[0]), ""
    if fields[0] == "Z" and int(fields[17]) > 1:
        message = "its main thread has ended, and the others may not be read"
        fields = ["", *fields[1:]]
    return Process(pid, int(fields[1]), int(fields[19]), of, rank, name, fields[0], cpu_s,
                   _io_bytes(pid), rss_mib, message=message)  # fmt: skip


def _io_bytes(pid: int | str) -> int:
    """Bytes that a process or one of its threads read and wrote by any call; 0 if unreadable."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    return 0


def _named(pid: int, state: str) -> str:
    """Short command line of a process; the kernel's name for it if it has none."""
    folder = f"/proc/{pid}"
    try:
        with open(f"{folder}/cmdline", "rb") as file:
            words = [word.decode(errors="replace") for word in file.read().split(b"\0")]
        with open(f"{folder}/comm", errors="replace") as file:
            own = file.read().strip()
    except OSError:
        return ""
    text = " ".join(" ".join([os.path.basename(words[0]), *words[1:]]).split())
    if not text:
        return f"{own} (ended)" if state == "Z" else own
    for module, meaning in (
        ("multiprocessing.spawn", "a worker of multiprocessing (spawn)"),
        ("multiprocessing.forkserver", "the fork server of multiprocessing"),
        ("multiprocessing.resource_tracker", "the resource tracker of multiprocessing"),
    ):
        if f"from {module} import" in text:
            return meaning
    if " whyhung.process.child " in text:
        return TRIAL
    if own.startswith("pt_data_"):
        text = f"{own}: {text}"
    return text if len(text) <= _NAME else text[: _NAME - 3] + "..."


def _tids(pid: int) -> list[int]:
    """Thread ids of a process, the main thread's first; empty if the process is gone."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))
    except OSError:
        return []


def _could_go_on(thread: Thread, why: str) -> Thread:
    if thread.wait is None:
        return thread
    wait = replace(thread.wait, text=f"{thread.wait.text}; {why}", outside=True)
    return replace(thread, wait=wait)


def _catches(pid: int, *, ours: bool) -> str:
    """Kind of signal it handles, or ""; ours: a trial, whose SIGUSR1 handler only writes stacks."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return ""
    mask = int(caught.split()[1], 16)
    if any(mask >> (number - 1) & 1 for number in _ALARMS):
        return "an alarm"
    asked = (signal.SIGUSR2,) if ours else (signal.SIGUSR1, signal.SIGUSR2)
    return "a signal" if any(mask >> (number - 1) & 1 for number in asked) else ""


def _switches(pid: int, tid: int) -> str:
    """Context switch counts of a thread, as lines of its status; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", errors="replace") as file:
            return " ".join(line for line in file if "_ctxt_switches" in line)
    except OSError:
        return ""
