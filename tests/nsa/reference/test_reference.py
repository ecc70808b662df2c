"""The facts of the definition, each a sentence. Agreement of the backends is tested elsewhere."""

from dataclasses import replace
from itertools import product

import brute
import pytest
import torch
from cases import EVEN, ODD, SMALL, TINY, Case, draw
from torch.overrides import TorchFunctionMode

from nsa.blocks import count_compressed, count_selectable
from nsa.config import PHI_KINDS, NSAConfig
from nsa.reference.attend import attend
from nsa.reference.compress import compress
from nsa.reference.nsa import BRANCHES, nsa
from nsa.reference.select import importance, select


def run(drawn, **changes):
    args, kwargs = drawn.arguments()
    return nsa(*args, **(kwargs | changes))


@pytest.mark.parametrize("config", [TINY, SMALL, EVEN, ODD], ids=["tiny", "small", "even", "odd"])
def test_agrees_with_a_second_opinion_in_scalar_python(config):
    drawn = draw(Case(71, kv_heads=2, group=2, dim=3, value_dim=2, config=config))
    result = run(drawn)
    (q, k, v, gates, _), _ = drawn.arguments()
    for h in range(2):
        heads = range(2 * h, 2 * h + 2)
        o, blocks = brute.nsa_one_group(
            [q[0, :, g].tolist() for g in heads],
            {b: k[b][0, :, h].tolist() for b in BRANCHES},
            {b: v[b][0, :, h].tolist() for b in BRANCHES},
            [gates[0, :, g].tolist() for g in heads],
            config,
        )
        want = torch.tensor(o, dtype=torch.float64).transpose(0, 1)  # [T, G, DV]
        torch.testing.assert_close(result.o[0, :, heads], want, rtol=1e-12, atol=1e-12)
        assert [[j for j in row if j >= 0] for row in result.blocks[0, :, h].tolist()] == blocks


@pytest.mark.parametrize("branch", BRANCHES)
def test_no_query_sees_the_future(branch):
    drawn = draw(Case(50, kv_heads=2, group=2, dim=8, value_dim=8))
    before = run(drawn, branches=(branch,)).o
    for t in range(49):
        after = run(drawn.otherwise_after(t), branches=(branch,)).o
        assert torch.equal(before[:, : t + 1], after[:, : t + 1]), f"changing {t + 1}.. shows"


def test_no_selection_depends_on_the_future():
    drawn = draw(Case(60, kv_heads=2, group=2, dim=8, value_dim=8))
    before = run(drawn).blocks
    for t in range(0, 59, 4):
        assert torch.equal(before[:, : t + 1], run(drawn.otherwise_after(t)).blocks[:, : t + 1])


def test_unselected_blocks_receive_zero_gradient():
    drawn = draw(Case(64, kv_heads=1, group=2, dim=8, value_dim=8))
    result = run(drawn, branches=("slc",))
    for t in (20, 41, 63):
        leaves, chosen = [drawn.leaves[f"{x}_slc"] for x in "kv"], result.blocks[0, t, 0].tolist()
        k, v = torch.autograd.grad(result.o[0, t].sum(), leaves, retain_graph=True)
        for j in range(8):
            rows = slice(j * 8, j * 8 + 8)
            assert (v[0, rows].abs().sum() > 0) == (j in chosen)
            assert j in chosen or torch.count_nonzero(k[0, rows]) == 0


def test_the_querys_own_block_and_the_forced_ones_are_always_selected():
    for config in (TINY, SMALL, EVEN, ODD):
        blocks = run(draw(Case(100, config=config))).blocks
        for t in range(100):
            own = t // config.select_block
            forced = {j for j in range(config.select_initial) if j <= own}
            forced |= {j for j in range(own - config.select_local + 1, own + 1) if j >= 0}
            for row in blocks[0, t].tolist():
                assert forced <= set(row), f"t={t}: {row} lacks some of {forced}"


def test_selection_is_ascending_and_padded_with_minus_one_at_the_end():
    blocks = run(draw(Case(100, kv_heads=2))).blocks
    assert blocks.dtype == torch.int32 and blocks.shape == (1, 100, 2, TINY.select_count)
    for t in range(100):
        legal = min(t // TINY.select_block + 1, TINY.select_count)
        for row in blocks[0, t].tolist():
            assert row[:legal] == sorted(set(row[:legal])) and -1 not in row[:legal]
            assert row[legal:] == [-1] * (TINY.select_count - legal)


@pytest.mark.parametrize(
    ("branch", "sizes"), [("slc", {"select_count": 8, "window": 6}), ("win", {"window": 61})]
)
def test_selecting_every_block_or_a_window_of_all_is_dense_causal_attention(branch, sizes):
    drawn = draw(Case(61, config=NSAConfig(4, 2, 8, **{"select_count": 4} | sizes)))
    got = run(drawn, branches=(branch,)).branches[branch]
    q, k, v = (drawn.leaves[n].transpose(1, 2) for n in ("q", f"k_{branch}", f"v_{branch}"))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, o.transpose(1, 2))


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_window_holds_exactly_w_keys(window):
    drawn = draw(Case(20, kv_heads=1, group=1, config=NSAConfig(4, 2, 8, 4, window=window)))
    o = run(drawn, branches=("win",)).branches["win"]
    (grad,) = torch.autograd.grad(o[0, 15].sum(), [drawn.leaves["v_win"]])
    assert grad[0].abs().sum((1, 2)).nonzero().flatten().tolist() == list(range(16 - window, 16))


def test_compressed_keys_are_seen_from_their_last_token_on():
    drawn = draw(Case(20, kv_heads=1, group=1))
    o = run(drawn, branches=("cmp",)).branches["cmp"]
    for t in range(20):
        (grad,) = torch.autograd.grad(o[0, t].sum(), [drawn.leaves["v_cmp"]], retain_graph=True)
        last = max((2 * i + 3 for i in range(10) if 2 * i + 3 <= t), default=-1)
        assert grad[0].abs().sum((1, 2)).nonzero().flatten().tolist() == list(range(last + 1))


def test_all_heads_of_a_group_select_the_same_blocks():
    drawn = draw(Case(64, kv_heads=2, group=3))
    result = run(drawn, branches=("slc",))
    assert result.blocks.shape[2] == 2
    for head, t in product(range(6), (40, 63)):
        o = result.o[0, t, head].sum()
        (grad,) = torch.autograd.grad(o, [drawn.leaves["v_slc"]], retain_graph=True)
        touched = set((grad[0, :, head // 3].abs().sum(1).nonzero() // 8).flatten().tolist())
        assert touched == set(result.blocks[0, t, head // 3].tolist()) - {-1}


def test_a_packed_batch_equals_its_sequences_run_alone():
    drawn = draw(Case(48, packed=(1, 30, 17)))
    result = run(drawn)
    for rows in (slice(0, 1), slice(1, 31), slice(31, 48)):
        leaves = {name: x[:, rows] for name, x in drawn.leaves.items()}
        alone = run(replace(drawn, leaves=leaves, cu_seqlens=None))
        assert torch.equal(result.o[:, rows], alone.o)
        assert torch.equal(result.blocks[:, rows], alone.blocks)


def test_an_empty_sequence_in_a_pack_changes_nothing():
    drawn = draw(Case(48, packed=(18, 30)))
    bounds = torch.tensor([0, 18, 18, 48], dtype=torch.int32)
    assert torch.equal(run(drawn).o, run(drawn, cu_seqlens=bounds).o)


@pytest.mark.parametrize("index, branch", list(enumerate(BRANCHES)))
def test_scaling_a_gate_scales_only_its_branch(index, branch):
    drawn = draw(Case(40))
    result = run(drawn)
    scaled = drawn.to(torch.float64)
    with torch.no_grad():
        scaled.leaves["gates"][..., index] *= 3
    gate = drawn.leaves["gates"][..., index : index + 1]
    torch.testing.assert_close(run(scaled).o - result.o, 2 * gate * result.branches[branch])


@pytest.mark.parametrize("tokens", [1, 2, 3, 11])
def test_a_query_that_sees_no_key_yields_zero_and_minus_infinity_and_zero_gradient(tokens):
    drawn = draw(Case(tokens, config=ODD))  # l = 12: nobody sees a compressed key
    result = run(drawn, branches=("cmp",))
    assert torch.count_nonzero(result.branches["cmp"]) == 0
    assert result.lse["cmp"].isneginf().all()
    result.o.sum().backward()
    for name in ("q", "k_cmp", "v_cmp"):
        grad = drawn.leaves[name].grad
        assert grad is None or torch.count_nonzero(grad) == 0


def test_empty_rows_beside_full_ones_give_finite_gradients():
    drawn = draw(Case(30))
    result = run(drawn)
    assert result.lse["cmp"][:, :3].isneginf().all() and result.lse["cmp"][:, 3:].isfinite().all()
    result.o.sum().backward()
    assert all(x.grad.isfinite().all() for x in drawn.leaves.values())
    assert torch.count_nonzero(drawn.leaves["gates"].grad[:, :3, :, 0]) == 0


def test_lse_is_the_natural_logarithm():
    q, k, v = (torch.randn(1, n, 1, 4, dtype=torch.float64) for n in (1, 5, 5))
    _, lse = attend(q, k, v, torch.ones(1, 1, 1, 5, dtype=torch.bool), scale=0.5)
    want = torch.log(torch.exp(k[0, :, 0] @ q[0, 0, 0] * 0.5).sum())
    torch.testing.assert_close(lse[0, 0, 0], want)


def test_statistics_stay_fp32_for_low_precision_inputs():
    result = run(draw(Case(20), torch.bfloat16))
    assert result.o.dtype == torch.bfloat16
    assert {x.dtype for x in result.lse.values()} == {torch.float32}


@pytest.mark.parametrize("phi", PHI_KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck(phi, shared):
    config = NSAConfig(4, 2, 4, 2, select_initial=0, window=3)
    sizes = {"kv_heads": 1, "group": 2, "dim": 2, "value_dim": 3, "config": config}
    drawn = draw(Case(11, **sizes, phi=phi, shared=shared))
    assert drawn.has_the_gradients_of(lambda x: run(x).o)


def test_no_gradient_flows_through_the_selection():
    drawn = draw(Case(60))
    result = run(drawn, branches=("slc",))
    assert not result.importance.requires_grad
    # Nor beside it, as a block weighed by its own importance would let it.
    names = ("q", "k_cmp", "k_slc", "v_slc")
    leaves = [drawn.leaves[name] for name in names]
    given = run(drawn, branches=("slc",), blocks=result.blocks)
    losses = result.o.square().sum(), given.o.square().sum()
    got, want = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses)
    assert got[1] is None
    for name, g, w in zip(names, got, want, strict=True):
        assert g is w or torch.equal(g, w), name


def test_the_papers_sizes_weigh_a_blocks_compressed_keys_1_2_2_2_1():
    config = NSAConfig()
    p_cmp = torch.eye(256, count_compressed(256, config), dtype=torch.float64)
    weights = importance(p_cmp[None, None, None], config)[0, :15, 0]  # [i, j]: query i sees key i
    assert weights.shape == (15, 4)
    for j in range(4):
        want = {4 * j - 1: 1, 4 * j: 2, 4 * j + 1: 2, 4 * j + 2: 2, 4 * j + 3: 1}
        assert weights[:, j].tolist() == [want.get(i, 0) for i in range(15)]


def test_importance_is_the_double_sum_of_equation_9():
    config = NSAConfig(compress_block=12, compress_stride=4, select_block=20, select_count=4)
    tokens = 100
    p_cmp = torch.rand(1, 1, 2, tokens, count_compressed(tokens, config), dtype=torch.float64)
    got = importance(p_cmp, config)[0, :, 0]
    want = torch.zeros_like(got)
    for j, m, n in product(range(count_selectable(tokens, config)), range(20 // 4), range(12 // 4)):
        i = 20 // 4 * j + m - n
        if 0 <= i < p_cmp.shape[-1]:
            want[:, j] += p_cmp[0, 0, :, :, i].sum(0)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sizes", [(12, 4, 20), (4, 4, 8), (32, 16, 64)], ids=str)
def test_the_case_studys_fraction_of_a_block_is_equation_9_divided_by_l_over_d(sizes):
    length, stride, size = sizes
    config = NSAConfig(length, stride, size, select_count=4)
    tokens = 6 * size + 3
    count, blocks = count_compressed(tokens, config), count_selectable(tokens, config)
    fraction = torch.zeros(count, blocks, dtype=torch.float64)
    for i, j in product(range(count), range(blocks)):
        shared = min(i * stride + length, (j + 1) * size) - max(i * stride, j * size)
        fraction[i, j] = max(0, shared) / length
    torch.testing.assert_close(fraction.sum(1), torch.ones(count, dtype=torch.float64))
    p_cmp = torch.rand(1, 2, 3, tokens, count, dtype=torch.float64)
    ours, theirs = importance(p_cmp, config), torch.einsum("bhgtc,cj->bthj", p_cmp, fraction)
    torch.testing.assert_close(ours / (length / stride), theirs)
    assert torch.equal(select(ours, config), select(theirs, config))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_selection_is_taken_in_int32_and_int64(dtype):
    drawn = draw(Case(40))
    args, kwargs = drawn.arguments()
    found = nsa(*args, **kwargs)
    again = nsa(*args, **kwargs | {"blocks": found.blocks.to(dtype)})
    assert torch.equal(again.o, found.o)


def test_the_highest_importance_wins_beside_the_forced_blocks_and_ties_go_to_the_lower_index():
    config = NSAConfig(4, 2, 8, select_count=5, window=6)
    scores = torch.zeros(1, 80, 1, 10)
    assert select(scores[:, :64, :, :8], config)[0, 63, 0].tolist() == [0, 1, 2, 6, 7]
    scores[..., 5], scores[..., 3], scores[..., 9] = 2.0, 1.0, 9.0
    blocks = select(scores, config)
    assert blocks[0, 71, 0].tolist() == [0, 3, 5, 7, 8]  # block 9 lies in its future


class TiesTurned(TorchFunctionMode):
    """A sort that is not asked to be stable may leave ties in any order; this one turns them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.sort and not kwargs.get("stable"):
            found = function(args[0].flip(-1), *args[1:], **kwargs | {"stable": True})
            last = args[0].shape[-1] - 1
            return type(found)((found.values, last - found.indices))
        return function(*args, **kwargs)


def test_ties_go_to_the_lower_index_whatever_a_sort_does_that_is_not_stable():
    config = NSAConfig(4, 2, 8, select_count=5, window=6)
    with TiesTurned():
        assert torch.zeros(3).sort(descending=True).indices.tolist() == [2, 1, 0]
        blocks = select(torch.zeros(1, 64, 1, 8), config)
    assert blocks[0, 63, 0].tolist() == [0, 1, 2, 6, 7]


def test_scores_that_are_not_a_number_do_not_displace_forced_or_better_blocks():
    config = NSAConfig(4, 2, 8, select_count=5, window=6)
    scores = torch.full((1, 80, 1, 10), float("nan"))
    scores[..., 5] = 0.0
    assert select(scores, config)[0, 79, 0].tolist() == [0, 1, 5, 8, 9]


def test_a_block_without_a_visible_compressed_key_can_still_be_selected():
    config = NSAConfig(8, 8, 8, select_count=3, select_initial=0, select_local=1, window=4)
    scores = torch.zeros(1, 24, 1, 3)
    assert select(scores, config)[0, 23, 0].tolist() == [0, 1, 2]


def test_rotary_after_compression_rotates_key_i_by_the_position_of_its_first_token():
    drawn = draw(Case(30, dim=4, compress_rope=True))
    (q, k, v, _, config), kwargs = drawn.arguments()
    cos, sin = kwargs["phi"].rotary
    k_cmp = compress(k["cmp"], "mean", None, config)
    starts = torch.arange(k_cmp.shape[1]) * config.compress_stride
    first, second = k_cmp.chunk(2, -1)
    c, s = cos[starts][:, None], sin[starts][:, None]
    turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    seen = (starts + config.compress_block - 1 <= torch.arange(30)[:, None])[None, None]
    want, _ = attend(q, turned, compress(v["cmp"], "mean", None, config), seen, scale=0.5)
    torch.testing.assert_close(run(drawn, branches=("cmp",)).branches["cmp"], want)
