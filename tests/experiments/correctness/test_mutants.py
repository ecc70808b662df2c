"""The suite kills every mutant: proof that its tests look where the case study's did not."""

import subprocess

import pytest

from nsa.experiments.correctness.gallery import run_tests
from nsa.experiments.correctness.mutants import MUTANTS, Mutant, mutated_copy
from nsa.lab import sweep

DEADLINE_S = 3600.0  # ends what hangs; how busy the machine is decides nothing
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)  # the first test runs those of all mutants

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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """What the killer of each mutant said; two mutants at a time."""

    def outcome(_, name: str) -> subprocess.CompletedProcess:
        root = mutated_copy(tmp_path_factory.mktemp(name), name)
        return run_tests(root, [MUTANTS[name].killer], deadline_s=DEADLINE_S)

    return dict(zip(MUTANTS, sweep.each(outcome, list(MUTANTS), workers=2), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_kills(name, outcomes):
    ended = outcomes[name]
    assert ended.returncode == 1, f"survived:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    # Killed by what a test saw, not by code that no longer runs.
    assert "AssertionError" in ended.stdout or "assert " in ended.stdout, ended.stdout[-2000:]


def test_every_promised_defect_has_a_mutant():
    assert set(MUTANTS) >= PROMISED


@pytest.mark.processes
@pytest.mark.full
def test_the_killers_pass_on_the_code_as_it_is(tmp_path):
    killers = sorted({one.killer for one in MUTANTS.values()})
    ended = run_tests(mutated_copy(tmp_path), killers, deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout[-2000:]


def test_a_mutant_whose_line_is_gone_is_an_error(tmp_path, monkeypatch):
    gone = Mutant(("", ""), "", "-", "nsa/blocks.py", "no such line", "-", "")
    monkeypatch.setitem(MUTANTS, "gone", gone)
    with pytest.raises(ValueError, match=r"'gone': 0 places in nsa/blocks.py"):
        mutated_copy(tmp_path, "gone")
