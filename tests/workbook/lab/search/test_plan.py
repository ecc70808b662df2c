import json
import sys

import pytest
from places import NOTEBOOKS

from workbook.lab.search.factors import TRAINING_SUBJECT, find, known, listed
from workbook.lab.search.plan import ATTEMPT, Plan

STRANGER = "lab_entries:broken_pair"
BOTH = [False, True]


def plan(**more):
    return Plan.from_dict({"factors": {"layers": [1, 2]}, "settings": {"device": "cpu"}} | more)


def test_every_factor_of_the_lab_is_known_and_its_default_is_legal():
    factors = known(TRAINING_SUBJECT)
    asked_for = (
        "branch selected_backend compressed_backend window_backend layers tokens dim batch dtype "
        "checkpoint aux_stats tracing strict safe_packing allocator launch_blocking anomaly "
        "deterministic compile ranks communication static_graph find_unused_parameters python "
        "deadline_factor comm_hook gradient_as_bucket_view bucket_mb conservative weights planted"
    )
    assert set(asked_for.split()) <= set(factors)
    for factor in factors.values():
        assert factor.check(factor.default) == factor.default
        assert factor.help and json.dumps(factor.default) is not None
    assert all(name in listed() for name in factors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("branch", "select", r"branch='select': is unknown; known are all, cmp, slc, win"),
        ("selected_backend", "maskd", "the nearest is 'masked'"),
        ("backend", None, "known are auto"),
        ("layers", 0, "layers=0: must be a whole number of at least 1"),
        ("layers", True, "layers=True: must be a whole number"),
        ("layers", 2.0, "layers=2.0: must be a whole number"),
        ("dtype", "fp-16", "known are fp32, bf16, fp16"),
        ("checkpoint", "2-4", "is not a layer range"),
        ("checkpoint", True, "must be text"),
        ("aux_stats", "yes", "must be true or false"),
        ("tracing", "al", "the nearest is 'all'"),
        ("allocator", "expandable", "must be text as 'max_split_size_mb:64'"),
        ("python", "/nowhere/python", "must be the path of a Python interpreter"),
        ("deadline_factor", 0, "must be a number greater than 0"),
        ("preset", "smok", "the nearest is 'smoke'"),
        ("changes", "phi", "must be a mapping"),
        ("lr", "1e-3", "must be a number"),
        ("ranks", 0, "at least 1"),
    ],
)
def test_an_illegal_value_is_refused_with_what_would_do(name, value, message):
    with pytest.raises(ValueError, match=message):
        find(TRAINING_SUBJECT, name).check(value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"factors": {"layer": [1, 2]}}, "unknown factor 'layer'; the nearest is 'layers'"),
        ({"factors": {"T": [64, 128]}}, "unknown factor 'T'; the nearest is 'tokens'"),
        ({"factors": {"xyzzy": [1]}}, "unknown factor 'xyzzy'; known are ranks"),
        ({"settings": {"branches": "cmp"}}, "unknown factor 'branches'; the nearest is 'branch'"),
        ({"factor": {}}, "a plan has no 'factor'; the nearest is 'factors'"),
        ({"factors": {}}, "a plan needs factors"),
        ({"factors": {"layers": 2}}, "factor 'layers' wants a list of values, got 2"),
        ({"factors": {"layers": []}}, "wants a list of values"),
        ({"factors": {"layers": [1, 1]}}, "factor 'layers' has 1 twice"),
        ({"factors": ["layers"]}, "must be a mapping"),
        ({"settings": {"layers": 2}}, "both fixed and varied: layers"),
        ({"never": [{"layers": 3}]}, r"never: layers: 3 is none of \[1, 2\]"),
        ({"never": [{"layer": 1}]}, "never names 'layer', which is not varied; known are layers"),
        ({"never": {"layers": 1}}, "must be a list of mappings"),
        ({"seen": {"layers": 3}}, r"seen: layers: 3 is none of \[1, 2\]"),
        ({"seen": {"layer": 1}}, "seen names 'layer', which is not varied; known are layers"),
        ({"seen": [1]}, "must be a mapping"),
        ({"seen": {"layers": 2}, "never": [{"layers": 2}]}, "what was seen cannot be run: never"),
        ({"never": [{"layers": 1}, {"layers": 2}]}, "no value of layers can be run"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"most": True}, "most=True must be a whole number"),
        ({"deadline_s": -1}, "must be a number of seconds greater than 0"),
        ({"stall_s": None}, "must be a number of seconds greater than 0"),
        ({"on_hang": "end"}, "on_hang='end' is unknown; known are report, kill"),
        ({"on_stall": True}, "on_stall=True is unknown; known are report, kill"),
        ({"cover": "pair"}, "cover='pair' is unknown; known are all, pairs, triples"),
        ({"kind": "HUNG"}, "the nearest is 'HANG'"),
        ({"oracles": ["finit"]}, "no oracle 'finit'; the nearest is 'finite'"),
        ({"subject": "no_such_module:make"}, "there is no module no_such_module"),
        ({"subject": "lab"}, "no module of that name .* as 'package.module:function'"),
        ({"factors": {"deadline_factor": [1.0, 2.0]}}, "nothing to multiply; give deadline_s"),
        ({"settings": {"ranks": 2}}, "the settings cannot be run: batch=1 cannot be split"),
        ({"factors": {"batch": [1, 3]}, "settings": {"ranks": 2}}, "no value of batch can be run"),
        ({"factors": {"compile": [True, False], "strict": [True, False]}},
         "the first value of every factor, cannot be run: strict looks at values"),
        ({"factors": {"device": ["cuda", "cpu"]}, "settings": {"communication": "nccl"}},
         "DDP's options have no effect on one rank"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_in_words(more, message):
    with pytest.raises(ValueError, match=message):
        plan(**more)


def test_what_does_not_go_together_is_left_out_and_told_of(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    switches = dict.fromkeys(("compile", "strict", "launch_blocking"), BOTH)
    made = plan(factors=switches | {"branch": ["all", "cmp"], "window_backend": [None, "masked"]})
    assert made.left_out == (
        "launch_blocking=true: allocator and launch_blocking have no effect without a GPU",
    )
    assert made.values["launch_blocking"] == [False]
    assert made.factors["launch_blocking"] == BOTH
    cells = list(made.cells())
    assert len(cells) == 3 * 3 and cells[0] == made.base
    assert not any(cell["compile"] and cell["strict"] for cell in cells)
    assert not any(cell["branch"] == "cmp" and cell["window_backend"] for cell in cells)
    both = {"branch": "cmp", "window_backend": "masked"}
    assert "has no effect on branch='cmp'" in made.why_not(both)


RANKS = {"device": "cpu", "ranks": 2, "batch": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_hook": "bf16"}, "DDP's options have no effect on one rank"),
        ({"gradient_as_bucket_view": False}, "DDP's options have no effect on one rank"),
        (RANKS | {"parallel": "fsdp", "comm_hook": "bf16"}, "parallel='fsdp' has no use for them"),
        (RANKS | {"tracing": "buckets", "comm_hook": "bf16"}, "DDP takes one only"),
        (RANKS | {"weights": "bf16"}, "a specimen of one rank without autocast"),
        ({"weights": "bf16", "dtype": "fp16"}, "a specimen of one rank without autocast"),
        ({"conservative": True, "dtype": "bf16", "compile": True},
         "conservative turns all optimisations off, dtype=bf16, compile=true turns one on"),
        ({"conservative": True, "window_backend": "sdpa"}, "a branch's own backend turns one on"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(settings={"device": "cpu"} | settings)


def test_a_conservative_trial_has_what_determinism_needs_set_before_it_starts():
    made = plan(factors={"conservative": BOTH}, settings={"device": "cpu", "backend": "masked"})
    assert made.spec({"conservative": True}).env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert made.spec({"conservative": False}).env == {}


def test_never_is_kept_to():
    never = [{"layers": [2, 4], "strict": True}]
    made = plan(factors={"layers": [1, 2, 4], "strict": BOTH}, never=never)
    assert len(list(made.cells())) == 4
    assert made.why_not({"layers": 2, "strict": True}) == "never: layers=2, strict=true"
    assert made.legal({"layers": 2})


def test_pairs_are_fewer_than_all_and_begin_with_the_defaults():
    factors = {"layers": [1, 2, 4], "strict": BOTH, "anomaly": BOTH, "tokens": [64, 128, 256]}
    every, pairs = plan(factors=factors), plan(factors=factors, cover="pairs")
    cells = list(pairs.cells())
    assert len(list(every.cells())) == every.size() == 36
    assert 9 <= len(cells) < 16 and cells[0] == pairs.base


def test_a_cell_becomes_a_spec_with_what_must_be_set_before_torch_starts():
    made = plan(
        factors={"launch_blocking": [False], "allocator": [""], "anomaly": BOTH},
        settings={"device": "cpu", "python": sys.executable, "ranks": 2, "batch": 2,
                  "env.OMP_NUM_THREADS": "1", "deterministic": True, "aux_stats": True},
        steps=5, deadline_s=10,
    )  # fmt: skip
    spec = made.spec({"launch_blocking": True, "allocator": "max_split_size_mb:64",
                      "anomaly": True, "deadline_factor": 2.0})  # fmt: skip
    assert spec.subject == TRAINING_SUBJECT and spec.steps == 5 and spec.ranks == 2
    assert spec.python == sys.executable and spec.seed == spec.settings["seed"] == 1337
    assert spec.env == {
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }
    assert set(spec.observers) == {"launch_blocking", "anomaly", "aux_stats"}
    assert spec.oracles == ("arrival", "finite", "ranks")
    assert not {"python", "ranks", "deadline_factor", "env.OMP_NUM_THREADS"} & set(spec.settings)
    assert plan(oracles=[]).spec({}).oracles == ()


def test_a_deadline_grows_by_its_factor_and_observers_are_told():
    made = plan(deadline_s=30, predicted_s=4.0, factors={"deadline_factor": [1, 2, 5]})
    asked = [made.options(cell) for cell in made.cells()]
    assert [options["deadline_s"] for options in asked] == [30, 60, 150]
    assert {options["factor"] for options in asked} == {1.0}
    assert asked[0]["predicted_s"] == 4.0 and asked[0]["stall_s"] == 5.0
    assert plan().options({"anomaly": True, "aux_stats": True})["factor"] == pytest.approx(5.04)
    assert plan().options({})["deadline_s"] is None


def test_a_certified_hang_is_ended_and_a_stall_is_not_unless_the_plan_says_so():
    actions = [made.options({}) for made in (plan(), plan(on_hang="report", on_stall="kill"))]
    told = [(options["on_hang"], options["on_stall"]) for options in actions]
    assert told == [("kill", "report"), ("report", "kill")]


def test_another_attempt_is_another_trial_of_the_same_settings():
    made = plan()
    first, second = made.spec(made.base), made.spec(made.base, 1)
    assert first.settings == second.settings and second.env == {ATTEMPT: "1"}
    assert first.id("", {}) != second.id("", {})


def test_a_strangers_factors_may_be_any_json():
    made = Plan(subject=STRANGER, factors={"cache": [False, {"size": 3}], "T": [[1], "x"]})
    assert len(list(made.cells())) == 4
    spec = made.spec({"cache": {"size": 3}, "T": [1], "ranks": 2})
    assert spec.settings == {"cache": {"size": 3}, "T": [1], "seed": 1337} and spec.ranks == 2
    with pytest.raises(ValueError, match="does not fit JSON"):
        Plan(subject=STRANGER, factors={"cache": [{1, 2}]})
    with pytest.raises(ValueError, match="ranks=0: must be a whole number"):
        Plan(subject=STRANGER, factors={"ranks": [0]})


def test_a_plan_with_what_is_gone_still_opens():
    assert plan(screen=True) == plan()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("params/plan_*.yaml")), ids=lambda p: p.stem)
def test_a_plan_that_is_shipped_can_be_run(path):
    yaml = pytest.importorskip("yaml")
    made = Plan.from_dict(yaml.safe_load(path.read_text()))
    assert made.question and 1 < len(list(made.cells())) <= 40
    for cell in made.cells():
        made.spec(cell)
