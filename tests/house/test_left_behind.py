"""Tests read what git tracks, so nothing that users leave lying about turns one of them red."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from left_behind import plant
from places import CEILING, OF_NOTEBOOKS, ROOT, UNKNOWN, in_git, patient, tracked
from processes import environment_with_package

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.environment(of="left behind"),
    pytest.mark.skipif(not in_git(), reason=UNKNOWN),
]
# Tests that look for files of a kind. The others are handed committed runs by `places`.
LOOKING = (
    "tests/workbook/cli/test_figures.py",
    "tests/workbook/rooms/case_study/test_decision.py",
    "tests/house",
    "tests/whyhung/process/test_spec.py",
    "tests/workbook/lab/search/test_plan.py",
    "tests/workbook/runs/test_browse.py",
    "tests/workbook/runs/test_loaded.py",
    "tests/workbook/runs/test_notebooks.py",
    "tests/workbook/runs/test_places.py",
    "tests/workbook/runs/test_results.py",
)
QUICK = "not slow and not full and not long and not gpu and not environment"
WHO = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone in which all that is tracked here is committed as it is here.

    One for all tests, so that its modules are compiled once.
    """
    folder = tmp_path_factory.mktemp("clone") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    held = tracked()
    for name in git(ROOT, "ls-files", "-z").split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name in held:
            (folder / name).write_bytes(held[name].read_bytes())
        else:
            (folder / name).unlink(missing_ok=True)
    git(folder, "add", "-A")
    git(folder, *WHO, "commit", "--quiet", "--allow-empty", "-m", "as it is here")
    return folder


@pytest.fixture(scope="module")
def littered(clone):
    plant(clone)
    return clone


def run_quick(folder: Path) -> str:
    """Run the quick ones of these tests there; the last lines of what pytest says."""
    paths = f"{folder}{os.pathsep}{folder / 'tests/support'}"
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-m", QUICK]
    done = subprocess.run(
        [*command, *LOOKING],
        cwd=folder,
        env=environment_with_package() | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout[-4000:]


def test_without_git_tests_of_what_is_tracked_are_skipped_and_no_other_is_red(clone):
    assert not git(clone, "status", "--porcelain")  # it runs before the clone is littered
    for name in (".git", "runs"):  # an sdist leaves the runs out
        (clone / name).rename(clone.parent / name)
    try:
        said = run_quick(clone)
    finally:
        for name in (".git", "runs"):
            (clone.parent / name).rename(clone / name)
    assert re.search(r"\d+ passed, \d+ skipped", said)


def test_what_users_leave_lying_about_turns_no_test_red(littered):
    assert re.search(r"^ M notebooks/01_", git(littered, "status", "--porcelain"), re.MULTILINE)
    (passed,) = re.findall(r"(\d+) passed", run_quick(littered))
    assert int(passed) > 300


def test_nbval_is_given_the_notebooks_and_runs_that_git_has(littered):
    command = [sys.executable, "tests/support/places.py", "build/staged"]
    said = subprocess.run(command, cwd=littered, capture_output=True, text=True, check=True).stdout
    assert said.startswith("notebooks/01_memory_scaling.ipynb is tested as git has it")
    laid = littered / "build/staged"
    listed = git(littered, "ls-files", "-z", *OF_NOTEBOOKS).split("\0")[:-1]
    found = [path for pattern in OF_NOTEBOOKS for path in laid.glob(pattern)]
    assert sorted(str(path.relative_to(laid)) for path in found) == sorted(listed)
    for path in found:
        committed = git(littered, "show", f":{path.relative_to(laid)}")
        assert path.read_text() == CEILING.sub(patient, committed)
    assert "deadline_s: float = 480.0  # " in (laid / "notebooks/04_throughput.ipynb").read_text()
    records = git(littered, "ls-files", "-z", "runs/*/*/record.json").split("\0")[:-1]
    linked = [str(path.relative_to(laid)) for path in laid.glob("runs/*/*/record.json")]
    assert sorted(linked) == sorted(records)
