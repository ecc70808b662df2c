"""Decide which sets of tests marked `environment` are due, by the files that they cover.

    python tests/support/green.py            print what `pytest -m` leaves out, and say so
    python tests/support/green.py --record   run every set, and record those that passed whole

Such tests need something beside Python (Slurm, a Chromium, a build, a clone) or read all committed
runs, and rarely change their mind. `.ci/green.json` holds for each set a hash of all files that it
covers, as they were when all of it last passed. A set is due where that hash is another one now,
where none is recorded, and where git does not say which files there are. A set of which a test was
skipped has not passed, so a machine without Slurm records nothing about Slurm.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from places import ROOT, in_git, tracked

RECORD = ROOT / ".ci/green.json"
NAMES = "names of "  # before a pattern: which files there are counts, not what they hold
ALWAYS = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/support/places.py")
# Set: patterns as in Path.glob. A test is in the set that its mark names: environment(of="wheel").
COVERS = {
    "browser": (
        "workbook/rooms/explore/**",
        "workbook/runs/**",
        "notebooks/90_explore.ipynb",
        "tests/workbook/rooms/explore/test_explore_browser.py",
        "tests/support/jupyter.py",
        "tests/workbook/runs/site/*.py",
        f"{NAMES}runs/**",
    ),
    "freeze": (
        "workbook/rooms/**",
        "workbook/lab/*.py",
        "whyhung/process/*.py",
        "whyhung/verdict/*.py",
        "workbook/runs/*.py",
        "runs/**",
        "tests/house/freeze.json",
        "tests/house/test_freeze.py",
        "tests/support/freeze_calls.py",
    ),
    "left behind": (
        ".gitignore",
        "tests/workbook/cli/test_figures.py",
        "tests/workbook/rooms/case_study/*.py",
        "tests/house/*.py",
        "tests/whyhung/process/test_spec.py",
        "tests/workbook/lab/search/test_plan.py",
        "tests/support/left_behind.py",
        "tests/support/processes.py",
        "tests/workbook/runs/*.py",
    ),
    "slurm": (
        "workbook/cli/*.py",
        "whyhung/process/*.py",
        "workbook/runs/*.py",
        "workbook/runs/batch/**",
        "tests/support/batches.py",
        "tests/support/sample_notebooks.py",
        "tests/support/slurm*",
        "tests/workbook/runs/batch/test_batch_slurm.py",
    ),
    "wheel": (
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "setup.py",
        "workbook/cli/*.py",
        "workbook/runs/identity.py",
        "workbook/runs/places.py",
        "workbook/runs/parameters.py",
        "tests/house/test_wheel.py",
        f"{NAMES}nsa/**",
        f"{NAMES}workbook/**",
        f"{NAMES}notebooks/**",
    ),
}


def fingerprint(patterns: Sequence[str], files=tracked) -> str:
    """Hash the names and contents of the files that git tracks and a pattern matches."""
    digest = hashlib.sha256()
    for pattern in sorted({*patterns, *ALWAYS}):
        for name, path in sorted(files(pattern.removeprefix(NAMES)).items()):
            held = b"" if pattern.startswith(NAMES) else path.read_bytes()
            digest.update(f"{name}\0{hashlib.sha256(held).hexdigest()}\n".encode())
    return digest.hexdigest()


def recorded(file: Path = RECORD) -> dict[str, str]:
    """The hashes with which sets passed. Nothing where the file is missing or damaged."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def due(now: Mapping[str, str], passed: Mapping[str, str]) -> list[str]:
    """The sets whose files are not those with which they passed."""
    return [name for name, value in now.items() if passed.get(name) != value]


def left_out(sets: Sequence[str]) -> str:
    """The end of a marker expression that leaves sets out."""
    return "".join(f" and not environment(of='{name}')" for name in sets)


def passed_whole(report: str) -> bool:
    """True if a JUnit report has tests, and each of them passed."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    bad = sum(int(s.get(what, 0)) for s in suites for what in ("failures", "errors", "skipped"))
    return bool(suites) and not bad and sum(int(s.get("tests", 0)) for s in suites) > 0


def files_of(name: str) -> list[str]:
    """The test files of a set."""
    covered = {file: path for pattern in COVERS[name] for file, path in tracked(pattern).items()}
    mark = f'environment(of="{name}")'
    return sorted(
        file
        for file, path in covered.items()
        if path.name.startswith("test_") and mark in path.read_text()
    )


def record() -> int:
    """Run every set; the number of those of which a test failed."""
    now = {name: fingerprint(patterns) for name, patterns in COVERS.items()}
    kept, failed = recorded(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COVERS:
            report = Path(folder) / "report.xml"
            chosen = ["-m", f"environment(of='{name}')", *files_of(name)]
            # the usual form of the report refuses a test that records a property
            chosen += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
            ended = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", *chosen], cwd=ROOT)
            whole = ended.returncode == 0 and passed_whole(report.read_text())
            failed += ended.returncode != 0
            kept.pop(name, None)
            if whole:
                kept[name] = now[name]
            print(f"{name}: {'recorded' if whole else 'due until all of it passes'}", flush=True)
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="run all sets, record what passed")
    asked = parser.parse_args()
    if not in_git():
        print("not a git checkout: every test marked `environment` is due", file=sys.stderr)
        return 0
    if asked.record:
        return record()
    now = {name: fingerprint(patterns) for name, patterns in COVERS.items()}
    unchanged = sorted(now.keys() - due(now, recorded()))
    if unchanged:
        said = ", ".join(unchanged)
        print(f"left out, for what they cover is as when they passed: {said}", file=sys.stderr)
    print(left_out(unchanged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
