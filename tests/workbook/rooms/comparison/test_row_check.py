"""The benchmark's accuracy check passes what is right and stops every planted mistake."""

from dataclasses import replace

import pytest
import torch

from nsa.attention import registry
from nsa.reference.nsa import nsa
from workbook.lab.measure.accuracy import AccuracyError
from workbook.lab.measure.attention_inputs import draw
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.comparison import check as row_check
from workbook.rooms.comparison.check import check, revealed, sample_rows
from workbook.rooms.comparison.implementations import DENSE_ATTENTIONS, of_backends, peer

SHAPE = Shape(150, 4, 2, 16, 16, dtype="fp32", config=TINY_CONFIG)
(GATHER,) = of_backends(["gather"])
TORCH = [n for n in registry.names() if n in ("packed", "gather", "sdpa", "masked")]


@pytest.fixture
def few_rows(monkeypatch):
    """T as long as a benchmark's: a sample of rows, a few of them at a time."""
    monkeypatch.setattr(row_check, "ALL_ROWS", 100)
    monkeypatch.setattr(row_check, "ELEMENTS", 4 * 150 * 20)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", TORCH)
def test_a_right_backend_passes_with_its_own_selection(name, shared, dtype):
    (backend,) = of_backends([name])
    drawn = draw(replace(SHAPE, shared_kv=shared, dtype=dtype, batch=2))
    checked = check(backend, drawn)
    assert checked.what == "all rows, own selection, forward and gradients"
    assert [e.name for e in checked.errors] == ["o", *(f"d{n}" for n in drawn.leaves())]
    assert all(0 <= e.worst <= e.limit for e in checked.errors)


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("queries", ["random", "correlated"])
def test_a_right_backend_passes_on_a_sample_of_rows(few_rows, queries, reveal):
    checked = check(GATHER, draw(replace(SHAPE, queries=queries)), reveal=reveal)
    assert checked.what.startswith("64 rows, " + ("own sel" if reveal else "selection handed in"))


def test_dense_attention_is_checked_against_dense_attention(few_rows):
    checked = check(DENSE_ATTENTIONS[0], draw(SHAPE))
    assert [e.name for e in checked.errors] == ["o", "dq", "dk", "dv"]


def test_the_sample_holds_the_first_and_the_last_rows():
    rows = sample_rows(100_000, torch.device("cpu"))
    assert len(rows) == row_check.SAMPLE and rows.diff().min() > 0
    assert rows[0] == 0 and rows[-8:].tolist() == list(range(99_992, 100_000))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zeros", "selects"),
        ("scaled", "o: worst error"),
        ("no_window", "o: worst error"),
        ("newest_blocks", "its selection loses"),
        ("too_many_blocks", r"selects \[5\] blocks, 4 are right"),
        ("wrong_dk", "dk: worst error"),
        ("stray_dq", "dq: .* not 0 at queries whose dO is 0"),
        ("not_a_number", "not finite"),
        ("window_one_short", "o: worst error"),
        ("wrong_dgates", "dgates: worst error"),
        ("no_dgates", "no gradient reaches dgates"),
        ("nan_where_nobody_looks", "not finite"),
        ("nan_gradient_where_nobody_looks", "dq, dk, dv, dgates with dO at all queries: not fin"),
    ],
)
def test_a_planted_mistake_is_red(few_rows, name, said, monkeypatch):
    wrong = peer(f"bench_peers:{name}")
    assert "nobody_looks" not in name or 20 not in sample_rows(SHAPE.tokens, torch.device("cpu"))
    if name == "not_a_number":
        monkeypatch.setattr(row_check, "ALL_ROWS", 4096)
    with pytest.raises(AccuracyError, match=said):
        check(wrong, draw(SHAPE))


def test_a_check_can_be_held_to_a_later_output(few_rows):
    drawn = draw(SHAPE)
    checked = check(GATHER, drawn)
    o = GATHER.call(drawn, None).detach()
    checked.hold_again(o, "later")
    with pytest.raises(AccuracyError, match="o later: worst"):
        checked.hold_again(o * 1.01, "later")
    o[:, 20] = float("nan")  # not among the rows
    with pytest.raises(AccuracyError, match="o later is not finite"):
        checked.hold_again(o, "later")


def test_the_exact_rows_are_the_references(few_rows):
    drawn = draw(SHAPE)
    rows = sample_rows(SHAPE.tokens, drawn.q.device)
    leaves = {n: x.detach().double().requires_grad_() for n, x in drawn.leaves().items()}
    k, v = (dict.fromkeys(("cmp", "slc", "win"), leaves[n]) for n in "kv")
    want = nsa(leaves["q"], k, v, leaves["gates"], SHAPE.config)
    do = torch.zeros_like(drawn.do)
    do[:, rows] = drawn.do[:, rows]
    grads = torch.autograd.grad(want.o, list(leaves.values()), do.double())
    o, found = row_check.at_rows(drawn, rows, want.blocks[:, rows], torch.float64)
    torch.testing.assert_close(o, want.o[:, rows].detach())
    for name, grad in zip(leaves, grads, strict=True):
        at = grad[:, rows] if name in ("q", "gates") else grad
        torch.testing.assert_close(found[name], at, msg=name)


def test_a_selection_is_revealed_in_several_passes():
    (backend,) = of_backends(["masked"])
    shape = replace(SHAPE, tokens=300, value_dim=8)  # 19 blocks, 8 of them a pass
    drawn = draw(shape)
    k, v = ({b: x.double() for b, x in drawn.by_branch(name).items()} for name in "kv")
    want = nsa(drawn.q.double(), k, v, drawn.gates.double(), shape.config).blocks
    rows = torch.tensor([0, 17, 150, 299])
    assert torch.equal(revealed(backend, drawn, rows), want[:, rows])


def test_the_small_check_keeps_dims_and_group_and_leaves_a_choice():
    shape = Shape(65536, kv_heads=16)
    small = row_check.small(shape)
    assert (small.dim, small.group, small.config) == (shape.dim, 4, shape.config)
    assert small.tokens > shape.config.select_block * shape.config.select_count
    assert row_check.small(replace(shape, tokens=100)).tokens == 100
