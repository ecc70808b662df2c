"""Removal of runs: those that git tracks, those that are old, and deletion of a folder."""

import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

from workbook.runs.files import tracked_files
from workbook.runs.record import load, status_now
from workbook.runs.store import Store

GOING = ".going-"  # prefix of a run that is being removed


def tracked(root: str | Path) -> set[Path]:
    """Folders of runs below `root` with a file that git tracks; none outside of a checkout.
    ValueError if git cannot list them, so that nothing is removed on a guess."""
    root = Path(root).resolve()
    if not any((place / ".git").exists() for place in (root, *root.parents)):
        return set()
    try:
        listed = tracked_files(root)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or error
        raise ValueError(f"git does not say what it tracks below {root}: {said}") from None
    parts = [Path(name).parts for name in listed]
    return {root.joinpath(*place[:2]) for place in parts if len(place) > 2}


def older(root: str | Path, age_s: float) -> dict[Path, float]:
    """{run below `root` that began longer ago: its age in seconds}, oldest first, without those
    that run or that git tracks."""
    kept, now, found = tracked(root), time.time(), {}
    for folder in Store(root).folders():
        record = load(folder)
        age = now - began(record, folder)
        if age > age_s and folder.resolve() not in kept and status_now(record) != "running":
            found[folder] = age
    return found


def began(record: dict, folder: Path) -> float:
    """Time at which a run began, in seconds; for a damaged record, when its folder was written."""
    try:
        at = datetime.fromisoformat(record["started"])
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (KeyError, ValueError, TypeError):
        return folder.stat().st_mtime


def remove(folder: Path) -> None:
    """Remove a run's folder, and its day's if that is empty then. An interrupted removal leaves no
    run. OSError if it cannot be removed; ValueError for a link."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link to {folder.readlink()}; remove the link by hand")
    going = folder.with_name(f"{GOING}{folder.name}-{time.time_ns()}")
    folder.rename(going)
    (going / "record.json").unlink(missing_ok=True)
    shutil.rmtree(going)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def leftovers(root: str | Path) -> list[Path]:
    """Folders of runs whose removal was interrupted."""
    return sorted(Path(root).glob(f"*/{GOING}*"))
