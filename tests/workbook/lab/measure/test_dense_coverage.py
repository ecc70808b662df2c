import pytest
import torch
from tiny_models import TOKENS, tiny, tokens

from nsa.config import NSAConfig
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin
from workbook.lab.measure import coverage as measured
from workbook.lab.measure.coverage import coverage, covered

CONFIG = NSAConfig(4, 2, select_block=4, select_count=4, select_initial=1, select_local=1, window=8)
ALL = NSAConfig(4, 2, select_block=4, select_count=64, select_initial=1, select_local=1, window=8)
D = 4


def spiked(at, width, strength):
    """q and k [1, 64, 1, D] of queries that all look for one key, which `width` keys share."""
    q, k = torch.zeros(1, 64, 1, D), torch.zeros(1, 64, 1, D)
    q[..., 0] = strength
    k[:, at : at + width, :, 0] = 2.0
    return q, k


def test_a_block_that_holds_all_attention_is_chosen_and_best():
    found = covered(*spiked(at=20, width=4, strength=20.0), {"nsa": CONFIG})["nsa"]
    assert found["far"] > 0.99 and found["chosen"] > 0.99 and found["best"] > 0.99


def test_averaged_keys_miss_what_other_keys_of_the_block_hide():
    q, k = spiked(at=20, width=1, strength=20.0)
    k[:, 21:24, :, 0] = -8.0  # the average of its block is the lowest of all
    found = covered(q, k, {"nsa": CONFIG})["nsa"]
    assert found["far"] > 0.99 and found["best"] > 0.99
    assert found["chosen"] < 0.01


def test_even_attention_is_held_by_share_of_blocks():
    """Keys that are all zero give every earlier token the same weight."""
    found = covered(torch.zeros(1, 64, 2, D), torch.zeros(1, 64, 1, D), {"nsa": CONFIG, "all": ALL})
    rows = torch.arange(32, 64)
    far = (rows + 1 - 8).float()
    assert found["nsa"]["far"] == pytest.approx(float((far / (rows + 1)).mean()), rel=1e-5)
    # Three of the four blocks lie beyond the window at most: 12 keys.
    assert found["nsa"]["best"] <= float((12 / (rows + 1)).sum() / (far / (rows + 1)).sum()) + 1e-6
    assert found["all"]["best"] == pytest.approx(1) and found["all"]["chosen"] == pytest.approx(1)


def test_lengths_that_no_block_divides(monkeypatch):
    monkeypatch.setattr(measured, "QUERIES", 7)
    q, k = (x[:, :61] for x in spiked(at=20, width=4, strength=20.0))
    assert covered(q, k, {"nsa": CONFIG})["nsa"]["chosen"] > 0.99


def test_each_dense_layer_of_a_model_is_described_and_the_model_is_as_before():
    model = LanguageModel(dense_twin(tiny()))
    before = model(tokens())[0]
    found = coverage(model, tokens(), {"nsa": CONFIG, "all": ALL})
    assert len(found) == model.config.layers
    for layer in found:
        assert 0 <= layer["nsa"]["chosen"] <= layer["nsa"]["best"] + 1e-6 <= 1 + 2e-6
        assert layer["all"]["best"] == pytest.approx(1, abs=1e-4)
    assert torch.equal(model(tokens())[0], before) and CONFIG.window < TOKENS


def test_a_model_without_dense_attention_is_refused():
    with pytest.raises(ValueError, match="attention='dense' does"):
        coverage(LanguageModel(tiny()), tokens(), {"nsa": CONFIG})
