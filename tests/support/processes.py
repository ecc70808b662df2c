"""Processes that tests start: what they run in, what is waited for, and who is left."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from places import ROOT, SUPPORT


def environment_with_package() -> dict[str, str]:
    """For children that must import this nsa and these helpers, from whatever folder they start."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}


def python(code: str, **options) -> subprocess.Popen:
    """An interpreter that runs the code."""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment_with_package(), text=True, **options)


@contextmanager
def running(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """This process, which is killed at the end of the block."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Until the condition holds, which it must within this time."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def printed_by(code: str) -> str:
    """Output of an interpreter that runs the code, which must not fail."""
    process = python(code, stdout=subprocess.PIPE)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    return printed


def told_by(program: str, *args: object, interpreted: bool = False) -> dict:
    """Last line of a program of this folder, as JSON; its kernels are interpreted if asked."""
    environment = environment_with_package()
    if not interpreted:
        environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, SUPPORT / program, *map(str, args)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def only_rank(monkeypatch, port: int) -> None:
    """Set the environment that torchrun gives the only rank."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))


def run_ranks(count: int, program: str, *arguments: object) -> None:
    """Processes of a program of this folder, started without torchrun but with what it would set;
    none must fail."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = environment_with_package() | meeting | {"OMP_NUM_THREADS": "1"}
    if given := os.environ.get("PYTHONPATH"):
        common["PYTHONPATH"] += f"{os.pathsep}{given}"
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    # Files, because a rank that waits for its pipe to be read holds the others up.
    with ExitStack() as files:
        told = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SUPPORT / program), *map(str, arguments)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=told[rank],
            )
            for rank in range(count)
        ]
        try:
            for rank, errors in zip(ranks, told, strict=True):
                if rank.wait(timeout=400):
                    errors.seek(0)
                    raise AssertionError(errors.read()[-4000:])
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_there(path: Path, process: subprocess.Popen) -> None:
    """Until the process, which must live on, has made the file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids, within_s=5.0):
    """Wait for processes to end; returns those that live on."""
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]
