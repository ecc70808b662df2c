import dataclasses
import re

import pytest
from evidences import SPIN, frozen, looks, moving, oracle, p, resting, returned, trial
from verdict_cases import ALONE, FLIGHTS, NATIVE, RANKS

from nsa.cli.main import main
from nsa.lab.search.ledger import Ledger
from nsa.lab.verdict import Verdict, judge
from nsa.lab.verdict.explain import page, strip
from nsa.lab.watch.evidence import P, Sample


def hung(**more):
    evidence = frozen(8, looks(9), again=frozen(20, looks(12)), flights=FLIGHTS)
    evidence.oracles = {"finite": oracle(), "graph": oracle(None, detail="too few | steps")}
    evidence.losses, evidence.notes = [2.5, 2.25], ["process 7 could not be ended"]
    evidence.spec["settings"] = {"layers": 2, "changes": {"dim": 64}}
    return dataclasses.replace(evidence, **more)


def test_a_page_tells_verdict_rule_and_evidence():
    told = page(hung(), name="abc123")
    assert told.splitlines()[:3] == [
        "trial abc123: HANG:python-spin",
        "rule: rests, with a proof that it cannot go on",
        "place: backward, train.py never_ends",
    ]
    for words in (
        "rank 0 rests at step 3 backward, 12 modules, node 4 of 203",
        "settings", "layers=2, changes.dim=64",
        "stopped by the supervisor (deadline): still running after 20 s",
        "rank 0, py-spy, 3 looks, 9.0 to 10.2 s", "MainThread, has the GIL", SPIN[0],
        "all_reduce", "too few | steps", "2: 2.5, 2.25", "Rerun for twice as long",
        "process 7 could not be ended",
    ):  # fmt: skip
        assert words in told


def test_a_page_fits_a_terminal():
    broken = {"graph": oracle(False, "graph-growth", "word " * 60)}
    for line in page(hung(oracles=broken, preflight=["reason " * 40])).splitlines():
        assert len(line) <= 130 and line == line.rstrip()


def test_markdown_keeps_its_tables_whole():
    told = page(hung(), name="abc123", markdown=True)
    assert told.startswith("### Trial `abc123`: HANG:python-spin\n")
    assert "too few \\| steps" in told
    for table in re.findall(r"(?:^\|.*\n)+", told, re.MULTILINE):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1
    assert told.count("```") % 2 == 0
    assert "train.py:31 never\\_ends" in told  # no emphasis in the middle of a name


@pytest.mark.parametrize("case", [*ALONE, *RANKS])
@pytest.mark.parametrize("markdown", [False, True])
def test_every_evidence_has_a_page(case, markdown):
    evidence = {**ALONE, **RANKS}[case][0]
    verdict, told = judge(evidence), page(evidence, markdown=markdown)
    assert verdict.label in told and verdict.rule in told


def test_looks_that_saw_the_same_are_told_once_and_others_each():
    other = ["/home/someone/train.py:60 other"]
    told = page(frozen(8, looks(9, each=[SPIN, SPIN, other], gil=False)))
    assert "rank 0, py-spy, 2 looks, 9.0 to 9.6 s" in told
    assert "rank 0, py-spy, 10.2 s" in told


def test_the_strip_is_a_slope_for_slow_and_flat_for_hung():
    slow = strip(moving(6), 6, 6.0, width=12)
    hung = strip([*moving(3), *resting(3, 9)], 6, 12.0, width=12)
    assert slow[0] < slow[5] < slow[-1] == "█"
    assert len(set(hung[4:])) == 1
    assert strip([Sample(0.0, 0, P())], 6, 0.0, width=4) == "    "


@pytest.fixture
def stored(tmp_path):
    """Puts trials where `nsa explain` finds them; asked(words...) is its exit code."""

    def asked(*words):
        return main(["explain", *words, "--trials", str(tmp_path)])

    def put(**trials):
        for name, evidence in trials.items():
            Ledger(tmp_path).put(name, evidence, judge(evidence))
        return asked

    return put


def test_a_stored_trial_is_explained_by_id_beginning_or_folder(stored, tmp_path, capsys):
    asked = stored(aaa111=hung(), bbb222=returned())
    for words, code, told in (
        (["aaa1"], 1, "trial aaa111: HANG:python-spin\n"),
        (["latest"], 0, "trial bbb222: PASS\n"),
        ([str(tmp_path / "aaa111"), "--markdown"], 1, "### Trial `aaa111`"),
    ):
        assert asked(*words) == code
        assert capsys.readouterr().out.startswith(told)


def test_a_verdict_is_told_as_it_was_stored_unless_it_is_judged_again(stored, tmp_path, capsys):
    asked = stored()
    Ledger(tmp_path).put("aaa111", hung(), Verdict("SLOW", rule="an older rule"))
    asked("aaa111")
    assert "rule: an older rule" in capsys.readouterr().out
    asked("aaa111", "--again")
    assert "HANG:python-spin" in capsys.readouterr().out


def test_a_trial_that_is_not_there_is_one_line(stored, tmp_path, capsys):
    def refused(words, said):
        assert stored()(words) == 2
        assert said in capsys.readouterr().err

    refused("abc", "no trials in")
    stored(aaa111=returned(), aaa222=returned())
    refused("aaa", "'aaa' begins 2 trials: aaa111, aaa222; write more")
    refused("xyz", "no trial 'xyz' among 2")
    (tmp_path / "aaa111" / "evidence.json").write_text("{")
    refused("aaa111", "cannot be read")


def test_a_thread_without_frames_is_told_with_its_reason():
    (look,) = looks(9, count=1, **NATIVE)
    unseen = dataclasses.replace(look, threads=[], message="not permitted")
    assert "no stack: not permitted" in page(frozen(8, [unseen], at=p()))


def test_a_trial_that_still_runs_has_a_page_too():
    told = page(trial(moving(4), end=None))
    assert "it still ran after" in told and "INCONCLUSIVE:running" in told
