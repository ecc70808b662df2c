"""Every row of the case study has its line, and each line leads to what it names."""

import re

import pytest
from places import ROOT, UNKNOWN, in_git

PAGE = ROOT / "docs" / "coverage.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (works|partly|not built) \| (.+?) \| (.+?) \| (.*?) ?\|$")
ROWS = [ROW.match(line) for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
NAMED = re.compile(r"`([^`]+)`")


def shown(name: str) -> bool:
    """True if a path, `tests/file.py::test_name` or a run is in a checkout."""
    path, _, test = name.partition("::")
    place = ROOT / path
    if not test:
        return place.exists()
    return place.is_file() and f"\ndef {test}(" in place.read_text()


def test_there_is_a_line_for_each_of_the_128_rows():
    assert [int(row[1]) for row in ROWS] == list(range(1, 129))


def wrong_in(row: re.Match) -> list[str]:
    """Names in a line that are not there, show nothing, or are left unsaid."""
    _, _, state, lives, by, note = row.groups()
    named = [name for part in (lives, by) for name in NAMED.findall(part)]
    wrong = [f"{name} is not there" for name in named if not shown(name)]
    evidence = [name for name in NAMED.findall(by) if name.startswith(("tests/", "runs/"))]
    if not evidence and state != "not built":
        wrong.append("nothing shows that it works")
    if not note and state != "works":
        wrong.append("what is missing is not said")
    return wrong


def test_what_a_line_names_is_there_and_what_works_is_shown():
    if not in_git():
        pytest.skip(UNKNOWN)  # and an sdist has no runs
    found = {row[1]: wrong_in(row) for row in ROWS}
    assert {row: wrong for row, wrong in found.items() if wrong} == {}


def test_a_wrong_line_is_noticed():
    line = "| 3 | A row | partly | `nsa/none.py` | `README.md` | |"
    assert wrong_in(ROW.match(line)) == [
        "nsa/none.py is not there", "nothing shows that it works", "what is missing is not said",
    ]  # fmt: skip


def test_at_most_three_rows_are_not_built():
    assert sum(row[3] == "not built" for row in ROWS) <= 3


def test_the_count_at_the_top_is_that_of_the_lines():
    count = {state: sum(row[3] == state for row in ROWS) for state in ("works", "partly")}
    assert f"{count['works']} work, {count['partly']} in part" in PAGE.read_text()


def test_what_is_not_there_is_noticed():
    assert shown("nsa/config.py") and shown("tests/house/test_coverage.py::shown") is True
    assert not shown("nsa/none.py") and not shown("tests/house/test_coverage.py::test_none")
