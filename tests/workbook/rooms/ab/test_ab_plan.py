"""A plan of variants: what it means, and what is refused before any trial."""

import pytest
from places import ROOT

from workbook.lab.search.factors import TRAINING_SUBJECT
from workbook.rooms.ab.plan import ABPlan, check_parameters
from workbook.runs.parameters import read_file

TWO = {"factors": {"backend": ["gather", "masked"]}}
GRID = {"factors": {"backend": ["gather", "masked"], "layers": [1, 2, 4]}}


def names(**given):
    return [variant.name for variant in ABPlan(**given).listed]


def test_every_combination_is_a_variant_and_the_first_values_come_first():
    assert names(**GRID)[0] == "backend=gather, layers=1" and len(names(**GRID)) == 6


def test_never_leaves_variants_out():
    never = [{"backend": "masked", "layers": [2, 4]}]
    assert len(names(**GRID, never=never)) == 4


def test_variants_by_name_have_the_defaults_of_what_they_do_not_name():
    variants = {"plain": {}, "careful": {"anomaly": True, "checkpoint": "all"}}
    plain, careful = ABPlan(variants=variants).listed
    assert plain.trial == {"anomaly": False, "checkpoint": ""}
    assert careful.trial == variants["careful"] and careful.cell == {"variant": "careful"}


def test_a_stored_plan_of_named_variants_means_what_it_meant(tmp_path):
    file = tmp_path / "parameters.yaml"
    file.write_text(
        "arms: {plain: {}, careful: {anomaly: true}}\n"
        "expect: [{cost: {factor: arm, value: careful}}, {fault: {arm: plain, says: no}},\n"
        "         {equal_loss: 0.0, where: {arm: [plain, careful]}}]\n"
    )
    cost, fault, loss = ABPlan(**read_file(file)).rules
    assert (cost.given["factor"], fault.given["variant"]) == ("variant", "plain")
    assert loss.says.endswith("where variant=['plain', 'careful']")
    own = {"subject": "stranger:make", "factors": {"arm": [1, 2, 3]}}  # a factor of that name
    (line,) = ABPlan(**own, expect=[{"linear_in": {"factor": "arm"}}]).rules
    assert line.given["factor"] == "arm"


def test_the_parameters_of_every_committed_run_are_those_of_today():
    files = sorted((ROOT / "runs").glob("*/08_ab-*/parameters.yaml"))
    assert len(files) >= 12
    for file in files:
        given = read_file(file)
        assert given["subject"] == TRAINING_SUBJECT
        check_parameters(given)  # of one for a GPU little can be said here


def test_true_and_1_are_two_values():
    variants = {"a": {"width": 1, "depth": 2}, "b": {"width": True, "depth": 3}}
    plan = ABPlan(subject="stranger:make", variants=variants)
    assert [type(value) for value in plan.trials.values["width"]] == [int, bool]
    assert [type(variant.trial["width"]) for variant in plan.listed] == [int, bool]


def test_every_trial_is_measured_and_counted_only_if_asked_for():
    def observers(**more):
        plan = ABPlan(**TWO, **more)
        return plan.trials.spec(plan.listed[0].trial).observers

    assert observers() == ("measure",) and observers(count=True) == ("measure", "count")


def test_a_plan_is_placed_where_it_does_not_say_itself_what_trains_it():
    def settings(**given):
        plan = ABPlan.on("cpu", 1, **given)
        return [plan.trials.spec(variant.trial).settings["threads"] for variant in plan.listed]

    assert settings(**TWO) == [1, 1]
    assert settings(**TWO, settings={"threads": 2}) == [2, 2]
    assert settings(factors={"threads": [1, 2]}) == [1, 2]
    assert settings(variants={"one": {"threads": 1}, "two": {"threads": 2}}) == [1, 2]


def test_a_strangers_subject_gets_no_settings_of_ours():
    plan = ABPlan.on("cpu", 1, subject="stranger:make", factors={"width": [1, 2]})
    assert plan.trials.spec(plan.listed[0].trial).settings == {"width": 1, "seed": 1337}


def test_variants_that_train_the_same_are_told_from_those_that_do_not():
    groups = ABPlan(**GRID).alike().values()
    assert [[variant.cell["layers"] for variant in group] for group in groups] == [
        [1, 1],
        [2, 2],
        [4, 4],
    ]


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "no variants: a plan has factors"),
        ({**TWO, "variants": {"a": {}, "b": {"anomaly": True}}}, "both factors and variants"),
        ({"factors": {"bakend": ["gather"]}}, "unknown factor 'bakend'; the nearest is 'backend'"),
        ({"variants": {"a": {}, "b": {"anomlay": True}}}, "the nearest is 'anomaly'"),
        ({"variants": {"a": {}, "b": {}}}, "all are equal"),
        ({"variants": {"a": {}, "b": {"anomaly": False}}}, "variants 'a' and 'b' are equal"),
        ({"variants": {"a": {}, "b": "anomaly"}}, "must be a mapping of factors"),
        (
            {"variants": {"a": {"layers": 1, "checkpoint": "0:2"}, "b": {}}},
            "cannot be run",
        ),
        ({"factors": {"layers": [2]}}, "one variant, .*, has none to be compared with"),
        ({"factors": {"layers": [1, 2]}, "steps": 2}, "leave none to time after warmup=2"),
        ({**TWO, "settings": {"compile": True}, "count": True}, "fused kernels"),
        ({**TWO, "repeats": 0}, "repeats=0 must be a whole number of at least 1"),
        ({**TWO, "settings": {"measure": False}}, "every trial is measured"),
        ({**TWO, "settings": {"backend": "gather"}}, "both fixed and varied"),
        (
            {"subject": "stranger:make", "variants": {"a": {"width": 1}, "b": {}}},
            "give it in every variant",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ABPlan(**given)


@pytest.mark.parametrize(
    "rule, message",
    [
        ("same_verdit", "no rule 'same_verdit'; the nearest is 'same_verdict'"),
        (3, "a rule is its name"),
        ({"same_verdict": None, "equal_gradients": None}, "each entry is one rule"),
        ({"same_verdict": 3}, "takes nothing, got 3"),
        ({"equal_loss": "little"}, "wants a number of at least 0, got 'little'"),
        ({"equal_loss": -1}, "of at least 0"),
        ({"verdict": "PAST"}, "verdict='PAST' is unknown"),
        ({"verdict": {"backend=gathre, layers=1": "PASS"}}, "the nearest is 'backend=gather, l"),
        ({"fault": {"variant": "backend=gather, layers=1"}}, "fault needs says"),
        ({"equal": {"of": "alocated"}}, "the nearest is 'allocated'"),
        ({"equal": {"of": "seconds"}}, "cost, with least and most, judges their interval"),
        ({"equal": {"of": "operations"}}, "count: true"),
        ({"cost": {"factor": "tokens"}}, "'tokens' is not varied by this plan"),
        ({"cost": {"factor": "layers"}}, "say which: value"),
        ({"cost": {"factor": "layers", "base": 3, "value": 1}}, "3 is none of"),
        ({"cost": {"factor": "layers", "base": 1, "value": 1}}, "are both 1"),
        ({"cost": {"factor": "backend", "leest": 1}}, "cost has no 'leest'; the nearest"),
        ({"cost": {"factor": "backend", "least": 2, "most": 1}}, "least=2 is above most=1"),
        ({"linear_in": {"factor": "backend"}}, "must be 3 or more numbers"),
        ({"linear_in": {"factor": "tokens"}}, "'tokens' is not varied"),
        (
            {"linear_in": {"factor": "layers"}, "where": {"layers": [1, 2]}},
            "no two variants differ",
        ),
        ({"linear_in": {"factor": "layers", "r2": 2}}, "more than 1"),
        ({"exponent_in": {"factor": "layers", "start": 2}}, "must be 3 or more numbers"),
        ({"rank_order": {"factor": "backend", "order": ["gather"]}}, "two or more values"),
        ({"rank_order": {"factor": "backend", "order": ["gather", "flex"]}}, "'flex' is none of"),
        ({"equal_loss": 0, "where": {"backend": "gather"}}, "no two variants train the same"),
        ({"same_verdict": None, "where": {"layers": 3}}, "3 is none of"),
        ({"same_verdict": None, "where": {"tokens": 3}}, "'tokens' is not varied"),
        ({"same_verdict": None, "where": {"layers": 1, "backend": "gather"}}, "leaves 1 variant"),
    ],
)
def test_an_expectation_that_does_not_fit_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        ABPlan(**GRID, expect=[rule])


def test_a_power_is_of_the_values_from_its_start_on():
    depths = {"factors": {"layers": [1, 2, 4, 8]}}
    (rule,) = ABPlan(**depths, expect=[{"exponent_in": {"factor": "layers", "start": 2}}]).rules
    assert [[variant.cell["layers"] for variant in group] for group in rule.groups] == [[2, 4, 8]]


def test_yaml_reads_1e_4_as_text_and_the_rule_as_a_number():
    (rule,) = ABPlan(**TWO, expect=[{"equal_loss": "1e-4"}]).rules
    assert rule.given == {"limit": 1e-4} and "0.0001 nats" in rule.says
