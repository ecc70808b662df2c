import json

import pytest
import torch
from tiny_models import tiny

from nsa.attention import registry
from nsa.experiments.correctness import learning
from nsa.experiments.correctness.learning import LUCK, PEEK, SOLVED, Taking, learn, peek
from nsa.experiments.correctness.lessons import LESSONS, lesson
from nsa.experiments.correctness.mutants import MUTANTS
from nsa.lab.process.trial import run_child
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin
from nsa.model.tasks import Copy, Recall


def short(name="window", tokens=64, steps=2, **given):
    """A lesson of a few steps; `given` stands in its spec."""
    spec = lesson(name, tokens, backend="masked", batch=2) | given
    spec["train"] |= {"steps": steps}
    return spec


def answered(monkeypatch, looks):
    """`learn` on answers made up: {question: accuracy} for each look."""
    names = {(1, 31): "inside", (31, 31): "last", (32, 32): "outside"}
    given = (look[name] for look in looks for name in names.values())
    monkeypatch.setattr(learning, "_asked", lambda *_: next(given))


SOLVED_ALL = {"inside": 1.0, "last": SOLVED, "outside": 0.125 + LUCK}


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.parametrize("tokens", [64, 2048])
def test_a_lesson_is_json_and_its_tasks_fit_its_rows(name, tokens):
    spec = json.loads(json.dumps(lesson(name, tokens)))
    config = ModelConfig.from_dict(spec["model"])
    assert config.nsa.select_count * config.nsa.select_block < tokens
    for one in [*spec["tasks"], *(q["task"] for q in spec["questions"].values())]:
        ids, _ = learning.task(**one).batch(0, 2, tokens)
        assert ids.shape == (2, tokens)
        assert one["vocab"] == config.vocab


def test_the_row_of_a_lesson_says_what_was_found():
    row = json.loads(json.dumps(learn(short())))
    assert set(row["accuracy"]) == {"inside", "last", "outside"} == set(row["chance"])
    assert row["expected"] == {"inside": True, "last": True, "outside": False}
    assert row["steps"] == 2
    assert [look["step"] for look in row["curve"]] == [2]
    assert row["loss"] == row["curve"][-1]["loss"]
    assert row["peek"] == 0.0
    assert not row["as_expected"]  # two steps teach nothing


@pytest.mark.processes
@pytest.mark.full
def test_a_lesson_runs_in_a_process_of_its_own():
    outcome = run_child("nsa.experiments.correctness.learning:learn", short(), deadline_s=100)
    assert outcome.status == "ok", outcome.message
    assert outcome.result["tokens"] == 64


@pytest.mark.parametrize(
    ("looks", "steps", "verdict"),
    [
        ([SOLVED_ALL, SOLVED_ALL, {}], 2, True),
        ([SOLVED_ALL, SOLVED_ALL | {"inside": 0.5}, SOLVED_ALL, SOLVED_ALL], 4, True),
        ([SOLVED_ALL | {"outside": 0.125 + LUCK + 0.01}] * 4, 4, False),
        ([SOLVED_ALL | {"last": SOLVED - 0.01}] * 4, 4, False),
        ([{"inside": 0.1, "last": 0.1, "outside": 0.1}] * 3 + [SOLVED_ALL], 4, True),
    ],
)
def test_it_ends_once_all_is_as_it_should_be_twice(monkeypatch, looks, steps, verdict):
    answered(monkeypatch, looks)
    row = learn(short(steps=4, every=1))
    assert (row["steps"], row["as_expected"]) == (steps, verdict)


def test_what_peeks_is_never_as_expected(monkeypatch):
    answered(monkeypatch, [SOLVED_ALL])
    monkeypatch.setattr(learning, "peek", lambda *_, **__: PEEK)
    assert not learn(short())["as_expected"]


def test_its_time_is_limited():
    assert learn(short(every=1, budget_s=0.0))["steps"] == 1


def staged(monkeypatch, looks, steps=4):
    """`learn` on two stages, T 128 and 512, and answers made up for each look: (row, asked)."""
    asked, given = [], iter(looks)

    def answer(model, task, train):
        asked.append((train.tokens, task.distance))
        return next(given)

    monkeypatch.setattr(learning, "_asked", answer)
    spec = short("compressed", 512, steps, every=1)
    spec["stages"][0] |= {"steps": steps}
    return learn(spec), asked


def test_a_stage_ends_once_solved_and_questions_at_the_full_length_decide(monkeypatch):
    row, asked = staged(monkeypatch, [1.0, 1.0, 0.1, 0.1, 0.1, 0.1])
    assert asked == [(128, (32, 127))] * 2 + [(512, (32, 511))] * 4
    assert [look["tokens"] for look in row["curve"]] == [128] * 2 + [512] * 4
    assert [look["step"] for look in row["curve"]] == [1, 2, 3, 4, 5, 6]
    assert row["accuracy"] == {"far": 0.1} and not row["as_expected"]
    assert (row["steps"], row["tokens"]) == (6, 512)


def test_a_stage_that_is_not_solved_ends_at_its_steps(monkeypatch):
    row, asked = staged(monkeypatch, [0.1, 1.0, 0.1, 1.0, 1.0], steps=3)
    assert [tokens for tokens, _ in asked] == [128] * 3 + [512] * 2
    assert row["as_expected"]


def test_after_a_stage_that_is_not_learnt_the_full_length_comes_at_once(monkeypatch):
    monkeypatch.setattr(learning, "_asked", lambda *_: 0.1)
    spec = short("copy", 128, 1, every=1)
    for stage in spec["stages"]:
        stage |= {"steps": 2}
    assert [look["tokens"] for look in learn(spec)["curve"]] == [64, 64, 128]


def test_short_of_time_only_the_full_length_is_trained():
    row = learn(lesson("compressed", 512, backend="masked") | {"every": 1, "budget_s": 0.0})
    assert [(look["tokens"], look["step"]) for look in row["curve"]] == [(512, 1)]


def test_a_stage_goes_on_with_the_weights_of_the_one_before(monkeypatch):
    """Only the first draws them: a stage at a rate of nearly nothing leaves what it found."""
    seen = []

    def answer(model, task, train):
        seen.append(model.head.weight.detach().clone())
        return 1.0

    monkeypatch.setattr(learning, "_asked", answer)
    spec = short("compressed", 512, 1)
    spec["train"] |= {"lr": 1e-12}
    spec["stages"] = [spec["stages"][0] | {"steps": 1, "lr": 1e-12}] * 2
    torch.manual_seed(0)
    learn(spec)
    assert torch.allclose(seen[0], seen[1]) and torch.allclose(seen[1], seen[2])


def test_the_stages_of_a_lesson_have_its_blocks_and_tasks_that_fit():
    assert [stage["tokens"] for stage in lesson("selection", 2048)["stages"]] == [128, 512]
    assert [stage["tokens"] for stage in lesson("selection", 8192)["stages"]] == [512, 2048]
    assert lesson("selection", 128)["stages"] == lesson("window", 2048)["stages"] == []
    taught = [(s["tokens"], s["tasks"][0]["name"], s["lr"]) for s in lesson("recall")["stages"]]
    assert taught[3:5] == [(128, "copy", 3e-3), (128, "recall", 1e-3)]  # copying is learnt first
    for name in LESSONS:
        spec = lesson(name, 2048)
        for stage in spec["stages"]:
            assert stage["questions"].keys() == spec["questions"].keys()
            for one in [*stage["tasks"], *(q["task"] for q in stage["questions"].values())]:
                learning.task(**one).batch(0, 2, stage["tokens"])


@pytest.mark.parametrize(
    ("device", "backend", "precision", "graph"),
    [
        ("cuda", "triton", "fp32", True),
        ("cuda:1", "auto", "bf16", True),
        ("cuda", "triton", "fp16", False),
        ("cuda", "gather", "fp32", False),
        ("cpu", "auto", "fp32", False),
    ],
)
def test_steps_are_one_graph_where_launches_bind_them(device, backend, precision, graph):
    spec = lesson("window", 64, device=device, backend=backend, precision=precision)
    assert spec["train"]["cuda_graph"] is graph


def test_tasks_are_taken_in_turn():
    one, two = Copy(), Recall(vocab=64)
    both = Taking((one, two))
    for step, (task, own) in enumerate(((one, 0), (two, 0), (one, 1), (two, 1))):
        assert torch.equal(both.batch(step, 2, 128)[0], task.batch(own, 2, 128)[0])


def test_causal_attention_does_not_peek():
    for config in (tiny(), dense_twin(tiny())):
        assert peek(LanguageModel(config), 48) < PEEK


def test_a_model_that_sees_the_future_peeks():
    model = LanguageModel(dense_twin(tiny(layers=1)))
    seen = model.blocks[0].attention._attend

    def ahead(q, k, v, cu_seqlens):
        return seen(q, k.roll(-1, 1), v.roll(-1, 1), cu_seqlens)

    model.blocks[0].attention._attend = ahead
    assert peek(model, 48) > 5 * PEEK


def test_a_model_of_nans_peeks():
    model = LanguageModel(dense_twin(tiny(layers=1)))
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    assert peek(model, 48) == float("inf")


def test_unknown_lessons_and_short_rows_are_refused():
    with pytest.raises(ValueError, match=r"no lesson 'windows'; there are window, blocks"):
        lesson("windows")
    with pytest.raises(ValueError, match=r"tokens=63: a lesson needs at least 64"):
        lesson("window", 63)
    with pytest.raises(ValueError, match="steps=None"):
        learn(short(steps=None))


def test_every_mutant_has_a_lesson_or_a_reason_why_none_tells_it():
    lessons = [one.lesson for one in MUTANTS.values()]
    told = [one for one in lessons if not isinstance(one, str)]
    assert len(told) == 16 and all(lessons)
    for which, backend, tokens in told:
        assert backend in registry.names()
        lesson(which, tokens, backend=backend)


@pytest.mark.slow
def test_nsa_finds_the_needle_and_a_window_too_short_for_it_does_not():
    """Selection finds it in any block; the window, of the same rows, sees the near ones only."""
    right, blind = (lesson("selection", 128, backend="masked") for _ in range(2))
    right["train"] |= {"steps": 300}
    blind["model"] |= {"force_branch": "win"}  # w = 32, and "far" is 16 to 111 tokens back
    blind["model"]["nsa"] |= {"window": 16}
    found = learn(right)
    assert found["as_expected"], found["curve"]
    blind["train"] |= {"steps": found["steps"]}
    missed = learn(blind)["accuracy"]
    assert missed["own"] > SOLVED
    assert missed["far"] < 1 / 8 + LUCK
