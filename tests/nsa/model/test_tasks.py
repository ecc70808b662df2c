import json
from dataclasses import replace

import pytest
import torch
from tiny_models import refuses_type, tiny

from nsa.model.llama import LanguageModel
from nsa.model.tasks import IGNORED, MARK, Copy, Needle, Recall, accuracy, task
from nsa.model.train import Data

TASKS = (
    Copy(vocab=12, length=5),
    Copy(vocab=12, length=5, distance=(6, 20)),
    Needle(),
    Needle(distance=(3, 9)),
    Needle(pairs=4),
    Recall(vocab=20, pairs=3),
    Recall(vocab=20, pairs=3, gap=(0, 9)),
)
each = pytest.mark.parametrize("one", TASKS, ids=str)


def answers(targets):
    """[B, S]: the scored targets of each row."""
    return targets[targets != IGNORED].view(len(targets), -1)


@each
def test_a_batch_depends_on_seed_and_step_alone_and_its_record_is_json_that_makes_it(one):
    ids, targets = one.batch(3, 4, 40)
    record = json.loads(json.dumps(one.record()))
    assert record.pop("chance") == one.chance
    made = task(record.pop("name"), **record)
    assert made == one
    again = made.batch(3, 4, 40)
    assert torch.equal(again[0], ids) and torch.equal(again[1], targets)
    assert not torch.equal(one.batch(4, 4, 40)[0], ids)
    assert not torch.equal(replace(one, seed=7).batch(3, 4, 40)[0], ids)


@each
@pytest.mark.parametrize("tokens", [40, 41])
def test_every_row_scores_as_many_tokens_and_each_is_the_next_one(one, tokens):
    ids, targets = one.batch(0, 16, tokens)
    assert isinstance(one, Data)
    assert ids.shape == targets.shape == (16, tokens)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < one.vocab
    assert len({int(n) for n in (targets != IGNORED).sum(1)}) == 1
    inside = targets[:, :-1]
    assert torch.equal(inside[inside != IGNORED], ids[:, 1:][inside != IGNORED])
    assert (targets[:, -1] != IGNORED).all()  # the last token always has its question answered


@pytest.mark.parametrize("distance", [None, 6, 30, (6, 35)])
def test_a_copy_repeats_the_string_at_its_distance(distance):
    ids, targets = Copy(vocab=12, length=5, distance=distance).batch(0, 32, 40)
    whole = torch.cat((ids, targets[:, -1:]), 1)
    found = set()
    for row in whole:
        first, second = (row == MARK).nonzero()[:, 0].tolist()
        assert torch.equal(row[first + 1 : first + 6], row[second + 1 : second + 6])
        assert len(set(row[first + 1 : first + 6].tolist())) == 5
        assert second + 5 == 40
        found.add(second - first)
    assert torch.equal(answers(targets), whole[:, -5:])
    low, high = (distance, distance) if isinstance(distance, int) else distance or (35, 35)
    assert found <= set(range(low, high + 1))
    assert len(found) > 1 or low == high


@pytest.mark.parametrize("distance", [(1, 1), (7, 7), (39, 39), (4, 12)])
def test_the_only_value_lies_at_its_distance_from_the_question(distance):
    one = Needle(values=5, filler=3, vocab=9, distance=distance)
    ids, targets = one.batch(0, 64, 40)
    values = (ids >= 1) & (ids <= 5)
    assert (values.sum(1) == 1).all()
    found = 39 - values.int().argmax(1)
    assert set(found.tolist()) <= set(range(distance[0], distance[1] + 1))
    assert torch.equal(ids[values], targets[:, -1])
    assert (ids[:, -1] == MARK).all()


@pytest.mark.parametrize("tokens", [22, 23, 40])
@pytest.mark.parametrize("distance", [None, (2, 2), (9, 9)])
def test_a_needle_among_other_pairs_is_told_by_its_key(tokens, distance):
    one = Needle(values=5, filler=3, vocab=20, pairs=5, distance=distance)
    ids, targets = one.batch(0, 200, tokens)
    for row, answer in zip(ids, targets[:, -1], strict=True):
        keys = (row[:-1] > 8).nonzero()[:, 0].tolist()
        assert len(keys) == 5
        assert len({int(row[k]) for k in keys}) == 5
        (asked,) = [k for k in keys if row[k] == row[-1]]
        assert row[asked + 1] == answer and row[-2] == MARK
        assert all(1 <= row[k + 1] <= 5 for k in keys)
        if distance:
            assert tokens - 1 - (asked + 1) == distance[0]


def test_recall_asks_for_every_pair_once():
    ids, targets = Recall(vocab=20, pairs=3, gap=(0, 9)).batch(0, 64, 30)
    whole = torch.cat((ids, targets[:, -1:]), 1)
    gaps = set()
    for row, scored in zip(whole, answers(targets), strict=True):
        place = (row > 1).nonzero()[:, 0].tolist()
        pairs = row[place[:6]].view(3, 2).tolist()
        again = row[place[6:]].view(3, 2).tolist()
        assert sorted(pairs) == sorted(again)
        assert scored.tolist() == [value for _, value in again]
        gaps.add(place[6] - place[5] - 1)
    assert gaps == set(range(10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copy(vocab=8, length=7), "vocab >= 9, got 8; at most 6 would do"),
        (lambda: Copy(length=5, distance=5), "distance=5: at least 6"),
        (lambda: Copy(length=0), "length=0 must be at least 1"),
        (lambda: Needle(vocab=30), "leaves -3 keys .* vocab >= 34"),
        (lambda: Needle(pairs=40), "leaves 31 keys .* vocab >= 73"),
        (lambda: Needle(distance=(5, 4)), r"\(5, 4\): at least 1, and the larger number last"),
        (lambda: Needle(distance=0), "distance=0: at least 1"),
        (lambda: Recall(vocab=20, pairs=10), "has 9, vocab=22 would do"),
        (lambda: Recall(seed=-1), "seed=-1"),
        (lambda: Recall().batch(0, 0, 100), "batch=0"),
        (lambda: task("nedle"), "there are copy, needle, recall"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("one", "tokens", "enough", "message"),
    [
        (Copy(length=20), 40, 41, "do not hold .* the least tokens that do are 41"),
        (Copy(length=5, distance=30), 30, 35, "distance of 30; .* are 35"),
        (Needle(distance=40), 40, 41, "at least 41 tokens would do"),
        (Needle(pairs=4), 9, 12, "at least 12 tokens would do"),
        (Recall(pairs=4), 14, 15, "15 would do"),
        (Recall(pairs=4, gap=9), 20, 24, "24 would do"),
    ],
    ids=str,
)
def test_too_few_tokens_are_refused_with_as_many_as_do(one, tokens, enough, message):
    with pytest.raises(ValueError, match=message):
        one.batch(0, 1, tokens)
    assert one.batch(0, 8, enough)[0].shape == (8, enough)


def test_a_number_that_is_none_is_refused():
    for name, value in (("pairs", 2.0), ("gap", (1, 2, 3)), ("gap", "9")):
        refuses_type(Recall(), name, value, rf"{name}=.* is not an int")


class Knows(torch.nn.Module):
    """Answers a share of the scored tokens rightly: those of the first rows."""

    def __init__(self, targets, right):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.targets, self.right = targets, right

    def forward(self, ids):
        assert not self.training
        known = self.targets.clamp(min=0).clone()
        known[self.right :] = 0  # never an answer
        return torch.nn.functional.one_hot(known, 64).float(), None


def test_accuracy_is_the_share_that_is_right_of_what_training_has_not_shown():
    one = Recall(vocab=64, pairs=4)
    targets = one.batch(5, 8, 40)[1]
    model = Knows(targets, right=6).train()
    found = accuracy(model, one, batch=8, tokens=40, batches=1, first_step=5)
    assert found == pytest.approx(6 / 8)
    assert model.training
    model = LanguageModel(tiny(vocab=64))
    found = accuracy(model, one, batch=16, tokens=48, batches=4)
    assert found < 3 * one.chance + 0.05
    assert accuracy(model, one, batch=16, tokens=48, batches=4) == found
