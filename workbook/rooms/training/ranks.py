"""Ranks of a training under torchrun: the launch, and the files in which each reports its state.

A rank writes rank<r>.json: {"rank", "pid", "state", "time"}, and after a failure its message and
traceback; and rank<r>.log, its output and errors. A rank whose state is "running" and whose process
is gone was killed. That takes precedence over the other ranks' reports: they lose their connection
to it, or are terminated. This module imports as little as possible.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from whyhung.process import family
from whyhung.process.child import lost_another, put, read
from whyhung.process.ranks import exits

ENDING_S = 8.0  # for ranks to end by themselves after Ctrl-C
STUCK_S = 5.0  # for a rank to end after Ctrl-C, which a collective never checks for
TAIL_LINES = 40
EXITING = 0x4  # PF_EXITING among a process's flags, field 9 of /proc/<pid>/stat


def launch(
    module: str, arguments: Sequence[str], *, ranks: int, folder: Path, port: int | None = None
) -> dict[int, int] | None:
    """Run `python -m module arguments...` as `ranks` processes under torchrun until all have ended.

    Returns None if all succeeded, else the exit codes of ranks that torchrun saw fail, by rank;
    empty if unknown. However it ends, including exceptions such as KeyboardInterrupt, none of
    their processes is left.

    Raises ValueError if `port` is in use; None finds a free one.
    """
    if port is not None:
        check_port(port)
    cookie = family.new_cookie()
    (Path(folder) / "exits.json").unlink(missing_ok=True)
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "whyhung.process.ranks"),
            *(str(ranks), str(port or 0), str(folder), "0", module, *arguments),
        ],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process, which passes it on
        env=family.environment(os.environ, cookie),
    )
    try:
        good = child.wait() == 0
    except BaseException:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
        raise
    finally:
        family.end_family(cookie, {child.pid} if child.poll() is None else ())
        child.wait()
    if good:
        return None
    return exits(folder)[0]


def check_port(port: int) -> None:
    """Raise ValueError unless a server can be started at this port of this host."""
    if not 0 < port < 2**16:
        raise ValueError(f"port {port} is none; 1 to 65535 are, e.g. 29500")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} is in use ({error.strerror}); another one would do, or none: "
                "without --port a free one is found"
            ) from None


class Both:
    """Text stream into the log, and into the previous stream as long as that accepts it."""

    def __init__(self, log, console) -> None:
        self._log, self._console = log, console

    def write(self, text: str) -> int:
        self._log.write(text)
        with contextlib.suppress(OSError, ValueError):
            self._console.write(text)
        return len(text)

    def flush(self) -> None:
        self._log.flush()
        with contextlib.suppress(OSError, ValueError):
            self._console.flush()

    def __getattr__(self, name: str):
        return getattr(self._log, name)


@contextmanager
def logged(folder: Path, rank: int, console: bool) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to rank<r>.log in the block, C and C++ code included.

    `console`: Python's own output goes to the terminal as well.
    """

    def opened(number: int):
        return os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8")

    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    consoles = [opened(number) for number in (1, 2)]
    with open(Path(folder, f"rank{rank}.log"), "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    streams = [opened(number) for number in (1, 2)]
    sys.stdout, sys.stderr = map(Both, streams, consoles) if console else streams
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
        for number, terminal in enumerate(consoles, 1):
            os.dup2(terminal.fileno(), number)
        for stream in (*streams, *consoles):
            with contextlib.suppress(OSError):
                stream.close()


@dataclass(frozen=True)
class Failure:
    """First rank to fail, by its own fault if any did.

    how: "exception", "bad input" (a ValueError), "killed", "interrupted" or "terminated".
    """

    rank: int
    how: str
    message: str
    time: float
    traceback: str = ""


def say(folder: Path, rank: int, state: str, **more) -> None:
    """Write this rank's state to its file, atomically."""
    content = {"rank": rank, "pid": os.getpid(), "state": state, "time": time.time(), **more}
    put(Path(folder, f"rank{rank}.json"), content, indent=1)


@contextmanager
def accounted(folder: Path, rank: int, when_ended: Callable[[], None]) -> Iterator[dict]:
    """Wrap all of a rank's work: its file records how it ended and, on success, the yielded dict.

    `when_ended` is called after that record, except on success. SIGTERM ends the process with 143
    even if the main thread waits for a GPU or for other ranks, since a separate thread receives
    it. After Ctrl-C the main thread has STUCK_S to end by itself, then it is ended likewise.
    """
    say(folder, rank, "running")
    said = threading.Lock()  # acquired by the first to record the end, and kept

    def end(state: str, code: int) -> None:
        if said.acquire(blocking=False):
            say(folder, rank, state)
            when_ended()
        else:
            time.sleep(STUCK_S)  # the main thread has ended, unless it is stuck on its way out
        os._exit(code)

    more: dict = {}
    with _heard(end):
        try:
            yield more
        except BaseException as error:
            if said.acquire(blocking=False):
                lines = "".join(traceback.format_exception(error)).splitlines()
                what = {"message": one_line(error), "traceback": "\n".join(lines[-TAIL_LINES:])}
                bad_input = isinstance(error, ValueError | ModuleNotFoundError)
                state = "bad input" if bad_input else "exception"
                state = "interrupted" if isinstance(error, KeyboardInterrupt) else state
                say(folder, rank, state, **what)
                when_ended()
            raise
        said.acquire(blocking=False)
    say(folder, rank, "ok", **more)


@contextmanager
def _heard(end: Callable[[str, int], None]) -> Iterator[None]:
    """Wake a thread through a pipe on SIGTERM and SIGINT, even if C code blocks the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            heard = os.read(reading, 1)
            if heard == bytes([signal.SIGTERM]):
                end("terminated", 128 + signal.SIGTERM)
            if heard == bytes([signal.SIGINT]) and not over.wait(STUCK_S):
                end("interrupted", 128 + signal.SIGINT)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(fd_before)
        with contextlib.suppress(OSError):
            os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


def one_line(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is a ValueError with a message."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def first_failure(
    folder: Path, ranks: int, exitcodes: Mapping[int, int] | None = None
) -> Failure | None:
    """Return the rank that failed first, or None if all succeeded or still run.

    `exitcodes`: exit codes known so far, by rank; negative for a signal.
    """
    found = []
    for rank in range(ranks):
        said = read(Path(folder, f"rank{rank}.json"), {})
        state, code = said.get("state"), (exitcodes or {}).get(rank)
        if state is None and code is None:
            continue  # it never came as far as that
        if state in (None, "running"):
            if code == -signal.SIGTERM:
                how, message = "terminated", "was asked to end"
            elif code or not _lives(said.get("pid")):
                how, message = "killed", _how_killed(code)
            else:
                continue
            found.append(Failure(rank, how, message, said.get("time", 0.0)))
        elif state != "ok":
            message = said.get("message") or f"was {state}"
            found.append(Failure(rank, state, message, said["time"], said.get("traceback", "")))
    order = {"killed": 0, "exception": 1, "bad input": 1}

    def place(failure: Failure) -> tuple[int, bool, float]:
        return order.get(failure.how, 2), lost_another(failure.message), failure.time

    return min(found, key=place, default=None)


def _how_killed(code: int | None) -> str:
    if code is None:
        return "was killed: its process is gone without a word"
    if code < 0:
        return f"was killed by {family.signal_name(-code)}"
    return f"ended at once with exit code {code}"


def _lives(pid: int | None) -> bool:
    try:
        state, *fields = family.stat(Path(f"/proc/{pid}"))
    except OSError:
        return False
    # Its sockets close, which the other ranks notice, a moment before it is a zombie.
    return state not in "ZX" and not int(fields[5]) & EXITING
