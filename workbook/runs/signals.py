"""Signal handlers for a time. Loads nothing else: papermill loads the engine, which needs them."""

import contextlib
import signal
import threading
from collections.abc import Callable


class Terminated(KeyboardInterrupt):
    """SIGTERM at a time when the engine itself does not handle it."""


def termination_is_an_exception():
    """Context in which SIGTERM raises Terminated; without effect outside the main thread."""

    def raise_it(_number, _frame):
        raise Terminated

    return signals_handled({signal.SIGTERM: raise_it})


@contextlib.contextmanager
def signals_handled(handlers: dict[int, Callable]):
    """Install these handlers, in the main thread, and restore the old ones at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
