"""Find and end every process that a kernel started, however far it went from it.

Children may live in sessions of their own (torchrun's workers do), outlive their parent, or be
adopted by init once the kernel was killed, so neither process groups nor the tree of parents is
enough. Each inherits the kernel's environment, though: a cookie in it finds them all.
"""

import contextlib
import time

COOKIE = "NSA_KERNEL_COOKIE"


def family(cookie: str, root: int | None = None) -> list:
    """Live processes (psutil.Process) that carry `cookie`, and the descendants of `root`."""
    import psutil

    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(COOKIE) == cookie:
                found[process.pid] = process
    if root is not None:
        with contextlib.suppress(psutil.Error):
            found.setdefault(root, psutil.Process(root))
    # a child that dropped the environment is still below one that did not
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            for child in process.children(recursive=True):
                found.setdefault(child.pid, child)
    return [process for process in found.values() if _lives(process)]


def end_family(cookie: str, root: int | None = None, within_s: float = 5.0) -> int:
    """SIGKILL all of them, again until none is left; returns how many were left at the end."""
    import psutil

    deadline = time.monotonic() + within_s
    while processes := family(cookie, root):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=0.5)
        if time.monotonic() > deadline:
            return len(family(cookie, root))
    return 0


def _lives(process) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
