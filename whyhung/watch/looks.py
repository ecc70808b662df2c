"""Activity of a trial's processes, observed from outside.

Stacks of every thread come from py-spy where it is permitted, and are added to the threads of a
snapshot from `kernel`; elsewhere a process that counts its progress reports its own (watch.locks).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from whyhung.process import procfs
from whyhung.watch import kernel, visible
from whyhung.watch.evidence import Process, Snapshot, Thread, Wait

SIGNAL_S = 1.0  # a healthy interpreter writes its stacks within milliseconds
MANY = 100  # threads: to stop so many takes 100 ms
PY_SPY_S, NATIVE_S = 8.0, 30.0  # reading the symbols of large libraries takes long
GIL_S = 0.005  # the interpreter's own switch interval
AT_ONCE = 4  # processes that are read in parallel
LONGER = 8  # --locals options, for the longest locals that py-spy shows, some 500 characters


def with_stacks(snapshot: Snapshot, *, native: bool = False) -> Snapshot:
    """Add py-spy's stacks to each process of the snapshot's family that runs Python.

    native: also names of C functions in the ranks, which stops these for longer. If a process has
    no stacks, its message gets the reason.
    """
    asked = [x for x in snapshot.processes if x.of != kernel.STRANGER and runs_python(x.pid)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        taken = pool.map(lambda x: py_spy(x.pid, native=native and x.rank is not None), asked)
        answers = {process.pid: answer for process, answer in zip(asked, taken, strict=True)}
    processes = []
    for process in snapshot.processes:
        found, why = answers.get(process.pid, ([], ""))
        if found and procfs.lives(process.pid, process.started):
            # A forked worker's code is as old as its rank's.
            oldest = min(x.started for x in snapshot.processes if x.of == process.of)
            process = _merged(process, found, _moment(oldest))
        why = why or ("" if found or process.pid not in answers else "py-spy saw no thread")
        message = "; ".join(filter(None, (process.message, why)))
        processes.append(replace(process, message=message))
    return replace(snapshot, processes=tuple(processes), tool="native" if native else "py-spy")


def runs_python(pid: int) -> bool:
    """True if it is an interpreter, or has one loaded; False if it is gone or may not be read."""
    with suppress(OSError):
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy")):
            return True
        return "/libpython" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def py_spy(pid: int, *, native: bool = False) -> tuple[list[dict[str, Any]], str]:
    """(threads in py-spy's JSON format, ""), or ([], reason for the failure).

    It needs no help from the process, but ptrace: root, CAP_SYS_PTRACE, or a parent's right.
    """
    program = _py_spy()
    if program is None:
        return [], "py-spy is not installed (pip install py-spy)"
    seen = procfs.process(pid)
    if seen is None or not seen.lives:
        return [], "it ended before py-spy looked"
    options = ["--locals"] * LONGER + ["--native"] * native
    many = False
    with suppress(OSError):
        many = len(os.listdir(f"/proc/{pid}/task")) > MANY and not native
    if seen.state in "Tt" or many:  # it cannot be stopped for reading, or not for that long
        options = [*options[:LONGER], "--nonblocking"]
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    within_s = NATIVE_S if native else PY_SPY_S
    try:
        done = subprocess.run(  # in a session of its own: a Ctrl-C is for others
            command, capture_output=True, text=True, errors="replace", timeout=within_s,
            check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return [], f"py-spy did not answer within {within_s:g} s"
    except (OSError, ValueError) as error:
        return [], f"py-spy: {error}"
    if not procfs.lives(pid, seen.started):
        return [], "it ended while py-spy looked"
    said = done.stderr.strip().splitlines()
    why = f"py-spy: {said[0] if said else f'exit code {done.returncode}'}"
    return [], f"{why}; {kernel.HELP}" if "ermission" in done.stderr else why


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _moment(started: int) -> float:
    """Convert the kernel's ticks since boot to seconds since the epoch."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + started / os.sysconf("SC_CLK_TCK")


def _merged(process: Process, found: list[dict[str, Any]], began: float) -> Process:
    """Add py-spy's data to the threads; those not in the snapshot began later and are omitted."""
    by_tid = {thread.get("os_thread_id"): thread for thread in found}
    threads = []
    for thread in process.threads:
        seen = by_tid.get(thread.tid)
        if seen is not None:
            frames = seen.get("frames", ())
            # A C frame has its file as module, a Python frame has none.
            python = [frame for frame in frames if not frame.get("module")]
            above = takewhile(lambda frame: frame.get("module"), frames)
            shown = any(frame.get("locals") is not None for frame in python)
            sleeps = thread.wait is not None and thread.wait.left_s is not None
            name = seen.get("thread_name") or thread.name
            thread = replace(
                thread,
                name=name,
                gil=seen.get("owns_gil"),
                frames=tuple(f"{f['filename']}:{f['line']} {f['name']}" for f in python),
                native=tuple(map(_named, above)),
                visible=visible.digest(python, process.pid, began) if shown else "",
                polled=visible.polled(python, process.pid) if sleeps and shown else "",
                ours=thread.ours or name in kernel.OURS,
            )
        threads.append(thread)
    return replace(process, threads=tuple(_for_the_gil(process.pid, threads)))


def _named(frame: dict[str, Any]) -> str:
    """Name of a C function; its library's if it has none, as in drivers."""
    unnamed = frame["name"].startswith("0x")
    return os.path.basename(frame["module"]) if unnamed else frame["name"]


def _for_the_gil(pid: int, threads: list[Thread]) -> Iterator[Thread]:
    """Set waits for the GIL: they retry every few milliseconds, and only its owner can end them."""
    owner = next((thread for thread in threads if thread.gil), None)
    for thread in threads:
        wait = thread.wait
        asks = wait is not None and wait.kind == "lock" and wait.left_s is not None
        if asks and wait.left_s <= GIL_S and owner not in (None, thread) and thread.frames:
            text = f"waits for the GIL, which thread {owner.tid} ({owner.name}) holds"
            wait = Wait("GIL", text, ((pid, owner.tid),), source=f"{wait.source}, py-spy")
            thread = replace(thread, wait=wait)
        yield thread


def asked(pid: int, file: Path) -> str:
    """Send SIGUSR1, and return the text that faulthandler appends to `file`; "" for nothing.

    Works while the GIL is held, but not while the process is stopped. The process must have
    registered: else the signal ends it. Raises OSError if there is no process or no file.
    """
    before = seen = file.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + SIGNAL_S
    while time.monotonic() < end:
        time.sleep(0.05)
        now = file.stat().st_size
        if now > before and now == seen:
            break
        seen = now
    with open(file, "rb") as stream:
        stream.seek(before)
        return stream.read().decode(errors="replace")
