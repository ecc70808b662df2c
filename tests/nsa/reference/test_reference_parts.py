"""The facts of compression, rotary positions and gates, each a sentence."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from cases import ODD, TINY

from nsa.blocks import count_compressed
from nsa.reference.compress import Phi, PhiWeights, compress
from nsa.reference.gate import sigmoid_gates, softmax_gates
from nsa.reference.rotary import rotary_tables, rotate


def test_compression_counts_blocks_as_equation_7_says():
    for tokens, want in ((1, 0), (11, 0), (12, 1), (15, 1), (16, 2), (100, 23)):
        x = torch.randn(1, tokens, 1, 2)
        assert compress(x, "mean", None, ODD).shape[1] == want == count_compressed(tokens, ODD)


def test_mean_compression_averages_its_tokens():
    x = torch.randn(2, 30, 2, 4, dtype=torch.float64)
    got = compress(x, "mean", None, TINY)
    for i in range(got.shape[1]):
        torch.testing.assert_close(got[:, i], x[:, 2 * i : 2 * i + 4].mean(1))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_learned_compression_flattens_a_block_token_by_token_per_head(kind):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    x, position = normal(1, 10, 2, 3), normal(2, 4, 3)
    shapes = [(2, 12, 3)] if kind == "linear" else [(2, 12, 5), (2, 5), (2, 5, 3), (2, 3)]
    weights = PhiWeights(position, *(normal(*shape) for shape in shapes))
    got = compress(x, kind, weights, TINY)
    assert got.shape == (1, 4, 2, 3)
    for i, h in product(range(4), range(2)):
        want = torch.cat([x[0, 2 * i + s, h] + position[h, s] for s in range(4)])
        want = want @ weights.weight1[h]
        if kind == "mlp":  # two layers with a GELU between
            want = want + weights.bias1[h]
            want = want * (1 + torch.erf(want / 2**0.5)) / 2
            want = want @ weights.weight2[h] + weights.bias2[h]
        torch.testing.assert_close(got[0, i, h], want)


def test_an_unknown_phi_and_missing_weights_are_refused():
    with pytest.raises(ValueError, match="'conv' is unknown; known are mean, linear, mlp"):
        Phi("conv")
    with pytest.raises(ValueError, match="needs weights"):
        Phi("linear")


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_rotated_products_depend_on_the_distance_alone(scale):
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    tables = rotary_tables(100, 8, dtype=torch.float64, scale=scale)

    def score(t, s):
        a, b = (rotate(x, *tables, positions=torch.tensor([p])) for x, p in ((q, t), (k, s)))
        return (a * b).sum()

    torch.testing.assert_close(score(7, 3), score(64, 60))
    assert not torch.isclose(score(7, 3), score(7, 4))


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_pair_i_at_position_t_turns_by_t_over_a_power_of_the_base(base):
    cos, sin = rotary_tables(40, 6, base, dtype=torch.float64)
    assert cos.shape == sin.shape == (40, 3)
    for t, i in product(range(40), range(3)):
        angle = t / base ** (2 * i / 6)
        assert cos[t, i].item() == pytest.approx(math.cos(angle), abs=1e-12)
        assert sin[t, i].item() == pytest.approx(math.sin(angle), abs=1e-12)


def test_a_scale_of_eight_stands_token_8t_where_token_t_stood():
    plain, scaled = rotary_tables(40, 6), rotary_tables(320, 6, scale=8.0)
    assert torch.equal(scaled[0][::8], plain[0]) and torch.equal(scaled[1][::8], plain[1])
    assert not torch.equal(scaled[0][:40], plain[0])


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_bf16_product_is_off_by_its_rounding_alone_at_any_position(scale):
    positions = torch.tensor([0, 1, 1000, 65_535])
    q, k = torch.randn(2, 1, 4, 3, 64).bfloat16()
    tables = [
        rotary_tables(65_536, 64, scale=scale, dtype=d) for d in (torch.float32, torch.float64)
    ]
    (got, exact) = (
        [rotate(x.to(dtype), *t, positions=positions).double() for x in (q, k)]
        for t, dtype in zip(tables, (torch.bfloat16, torch.float64), strict=True)
    )
    # An element is rounded once, by at most 2**-9 of itself; angles are fp32, t 2**-24 off.
    angle = 65_535 / scale * 2**-24 * 2
    for mine, want in zip(got, exact, strict=True):
        pair = want.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
        assert ((mine - want).abs() <= 2**-8 * want.abs() + angle * pair).all()
    scores, wanted = ((a * b).sum(-1) for a, b in (got, exact))
    size = exact[0].norm(dim=-1) * exact[1].norm(dim=-1)
    assert ((scores - wanted).abs() <= (2**-7 + 2 * angle) * size).all()


def test_rotary_turns_by_a_base_of_10000_in_fp32_unless_told():
    cos, sin = rotary_tables(40, 6)
    assert cos.dtype == sin.dtype == torch.float32
    want = rotary_tables(40, 6, 1e4, dtype=torch.float64)
    torch.testing.assert_close((cos.double(), sin.double()), want, rtol=0, atol=1e-5)


def test_rotary_refuses_an_odd_head_dim():
    with pytest.raises(ValueError, match="even head_dim, got 7"):
        rotary_tables(4, 7)


def layers(*weights):
    """Linear layers with these weights and biases."""
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [partial(torch.nn.functional.linear, weight=w, bias=b) for w, b in pairs]


def test_sigmoid_gates_are_one_triple_a_head_in_zero_one():
    weights = (torch.randn(8, 6), torch.randn(8), torch.randn(12, 8), torch.randn(12))
    hidden = torch.randn(2, 5, 6)
    gates = sigmoid_gates(hidden, *layers(*weights))
    assert gates.shape == (2, 5, 4, 3) and ((gates > 0) & (gates < 1)).all()
    one = weights[2] @ torch.nn.functional.silu(weights[0] @ hidden[1, 2] + weights[1]) + weights[3]
    torch.testing.assert_close(gates[1, 2, 3], one[9:].sigmoid())
    torch.testing.assert_close(
        sigmoid_gates(hidden, *layers(*weights), 4.0)[1, 2, 3], (one[9:] / 4).sigmoid()
    )


def test_softmax_gates_are_one_triple_a_group_and_add_up_to_one():
    weights = (torch.randn(3, 6), torch.randn(3), torch.randn(3, 3), torch.randn(3))
    q = torch.randn(2, 5, 4, 6)
    gates = softmax_gates(q, 2, *layers(*weights))
    assert gates.shape == (2, 5, 4, 3)
    torch.testing.assert_close(gates.sum(-1), torch.ones(2, 5, 4))
    assert torch.equal(gates[:, :, 0], gates[:, :, 1])
    swapped = softmax_gates(q[:, :, [1, 0, 3, 2]], 2, *layers(*weights))
    torch.testing.assert_close(gates, swapped)  # only the mean of a group counts
    # Softmax of logits / tau is the softmax's own power 1 / tau, made to add up to one.
    cooled = gates**4 / (gates**4).sum(-1, keepdim=True)
    torch.testing.assert_close(softmax_gates(q, 2, *layers(*weights), 0.25), cooled)
