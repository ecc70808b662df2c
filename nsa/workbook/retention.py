"""Which runs may go: rules of age, size and status, and what is cited, which always stays."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from nsa.spelling import choice
from nsa.workbook.files import read_json
from nsa.workbook.record import STATUS_OF, load, status_now
from nsa.workbook.store import Store

ENDED = (*dict.fromkeys(STATUS_OF.values()), "lost")  # the statuses of runs that are over
GOING = ".going-"  # begins the name of a run that is being removed
ID = r"[0-9a-f]{8}(?:-\d+)?"  # as a run's name ends
ALONE = re.compile(rf"(?<![0-9a-f]){ID}(?![\w])")
NAMED = re.compile(r"(?:\d{4}-\d\d-\d\d/)?[A-Za-z0-9_.-]*[A-Za-z0-9_]")
READ = (".md", ".json", ".svg", ".ipynb", ".yaml")
BESIDE = ("*", "figures/*", "docs/**/*", "notebooks/**/*")  # what is read beside the runs


@dataclass(frozen=True)
class Found:
    """One run on disk. `kept` says why it must stay, or is empty."""

    folder: Path
    status: str
    age_s: float
    size: int  # bytes of its files
    kept: str = ""


@dataclass(frozen=True)
class Rules:
    """What a run must be to go; all that are given must hold. `down_to` spares the newest of those
    that fit, as long as all runs together would take no more than so many bytes."""

    statuses: tuple[str, ...] = ()
    older_s: float | None = None
    larger: int | None = None
    down_to: int | None = None

    def __post_init__(self) -> None:
        for status in self.statuses:
            choice("status", status, ENDED)
        if not self.statuses and self.older_s is self.larger is self.down_to is None:
            raise ValueError(
                "--prune needs to know what may go: --older 30d, --status failed,lost, "
                "--larger 1GiB or --down-to 20GiB; several must all hold"
            )

    def choose(self, runs: Sequence[Found]) -> list[Found]:
        """Those of the runs, oldest first, that may go. What is kept is not among them."""
        fit = [
            run
            for run in runs
            if not run.kept
            if not self.statuses or run.status in self.statuses
            if self.older_s is None or run.age_s > self.older_s
            if self.larger is None or run.size > self.larger
        ]
        if self.down_to is None:
            return fit
        total, going = sum(run.size for run in runs), []
        for run in fit:
            if total <= self.down_to:
                break
            going.append(run)
            total -= run.size
        return going


def runs(root: str | Path) -> list[Found]:
    """Every run below `root`, oldest first, with why it must stay: it runs, git tracks it, or a
    document, a figure or a committed run names it."""
    root, now = Path(root), datetime.now(UTC)
    folders, files = Store(root).folders(), _git_files(root)
    tracked = _with_files(root, files)
    named = cited(root, folders, files)
    found = []
    for folder in folders:
        record = load(folder)
        status = status_now(record)
        kept = "it runs" if status == "running" else ""
        if folder.resolve() in tracked:
            kept = "git tracks it"
        elif folder in named:
            kept = f"{named[folder]} names it"
        found.append(Found(folder, status, _age_s(record, folder, now), size_of(folder), kept))
    return found


def cited(root: Path, folders: Iterable[Path], tracked: Iterable[Path]) -> dict[Path, str]:
    """{run: a file that names it}: with its day, by its folder's name, or by its id alone. Read are
    the tracked files, and figures, documents and notebooks beside `root`, tracked or not."""
    words, found = {}, {}
    for folder in folders:
        words[f"{folder.parent.name}/{folder.name}"] = folder
        if id := re.search(rf"-({ID})$", folder.name):
            words |= {folder.name: folder, id[1]: folder}
    for file in _documents(root, tracked):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for word in words.keys() & {*ALONE.findall(text), *NAMED.findall(text)}:
            found.setdefault(words[word], _shown(file, root))
    return found


def remove(folder: Path) -> None:
    """A run's folder goes, and its day's where that is empty then. What is cut off in the middle is
    no run any more. OSError where it cannot be removed; ValueError for a link."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link to {folder.readlink()}; remove the link by hand")
    going = folder.with_name(f"{GOING}{folder.name}-{time.time_ns()}")
    folder.rename(going)
    (going / "record.json").unlink(missing_ok=True)
    shutil.rmtree(going)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def leftovers(root: str | Path) -> list[Path]:
    """Folders of runs whose removal was cut off."""
    return sorted(Path(root).glob(f"*/{GOING}*"))


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder; a link counts as itself."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def _age_s(record: dict, folder: Path, now: datetime) -> float:
    """Since the run began; of a damaged record since its folder was written."""
    try:
        began = datetime.fromisoformat(record["started"])
        return (now - (began if began.tzinfo else began.replace(tzinfo=UTC))).total_seconds()
    except (KeyError, ValueError, TypeError):
        return now.timestamp() - folder.stat().st_mtime


def _documents(root: Path, tracked: Iterable[Path]) -> Iterator[Path]:
    """What may name a run, and the manifests of batches that go on; a run that is not tracked is no
    document, as it names itself."""
    root, tracked = root.resolve(), dict.fromkeys(tracked)
    for manifest in root.glob("batches/*/manifest.json"):
        driver = {"status": "running", **read_json(manifest, {}).get("driver", {})}
        if status_now(driver) == "running":
            yield manifest
    beside = (f for pattern in BESIDE for f in root.parent.glob(pattern) if root not in f.parents)
    for file in tracked | dict.fromkeys(beside):
        if file.suffix in READ and file.is_file():
            yield file


def _with_files(root: Path, files: Iterable[Path]) -> set[Path]:
    """Folders of runs to which any of these files belongs."""
    root = root.resolve()
    parts = [file.relative_to(root).parts for file in files if root in file.parents]
    return {root.joinpath(*place[:2]) for place in parts if len(place) > 2}


def _git_files(root: Path) -> list[Path]:
    """What git tracks in the checkout that `root` lies in; [] where there is none."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        top = Path(git("rev-parse", "--show-toplevel").strip())
        return [top / name for name in git("-C", str(top), "ls-files", "-z").split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        return []


def _shown(file: Path, root: Path) -> str:
    top = root.resolve().parent
    return (file.relative_to(top) if top in file.parents else file).as_posix()
