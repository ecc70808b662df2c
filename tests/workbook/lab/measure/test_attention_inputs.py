"""Drawn inputs have the statistics they claim, and unions are counted right."""

from dataclasses import replace

import pytest
import torch

from nsa.config import NSAConfig
from nsa.reference.compress import Phi, compress_keys
from nsa.reference.nsa import nsa
from workbook.lab.measure import attention_inputs, shapes
from workbook.lab.measure.attention_inputs import (
    autoregressive,
    draw,
    importance_at,
    mean_union,
    select_at,
)
from workbook.lab.measure.shapes import Shape, shapes_from

SMALL = Shape(96, heads=4, kv_heads=2, dim=16, value_dim=24, dtype="fp32")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("queries", shapes.QUERIES)
def test_inputs_have_the_shapes_dtype_and_variance_asked_for(shared, queries):
    shape = Shape(300, 4, 2, 16, 24, batch=2, dtype="bf16", queries=queries, shared_kv=shared)
    drawn = draw(shape)
    assert drawn.q.shape == (2, 300, 4, 16) and drawn.do.shape == (2, 300, 4, 24)
    names = ["k", "v"] if shared else [f"{x}_{b}" for x in "kv" for b in ("cmp", "slc", "win")]
    assert list(drawn.leaves()) == ["q", *names, "gates"]
    for name, x in drawn.leaves().items():
        assert x.dtype == torch.bfloat16 and x.requires_grad and x.is_leaf
        if name != "gates":
            assert float(x.detach().float().var()) == pytest.approx(1, abs=0.2)
    assert drawn.by_branch("v")["slc"].shape == (2, 300, 2, 24)


def test_the_same_seed_gives_the_same_tensors_and_another_does_not():
    first, again, other = draw(SMALL), draw(SMALL), draw(replace(SMALL, seed=7))
    assert torch.equal(first.q, again.q) and torch.equal(first.do, again.do)
    assert not torch.equal(first.q, other.q)


def test_correlated_queries_are_an_autoregressive_process_across_chunks():
    x = autoregressive((1, 1024, 4000), 0.98, torch.Generator().manual_seed(0))[0]
    assert torch.allclose(x.var(1).mean(), torch.tensor(1.0), atol=0.02)
    for first in (0, 255, 256, 1022):  # inside a chunk and over its border
        assert float((x[first] * x[first + 1]).mean()) == pytest.approx(0.98, abs=0.06)
    assert float((x[200] * x[300]).mean()) == pytest.approx(0.98**100, abs=0.06)


def test_a_union_counts_distinct_blocks_and_no_empty_slots(monkeypatch):
    blocks = torch.tensor([[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3], [7, 8, 9]])
    blocks = blocks.int()[None, :, None]
    for elements in (1 << 24, 1):
        monkeypatch.setattr(attention_inputs, "ELEMENTS", elements)
        assert mean_union(blocks, 2) == (2 + 4) / 2
        assert mean_union(blocks, 4) == 4
    with pytest.raises(ValueError, match="5 tokens hold no tile of 8"):
        mean_union(blocks, 8)


def test_selection_at_rows_is_the_definitions():
    config = NSAConfig(4, 2, 8, 4, window=6)
    drawn = draw(SMALL)
    k = drawn.by_branch("k")
    want = nsa(drawn.q, k, drawn.by_branch("v"), drawn.gates, config)
    rows = torch.tensor([0, 5, 6, 40, 95])
    k_cmp = compress_keys(k["cmp"], Phi(), config)
    found = importance_at(drawn.q[:, rows], k_cmp, rows, 96, config)
    torch.testing.assert_close(found, want.importance[:, rows])
    assert torch.equal(select_at(found, rows, config), want.blocks[:, rows])


@pytest.mark.parametrize(
    ("queries", "of_4", "of_8"), [("random", 54.0, 101.0), ("correlated", 22.6, 28.8)]
)
def test_neighbours_share_as_many_blocks_as_was_simulated_at_64k(queries, of_4, of_8):
    generator, config, tokens = torch.Generator().manual_seed(0), NSAConfig(), 65536
    keys = torch.randn(1, tokens, 1, 128, generator=generator)
    k_cmp = compress_keys(keys, Phi(), config)
    unions = []
    for first in range(tokens // 2, tokens, 2048):
        if queries == "random":
            q = torch.randn(1, 8, 16, 128, generator=generator)
        else:
            q = autoregressive((1, 8, 16 * 128), 0.98, generator).unflatten(2, (16, 128))
        rows = torch.arange(first, first + 8)
        blocks = select_at(importance_at(q, k_cmp, rows, tokens, config), rows, config)
        unions.append([mean_union(blocks, 4), mean_union(blocks, 8)])
    four, eight = torch.tensor(unions).mean(0).tolist()
    assert four == pytest.approx(of_4, rel=0.08) and eight == pytest.approx(of_8, rel=0.08)


def test_shapes_come_from_names_and_from_lists():
    main = shapes_from(["main"], tokens=[4096], queries=["random", "correlated"])
    assert [(s.tokens, s.queries) for s in main] == [(4096, "random"), (4096, "correlated")]
    small = shapes_from(["small"], tokens=[1024])
    assert [(s.tokens, s.dim) for s in small] == [(1024, 64), (1024, 128)]
    (one,) = shapes_from(["tokens=4k,heads=32,kv_heads=8,dim=64,queries=correlated,window=128"])
    assert (one.tokens, one.heads, one.value_dim, one.config.window) == (4096, 32, 64, 128)
    assert Shape.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mian", "known are main, small, g4, tiny"),
        ("tokens=4k,head=3", "the nearest is 'heads'"),
        ("tokens=4q", "'4q' is no number of tokens"),
        ("heads=8", "needs tokens="),
        ("tokens=4k,heads=7", "heads=7 is not a multiple of kv_heads=4"),
        ("tokens=4k,dtype=int8", "dtype='int8' is unknown"),
        ("tokens=4k,window=0", "window=0 must be at least 1"),
        ("tokens=4k,shared_kv=maybe", "must be true or false"),
    ],
)
def test_a_wrong_shape_says_what_would_do(text, message):
    with pytest.raises(ValueError, match=message):
        shapes_from([text])
