"""The physical limit: pairs counted against masks, and the published table reproduced."""

import pytest
import torch
from cases import ODD, SMALL, TINY

from nsa.blocks import count_compressed
from nsa.lab.measure import limits
from nsa.lab.measure.limits import Ceilings, Work
from nsa.lab.measure.shapes import NAMED, Shape
from nsa.reference.nsa import compressed_visible, window_visible
from nsa.reference.select import select, selected_tokens

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
