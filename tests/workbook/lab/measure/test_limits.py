"""The physical limit and a step's model FLOPs, against masks, published tables and torch."""

import math

import pytest
import torch
from cases import ODD, SMALL, TINY
from tiny_models import TOKENS, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from nsa.blocks import count_compressed
from nsa.model.flops import StepFlops, step_flops
from nsa.model.llama import LanguageModel
from nsa.model.presets import dense_twin, production
from nsa.reference.nsa import compressed_visible, window_visible
from nsa.reference.select import select, selected_tokens
from workbook.lab.measure import limits
from workbook.lab.measure.limits import Ceilings, Work, nominal_tflops
from workbook.lab.measure.shapes import NAMED, Shape

BATCH = 2
CEILINGS = Ceilings(matmul_tflops=790, copy_tb_s=4.24)
# T: cmp, score, slc, win, forward, backward, dense forward; ms, from the published figures.
TABLE = {
    8192: (0.09, 0.04, 0.32, 0.17, 0.62, 1.43, 1.39),
    32768: (1.39, 0.70, 1.33, 0.69, 4.10, 8.52, 22.3),
    65536: (5.56, 2.78, 2.68, 1.39, 12.4, 24.1, 89.1),
    131072: (22.3, 11.1, 5.38, 2.78, 41.5, 76.0, 356),
}


@pytest.mark.parametrize("tokens", TABLE)
def test_the_published_limits_are_reproduced(tokens):
    shape = Shape(tokens)
    flops = limits.branch_flops(shape)
    ms = [flops[b] / 790e9 for b in ("cmp", "score", "slc", "win")]
    work = limits.work(shape)
    ms += [work[mode].limit_ms(CEILINGS) for mode in ("forward", "backward")]
    ms.append(limits.work(shape, "dense_attention")["forward"].limit_ms(CEILINGS))
    assert ms == pytest.approx(TABLE[tokens], rel=0.005, abs=0.006)


@pytest.mark.parametrize("config", [TINY, SMALL, ODD], ids=["tiny", "small", "odd"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 333])
def test_pairs_are_those_of_the_definitions_masks(config, tokens):
    positions = torch.arange(tokens)
    blocks = select(torch.rand(1, tokens, 1, -(-tokens // config.select_block)), config)
    causal = positions <= positions[:, None]
    compressed = count_compressed(tokens, config)
    assert limits.pairs(tokens, config) == {
        "cmp": int(compressed_visible(positions, compressed, config).sum()),
        "slc": int((selected_tokens(blocks, tokens, config) & causal).sum()),
        "win": int(window_visible(positions, config).sum()),
        "dense": int(causal.sum()),
    }


def test_a_backward_counts_three_products_of_keys_and_two_of_values():
    shape = Shape(512, heads=4, kv_heads=2, dim=192, value_dim=128)
    seen = limits.pairs(512, shape.config)["dense"]
    work = limits.work(shape, "dense_attention")
    assert work["forward"].flops == 4 * seen * 2 * (192 + 128)
    assert work["backward"].flops == 4 * seen * 2 * (3 * 192 + 2 * 128)
    assert work["step"].flops == work["forward"].flops + work["backward"].flops


def test_bytes_are_every_input_read_and_every_output_written_once():
    shape = Shape(100, heads=4, kv_heads=2, dim=32, value_dim=16, batch=3, dtype="fp32")
    q, k, v, gates, o = (300 * n * 4 for n in (4 * 32, 2 * 32, 2 * 16, 4 * 3, 4 * 16))
    work = limits.work(shape)
    assert work["forward"].bytes == q + k + v + gates + o
    assert work["backward"].bytes == 2 * (q + k + v + gates) + o
    own = limits.work(Shape(**{**vars(shape), "shared_kv": False}))
    assert own["forward"].bytes == q + 3 * (k + v) + gates + o


def test_whichever_takes_longer_is_the_limit():
    assert Work(flops=790 * 10**9, bytes=1).limit_ms(CEILINGS) == pytest.approx(1.0)
    assert Work(flops=1, bytes=int(4.24e9)).limit_ms(CEILINGS) == pytest.approx(1.0)


def test_ceilings_are_measured_and_positive():
    found = limits.measure_ceilings("cpu", torch.float32)
    assert found.matmul_tflops > 1e-4 and found.copy_tb_s > 1e-5


def test_named_shapes_are_the_published_ones():
    assert [s.tokens for s in NAMED["main"]] == list(TABLE)
    assert {(s.heads, s.kv_heads, s.dim) for s in NAMED["main"]} == {(64, 4, 128)}
    assert NAMED["g4"][0].group == 4


def counted(config):
    """Operations of products with matrices in one forward and backward, by torch's counter."""
    model = LanguageModel(config)
    with FlopCounterMode(display=False) as counter:
        _, loss = model(tokens(BATCH), tokens(BATCH, seed=1))
        loss.backward()
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize(
    "changes", [{}, {"shared_kv": True}, {"layers": 3, "mlp_hidden": 48}, {"gate": "softmax"}]
)
def test_products_with_weights_are_those_that_torch_counts(changes):
    for config in (tiny(**changes), dense_twin(tiny(**changes))):
        assert step_flops(config, TOKENS, BATCH).weights == counted(config)


def test_dense_attention_is_counted_as_by_hand():
    found = step_flops(dense_twin(tiny()), 10, 3)  # 2 layers, 4 heads of 8
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
