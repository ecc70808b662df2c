"""The compressed and window kernels against attention over the mask written out."""

import pytest
import torch
from accuracy import assert_same
from backend_calls import DEVICE
from span_cases import COMPRESSED, CONFIG, WINDOW, Case, Problem, check

from nsa.blocks import Span
from nsa.kernels import span_bwd
from nsa.kernels.sequences import Axis
from nsa.kernels.span_common import descriptors_fit
from nsa.kernels.tiles import Tile

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

each_span = pytest.mark.parametrize("span", [COMPRESSED, WINDOW], ids=["compressed", "window"])

SHAPES = [
    ((70,), 4, 2, 16, 32, Tile(16, 16, 4, 2)),
    ((33, 33), 3, 1, 48, 16, Tile(32, 16, 4, 2)),
    ((5, 0, 40, 19), 2, 2, 16, 16, Tile(16, 32, 4, 2)),
    ((1, 50), 6, 1, 24, 40, Tile(64, 16, 4, 1)),
    ((3,), 2, 2, 16, 16, Tile(16, 32, 4, 2)),
    ((1,), 16, 1, 16, 16, None),
]


@pytest.mark.full
@each_span
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_as_accurate_as_plain_torch(span, number, dtype):
    if dtype == torch.bfloat16 and number % 2:
        dtype = torch.float16
    lengths, heads, kv_heads, dim, value_dim, tile = SHAPES[number]
    check(Case(lengths, span, heads, kv_heads, dim, value_dim, dtype, tile))


@each_span
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_sinks_take_their_share_as_accurately_as_by_plain_torch(span, number):
    lengths, heads, kv_heads, dim, value_dim, tile = SHAPES[number]
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    check(Case(lengths, span, heads, kv_heads, dim, value_dim, dtype, tile, sink=True), number != 2)


@each_span
def test_without_gates_the_weight_is_one(span):
    check(Case((40,), span), gated=False)


def test_a_window_one_token_short_of_the_sequence_leaves_out_the_first_key():
    check(Case((CONFIG.window + 1,), WINDOW))


@pytest.mark.parametrize("span", [Span(4, 2, 5), Span(8, 8), Span(lookback=1), Span(lookback=99)])
def test_any_run_of_keys_is_followed(span):
    case = Case((37,), span)
    problem = Problem(case)
    problem.keys = type(problem.keys)(1, case.keys_of(37))
    problem.k, problem.v = (torch.randn(problem.keys.rows, 1, 16, device=DEVICE) for _ in range(2))
    got, exact = problem.kernels(), problem.reference(torch.float64)
    for name, value in got.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(3,), (2, 7, 1)])
def test_a_query_that_sees_no_key_yields_zero_and_minus_infinity(lengths):
    problem = Problem(Case(lengths, COMPRESSED))
    o, lse2 = problem.forward(base=None)
    dq, delta = problem.dq(lse2)
    assert (o == 0).all() and (lse2 == float("-inf")).all()
    assert (dq == 0).all() and (delta == 0).all()
    assert all((x == 0).all() for x in problem.dkdv(lse2, delta))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, for tl.max
@each_span
def test_non_finite_rows_stay_in_their_sequence(span):
    problem = Problem(Case((20, 23, 37), span))
    clean = problem.kernels()
    before = problem.case.keys_of(20)
    token, key = slice(20, 43), slice(before, before + problem.case.keys_of(23))
    for x, rows in (("q", token), ("do", token), ("base", token), ("k", key), ("v", key)):
        getattr(problem, x)[rows] = float("nan")
    for name, value in problem.kernels().items():
        rows = key if name in ("dk", "dv") else token
        for part in (slice(0, rows.start), slice(rows.stop, None)):
            assert torch.equal(value[part], clean[name][part]), name


@pytest.mark.parametrize("lengths", [(40,), (5, 0, 33)], ids=["dense", "packed"])
def test_without_values_the_scores_alone_are_summed(lengths):
    problem = Problem(Case(lengths, COMPRESSED))
    _, want = problem.forward()
    problem.v = None
    o, lse2 = problem.forward(gates=None, base=None)
    assert o is None and torch.equal(lse2, want)


def test_a_key_with_all_the_weight_leaves_the_query_no_gradient():
    problem = Problem(Case((30,), WINDOW, dim=32, value_dim=32, dtype=torch.bfloat16))
    problem.gates, problem.span = torch.ones_like(problem.gates), Span(lookback=1)
    _, lse2 = problem.forward()
    dq, _ = problem.dq(lse2)
    assert dq.abs().max() < 1e-6, dq.abs().max()


def test_the_sum_may_replace_its_base_and_a_gradient_may_be_added_to():
    problem = Problem(Case((40,), WINDOW))
    want, lse2 = problem.forward()
    base = problem.base.clone()
    got, _ = problem.forward(base=base, out=base)
    assert got is base and torch.equal(got, want)
    alone, delta = problem.dq(lse2)
    into = torch.randn_like(alone)
    before = into.clone()
    added, _ = problem.dq(lse2, dq=into)
    assert added is into
    torch.testing.assert_close(into, before + alone)
    given, same = problem.dq(lse2, delta=delta)
    assert same is delta
    torch.testing.assert_close(given, alone, rtol=1e-4, atol=1e-5)


@each_span
def test_strides_of_tokens_and_heads_are_the_callers(span):
    problem = Problem(Case((24,), span, heads=4, kv_heads=2))
    want = problem.kernels()
    for name in ("q", "k", "v", "do", "base"):
        x = getattr(problem, name)
        wide = torch.nn.functional.pad(x.transpose(0, 1), (0, 5), value=float("nan"))
        setattr(problem, name, wide[..., : x.shape[2]].transpose(0, 1))
    problem.gates = problem.gates.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert all(torch.equal(x, want[name]) for name, x in problem.kernels().items())


@pytest.mark.full
@each_span
@pytest.mark.parametrize("lengths", [(45,), (33, 33)], ids=["one", "batch"])
def test_descriptors_fetch_what_pointers_do(span, lengths):
    problem = Problem(Case(lengths, span, heads=3, dim=24, value_dim=40, dtype=torch.bfloat16))
    both = []
    for descriptors in (False, True):
        o, lse2 = problem.forward(descriptors=descriptors)
        dq, delta = problem.dq(lse2, descriptors=descriptors)
        given, _ = problem.dq(lse2, delta=delta, descriptors=descriptors)
        keys = problem.dkdv(lse2, delta, descriptors=descriptors)
        both.append((o, lse2, dq, delta, given, *keys))
    for pointers, fetched in zip(*both, strict=True):
        assert_same(fetched, pointers)


@pytest.mark.full
@each_span
@pytest.mark.parametrize("wanted", [6, 1000])
def test_idle_processors_are_given_shares_of_heads_and_tokens(span, wanted, monkeypatch):
    problem = Problem(Case((50, 7), span, heads=12, kv_heads=2))
    _, lse2 = problem.forward()
    _, delta = problem.dq(lse2)
    whole = problem.dkdv(lse2, delta)
    monkeypatch.setattr(span_bwd, "processors", lambda device: wanted)
    monkeypatch.setattr(span_bwd, "LEAST_STEPS", 1)
    kernel, parts = span_bwd.sum_parts, []

    class Recorded:
        """The kernel, of which the number of parts that each launch adds up is kept."""

        def __getitem__(self, grid):
            def launch(*args, **options):
                parts.append(options["PARTS"])
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(span_bwd, "sum_parts", Recorded())
    torch.testing.assert_close(problem.dkdv(lse2, delta), whole, rtol=1e-5, atol=1e-5)
    most = max(parts, default=1)
    assert most > 6 if wanted == 1000 else most == (6 if span == COMPRESSED else 1)


def test_descriptors_are_left_where_they_cannot_fetch():
    plain, axis = torch.zeros(40, 2, 16, dtype=torch.bfloat16), Axis(1, 40)
    bounds = torch.tensor([0, 40])
    assert descriptors_fit(axis, axis, plain, plain)
    assert not descriptors_fit(axis, axis, plain, plain.float())
    assert not descriptors_fit(axis, axis, plain, plain[:, :1].expand(-1, 2, -1))
    assert not descriptors_fit(axis, axis, plain, torch.zeros(40, 2, 20).bfloat16()[..., 4:])
    assert not descriptors_fit(axis, Axis(1, 0), plain, plain[:0])
    assert not descriptors_fit(Axis(1, 40, bounds), Axis(1, 40, bounds), plain)


def test_a_scale_that_is_not_positive_is_refused():
    problem = Problem(Case((5,), WINDOW))
    problem.scale = 0.0
    with pytest.raises(ValueError, match="positive"):
        problem.forward()
