"""Tests marked `environment` are left out while the files that they cover stay as they were."""

import ast
import re
import subprocess
import sys

import green
import pytest
from places import ROOT, UNKNOWN, in_git, tracked

pytestmark = pytest.mark.processes  # git's, which names the files


@pytest.fixture
def files(tmp_path):
    """A folder, and a stand-in for what git tracks: all files of that folder."""
    for name in ("nsa/a.py", "nsa/b.py", "runs/r.json", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def listed(pattern):
        found = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.glob(pattern)}
        return {name: path for name, path in found.items() if path.is_file()}

    return tmp_path, listed


CHANGES = {
    "nothing": (lambda root: None, False),
    "a covered file": (lambda root: (root / "nsa/a.py").write_text("x"), True),
    "one that is new": (lambda root: (root / "nsa/c.py").write_text(""), True),
    "one that is gone": (lambda root: (root / "nsa/b.py").unlink(), True),
    "one that moved": (lambda root: (root / "nsa/b.py").rename(root / "nsa/c.py"), True),
    "one that all sets cover": (lambda root: (root / "pyproject.toml").write_text(""), True),
    "a name that counts": (lambda root: (root / "runs/s.json").write_text("r"), True),
    "what a file holds whose name counts": (lambda r: (r / "runs/r.json").write_text(""), False),
    "a file that is not covered": (lambda root: (root / "other.md").write_text(""), False),
}


@pytest.mark.parametrize(("change", "is_due"), CHANGES.values(), ids=CHANGES)
def test_a_set_is_due_when_a_file_that_it_covers_changed(files, change, is_due):
    root, listed = files
    patterns = ("nsa/*.py", f"{green.NAMES}runs/*")
    passed = {"one": green.fingerprint(patterns, listed)}
    change(root)
    now = {"one": green.fingerprint(patterns, listed)}
    assert green.due(now, passed) == ["one"] * is_due


def test_a_set_without_a_record_is_due():
    assert green.due({"one": "1", "two": "2"}, {"two": "2"}) == ["one"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3"])
def test_a_record_that_is_missing_or_damaged_makes_all_due(tmp_path, text):
    if text is not None:
        (tmp_path / "green.json").write_text(text)
    assert green.recorded(tmp_path / "green.json") == {}


REPORTS = {
    "passed": ('tests="2" failures="0" errors="0" skipped="0"', True),
    "one failed": ('tests="2" failures="1" errors="0" skipped="0"', False),
    "one broke": ('tests="2" failures="0" errors="1" skipped="0"', False),
    "one was skipped": ('tests="2" failures="0" errors="0" skipped="1"', False),
    "none ran": ('tests="0" failures="0" errors="0" skipped="0"', False),
}


@pytest.mark.parametrize(("counts", "whole"), REPORTS.values(), ids=REPORTS)
def test_a_set_has_passed_when_each_of_its_tests_has(counts, whole):
    assert green.passed_whole(f"<testsuites><testsuite {counts}/></testsuites>") is whole


def test_what_is_left_out_is_what_pytest_leaves_out(tmp_path):
    sets = {"frozen": "freeze", "built": "wheel", "planted": "left behind"}
    marked = [f"@pytest.mark.environment(of={x!r})\ndef test_{n}(): pass" for n, x in sets.items()]
    lines = ["import pytest", *marked, "def test_plain(): pass"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = environment: of a set\n")
    expression = "not slow" + green.left_out(["freeze", "left behind"])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    chosen = re.findall(r"::test_(\w+)$", done.stdout, re.MULTILINE)
    assert sorted(chosen) == ["built", "plain"]


def marked_sets() -> dict[str, set[str]]:
    """Set by set, the test files with a test of it."""
    found: dict[str, set[str]] = {}
    for name, path in tracked("tests/**/test_*.py").items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.environment":
                (of,) = [word.value.value for word in node.keywords if word.arg == "of"]
                found.setdefault(of, set()).add(name)
    return found


@pytest.mark.skipif(not in_git(), reason=UNKNOWN)
def test_every_marked_test_is_of_a_set_that_covers_the_test_itself():
    found = marked_sets()
    assert found == {name: set(green.files_of(name)) for name in green.COVERS}


@pytest.mark.skipif(not in_git(), reason=UNKNOWN)
def test_every_pattern_matches_a_file():
    every = {*green.ALWAYS}.union(*green.COVERS.values())
    assert [one for one in every if not tracked(one.removeprefix(green.NAMES))] == []


def test_make_leaves_out_what_is_unchanged_and_has_a_target_for_all_of_it():
    make = (ROOT / "Makefile").read_text()
    assert "tests/support/green.py)" in make
    assert re.search(r"^test-environment:.*\n\t.*tests/support/green\.py --record$", make, re.M)
