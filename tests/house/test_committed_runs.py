"""Runs and trials that a committed run or a document names can be opened in a plain checkout."""

import re

import pytest
from places import ROOT, UNKNOWN, committed_runs, in_git, tracked

from workbook.runs import keep
from workbook.runs.record import load

pytestmark = [
    pytest.mark.processes,  # git's, which names the files
    pytest.mark.skipif(not in_git(), reason=UNKNOWN),
]
FOLDERS = committed_runs()
RUN = re.compile(r"(?<![\w-])\d\d_[a-z0-9_]+-([0-9a-f]{8}(?:-\d+)?)(?![\w-])")
# Made before runs were refused that are not of a clean commit, and before trials were kept.
OF_BEFORE = "2026-11-24T13"


def test_a_committed_run_is_evidence_and_the_trials_that_it_names_can_be_opened():
    new = [folder for folder in FOLDERS if load(folder)["started"] > OF_BEFORE]
    assert [folder.name for folder in new if not load(folder).get("evidence")] == []
    assert {folder.name: lost for folder in new if (lost := keep.lost_ids(folder))} == {}


def test_runs_are_small_and_have_one_picture_of_a_figure():
    files = tracked("runs/**")
    assert sum(path.stat().st_size for path in files.values()) <= 40e6
    assert [name for name in files if name.endswith(".png") and name[:-3] + "svg" in files] == []


def gone_from(text: str, log: str = "") -> list[str]:
    """Runs that a text names and that are missing, unless the log says that they went."""
    kept = {folder.name for folder in FOLDERS}
    lost = [found for found in RUN.finditer(text) if found[0] not in kept]
    return sorted({m[0] for m in lost if not re.search(rf"…-{m[1]}`|{m[1]}` \(until", log)})


NAMED_IN = (
    "README.md",
    "docs/*.md",
    "nsa/**/*.*",
    "workbook/**/*.*",
    "whyhung/**/*.*",
    "notebooks/**/*.*",
    "figures/*.svg",
)


@pytest.mark.parametrize("pattern", [*NAMED_IN, "runs/*/*/verdicts.json"])
def test_every_run_that_is_named_is_there_or_the_log_says_that_it_went(pattern):
    log = (ROOT / "docs" / "log.md").read_text()
    files = tracked(pattern)
    found = {
        name: gone_from(file.read_text(errors="replace"), log if name == "docs/log.md" else "")
        for name, file in files.items()
    }
    assert files and {name: gone for name, gone in found.items() if gone} == {}


def test_a_run_that_is_gone_is_noticed():
    kept = FOLDERS[0].name
    text = f"`{kept}` and 09_none-0123abcd, once 09_none-0123abce"
    assert gone_from(text) == ["09_none-0123abcd", "09_none-0123abce"]
    log = "kept 09_none-0123abcd` (until then); `09_…-0123abce` went"
    assert gone_from(text, log) == []
