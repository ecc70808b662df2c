import json
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny

from nsa.attention import registry
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin
from nsa.model.tasks import Copy, Recall
from whyhung.process.trial import run_child
from workbook.rooms.correctness import learning
from workbook.rooms.correctness.learning import LUCK, PEEK, SOLVED, Stage, learn, peek
from workbook.rooms.correctness.lessons import ENTRY, LESSONS, learn_one, lesson
from workbook.rooms.correctness.mutants import MUTANTS

SHORT = {"name": "window", "tokens": 64, "backend": "masked", "batch": 2}


def paced(lesson, **changes):
    """The lesson with another pace of training in every stage."""
    stages = (replace(s, train=s.train.with_(**changes)) for s in lesson.stages)
    return replace(lesson, stages=tuple(stages))


def short(name="window", tokens=64, steps=2, **changes):
    return paced(lesson(**SHORT | {"name": name, "tokens": tokens}), steps=steps, **changes)


def answering(monkeypatch, given):
    """Questions get these answers; what was asked is kept as (T, the task's distance)."""
    asked, given = [], iter(given)

    def answer(model, task, train):
        asked.append((train.tokens, task.distance))
        return next(given)

    monkeypatch.setattr(learning, "_asked", answer)
    return asked


SOLVED_ALL = (1.0, SOLVED, 0.125 + LUCK)  # inside, last, outside


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.parametrize("tokens", [64, 2048])
def test_the_tasks_of_a_lesson_fit_its_rows(name, tokens):
    found = lesson(name, tokens)
    nsa, last = found.model.nsa, found.stages[-1]
    assert nsa.select_count * nsa.select_block < tokens == last.train.tokens
    for stage in found.stages:
        assert stage.questions.keys() == last.questions.keys()
        for task in [*stage.tasks, *(asked for asked, _ in stage.questions.values())]:
            ids, _ = task.batch(0, 2, stage.train.tokens)
            assert ids.shape == (2, stage.train.tokens)
            assert task.vocab == found.model.vocab


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
    spec = {"lesson": SHORT, "threads": 1, "budget_s": 0.0}
    outcome = run_child(ENTRY, spec, deadline_s=100)
    assert outcome.status == "ok", outcome.message
    assert outcome.result["tokens"] == 64


@pytest.mark.parametrize(
    ("looks", "steps", "verdict"),
    [
        ([SOLVED_ALL, SOLVED_ALL], 2, True),
        ([SOLVED_ALL, (0.5, *SOLVED_ALL[1:]), SOLVED_ALL, SOLVED_ALL], 4, True),
        ([(1.0, SOLVED, 0.125 + LUCK + 0.01)] * 4, 4, False),
        ([(1.0, SOLVED - 0.01, 0.125 + LUCK)] * 4, 4, False),
        ([(0.1, 0.1, 0.1)] * 3 + [SOLVED_ALL], 4, True),
    ],
)
def test_it_ends_once_all_is_as_it_should_be_twice(monkeypatch, looks, steps, verdict):
    answering(monkeypatch, sum(looks, ()))
    row = learn(short(steps=4), every=1)
    assert (row["steps"], row["as_expected"]) == (steps, verdict)


def test_what_peeks_is_never_as_expected(monkeypatch):
    answering(monkeypatch, SOLVED_ALL)
    monkeypatch.setattr(learning, "peek", lambda *_, **__: PEEK)
    assert not learn(short())["as_expected"]


def test_its_time_is_limited_and_short_of_it_only_the_full_length_is_trained():
    assert learn(short(), every=1, budget_s=0.0)["steps"] == 1
    spec = {"name": "compressed", "tokens": 512, "backend": "masked", "batch": 2}
    row = learn_one({"lesson": spec, "threads": None, "budget_s": 0.0})
    assert [(look["tokens"], look["step"]) for look in row["curve"]] == [(512, 25)]


def test_a_stage_ends_once_solved_and_questions_at_the_full_length_decide(monkeypatch):
    asked = answering(monkeypatch, [1.0, 1.0, 0.1, 0.1, 0.1, 0.1])
    row = learn(short("compressed", 512, 4), every=1)
    assert asked == [(128, (32, 127))] * 2 + [(512, (32, 511))] * 4
    assert [look["tokens"] for look in row["curve"]] == [128] * 2 + [512] * 4
    assert [look["step"] for look in row["curve"]] == [1, 2, 3, 4, 5, 6]
    assert row["accuracy"] == {"far": 0.1} and not row["as_expected"]
    assert (row["steps"], row["tokens"]) == (6, 512)


def test_a_stage_that_is_not_solved_ends_at_its_steps(monkeypatch):
    asked = answering(monkeypatch, [0.1, 1.0, 0.1, 1.0, 1.0])
    row = learn(short("compressed", 512, 3), every=1)
    assert [tokens for tokens, _ in asked] == [128] * 3 + [512] * 2
    assert row["as_expected"]


def test_after_a_stage_that_is_not_learnt_the_full_length_comes_at_once(monkeypatch):
    asked = answering(monkeypatch, [0.1] * 4)
    learn(short("copy", 128), every=1)
    assert [tokens for tokens, _ in asked] == [64, 64, 128, 128]


def test_a_stage_goes_on_with_the_weights_of_the_one_before(monkeypatch):
    """Only the first draws them: a stage at a rate of nearly nothing leaves what it found."""
    seen = []

    def answer(model, task, train):
        seen.append(model.head.weight.detach().clone())
        return 1.0

    monkeypatch.setattr(learning, "_asked", answer)
    found = short("compressed", 512, 1, lr=1e-12)
    torch.manual_seed(0)
    learn(replace(found, stages=(found.stages[0], *found.stages)))
    assert torch.allclose(seen[0], seen[1]) and torch.allclose(seen[1], seen[2])


def test_stages_have_the_blocks_of_the_full_length_and_what_is_needed_comes_first():
    def lengths(name, tokens):
        return [stage.train.tokens for stage in lesson(name, tokens).stages]

    assert lengths("selection", 2048) == [128, 512, 2048]
    assert lengths("selection", 8192) == [512, 2048, 8192]
    assert lengths("selection", 128) == [128] and lengths("window", 2048) == [2048]
    taught = [(s.train.tokens, type(s.tasks[0]), s.train.lr) for s in lesson("recall").stages]
    assert taught[3:5] == [(128, Copy, 3e-3), (128, Recall, 1e-3)]  # copying is learnt first


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
    found = lesson("window", 64, device=device, backend=backend, precision=precision)
    assert found.stages[0].train.cuda_graph is graph


def test_tasks_are_taken_in_turn():
    one, two = Copy(), Recall(vocab=64)
    both = Stage(None, (one, two), {})
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
    right = paced(lesson("selection", 128, backend="masked"), steps=300)
    found = learn(right)
    assert found["as_expected"], found["curve"]
    # w = 32, and "far" is 16 to 111 tokens back
    model = right.model.with_(force_branch="win", nsa={"window": 16})
    missed = learn(replace(paced(right, steps=found["steps"]), model=model))["accuracy"]
    assert missed["own"] > SOLVED
    assert missed["far"] < 1 / 8 + LUCK
