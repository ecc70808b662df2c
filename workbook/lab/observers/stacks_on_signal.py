"""Python stacks of all threads on SIGUSR1, for a training that goes on afterwards.

faulthandler writes them from inside the signal handler, without the GIL, so it reads frames of
running threads: one in 180 of its dumps ended a process whose second thread did nothing but call
functions (Python 3.11), and in a backward on a GPU a second thread calls all the time. Here a
separate thread waits for the signal and writes while it holds the GIL. Code that keeps the GIL
blocks this thread, too; py-spy shows that.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def stacks_on_signal(file: TextIO | str | os.PathLike | None = None) -> Iterator[None]:
    """Write the stack of every thread to `file` (default: stderr) on SIGUSR1, inside the `with`.

    The innermost frame is first, as in faulthandler. It takes milliseconds, also in a backward, and
    in native code that releases the GIL. A path is opened for appending. Call it from the main
    thread: elsewhere Python accepts no signal handlers, and raises ValueError.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(file, str | os.PathLike):
            file = stack.enter_context(Path(file).open("a", encoding="utf-8"))
        out = sys.stderr if file is None else file
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        # None: a handler in C, as faulthandler's; ignoring the signal at least ends no process.
        after = signal.SIG_IGN if before is None else before
        stack.callback(signal.signal, signal.SIGUSR1, after)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # the previous wakeup descriptor, -1 for none, is still written to
        other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def serve() -> None:
            while numbers := os.read(reader, 64):  # until the pipe is closed
                if other >= 0:
                    with contextlib.suppress(OSError):
                        os.write(other, numbers)
                for _ in range(numbers.count(signal.SIGUSR1)):
                    with contextlib.suppress(OSError, ValueError):
                        out.write(stacks())
                        out.flush()

        thread = threading.Thread(target=serve, name="nsa:SIGUSR1", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(other)
            os.close(writer)
            thread.join()
            os.close(reader)


def stacks() -> str:
    """Stacks of all threads except the calling one, in faulthandler's format, with thread names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] == main):
        if ident != own:
            which = "Current thread" if ident == main else "Thread"
            name = names.get(ident, "?")
            found.append(f"{which} 0x{ident:016x} [{name}] (most recent call first):")
            for each, line in traceback.walk_stack(frame):
                code = each.f_code
                found.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
            found.append("")
    return "\n".join(found) + "\n"
