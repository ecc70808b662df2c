"""A rank's standard output and error in a file of its own, whatever started it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


class Both:
    """What Python writes, into the log and to where it went before if somebody reads there."""

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


@contextlib.contextmanager
def logged(folder: Path, rank: int, console: bool) -> Iterator[None]:
    """File descriptors 1 and 2 are rank<r>.log while this is open, C and C++ code included.

    `console`: what Python itself prints goes to the terminal as well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(
        Path(folder, f"rank{rank}.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o644,
    )
    before = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    streams = [os.fdopen(os.dup(n), "w", buffering=1, encoding="utf-8") for n in (1, 2)]
    consoles = [os.fdopen(n, "w", buffering=1, encoding="utf-8") for n in kept]
    sys.stdout, sys.stderr = streams
    if console:
        sys.stdout, sys.stderr = map(Both, streams, consoles)
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
