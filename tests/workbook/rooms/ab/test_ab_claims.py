"""Every rule of an A/B, on trials made to deserve each of its verdicts."""

import math

import pytest

from whyhung.verdict import Verdict
from whyhung.watch.evidence import End, Evidence
from workbook.lab.search.execute import Done
from workbook.rooms.ab import claims, plots, table
from workbook.rooms.ab.plan import ABPlan
from workbook.rooms.ab.trials import Results, Trial

TWO = {"factors": {"backend": ["gather", "masked"]}}
DEPTHS = {"factors": {"layers": [1, 2, 4, 8]}}
CHOICES = {"factors": {"backend": ["gather", "masked", "sdpa"], "checkpoint": ["", "all"]}}


def results(given, rule, make, repeats=3, missing=0):
    """Results of one rule; make(cell, turn) gives a trial's values, and how it ended."""
    plan = ABPlan(**given, expect=[rule] if rule else [], repeats=repeats, count=True)
    found = Results(plan)
    for turn in range(repeats):
        for variant in plan.listed:
            made = {"kind": "PASS", "losses": [5.0, 4.0], "says": "", "paths": None} | make(
                variant.cell, turn
            )
            paths = made["paths"] or str(variant.cell)
            evidence = Evidence(
                spec={"settings": variant.trial | {"tokens": 64}},
                end=End("returned", 0, message=made["says"]),
                losses=made["losses"],
                witness={"paths": {"cmp": {paths: 1}}},
                result={"gradients": made.get("gradients", "same")},
            )
            done = Done(variant.trial, f"{len(found.trials):012x}", Verdict(made["kind"]), evidence)
            values = {name: v for name, v in made.items() if isinstance(v, float)}
            found.trials.append(
                Trial(variant, turn, done, values if made["kind"] == "PASS" else {})
            )
    if missing:
        found.trials, found.why = found.trials[:-missing], "the budget of 1 s is spent"
    return found


def verdict(given, rule, make, **more):
    (judged,) = claims.judge(results(given, rule, make, **more))[:1]
    return judged.verdict


def by(name, values, noise=(0.0, 0.01, -0.01), **of):
    """A metric by a variant's value of a factor, with a little noise by turn."""
    return lambda cell, turn: {of.get("of", "seconds"): values[cell[name]] * (1 + noise[turn])}


STEADY = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "kinds, expected",
    [(("PASS", "PASS"), "PASS"), (("HANG", "HANG"), "PASS"), (("PASS", "HANG"), "FAIL"),
     (("PASS", "INCONCLUSIVE"), "INCONCLUSIVE")],
)  # fmt: skip
def test_the_same_verdict(kinds, expected):
    of = dict(zip(("gather", "masked"), kinds, strict=True))
    assert verdict(TWO, "same_verdict", lambda c, t: {"kind": of[c["backend"]]}) == expected


def test_one_turn_that_ends_otherwise_is_not_the_same_verdict():
    assert verdict(TWO, "same_verdict", lambda c, t: {"kind": "SLOW" if t else "PASS"}) == "FAIL"


@pytest.mark.parametrize(
    "wanted, expected",
    [("PASS", "FAIL"), ({"backend=masked": "CRASH", "*": "PASS"}, "PASS"),
     ({"backend=gather": "PASS"}, "PASS"), ({"backend=masked": "OOM"}, "FAIL")],
)  # fmt: skip
def test_a_named_verdict(wanted, expected):
    def make(cell, turn):
        return {"kind": "CRASH" if cell["backend"] == "masked" else "PASS"}

    assert verdict(TWO, {"verdict": wanted}, make) == expected


@pytest.mark.parametrize(
    "says, kind, expected",
    [("nan in MulBackward0", "CRASH", "PASS"), ("nan somewhere", "CRASH", "FAIL"),
     ("nan in MulBackward0", "PASS", "FAIL")],
)  # fmt: skip
def test_a_planted_fault_is_one_that_fails_and_says_what(says, kind, expected):
    rule = {"fault": {"variant": "backend=masked", "says": "MulBackward0"}}
    assert verdict(TWO, rule, lambda c, t: {"kind": kind, "says": says}) == expected


@pytest.mark.parametrize(
    "paths, operations, expected",
    [((None, None), (9.0, 9.0), "PASS"), (("x", "x"), (9.0, 8.0), "PASS"),
     (("x", "x"), (9.0, 9.0), "FAIL")],
)  # fmt: skip
def test_variants_are_different_programs_by_their_paths_or_their_operations(
    paths, operations, expected
):
    def make(cell, turn):
        index = cell["backend"] == "masked"
        return {"paths": paths[index], "operations": operations[index], "nodes": 1.0}

    assert verdict(TWO, "different_programs", make) == expected


def test_variants_that_name_other_code_and_ran_the_same_are_invalid_unasked():
    def make(cell, turn):
        return {"paths": "x"}

    (judged,) = claims.judge(results(TWO, None, make))
    assert judged.verdict == "FAIL" and judged.found.startswith("INVALID, backend=")
    assert not claims.judge(results(TWO, None, lambda c, t: {}))


@pytest.mark.parametrize(
    "rule, losses, expected",
    [
        ({"equal_loss": 1e-4}, ([5.0, 4.0], [5.0, 4.00005]), "PASS"),
        ({"equal_loss": 1e-4}, ([5.0, 4.0], [5.001, 4.0]), "FAIL"),
        ({"equal_loss": 0}, ([5.0, 4.0], [5.0, 4.0]), "PASS"),
        ({"equal_loss": 0}, ([5.0, 4.0], [5.0, 4.0000001]), "FAIL"),
        ({"equal_loss": 1}, ([5.0, 4.0], [5.0, math.nan]), "FAIL"),
        ({"loss_within": 0.01}, ([9.0, 4.0], [5.0, 4.03]), "PASS"),
        ({"loss_within": 0.01}, ([5.0, 4.0], [5.0, 4.05]), "FAIL"),
        ({"loss_within": 0.01}, ([5.0, 4.0], [5.0, math.nan]), "INCONCLUSIVE"),
        ({"loss_apart": 0.01}, ([5.0, 4.0], [5.0, 4.05]), "PASS"),
        ({"loss_apart": 0.01}, ([5.0, 4.0], [5.0, 4.0]), "FAIL"),
    ],
)
def test_losses(rule, losses, expected):
    of = dict(zip(("gather", "masked"), losses, strict=True))
    assert verdict(TWO, rule, lambda c, t: {"losses": of[c["backend"]]}) == expected


@pytest.mark.parametrize(
    ("rule", "ends", "expected"),
    [
        # of the smaller: 0.25 / 4 and not 0.25 / 4.25
        ({"loss_within": 0.06}, (4.0, 4.25, 4.0), "FAIL"),
        ({"loss_within": 0.0625}, (4.25, 4.0, 4.0), "PASS"),
        ({"loss_apart": 0.06}, (4.0, 4.25, 4.75), "PASS"),
        ({"loss_apart": 0.0625}, (4.25, 4.0, 4.75), "FAIL"),  # the nearest two are judged
        ({"loss_within": 0.06}, (4.75, 4.0, 4.0), "FAIL"),  # and here the farthest
    ],
)
def test_last_losses_are_compared_in_pairs_relative_to_the_smaller(rule, ends, expected):
    of = dict(zip(("gather", "masked", "sdpa"), ends, strict=True))
    given = {"factors": {"backend": list(of)}}
    assert verdict(given, rule, lambda c, t: {"losses": [9.0, of[c["backend"]]]}) == expected


def test_losses_of_a_variant_that_failed_are_not_compared():
    def make(cell, turn):
        return {"kind": "CRASH" if cell["backend"] == "masked" else "PASS"}

    assert verdict(TWO, {"equal_loss": 0}, make) == "INCONCLUSIVE"


def test_losses_are_compared_among_variants_that_train_the_same():
    given = {"factors": {**DEPTHS["factors"], **TWO["factors"]}}
    assert verdict(given, {"equal_loss": 0}, lambda c, t: {"losses": [c["layers"]]}) == "PASS"


@pytest.mark.parametrize("digest, expected", [("same", "PASS"), ("other", "FAIL")])
def test_gradients_bit_for_bit(digest, expected):
    def make(cell, turn):
        return {"gradients": digest if cell["backend"] == "masked" else "same"}

    assert verdict(TWO, "equal_gradients", make) == expected


@pytest.mark.parametrize("masked, equal, differs", [(100.05, "PASS", "FAIL"),
                                                    (103.0, "FAIL", "PASS")])  # fmt: skip
def test_memory_that_is_equal_and_memory_that_differs(masked, equal, differs):
    make = by("backend", {"gather": 100.0, "masked": masked}, STEADY, of="allocated")
    assert verdict(TWO, {"equal": {"of": "allocated"}}, make) == equal
    assert verdict(TWO, {"differs": {"of": "allocated", "by": 0.01}}, make) == differs


def test_what_was_not_measured_is_not_decided():
    assert verdict(TWO, {"equal": {"of": "reserved"}}, lambda c, t: {}) == "INCONCLUSIVE"


@pytest.mark.parametrize(
    "bounds, ratio, noise, expected",
    [
        ({"least": 1.5, "most": 2.5}, 2.0, 0.01, "PASS"),
        ({"most": 1.5}, 2.0, 0.01, "FAIL"),
        ({"least": 2.5}, 2.0, 0.01, "FAIL"),
        ({"most": 1.5}, 2.0, 0.5, "INCONCLUSIVE"),
        ({}, 2.0, 0.01, ""),
    ],
)
def test_a_cost_is_judged_by_its_interval(bounds, ratio, noise, expected):
    noises = (0.0, noise, -noise)

    def make(cell, turn):
        masked = cell["backend"] == "masked"
        return {"seconds": ratio * (1 + noises[turn]) if masked else 1.0}

    assert verdict(TWO, {"cost": {"factor": "backend", **bounds}}, make) == expected


def test_drift_that_meets_both_variants_of_a_turn_does_not_widen_a_cost():
    drift = (1.0, 3.0, 10.0)
    make = lambda c, t: {"seconds": drift[t] * (2.0 if c["backend"] == "masked" else 1.0)}  # noqa: E731
    rule = {"cost": {"factor": "backend", "least": 1.99, "most": 2.01}}
    assert verdict(TWO, rule, make) == "PASS"


@pytest.mark.parametrize("gather, masked", [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_has_no_ratio(gather, masked):
    rule = {"cost": {"factor": "backend", "of": "allocated", "least": 0.5}}
    make = by("backend", {"gather": gather, "masked": masked}, STEADY, of="allocated")
    (judged,) = claims.judge(results(TWO, rule, make))
    assert judged.verdict == "INCONCLUSIVE" and "allocated is 0 in some variant" in judged.found


def test_one_turn_has_no_interval_of_times_and_a_point_of_memory():
    def of(metric):
        rule = {"cost": {"factor": "backend", "of": metric, "least": 1.5}}
        make = by("backend", {"gather": 1.0, "masked": 2.0}, of=metric)
        return verdict(TWO, rule, make, repeats=1)

    assert of("seconds") == "INCONCLUSIVE" and of("allocated") == "PASS"


@pytest.mark.parametrize(
    "masked, sdpa, expected",
    [(2.0, 3.0, "PASS"), (3.0, 2.0, "FAIL"), (1.001, 3.0, "INCONCLUSIVE")],
)
def test_a_rank_order_is_over_all_other_factors(masked, sdpa, expected):
    values = {"gather": 1.0, "masked": masked, "sdpa": sdpa}

    def make(cell, turn):
        noise = {"gather": 0.01, "masked": -0.01, "sdpa": 0.0}[cell["backend"]] * (turn - 1)
        return {"seconds": values[cell["backend"]] * (5 if cell["checkpoint"] else 1) * (1 + noise)}

    rule = {"rank_order": {"factor": "backend", "order": ["gather", "masked", "sdpa"]}}
    assert verdict(CHOICES, rule, make) == expected


def test_equal_memory_is_no_order():
    rule = {"rank_order": {"factor": "backend", "of": "allocated", "order": ["gather", "masked"]}}
    assert verdict(TWO, rule, lambda c, t: {"allocated": 1.0}) == "FAIL"


@pytest.mark.parametrize(
    "seconds, noise, expected",
    [
        ({1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0}, (0.0, 0.01, -0.01), "PASS"),
        ({1: 2.0, 2: 3.0, 4: 5.0, 8: 90.0}, (0.0, 0.01, -0.01), "FAIL"),
        ({1: 2.0, 2: 4.0, 4: 3.0, 8: 6.0}, (0.0, 0.9, -0.9), "INCONCLUSIVE"),
    ],
)
def test_a_line_over_layers(seconds, noise, expected):
    rule = {"linear_in": {"factor": "layers"}}
    assert verdict(DEPTHS, rule, by("layers", seconds, noise)) == expected


def test_counts_off_a_line_have_no_noise_to_hide_behind():
    counts = {1: 2.0, 2: 3.0, 4: 5.0, 8: 20.0}
    rule = {"linear_in": {"factor": "layers", "of": "operations"}}
    make = by("layers", counts, STEADY, of="operations")
    assert verdict(DEPTHS, rule, make) == verdict(DEPTHS, rule, make, repeats=1) == "FAIL"


def test_a_depth_that_hangs_leaves_no_line():
    def make(cell, turn):
        return {"seconds": 1.0} if cell["layers"] < 5 else {"kind": "HANG"}

    (judged,) = claims.judge(results(DEPTHS, {"linear_in": {"factor": "layers"}}, make))
    assert judged.verdict == "INCONCLUSIVE" and "layers=8 ended as HANG" in judged.found


@pytest.mark.parametrize("power, expected", [(1.0, "PASS"), (2.0, "FAIL")])
def test_an_exponent_is_judged_by_its_interval(power, expected):
    given = {"factors": {"tokens": [128, 256, 512, 1024]}}
    rule = {"exponent_in": {"factor": "tokens", "least": 0.8, "most": 1.2}}
    make = by("tokens", {t: float(t) ** power for t in given["factors"]["tokens"]})
    assert verdict(given, rule, make) == expected
    assert verdict(given, {"exponent_in": {"factor": "tokens"}}, make) == ""


def test_trials_that_were_not_run_decide_nothing_and_are_told():
    found = results(TWO, "same_verdict", lambda c, t: {}, missing=1)
    (judged,) = claims.judge(found)
    assert judged.verdict == "INCONCLUSIVE" and "the budget of 1 s is spent" in judged.found
    with pytest.raises(RuntimeError, match=r"1 of 6 trials were not run.*the same command goes on"):
        found.finish()


def test_a_claim_names_the_trials_it_stands_on_and_a_number_nobody_predicted_is_none():
    found = results(TWO, "same_verdict", lambda c, t: {})
    judged = claims.judge(found)
    (claim,) = [one.claim for one in judged]
    assert claims.tally(judged) == "of 1 predictions 1 hold, 0 are refuted, 0 are undecided"
    assert claim.evidence["trials"] == [trial.id for trial in found.trials]
    rule = {"cost": {"factor": "backend"}}
    (number,) = claims.judge(results(TWO, rule, by("backend", {"gather": 1.0, "masked": 2.0})))
    assert number.verdict == "" and claims.tally([number]).startswith("of 0 predictions")


def test_the_table_has_ratios_on_a_cpu_seconds_on_a_gpu_and_no_numbers_of_what_failed():
    def make(cell, turn):
        if cell["checkpoint"]:
            return {"kind": "OOM"}
        return {"seconds": 2.0 if cell["backend"] == "masked" else 1.0, "allocated": 3.0}

    found = results(CHOICES, "same_verdict", make)
    on_cpu, on_gpu = table.variants(found, on_cpu=True), table.variants(found, on_cpu=False)
    masked, failed = "backend=masked, checkpoint=''", "backend=gather, checkpoint=all"
    assert on_cpu.loc[masked, "seconds / first"] == "2.00"
    assert on_gpu.loc[masked, "seconds, s"] == "2"
    assert on_cpu.loc[failed, "verdict"] == "3 x OOM" and not on_cpu.loc[failed, "allocated, MiB"]
    assert len(table.failures(found)) == 9
    rows = table.to_metrics(found)
    assert [row["config"]["outcome"] for row in rows if row["median"] is None] == ["OOM"] * 3


def test_figures_are_drawn_of_what_there_is():
    plain = results(TWO, None, by("backend", {"gather": 1.0, "masked": 2.0}))
    depths = results(DEPTHS, None, by("layers", {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}))
    nothing = results(DEPTHS, None, lambda c, t: {"kind": "HANG"})
    assert plots.variants(plain) and plots.variants(nothing) and plots.over(nothing)
    assert plots.over(plain) is None and plots.losses(plain) is None
    (axes,) = plots.variants(plain).axes
    assert axes.get_legend_handles_labels()[1] == ["one turn", "median"]
    (axes,) = plots.over(depths).axes
    assert axes.get_xlabel() == "layers" and "least squares" in axes.get_legend_handles_labels()[1]
