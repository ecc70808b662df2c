import math

import pytest
import torch
from tiny_models import TOKENS, tiny
from torch.nn import functional as F

from nsa.model.data import IGNORED, synthetic
from nsa.model.llama import LanguageModel
from nsa.model.positions import ByPosition, by_position


class Some:
    """Random tokens of which only those at even positions are scored."""

    def batch(self, step, batch, tokens, device="cpu"):
        ids, targets = synthetic(3).batch(step, batch, tokens)
        targets = targets.clone()  # of one row they share the tokens' memory
        targets[:, 1::2] = IGNORED
        return ids, targets


def test_the_sums_are_those_of_each_rows_cross_entropy():
    model = LanguageModel(tiny())
    found = by_position(model, Some(), batch=2, tokens=TOKENS, batches=3, first_step=5)
    nats, right = torch.zeros(TOKENS, dtype=torch.float64), torch.zeros(TOKENS)
    for step in (5, 6, 7):
        ids, targets = Some().batch(step, 2, TOKENS)
        for row, wanted in zip(model.eval()(ids)[0], targets, strict=True):
            each = F.cross_entropy(row, wanted, reduction="none")
            nats += each.detach().double()
            right += row.argmax(-1) == wanted
    torch.testing.assert_close(found.nats, nats, atol=1e-5, rtol=1e-6)
    assert found.right.tolist() == right.tolist()
    assert found.scored.tolist() == [6.0, 0.0] * (TOKENS // 2)
    assert found.bits == pytest.approx(float(nats.sum()) / (3 * TOKENS) / math.log(2))
    assert found.accuracy == pytest.approx(float(right.sum()) / (3 * TOKENS))


def test_buckets_double_and_leave_out_what_is_not_scored():
    nats = torch.arange(10, dtype=torch.float64) * math.log(2)
    scored = torch.tensor([1.0] * 2 + [0.0] * 2 + [2.0] * 6, dtype=torch.float64)
    found = ByPosition(nats, nats, scored).buckets(least=2)
    assert found == {2: pytest.approx(0.5), 8: pytest.approx(22 / 8), 10: pytest.approx(17 / 4)}


def test_the_models_mode_stays():
    for training in (True, False):
        model = LanguageModel(tiny()).train(training)
        by_position(model, Some(), batch=1, tokens=TOKENS, batches=1)
        assert model.training is training
