"""Ranks of one host under torchrun and a supervisor that outlives them and leaves none behind.

`python -m nsa.lab.process.launch RANKS PORT FOLDER MODULE ARG...` is torchrun as a function. It
runs `python -m MODULE ARGUMENT...` as RANKS processes of this host and leaves in FOLDER exits.json,
the exit codes of those that failed. PORT 0 finds a free one. What torchrun itself has to say is in
FOLDER/torchrun.log; the ranks keep this process's standard output and error.

Runs `python -m MODULE ARGUMENT...` as RANKS processes of this host and leaves in FOLDER exits.json,
the exit codes of those that failed. PORT 0 finds a free one. What torchrun itself has to say is in
FOLDER/torchrun.log; the ranks keep this process's standard output and error.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from nsa.lab.process import family
from nsa.lab.process.family import die_with_parent

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
    cookie = family.new_cookie()
    (Path(folder) / "exits.json").unlink(missing_ok=True)
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "nsa.lab.process.launch"),
            *(str(ranks), str(port or 0), str(folder), module, *arguments),
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


def main(ranks: int, port: int, folder: str, module: str, *arguments: str) -> int:
    """0 when every rank ended well, else 1."""
    die_with_parent()
    # before torch makes the handlers of its loggers
    sys.stderr = open(Path(folder, "torchrun.log"), "w", buffering=1)  # noqa: SIM115
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static" if port else "c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0} if port else {"is_host": True},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        Path(folder, "exits.json").write_text(json.dumps(codes), encoding="utf-8")
        return 1
    except SignalException:
        return 1
    return 0


if __name__ == "__main__":
    ranks, port, *rest = sys.argv[1:]
    sys.exit(main(int(ranks), int(port), *rest))
