"""The suite kills every mutant: proof that its tests look where the case study's did not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import SUPPORT

from workbook.rooms.correctness.gallery import arguments_for
from workbook.rooms.correctness.mutants import MUTANTS, ROOT, Mutant, mutated_copy

DEADLINE_S = 3600.0  # ends what hangs; how busy the machine is decides nothing
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)  # the first test runs those of all mutants
PROGRAM = SUPPORT / "forked_tests.py"
# Mutants of one backend whose killers run on all, interpreted kernels first.
ONE_BACKEND = {
    "one-query-causal",
    "heads-as-time",
    "window-leak",
    "inverted-mask",
    "chunked-window-off-by-one",
    "sequential-window-off-by-one",
}

# The defects that the project promises to tell from attention.
PROMISED = {
    "one-query-causal",
    "heads-as-time",
    "current-block-dropped",
    "window-leak",
    "scores-see-the-future",
    "late-binding-checkpoint",
    "inverted-mask",
    "equation-9-wrong-sign",
    "window-off-by-one",
}


def in_copies(asked: list[tuple[Path, list[str]]]) -> list[tuple[int, str]]:
    """(exit status, output) of pytest with these arguments in each copy of the project."""
    given = json.dumps([(str(root), arguments) for root, arguments in asked])
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_S}
    ended = subprocess.run([sys.executable, PROGRAM], input=given, **options)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [(status, told) for status, told in json.loads(ended.stdout.splitlines()[-1])]


def killing(name: str, mutant: Mutant) -> list[str]:
    """Arguments that run the killer; of one that goes through all backends, the mutant's own."""
    narrow = ["-k", f"{mutant.killer.split('::')[1]} and {mutant.shows[1]}"]
    return [*arguments_for([mutant.killer]), *narrow * (name in ONE_BACKEND)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """End of the killer of each mutant, and what it said."""
    asked = [
        (mutated_copy(tmp_path_factory.mktemp(name), name), killing(name, mutant))
        for name, mutant in MUTANTS.items()
    ]
    return dict(zip(MUTANTS, in_copies(asked), strict=True))


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_kills(name, outcomes):
    status, told = outcomes[name]
    assert status == 1, f"survived:\n{told[-2000:]}"
    # Killed by what a test saw, not by code that no longer runs.
    assert "AssertionError" in told or "assert " in told, told[-2000:]


@pytest.mark.processes
@pytest.mark.full
def test_what_killed_passes_on_the_code_as_it_is(outcomes, tmp_path):
    killers = {re.search(r"^FAILED (.+?)(?: - |$)", told, re.M)[1] for _, told in outcomes.values()}
    assert {one.split("[")[0] for one in killers} == {one.killer for one in MUTANTS.values()}
    plain = arguments_for([])
    options = plain[: plain.index("-m")]
    [(status, told)] = in_copies([(mutated_copy(tmp_path), [*options, "-m", "", *sorted(killers)])])
    assert status == 0, told[-2000:]
    assert f"{len(killers)} passed" in told


def test_the_line_of_every_mutant_stands_in_its_file_once():
    """Quick, where the suites that kill them are not."""
    places = {n: (ROOT / m.file).read_text().count(m.before) for n, m in MUTANTS.items()}
    assert {name for name, count in places.items() if count != 1} == set()


def test_every_promised_defect_has_a_mutant():
    assert set(MUTANTS) >= PROMISED


def test_a_mutant_whose_line_is_gone_is_an_error(tmp_path, monkeypatch):
    gone = Mutant(("", ""), "", "-", "nsa/blocks.py", "no such line", "-", "")
    monkeypatch.setitem(MUTANTS, "gone", gone)
    with pytest.raises(ValueError, match=r"'gone': 0 places in nsa/blocks.py"):
        mutated_copy(tmp_path, "gone")
