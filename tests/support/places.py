"""Places of the project's own folders, for tests that read them or hand them to a child process.

Tests read what git tracks, never what someone left lying about: runs of their own, plots of them, a
site, other Pythons' caches. Tracked code, documents, figures and runs are read as they are here, so
that a change is tested before it is committed. Notebooks and their parameter files are read as
`git add` left them: whoever opens a notebook in JupyterLab or tries other parameters changes those.

    python tests/support/places.py FOLDER    lay FOLDER/notebooks and FOLDER/runs out for nbval
"""

import atexit
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent  # on the path of tests and of their children
TESTS = SUPPORT.parent
ROOT = TESTS.parent
PACKAGE = ROOT / "nsa"
OF_NOTEBOOKS = ("notebooks/*.ipynb", "notebooks/params/*.yaml")
CEILING = re.compile(r"(\bdeadline_s: float = )([\d.]+)(  # [^\"]*\ba ceiling\b)")
PATIENCE = 4  # times a ceiling, so that no busy machine ends a healthy child
UNKNOWN = "not a git checkout: nothing tells which files are the project's and which are yours"


def _listed(*patterns: str, only: tuple[str, ...] = ()) -> list[str]:
    """The names that git's index holds, or of these the modified (-m) and those that it does not
    know (-o). Nothing outside of a checkout."""
    command = ["git", "-C", ROOT, "ls-files", "-z", *only, "--", *(f":(glob){x}" for x in patterns)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return [name for name in done.stdout.split("\0") if name]


@functools.cache
def in_git() -> bool:
    """Return True if git tracks the files here: not so for a tarball inside another checkout."""
    return bool(_listed("pyproject.toml"))


def tracked(*patterns: str) -> dict[str, Path]:
    """The files that git tracks and that are there, all or those that match a pattern as in
    `Path.glob`: name from the root, and the file to read. Skips the test outside of a checkout."""
    if not in_git():
        import pytest

        pytest.skip(UNKNOWN, allow_module_level=True)
    found = {name: ROOT / name for name in _listed(*(patterns or ("**",)))}
    found |= {name: NOTEBOOKS.parent / name for name in found if name.startswith("notebooks/")}
    return {name: path for name, path in found.items() if path.is_file()}


def committed_runs() -> list[Path]:
    """The folders of runs that git tracks, none of whoever works here; none without git."""
    return [file.parent for file in tracked("runs/*/*/record.json").values()] if in_git() else []


@functools.cache
def committed_root() -> Path:
    """A folder like runs/ of links to the committed runs and the records beside them alone."""
    return _link_runs(_scratch() / "runs")


def _scratch() -> Path:
    made = Path(tempfile.mkdtemp(prefix="nsa-places-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _link_runs(to: Path) -> Path:
    to.mkdir(parents=True, exist_ok=True)
    beside = tracked("runs/*/*.json").values() if in_git() else ()
    for path in (*committed_runs(), *beside):
        link = to / path.relative_to(ROOT / "runs")
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)
    return to


def _check_out(to: Path) -> Path:
    """`to`/notebooks, with the notebooks and parameter files of git's index."""
    command = ["git", "-C", ROOT, "checkout-index", "-z", "--stdin", f"--prefix={to}/"]
    names = "\0".join(_listed(*OF_NOTEBOOKS))
    subprocess.run(command, input=names, text=True, check=True)
    return to / "notebooks"


def _as_staged() -> Path:
    """notebooks/ where it is as git's index has it, or there is no git; else a copy of that."""
    changed = in_git() and _listed(*OF_NOTEBOOKS, only=("-m", "-o"))
    return _check_out(_scratch()) if changed else ROOT / "notebooks"


def lay_out(to: Path) -> None:
    """Write `to`/notebooks and `to`/runs as a fresh clone has them, with longer deadlines where
    they are ceilings, and say which notebooks here differ. Without git all is linked as it is."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    if not in_git():
        (to / "notebooks").symlink_to(ROOT / "notebooks")
        (to / "runs").symlink_to(ROOT / "runs")
        return
    for notebook in _check_out(to.resolve()).glob("*.ipynb"):
        notebook.write_text(CEILING.sub(patient, notebook.read_text("utf-8")), "utf-8")
    _link_runs(to / "runs")
    for name in _listed(OF_NOTEBOOKS[0], only=("-m",)):
        print(f"{name} is tested as git has it, not as it is here; `git add` it to test yours")


def patient(found: re.Match) -> str:
    return f"{found[1]}{PATIENCE * float(found[2])}{found[3]}"


NOTEBOOKS = _as_staged()

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lay_out(Path(sys.argv[1]))
