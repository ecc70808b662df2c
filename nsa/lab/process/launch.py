"""Ranks of one host under a supervisor that outlives them, and leaves none of them behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa.lab.process import family as processes

ENDING_S = 8.0  # for ranks to end by themselves after Ctrl-C


def launch(
    module: str, arguments: Sequence[str], *, ranks: int, folder: Path, port: int | None = None
) -> dict[int, int] | None:
    """`python -m module arguments...` as `ranks` processes under torchrun; returns when all ended.

    None when all ended well, else the exit codes of those that torchrun saw fail, by rank. However
    it ends, exceptions such as KeyboardInterrupt included, no process of theirs is left.

    Raises ValueError when `port` is in use; None finds a free one.
    """
    if port is not None:
        check_port(port)
    cookie = processes.new_cookie()
    (Path(folder) / "exits.json").unlink(missing_ok=True)
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "nsa.lab.process.torchrun"),
            *(str(ranks), str(port or 0), str(folder), module, *arguments),
        ],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process, which passes it on
        env=processes.environment(os.environ, cookie),
    )
    try:
        good = child.wait() == 0
    except BaseException:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
        raise
    finally:
        processes.end_family(cookie, {child.pid} if child.poll() is None else ())
        child.wait()
    return None if good else exit_codes(folder)


def exit_codes(folder: Path) -> dict[int, int]:
    """Of the ranks that torchrun saw fail; empty when it could not tell."""
    try:
        codes = json.loads(Path(folder, "exits.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {int(rank): code for rank, code in codes.items()}


def check_port(port: int) -> None:
    """Raises ValueError unless a server can be started at this port of this host."""
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
