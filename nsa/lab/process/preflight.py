"""What a trial stands on: the source, the environment, a device that nobody else uses."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from nsa.lab.process import procfs

PACKAGE = Path(__file__).resolve().parents[2]
NOT_RUN = ("workbook", "cli", "__main__.py")  # no trial imports them
FREE_MIB = 256  # what a device may keep, beyond what it had
UNSEEN_MIB = 1024  # an idle driver holds some hundreds at most
DISTRIBUTIONS = ("torch", "triton", "flash-attn", "numpy")
_GPU = re.compile(r"\d+|GPU-[0-9a-f-]{36}")  # as nvidia-smi takes them; it knows no short forms
_TOLD = (
    "import importlib.metadata as m, json, platform\n"
    "def version(name):\n"
    "    try: return m.version(name)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({'python': platform.python_version(), "
    f"**{{name: version(name) for name in {DISTRIBUTIONS!r}}}}}))"
)


def source_hash(subject: str) -> str:
    """Of the files that a trial of `subject` may import: this package's, and the subject's own."""
    digest = hashlib.sha256()
    for file in [*_sources(), *_subject_files(subject)]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(
        file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in NOT_RUN
    )


def _subject_files(subject: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(subject.partition(":")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    file = Path(spec.origin).resolve()
    return [] if PACKAGE in file.parents else [file]


@lru_cache(maxsize=8)
def _environment(python: str | None) -> str:
    if python is None:
        found: dict[str, Any] = {"python": platform.python_version()}
        for name in DISTRIBUTIONS:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = None
    else:
        found = json.loads(_asked(python))
    found |= {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "gpus": [name for name, _ in gpus("name,driver_version")],
    }
    return json.dumps(found)


def environment(python: str | None = None) -> dict[str, Any]:
    """Versions and devices that decide what a trial does, by the interpreter that runs it.

    Raises ValueError for an interpreter that cannot be run.
    """
    return json.loads(_environment(python))


def _asked(python: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", _TOLD], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"python={python!r} cannot be run: {error}") from None
    return done.stdout


def reasons(uses_gpu: bool, only: str | None = None) -> list[str]:
    """Why a trial that starts now would prove nothing; empty where nothing speaks against it.

    only: the GPUs that it may use, as CUDA_VISIBLE_DEVICES names them; None: as this process may.
    """
    found = []
    if uses_gpu:
        there = foreign(only)
        found += [f"the GPU is also used by process {pid} ({mib} MiB)" for pid, mib in there]
        found += _unexplained(only) if not found else []
    for pid, started in list(_left.items()):
        seen = procfs.process(pid)
        if seen is None or seen.started != started or seen.state in "ZX":
            del _left[pid]
        else:
            found.append(f"process {pid} of an earlier trial still runs")
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
    seen = procfs.process(pid)
    if seen is None or seen.started != started or seen.state in "ZX":
        return False
    _left[pid] = started
    return True


def uses_gpu(settings: dict[str, Any], env: dict[str, str]) -> bool:
    """Whether a trial with these settings can touch a GPU of this machine."""
    told = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES")
    return settings.get("device") != "cpu" and told != "" and bool(gpus("name"))


def foreign(only: str | None = None) -> list[tuple[int, int]]:
    """(pid, MiB) of the GPU's processes that are neither this one nor one of its ancestors."""
    own = _ancestors()
    rows = _smi("--query-compute-apps=pid,used_memory", only)
    found = [(int(pid), int(mib) if mib.isdigit() else 0) for pid, mib in rows if pid.isdigit()]
    return [(pid, mib) for pid, mib in found if pid not in own]


def used_mib(only: str | None = None) -> list[int]:
    """Memory in use on each GPU."""
    return numbers("memory.used", only)


def wait_until_free(
    before: list[int], within_s: float = 15.0, only: str | None = None
) -> list[str]:
    """Waits until each GPU holds no more than `before`; says which of them still does."""
    end = time.monotonic() + within_s
    while True:
        now = used_mib(only)
        more = [
            f"GPU {index} still holds {mib - was} MiB of the trial"
            for index, (was, mib) in enumerate(zip(before, now, strict=False))
            if mib > was + FREE_MIB
        ]
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.2)


def _ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def numbers(field: str, only: str | None = None) -> list[int]:
    """One of nvidia-smi's whole-numbered fields, of each GPU that tells it."""
    return [int(x) for (x,) in gpus(field, only) if x.isdigit()]


def visible(told: str | None = None) -> list[str] | None:
    """The names in `told`, or else in CUDA_VISIBLE_DEVICES; None where that is not set."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES") if told is None else told
    return None if told is None else [name.strip() for name in told.split(",") if name.strip()]


def gpus(fields: str, only: str | None = None) -> list[list[str]]:
    """nvidia-smi's `fields` of each GPU, as text; [] where there is none."""
    return _smi(f"--query-gpu={fields}", only)


def _smi(query: str, only: str | None = None) -> list[list[str]]:
    """nvidia-smi's rows; none where there is none, or it does not answer.

    Of the GPUs that `only`, or else CUDA_VISIBLE_DEVICES, names: who uses others disturbs nobody.
    """
    names = visible(only)
    named = names and all(_GPU.fullmatch(name) for name in names)
    try:
        done = subprocess.run(
            [
                "nvidia-smi", query, "--format=csv,noheader,nounits",
                *([f"--id={','.join(names)}"] if named else []),
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
