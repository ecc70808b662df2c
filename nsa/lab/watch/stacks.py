"""Every thread's stack as a process writes it itself on SIGUSR1, even while its GIL is held."""

import os
import signal
import time
from pathlib import Path

SIGNAL_S = 1.0  # a healthy interpreter writes its stacks within milliseconds


def asked(pid: int, file: Path) -> str:
    """What faulthandler appends to `file` when the process gets the signal; "" for nothing.

    The process must have registered: else the signal ends it. OSError where there is no process or
    no file.
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
