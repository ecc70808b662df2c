"""The judge of claims: sentences, verdicts, and what stops a rule; rules that rooms share."""

import pytest

from workbook.runs import rules
from workbook.runs.claim import NotHere, Undecided, aim, claim


@claim("{what} is at most {most}")
def is_small(value, what="it", most=3):
    """A rule."""
    if value is None:
        raise Undecided("no value", {"seen": 0}, "of many")
    if value < 0:
        raise NotHere("there is none")
    return f"; it is {value}" if value > most else f"{value}", value <= most, {"value": value}


@pytest.mark.parametrize(
    ("value", "verdict", "sentence", "evidence"),
    [
        (2, "PASS", "it is at most 3: 2", {"value": 2}),
        (5, "FAIL", "it is at most 3; it is 5", {"value": 5}),
        (None, "INCONCLUSIVE", "it is at most 3: of many: not decided, no value", {"seen": 0}),
        (-1, "NOT APPLICABLE", "it is at most 3: not applicable here, there is none", {}),
    ],
)
def test_a_rule_becomes_a_claim_with_its_sentence_and_verdict(value, verdict, sentence, evidence):
    found = is_small(value)
    assert (found.verdict, found.claim, found.evidence) == (verdict, sentence, evidence)
    assert is_small.__doc__ == "A rule."


def test_a_sentence_has_the_arguments_of_its_rule_and_may_be_a_function_of_them():
    assert is_small(1, most=1, what="this").claim == "this is at most 1: 1"

    @aim(lambda rows: f"all {len(rows)} are fast")
    def are_fast(rows):
        return "", all(rows), {}, ["the last"]

    assert (are_fast([0, 1]).verdict, are_fast([0, 1]).claim) == ("AIM MISSED", "all 2 are fast")
    lacks = are_fast([1])
    assert lacks.verdict == "INCONCLUSIVE" and lacks.claim.endswith("not measured: the last")


def test_an_error_of_a_rule_is_no_verdict():
    with pytest.raises(KeyError):
        claim("it is")(lambda rows: rows["nothing"])({})


def test_cells_that_broke_off_are_named_and_a_run_of_none_decides_nothing():
    broke = rules.no_cell_broke("each ran", {"a": "error: x"}, {"ok": 1}, [])
    assert (broke.verdict, broke.claim) == ("FAIL", "each ran; broke off: a")
    assert rules.no_cell_broke("each ran", {}, {}, []).verdict == "INCONCLUSIVE"
    assert rules.no_cell_broke("each ran", {}, {"ok": 1}, ["b"]).verdict == "INCONCLUSIVE"
    assert rules.no_cell_broke("each ran", {}, {"ok": 1}, []).verdict == "PASS"


@pytest.mark.parametrize(
    ("gpu", "why"), [("", rules.NO_GPU), ("NVIDIA A100", "for an H200, this is NVIDIA A100")]
)
def test_only_an_h200_decides_its_aims(gpu, why):
    with pytest.raises(NotHere, match=why):
        rules.needs_h200(gpu)
    rules.needs_h200("NVIDIA H200")
