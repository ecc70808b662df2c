"""Preconditions of a trial: its source, its environment, a device that nobody else uses."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from whyhung.process import family, procfs, script, sources

FREE_MIB = 256  # memory that a device may keep, beyond that in use before
UNSEEN_MIB = 1024  # an idle driver holds some hundreds at most
DISTRIBUTIONS = ("torch", "triton", "flash-attn", "numpy")
_GPU = re.compile(r"\d+|GPU-[0-9a-f-]{36}")  # as nvidia-smi accepts them: no short forms


def source_hash(subject: str) -> str:
    """Return a hash of the files that a trial of `subject` may import: packages, and its own."""
    return digest_of(files(subject))


def files(subject: str) -> dict[str, str]:
    """Return {file: hash} of `sources.PACKAGES` and of files that the subject's imports lead to."""
    if script.is_file(subject):
        folder = os.path.dirname(os.path.abspath(subject))
        own = sources.closure([subject], folder)
    else:
        name, colon, _ = subject.partition(":")
        own = sources.closure(sources.files_of(name if colon else f"{name}.__main__"))
    return sources.hashes([*sources.of_packages(), *own])


def digest_of(found: Mapping[str, str]) -> str:
    """Return one hash of `files`, the same wherever they lie."""
    digest = hashlib.sha256()
    for file, content in found.items():
        digest.update(f"{os.path.basename(file)}\0{content}\0".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=8)
def environment(python: str | None) -> dict[str, Any]:
    """Return versions and devices that determine a trial, for the interpreter that runs it.

    The dict is cached: do not change it. Raises ValueError if the interpreter cannot be run.
    """
    return (_versions(DISTRIBUTIONS) if python is None else _versions_of(python)) | {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "gpus": [name for name, _ in gpus("name,driver_version")],
    }


def _versions(names):  # its source alone is run by another interpreter
    from importlib import metadata
    from platform import python_version

    found = {"python": python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _versions_of(python: str) -> dict[str, Any]:
    tell = f"import json\nprint(json.dumps(_versions({DISTRIBUTIONS!r})))"
    try:
        done = subprocess.run(
            [python, "-c", f"{inspect.getsource(_versions)}\n{tell}"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"python={python!r} cannot be run: {error}") from None
    return json.loads(done.stdout)


def reasons(uses_gpu: bool, only: str | None = None) -> list[str]:
    """Return reasons why a trial that starts now would prove nothing; empty if there are none.

    only: the GPUs it may use, as CUDA_VISIBLE_DEVICES names them; None: those of this process.
    """
    found = foreign(only) if uses_gpu else []
    for pid, started in list(_left.items()):
        if remember(pid, started):
            found.append(f"process {pid} of an earlier trial still runs")
        else:
            del _left[pid]
    return found


def foreign(only: str | None = None, besides: int | None = None) -> list[str]:
    """Return a sentence on each other process that uses these GPUs: neither this one nor one of its
    ancestors, nor one started by the process `besides`, as a torchrun's ranks are."""
    found, own = [], _ancestors(os.getpid())
    for pid, mib in _smi("--query-compute-apps=pid,used_memory", only):
        if pid.isdigit() and int(pid) not in own and besides not in _ancestors(int(pid)):
            held = int(mib) if mib.isdigit() else 0
            found.append(f"the GPU is also used by process {pid} ({held} MiB)")
    return found or _unexplained(only)


def _ancestors(pid: int) -> set[int]:
    """Return the process IDs of that process and of all its ancestors."""
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(family.stat(Path(f"/proc/{pid}"))[1])
        except OSError:
            break
    return found


def _unexplained(only: str | None) -> list[str]:
    """Return sentences on GPU memory of unseen processes: a container only sees the amount used."""
    torch = sys.modules.get("torch")
    initialized = torch is not None and torch.cuda.is_initialized()
    if initialized or _smi("--query-compute-apps=pid", only):
        return []
    return [
        f"{mib} MiB of GPU {index} are in use by a process that cannot be seen"
        for index, mib in enumerate(used_mib(only))
        if mib > UNSEEN_MIB
    ]


_left: dict[int, int] = {}  # pid: start time, of trials that have ended


def remember(pid: int, started: int) -> bool:
    """Note a process that should be gone; return True if it still runs."""
    runs = procfs.lives(pid, started)
    if runs:
        _left[pid] = started
    return runs


def uses_gpu(settings: dict[str, Any], env: dict[str, str]) -> bool:
    """Return True if a trial with these settings can use a GPU of this machine."""
    told = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES")
    return settings.get("device") != "cpu" and told != "" and bool(gpus("name"))


def used_mib(only: str | None = None) -> list[int]:
    """Return the memory in use on each GPU, in MiB."""
    return numbers("memory.used", only)


def wait_until_free(
    before: list[int], within_s: float = 15.0, only: str | None = None
) -> list[str]:
    """Wait until each GPU holds no more than `before`; return sentences on those that still do."""
    end = time.monotonic() + within_s
    while True:
        more = [
            f"GPU {index} still holds {mib - was} MiB of the trial"
            for index, (was, mib) in enumerate(zip(before, used_mib(only), strict=False))
            if mib > was + FREE_MIB
        ]
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.2)


def numbers(field: str, only: str | None = None) -> list[int]:
    """Return one of nvidia-smi's integer fields, for each GPU that reports it."""
    return [int(x) for (x,) in gpus(field, only) if x.isdigit()]


def visible(told: str | None = None) -> list[str] | None:
    """Return the names in `told`, or else in CUDA_VISIBLE_DEVICES; None if that is not set."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES") if told is None else told
    return None if told is None else [name.strip() for name in told.split(",") if name.strip()]


def first(count: int) -> str | None:
    """Return the first `count` GPUs that this process may use, in the form of `only`; None if
    nvidia-smi would not accept these names (MIG)."""
    names = visible()
    names = list(map(str, range(count))) if names is None else names[:count]
    return ",".join(names) if names and all(map(_GPU.fullmatch, names)) else None


def gpus(fields: str, only: str | None = None) -> list[list[str]]:
    """Return nvidia-smi's `fields` of each GPU, as text; [] if there is none."""
    return _smi(f"--query-gpu={fields}", only)


def _smi(query: str, only: str | None) -> list[list[str]]:
    """Return nvidia-smi's rows; [] if it is missing, fails, or times out.

    Limited to the GPUs that `only`, or else CUDA_VISIBLE_DEVICES, names: others do not matter.
    """
    names = visible(only)
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if names and all(_GPU.fullmatch(name) for name in names):
        command.append(f"--id={','.join(names)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def free_ram(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate, by its machine and its container."""
    found = []
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    group = root / "sys/fs/cgroup"
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(most - used + int(stat["inactive_file"]))  # reclaimable by the kernel
    except (OSError, KeyError, ValueError):  # "max" is no number
        pass
    return min(found, default=None)
