"""Hints of oracles are told with a PASS and change no verdict; growth is right, and late."""

from whyhung.verdict import judge
from whyhung.verdict.rules import ORDER
from whyhung.watch.evidence import End, Evidence
from workbook.lab.oracles import ORACLES


def judged(**oracles):
    asked = {
        name: {"ok": True, "detail": "", "what": "", "place": ""} | x for name, x in oracles.items()
    }
    return judge(
        Evidence(spec={"steps": 2}, losses=[1.0, 0.5], end=End("returned", 0), oracles=asked)
    )


def test_a_hint_stands_beside_a_pass():
    verdict = judged(rows={"hint": "8 of 16 rows"}, arrival={})
    assert verdict.label == "PASS"
    assert "hint: rows: 8 of 16 rows" in verdict.because
    assert not [b for b in judged(arrival={}).because if "hint" in b]


def test_a_step_that_grows_is_slow_by_its_own_doing_unless_something_is_wrong():
    growing = {"ok": False, "what": "growing", "detail": "2 ms more a step"}
    verdict = judged(duration=growing)
    assert (verdict.label, verdict.rule) == ("SLOW:growing", "right, and late by its own doing")
    assert (
        judged(duration=growing, memory={"ok": False, "what": "host-leak"}).label
        == "FAIL:host-leak"
    )


def test_a_rank_that_lost_its_loss_first_names_the_verdict():
    verdict = judged(loss={"ok": False, "what": "nan-loss", "detail": "rank 1: step 0"}, finite={})
    assert verdict.label == "FAIL:nan-loss" and "loss: rank 1: step 0" in verdict.because


def test_every_oracle_that_may_be_broken_has_its_place_among_them():
    assert set(ORDER) == set(ORACLES) - {"rows"}
