"""Several trials are one verdict, and two variants that ran one path compare nothing."""

import pytest
from evidences import process, returned, thread
from verdict_cases import LOCKED, still

from whyhung.verdict import judge
from workbook.lab.search.repeats import compare, compare_paths, jeffreys


def test_different_verdicts_of_one_spec_are_flaky_with_an_interval():
    hang, unseen = still(process(thread(wait=LOCKED))), still(count=0)
    verdict = compare([returned()] * 7 + [hang] * 3 + [unseen])
    assert verdict.label == "FLAKY:HANG:lock"
    assert verdict.numbers == {
        "n": 10, "k": 3, "of": "HANG:lock", "counts": {"PASS": 7, "HANG:lock": 3},
        "low": pytest.approx(0.0927, abs=1e-4), "high": pytest.approx(0.6058, abs=1e-4),
    }  # fmt: skip
    assert "1 of 11 are inconclusive and do not count" in verdict.because


def test_equal_verdicts_are_one_with_a_bound_and_not_proof_of_always():
    verdict = compare([returned()] * 59)
    assert verdict.kind == "PASS"
    assert "59 of 59 alike; another verdict comes in less than 4% (95 %)" in verdict.because[-1]
    assert compare([judge(returned())]).kind == "PASS"
    assert compare([still(count=0)]).kind == "INCONCLUSIVE"


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="no trials to compare"):
        compare([])
    other = returned()
    other.spec["steps"] = 7
    with pytest.raises(ValueError, match="2 different specs"):
        compare([returned(), other])
    with pytest.raises(ValueError, match="k=3 of n=2"):
        jeffreys(3, 2)


def test_variants_that_ran_one_path_are_invalid():
    def variant(name, times=6, **more):
        ran = {"slc": {name: times}, "win": {"gather": times}}
        return returned(witness={"paths": ran, "backends": {name: times}} | more)

    one, other = variant("gather"), variant("masked")
    assert compare_paths(one, variant("gather", 60)).label == "INVALID:same-path"
    assert compare_paths(one, other).kind == "PASS"
    assert "only the second ran slc: masked" in compare_paths(one, other).because
    assert compare_paths(one, returned(witness=None)).label == "INCONCLUSIVE:no-witness"
    assert compare_paths(one, returned(witness={"paths": {}})).kind == "INCONCLUSIVE"
    assert (
        compare_paths(variant("gather", compiled=False), variant("gather", compiled=True)).kind
        == "PASS"
    )
