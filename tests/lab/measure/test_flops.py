"""Model FLOPs of a training step, against a count by hand and torch's own counter."""

import math

import pytest
import torch
from tiny_models import TOKENS, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from nsa.lab.measure import limits
from nsa.lab.measure.limits import StepFlops, nominal_tflops, step_flops
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin, production

BATCH = 2


def counted(config):
    """Operations of products with matrices in one forward and backward, by torch's counter."""
    model = LanguageModel(config)
    with FlopCounterMode(display=False) as counter:
        _, loss = model(tokens(BATCH), tokens(BATCH, seed=1))
        loss.backward()
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("changes", [{}, {"shared_kv": True}, {"layers": 3, "mlp_hidden": 48}])
def test_products_with_weights_are_those_that_torch_counts(changes):
    for config in (tiny(**changes), dense_twin(tiny(**changes))):
        assert step_flops(config, TOKENS, BATCH).weights == counted(config)


def test_a_dense_model_is_counted_as_by_hand():
    config = dense_twin(tiny())  # 2 layers, dim 32, 4 heads of 8, 2 KV heads, MLP of 80, 256 bytes
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * config.mlp_size
    head = 32 * 256
    found = step_flops(config, 10, 3)
    assert found.weights == 6 * 3 * 10 * (2 * layer + head)
    # 55 pairs of ten tokens; two operations a multiply-add, two products forward, four backward
    assert found.attention == 2 * 3 * 4 * 55 * (2 + 4) * 2 * 8
    assert found.total == found.weights + found.attention


def test_attention_is_counted_by_the_pairs_that_its_branches_see():
    config = tiny(value_dim=16)
    seen = limits.pairs(TOKENS, config.nsa)
    pairs = seen["cmp"] + seen["slc"] + seen["win"]
    assert step_flops(config, TOKENS, BATCH).attention == 3 * 2 * BATCH * 4 * pairs * 2 * (8 + 16)


def test_a_learned_phi_multiplies_once_a_compressed_block():
    config = tiny(phi="mlp")  # l 4, d 2: 23 blocks of 48 tokens; 2 KV heads of 8
    side = 2 * (4 * 8 * 8 + 8 * 8)
    more = step_flops(config, TOKENS, BATCH).weights - step_flops(tiny(), TOKENS, BATCH).weights
    assert more == 6 * BATCH * config.layers * 23 * 2 * side


def test_a_softmax_gate_multiplies_once_a_group():
    config = tiny(gate="softmax")
    gate = 8 * 4 + 4 * 3
    plain = tiny()
    without = step_flops(plain, 1, 1).weights - 6 * plain.layers * (32 * 4 + 4 * 12)
    assert step_flops(config, 1, 1).weights == without + 6 * config.layers * 2 * gate


def test_recomputation_is_no_work():
    assert step_flops(tiny(checkpoint="all"), 64, 1) == step_flops(tiny(), 64, 1)


def test_utilisation_is_the_share_of_all_devices_ceilings():
    flops = StepFlops(weights=3 * 10**12, attention=10**12)
    assert flops.utilisation(step_s=0.5, tflops=16.0) == pytest.approx(0.5)
    assert flops.utilisation(step_s=0.5, tflops=16.0, devices=2) == pytest.approx(0.25)
    assert nominal_tflops("NVIDIA H200") == 989.4
    assert math.isnan(nominal_tflops("cpu"))


@pytest.mark.full
def test_the_production_model_does_what_the_notebook_predicts():
    dense, nsa = dense_twin(production()), production()
    at = {t: step_flops(dense, t, 1) for t in (4096, 8192)}
    assert at[4096].attention < at[4096].weights < 1.1 * at[8192].attention / 2
    # More operations than the twin's up to T 2.7k, a seventh at T 32k.
    ratio = {
        t: step_flops(nsa, t, 1).attention / step_flops(dense, t, 1).attention
        for t in (2048, 2600, 2800, 32768)
    }
    assert ratio[2048] > ratio[2600] > 1 > ratio[2800]
    assert ratio[32768] == pytest.approx(1 / 7, rel=0.1)
