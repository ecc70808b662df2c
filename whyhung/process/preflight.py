"""What a trial stands on: the source, the environment, a device that nobody else uses."""

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

FREE_MIB = 256  # what a device may keep, beyond what it had
UNSEEN_MIB = 1024  # an idle driver holds some hundreds at most
DISTRIBUTIONS = ("torch", "triton", "flash-attn", "numpy")
_GPU = re.compile(r"\d+|GPU-[0-9a-f-]{36}")  # as nvidia-smi takes them; it knows no short forms


def source_hash(subject: str) -> str:
    """Hash of the files that a trial of `subject` may import: of packages, and its own."""
    return digest_of(files(subject))


def files(subject: str) -> dict[str, str]:
    """{file: hash} of `sources.PACKAGES`, and of what the subject's imports lead to."""
    if script.is_file(subject):
        folder = os.path.dirname(os.path.abspath(subject))
        own = sources.closure([subject], folder)
    else:
        name, colon, _ = subject.partition(":")
        own = sources.closure(sources.files_of(name if colon else f"{name}.__main__"))
    return sources.hashes([*sources.of_packages(), *own])


def digest_of(found: Mapping[str, str]) -> str:
    """One hash of `files`, the same wherever they lie."""
    digest = hashlib.sha256()
    for file, content in found.items():
        digest.update(f"{os.path.basename(file)}\0{content}\0".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=8)
def environment(python: str | None) -> dict[str, Any]:
    """Versions and devices that decide what a trial does, by the interpreter that runs it.

    Nobody may change the dict. Raises ValueError for an interpreter that cannot be run.
    """
    return (_versions(DISTRIBUTIONS) if python is None else _versions_of(python)) | {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "gpus": [name for name, _ in gpus("name,driver_version")],
    }


def _versions(names):  # its text alone is what another interpreter runs
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
    """Why a trial that starts now would prove nothing; empty where nothing speaks against it.

    only: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them; None: as this process may.
    """
    found = foreign(only) if uses_gpu else []
    for pid, started in list(_left.items()):
        if remember(pid, started):
            found.append(f"process {pid} of an earlier trial still runs")
        else:
            del _left[pid]
    return found


def foreign(only: str | None = None, besides: int | None = None) -> list[str]:
    """Who else uses these GPUs, a sentence each: processes that are neither this one nor one of its
    ancestors, nor started by the process `besides`, as a torchrun's ranks are."""
    found, own = [], _ancestors(os.getpid())
    for pid, mib in _smi("--query-compute-apps=pid,used_memory", only):
        if pid.isdigit() and int(pid) not in own and besides not in _ancestors(int(pid)):
            held = int(mib) if mib.isdigit() else 0
            found.append(f"the GPU is also used by process {pid} ({held} MiB)")
    return found or _unexplained(only)


def _ancestors(pid: int) -> set[int]:
    """Of that process, itself included."""
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(family.stat(Path(f"/proc/{pid}"))[1])
        except OSError:
            break
    return found


def _unexplained(only: str | None) -> list[str]:
    """A container is not told who uses its GPUs, but how much of them is."""
    torch = sys.modules.get("torch")
    initialized = torch is not None and torch.cuda.is_initialized()
    if initialized or _smi("--query-compute-apps=pid", only):
        return []
    return [
        f"{mib} MiB of GPU {index} are in use by a process that cannot be seen"
        for index, mib in enumerate(used_mib(only))
        if mib > UNSEEN_MIB
    ]


_left: dict[int, int] = {}  # pid: when it started; of trials that have ended


def remember(pid: int, started: int) -> bool:
    """Notes a process that should be gone; whether it still runs."""
    runs = procfs.lives(pid, started)
    if runs:
        _left[pid] = started
    return runs


def uses_gpu(settings: dict[str, Any], env: dict[str, str]) -> bool:
    """Whether a trial with these settings can touch a GPU of this machine."""
    told = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES")
    return settings.get("device") != "cpu" and told != "" and bool(gpus("name"))


def used_mib(only: str | None = None) -> list[int]:
    """Memory in use on each GPU."""
    return numbers("memory.used", only)


def wait_until_free(
    before: list[int], within_s: float = 15.0, only: str | None = None
) -> list[str]:
    """Waits until each GPU holds no more than `before`; says which of them still does."""
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
    """One of nvidia-smi's whole-numbered fields, of each GPU that tells it."""
    return [int(x) for (x,) in gpus(field, only) if x.isdigit()]


def visible(told: str | None = None) -> list[str] | None:
    """The names in `told`, or else in CUDA_VISIBLE_DEVICES; None where that is not set."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES") if told is None else told
    return None if told is None else [name.strip() for name in told.split(",") if name.strip()]


def first(count: int) -> str | None:
    """The first so many GPUs that this process may use, as `only` takes them; None where nvidia-smi
    would not know them by these names (MIG)."""
    names = visible()
    names = list(map(str, range(count))) if names is None else names[:count]
    return ",".join(names) if names and all(map(_GPU.fullmatch, names)) else None


def gpus(fields: str, only: str | None = None) -> list[list[str]]:
    """nvidia-smi's `fields` of each GPU, as text; [] where there is none."""
    return _smi(f"--query-gpu={fields}", only)


def _smi(query: str, only: str | None) -> list[list[str]]:
    """nvidia-smi's rows; none where there is none, or it does not answer.

    Of the GPUs that `only`, or else CUDA_VISIBLE_DEVICES, names: who uses others disturbs nobody.
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
    """Bytes that this process may still take: of the machine, and of its container."""
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
        found.append(most - used + int(stat["inactive_file"]))  # which the kernel gives back
    except (OSError, KeyError, ValueError):  # "max" is no number
        pass
    return min(found, default=None)
