"""What a trial's processes and GPUs are doing, seen from outside.

Stacks of every thread come from py-spy where it may look. Elsewhere the process writes them itself
on SIGUSR1, by faulthandler, even while its GIL is held. A thread asks how busy the GPUs are,
because asking takes longer than a sample may.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nsa.lab.process import preflight, procfs
from nsa.lab.watch import progress
from nsa.lab.watch.evidence import Look

SIGNAL_S = 1.0  # a healthy interpreter writes its stacks within milliseconds
EVERY_S = 1.0
PY_SPY_S = 8.0
_THREAD = re.compile(r"^(Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*?)\])?")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
Threads = list[dict[str, Any]]


@contextmanager
def device_use(only: str | None = None) -> Iterator[SimpleNamespace]:
    """`with device_use() as use: use.percent` is the busiest GPU's, None before it was told.

    only: the GPUs that count, as CUDA_VISIBLE_DEVICES names them; None: those of this process. A
    GPU counts as busy while any kernel runs, one that never ends as well.
    """
    use, stop = SimpleNamespace(percent=None), threading.Event()

    def ask() -> None:
        while True:
            told = preflight.numbers("utilization.gpu", only)
            use.percent = max(map(float, told), default=None)
            if stop.wait(EVERY_S):
                return

    thread = threading.Thread(target=ask, name="device use", daemon=True)
    thread.start()
    try:
        yield use
    finally:
        stop.set()
        thread.join()


def look(tool: str, rank: int, pid: int, counted: Path, t: float) -> Look | None:
    """One look by one of evidence.TOOLS at a rank that counts its progress in `counted`.

    None where it counts nothing yet. faulthandler's file is stacks-K.txt beside it.
    """
    cells = progress.cells_of(counted)
    if cells is None:
        return None
    if tool == "proc":
        threads = procfs.threads(pid)
        message = "" if threads else "the process has ended, or there is no /proc"
    elif tool != "faulthandler":
        threads, message = py_spy(pid, native=tool == "native")
    elif cells[progress.LISTENS]:
        threads, message = [], f"faulthandler wrote nothing within {SIGNAL_S:g} s"
        try:
            written = asked(pid, counted.with_name(f"stacks-{rank}.txt"))
            if threads := parse(written, cells[progress.MAIN_THREAD]):
                message = ""
        except OSError as error:
            message = f"faulthandler: {error}"
    else:
        threads, message = [], "the process does not listen to SIGUSR1 yet"
    after = progress.cells_of(counted) or cells
    return Look(t, rank, tool, threads, progress.coordinate(after), message)


def py_spy(pid: int, *, native: bool = False) -> tuple[Threads, str]:
    """(threads, "") as py-spy sees them, or ([], why not). `native` adds the frames of C code.

    It needs no help from the process, but ptrace: root, CAP_SYS_PTRACE, or a parent's right.
    """
    program = _py_spy()
    if program is None:
        return [], "py-spy is not installed (pip install py-spy)"
    seen = procfs.process(pid)
    if seen is None:
        return [], "the process has ended"
    options = ["--native"] if native else []
    if seen.state in "Tt":  # it could not be stopped for the look, nor does it need to be
        options = ["--nonblocking"]
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_S, check=False
        )
        if done.returncode == 0:
            return [_thread(thread, pid) for thread in json.loads(done.stdout)], ""
    except subprocess.TimeoutExpired:
        return [], f"py-spy did not answer within {PY_SPY_S:g} s"
    except (OSError, ValueError) as error:
        return [], f"py-spy: {error}"
    said = done.stderr.strip().splitlines()
    return [], f"py-spy: {said[0] if said else f'exit code {done.returncode}'}"


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _thread(thread: dict[str, Any], pid: int) -> dict[str, Any]:
    return {
        "name": thread.get("thread_name") or "",
        "main": thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread",
        "active": thread.get("active"),
        "gil": thread.get("owns_gil"),
        "frames": [f"{f['filename']}:{f['line']} {f['name']}" for f in thread.get("frames", ())],
    }


def asked(pid: int, file: Path) -> str:
    """What faulthandler appends to `file` when the process gets the signal; "" for nothing.

    Also while its GIL is held, but not while it is stopped. The process must have registered: else
    the signal ends it. OSError where there is no process or no file.
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


def parse(text: str, main: int) -> Threads:
    """A dump of faulthandler as threads; `main` is the main thread's ident."""
    found: Threads = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            is_main = int(begins[2], 16) == main % 2**64
            name = begins[3] or ("MainThread" if is_main else "")
            thread = {"name": name, "main": is_main, "active": None, "gil": None, "frames": []}
            found.append(thread)
        elif (frame := _FRAME.match(line)) and found:
            found[-1]["frames"].append(f"{frame[1]}:{frame[2]} {frame[3]}")
    return found
