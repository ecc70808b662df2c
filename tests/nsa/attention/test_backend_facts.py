"""Facts that hold for each backend, or that tell them apart, whatever the reference says."""

import backend_calls
import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE, FAST, NAMES, WITH_GRADIENT, attend, interpreted, later
from cases import EVEN, ODD, SMALL, TINY, Case, draw

from nsa.attention import witness
from nsa.attention.api import nsa_attention
from nsa.attention.backends import triton
from nsa.attention.backends.flex import selection_tiles, span_tiles
from nsa.attention.span import chunks
from nsa.blocks import Span
from nsa.config import NSAConfig
from nsa.reference.compress import PhiWeights, compress
from nsa.reference.nsa import BRANCHES, nsa

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.full
@pytest.mark.parametrize("backend", WITH_GRADIENT)
def test_no_query_sees_the_future_also_when_the_window_is_shorter_than_the_sequence(backend):
    drawn = draw(Case(40, kv_heads=1, group=2), torch.float32, DEVICE)
    before = attend(drawn, backend)
    for t in (5, 30) if interpreted(backend) else (0, 5, 15, 30, 38):
        after = attend(drawn.otherwise_after(t), backend)
        torch.testing.assert_close(before[:, : t + 1], after[:, : t + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_an_earlier_token_outside_block_0_and_window_is_still_attended_to(backend):
    """One-key attention and a truncated window both pass tests that only look for leaks."""
    config = NSAConfig(4, 2, 8, 5, window=40)
    drawn = draw(Case(40, kv_heads=1, group=1, config=config), torch.float32, DEVICE)
    o = attend(drawn, backend)
    for branch in BRANCHES:
        leaves = [drawn.leaves[f"{x}_{branch}"] for x in "kv"]
        k, v = torch.autograd.grad(o[0, 39].sum(), leaves, retain_graph=True)
        assert (v[0].abs().sum((1, 2)) > 0).all(), f"{branch}: some token has no weight"
        assert k.abs().max() > 1e-6, f"{branch}: keys get no gradient"


@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_rows_without_a_key_give_zero_and_zero_gradient(backend):
    """ "Safe packing": here a property of every backend, with nothing to switch on."""
    drawn = draw(Case(30, config=ODD), torch.float32, DEVICE)
    drawn.blocks = torch.full((1, 30, 2, 5), -1, dtype=torch.int32, device=DEVICE)
    drawn.blocks[:, 20:, :, 0] = 0  # rows 0..19 select nothing
    o = attend(drawn, backend, branches=("cmp", "slc"))
    assert torch.count_nonzero(o[:, :11]) == 0  # l = 12: they see no compressed key either
    assert torch.count_nonzero(o[:, 20:]) == o[:, 20:].numel()
    names = [n for n in drawn.leaves if not n.endswith("_win")]
    grads = torch.autograd.grad(o.square().sum(), [drawn.leaves[n] for n in names])
    grads = dict(zip(names, grads, strict=True))
    assert all(g.isfinite().all() for g in grads.values())
    assert torch.count_nonzero(grads["q"][:, :11]) == 0
    assert torch.count_nonzero(grads["gates"][:, :11]) == 0
    assert torch.count_nonzero(grads["v_slc"][:, 20:]) == 0  # behind block 0


@pytest.mark.full
@pytest.mark.parametrize("backend", WITH_GRADIENT)
def test_a_kept_graph_goes_back_twice_for_nothing_it_saved_is_changed_in_place(backend):
    """The case study suspected in-place selection; here the version counters are looked at."""
    tokens = 26 if interpreted(backend) else 300  # in chunks
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    drawn, saved = draw(Case(tokens, phi="linear"), dtype, DEVICE), []

    def pack(x):
        saved.append((x, x._version, x.clone()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = attend(drawn, backend).square().mean()
    leaves = list(drawn.leaves.values())
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)
    assert saved
    for x, version, value in saved:
        assert x._version == version
        assert torch.equal(x, value) or not value.isfinite().all()


@pytest.mark.parametrize("backend", later(NAMES))
def test_the_output_has_the_dtype_of_q_whatever_the_gates_have(backend):
    args, kwargs = draw(Case(20), torch.float16, DEVICE).arguments()
    with torch.no_grad():
        o = nsa_attention(*args[:3], args[3].float(), args[4], **kwargs, backend=backend)
    assert o.dtype == torch.float16


@pytest.mark.parametrize("scale", [-0.4, 0.0, 2.5])
@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_the_scale_may_have_any_sign(backend, scale):
    drawn = draw(Case(30, kv_heads=1), torch.float32, DEVICE)
    args, kwargs = drawn.arguments()
    want = nsa(*args, **kwargs, scale=scale).o
    got = attend(drawn, backend, scale=scale)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if scale <= 0:
        ours, truth = (torch.autograd.grad(o.sum(), drawn.leaves["q"])[0] for o in (got, want))
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("backend", ["gather", "packed"])
def test_a_second_derivative_is_refused_rather_than_wrong(backend, branch):
    backend_calls.refuses_a_second_derivative(backend, branch)


@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on a CPU")
def test_masked_and_sequential_have_the_same_second_derivative():
    second = []
    for backend in ("masked", "sequential"):
        torch.manual_seed(3)
        drawn = draw(Case(20))
        q = drawn.leaves["q"]
        o = attend(drawn, backend)
        (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), q)[0])
    torch.testing.assert_close(*second)


SELECTIONS = {  # tokens, the blocks of each row as handed in, the same well-formed
    "a-repeated-block": (40, [0, 2, 2, 3], [0, 2, 3, -1]),
    "beyond-the-last": (20, [0, 3, 5, -1], [0, -1, -1, -1]),
    "more-slots-than-blocks": (20, [0, 0, 1, 1], [0, 1, -1, -1]),
    "empty-slots-first": (20, [-1, -1, 0, 1], [0, 1, -1, -1]),
}


@pytest.mark.parametrize("tokens, given, same", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("backend", later(NAMES))
def test_slots_that_name_no_block_or_one_again_are_empty(backend, tokens, given, same):
    drawn, found = draw(Case(tokens), torch.float32, DEVICE), []
    for row in (given, same):
        blocks = torch.tensor(row, dtype=torch.int32, device=DEVICE).expand(1, tokens, 2, 4)
        with torch.no_grad():
            found.append(attend(drawn, backend, blocks=blocks.contiguous(), branches=("slc",)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("lookback", [None, 40, 200])
@pytest.mark.parametrize("length, stride", [(1, 1), (16, 8), (128, 64)])
def test_flex_visits_every_tile_that_holds_a_key_of_a_run(length, stride, lookback):
    span = Span(length, stride, lookback)
    keys = (700 - length) // stride + 1
    tiles = span_tiles(span, 700, keys)
    for t in range(700):
        low, high = span.seen(t)
        seen = {s // 128 for s in (low, high - 1) if low < high}
        assert all(tiles[t // 128, column] for column in seen)
    assert tiles.sum() <= 21 + 5  # no more than the causal half


@pytest.mark.parametrize("size", [48, 64, 128, 200, 300])
def test_flex_visits_every_tile_that_a_lone_block_touches(size):
    for j in range(-(-700 // size)):  # the last one is not full
        blocks = torch.full((1, 700, 1, 2), -1, dtype=torch.int32)
        blocks[0, 699, 0, 0] = j
        tiles = selection_tiles(blocks, 700, size)[0, 0]
        touched = {key // 128 for key in range(j * size, min((j + 1) * size, 700))}
        assert set(tiles[-1].nonzero().flatten().tolist()) == touched
        assert not tiles[:-1].any()


@pytest.mark.filterwarnings("ignore:attention output is not finite")  # of the rows that do
@pytest.mark.parametrize("backend", ["gather", "packed", "sequential"])
def test_a_block_that_a_query_does_not_select_cannot_spoil_it(backend):
    config = NSAConfig(4, 2, 8, 2, select_initial=0, select_local=1, window=6)
    drawn = draw(Case(21, config=config), torch.float32, DEVICE)  # the last block is not full
    drawn.blocks = torch.full((1, 21, 2, 2), -1, dtype=torch.int32, device=DEVICE)
    drawn.blocks[..., 0] = torch.arange(21, device=DEVICE)[:, None] // 8
    with torch.no_grad():
        for name in ("k_slc", "v_slc"):
            drawn.leaves[name][:, :8] = torch.nan
        o = attend(drawn, backend, branches=("slc",))
    assert o[:, 8:].isfinite().all()


@pytest.mark.parametrize(("elements", "most"), [(1, 1), (7, 1), (27, 3), (29, 4), (10**6, 30)])
def test_chunks_have_every_row_once_and_are_as_large_as_fits(elements, most):
    parts = [[*range(part.start, part.stop)] for part in chunks(30, 7, elements)]
    assert [row for part in parts for row in part] == [*range(30)]
    assert {len(part) for part in parts[:-1]} <= {most} and len(parts) == -(-30 // most)


@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_keys_that_many_chunks_add_to_are_rounded_once(branch, monkeypatch):
    case = Case(256, kv_heads=1, group=2, config=NSAConfig(4, 2, 8, 5, window=256))
    drawn = draw(case, torch.bfloat16, DEVICE)
    leaves = [drawn.leaves[f"{x}_{branch}"] for x in "kv"]

    def gradients():
        o = attend(drawn, "gather", branches=(branch,))
        return torch.autograd.grad(o.float().square().sum(), leaves)

    whole = gradients()
    monkeypatch.setattr("nsa.attention.span.ELEMENTS", 2 * 256)  # one query at a time
    for apart, at_once in zip(gradients(), whole, strict=True):
        error = (apart.float() - at_once.float()).abs().max() / at_once.float().abs().max()
        assert error <= 2**-7, "two roundings to bf16, of p or of the sum, are at most a step apart"


@pytest.mark.full
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("backend", NAMES)
def test_a_branch_that_is_not_asked_for_costs_nothing(backend, branch):
    drawn = draw(Case(18 if interpreted(backend) else 40), torch.float32, DEVICE)
    with torch.no_grad(), witness.recording() as seen:
        with witness.recording() as alone:
            o = attend(drawn, backend, branches=(branch,))
        assert o.shape == attend(drawn, backend).shape
    assert {b for b, _ in alone.paths} <= {branch, "score"}
    assert {b for b, _ in seen.paths} == {*BRANCHES, "score"}


@pytest.mark.full
@pytest.mark.parametrize("backend", FAST)
def test_non_contiguous_and_expanded_inputs_work(backend):
    tokens = 26 if interpreted(backend) else 50
    drawn = draw(Case(tokens, kv_heads=2, group=2), torch.float32, DEVICE)
    (q, k, v, gates, config), _ = drawn.arguments()
    keys, rest = k["win"][:, :, :1].expand(-1, -1, 2, -1), (v["win"], gates, config)
    want = nsa_attention(q, keys.contiguous(), *rest, backend=backend)
    q2 = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(nsa_attention(q2, keys, *rest, backend=backend), want)


@pytest.mark.parametrize("backend", ["gather", "packed"])
def test_a_backward_under_autocast_keeps_its_dtypes(backend):
    drawn = draw(Case(30), torch.float32, DEVICE)
    plain = torch.autograd.grad(attend(drawn, backend).sum(), drawn.leaves["q"])[0]
    with torch.autocast(DEVICE, torch.bfloat16):
        again = torch.autograd.grad(attend(drawn, backend).sum(), drawn.leaves["q"])[0]
    torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("config", [TINY, SMALL, EVEN, ODD], ids=["TINY", "SMALL", "EVEN", "ODD"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_strides_add_up_to_the_blocks_of_the_reference(config, kind, dtype, tokens):
    case = Case(tokens, kv_heads=2, dim=16, value_dim=16, batch=2, config=config, phi=kind)
    drawn = draw(case, dtype)
    weights, wide = (d.arguments()[1]["phi"].key for d in (drawn, drawn.to(torch.float64)))
    x = torch.randn(2, tokens, 2, 16).to(dtype).requires_grad_()

    def results(function, x, weights):
        inputs = [x, *(t for t in vars(weights).values() if t is not None)]
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        o = function(inputs[0], kind, PhiWeights(*inputs[1:]), config)
        if o.numel() == 0:
            return [o]
        push = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
        return [o.detach(), *torch.autograd.grad(o, inputs, push)]

    got = results(triton.compress_by_strides, x, weights)
    same = results(compress, x, weights)
    exact = results(compress, x.double(), wide)
    names = ("o", "x", "position", "weight1", "bias1", "weight2", "bias2")
    for name, ours, torchs, truth in zip(names, got, same, exact, strict=False):
        if truth.numel():
            assert_as_accurate(f"{kind} {name}", ours, torchs, truth)
        assert ours.shape == truth.shape


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's own products are rounded as well")
def test_a_block_of_many_strides_is_added_up_before_it_is_rounded():
    config = NSAConfig(64, 1, 64, 3)
    torch.manual_seed(0)
    x, dtype = torch.randn(1, 80, 1, 8), torch.bfloat16
    weights = PhiWeights(torch.randn(1, 64, 8), torch.randn(1, 64 * 8, 8))
    low = PhiWeights(*(w.to(dtype) for w in (weights.position, weights.weight1)))
    given = x.to(dtype), "linear", low, config
    exact = compress(x.to(dtype).double(), "linear", PhiWeights(
        low.position.double(), low.weight1.double()), config)  # fmt: skip
    ours, torchs = (
        (f(*given).double() - exact).abs().mean() for f in (triton.compress_by_strides, compress)
    )
    assert ours <= 2 * torchs
