"""Environment of a run: versions, devices, source, settings. Never a host, a user or a path."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import nsa
from whyhung.process import child, family, preflight
from workbook.lab import sweep
from workbook.runs.files import git, tracked_files

PREFIXES = ("TORCH", "PYTORCH", "CUDA", "CUBLAS", "CUDNN", "NCCL", "TRITON")
PREFIXES += ("NSA_", "OMP_", "MKL_", "SLURM_JOB")
# how a run's processes find each other: different every time, and no setting
PROCESSES = ("NSA_RUN", sweep.RUN_ENDS, family.COOKIE, family.PARENT, child.PATH)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SECRET = re.compile(r"token|secret|passw|credential|api_?key|auth", re.IGNORECASE)
IDENTITY = re.compile("user|account|nodelist|node_?name|host|partition|group|uid|gid|cluster", re.I)
PACKAGE = Path(nsa.__file__).resolve().parent
# a new file there may change what runs
OWN = ("nsa", "whyhung", "workbook", "notebooks", "tests")
SOURCE = ("--", ".", ":(exclude)runs", ":(exclude)figures")
NEW = ("--exclude-standard", "--", *OWN)


def snapshot(seed: int | None = None) -> dict:
    """Everything needed to trace where numbers came from, JSON-able.

    GPUs have `name`, `memory_gib`, `compute_capability`, `driver`; an empty list without any. `git`
    is None outside a repository. Nothing here imports torch or starts CUDA.
    """
    return {
        "date": utc_now(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpus(),
        # versions that affect the numbers; None if a package is not installed
        "nsa": _version("nsa") or nsa.__version__,
        "torch": _version("torch"),
        "cuda": _cuda_of_torch(),
        "triton": _version("triton"),
        # flash-attn 2 and 4 are two distributions that may be installed side by side
        "flash_attn": _version("flash-attn"),
        "flash_attn_4": _version("flash-attn-4"),
        "git": git_state(),
        "seed": seed,
        "allocator": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
        # variables that change what runs, without secrets, identities or paths of this machine
        "variables": {
            name: _without_paths(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and not SECRET.search(name) and not IDENTITY.search(name)
            if name not in PROCESSES
        },
    }


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance(environment: dict) -> dict:
    """Columns of a metrics row that come from the environment: torch, triton, commit."""
    git = environment.get("git") or {}
    commit = (git.get("commit") or "")[:12]
    return {
        "torch": environment.get("torch") or "",
        "triton": environment.get("triton") or "",
        "commit": commit + ("+dirty" if commit and git.get("dirty") else ""),
    }


def devices() -> dict[str, str]:
    """Device names in rows measured here on "cpu" or "cuda": the CPU's model, a GPU's name."""
    return {"cpu": f"cpu: {cpu()}", "cuda": gpus()[0]["name"] if gpus() else "cuda"}


@lru_cache(maxsize=1)
def cpu() -> str:
    """CPU model as the system names it, else its architecture."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(errors="replace") if file.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _without_paths(value: str) -> str:
    """`/a/b/c` becomes `c`; in a value with other content, each path becomes `<path>`."""
    if re.fullmatch(r"/[^:;,=\s]*", value):
        return Path(value).name or "<path>"
    return re.sub(r"(?<![\w.])~?/[^:;,=\s]*", "<path>", value)


@lru_cache(maxsize=1)
def gpus() -> list[dict]:
    """GPUs that this process may use, as nvidia-smi names them."""
    rows = preflight.gpus("index,uuid,name,memory.total,compute_cap,driver_version")
    return visible_gpus(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(rows: list[list[str]], visible: str | None) -> list[dict]:
    """GPUs of nvidia-smi's rows that are in CUDA_VISIBLE_DEVICES."""
    found = []
    for index, uuid, name, memory_mib, capability, driver in (r for r in rows if len(r) == 6):
        memory_gib = round(float(memory_mib) / 1024, 1) if memory_mib.isdigit() else None
        gpu = {"name": name, "memory_gib": memory_gib}
        gpu |= {"compute_capability": capability, "driver": driver}
        found.append((index, uuid, gpu))
    if visible is None:
        return [gpu for _, _, gpu in found]
    return [
        gpu
        for name in preflight.visible(visible) or ()
        for index, uuid, gpu in found
        if name == index or (not name.isdigit() and uuid.startswith(name))
    ]


def git_state(folder: Path | None = None) -> dict | None:
    """`commit`, `dirty`, `dirty_hash` (sha256 of the diff and the untracked files), or None.

    Files under runs/ and figures/ are results, not source: they make nothing dirty, nor do new
    files outside of the folders in OWN. On a node with the files but no history, NSA_COMMIT gives
    the commit; `dirty` is then unknown (None).
    """
    top = folder or PACKAGE.parent
    commit = git(top, "rev-parse", "--verify", "HEAD").strip() or None
    told = os.environ.get("NSA_COMMIT")
    if told and not commit:
        return {"commit": told, "dirty": None, "dirty_hash": None}
    if not git(top, "rev-parse", "--show-toplevel"):
        return None
    difference = git(top, "diff", "HEAD", *SOURCE) if commit else ""
    untracked = sorted(_lines(git(top, "ls-files", "-z", "--others", *NEW)))
    if not difference and not untracked:
        return {"commit": commit, "dirty": False, "dirty_hash": None}
    digest = hashlib.sha256(difference.encode(errors="surrogateescape"))
    for name in untracked:
        path = Path(top, name)
        digest.update(name.encode(errors="surrogateescape") + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
    return {"commit": commit, "dirty": True, "dirty_hash": digest.hexdigest()}


def check_evidence(notebook: str | Path, package: Path = PACKAGE) -> None:
    """Raise ValueError, with a remedy, unless a run of this notebook can be evidence: the package
    is in the notebook's tree, and its commit is known and contains all of its source."""
    top = package.parent
    if top not in Path(notebook).resolve().parents:
        raise ValueError(
            f"evidence is made from one tree: {notebook} is not in that of {package}, which is "
            f"imported; run `python -m nsa run` in the notebook's own, or install that with -e"
        )
    state = git_state(top) or {}
    commit = state.get("commit") or ""
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        raise ValueError(
            f"evidence needs the commit of {top}, which is no git repository with one, and "
            f"NSA_COMMIT={commit!r} names none; set it to what `git rev-parse HEAD` says where "
            "these files are from, once that is clean"
        )
    if state["dirty"] is None:
        return
    names = _lines(git(top, "diff", "HEAD", "--name-only", "-z", *SOURCE))
    names += _lines(git(top, "ls-files", "-z", "--others", *NEW))
    if not tracked_files(top, package.name):
        names = [f"{package.name}/, none of which is in git"]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ValueError(
            f"evidence is made from a clean commit, and {', '.join(names[:8])}{more} differ from "
            f"{commit[:12]}: commit or `git stash -u` them, or run without --evidence"
        )


def _lines(text: str) -> list[str]:
    return [name for name in text.split("\0") if name]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """CUDA version torch was built for, read from its version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.M)
    return found and found[1]
