"""torch.func on the operation and the layer: as the plain call, or refused with who can."""

import pytest
import torch
from backend_calls import NAMES
from cases import TINY
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from nsa.attention.api import explain, nsa_attention
from nsa.attention.backends.sdpa import scaled_dot_product_attention
from nsa.attention.registry import Declined
from nsa.model.layer import NSAAttention

FIRST = ["auto", "packed", "gather", "sdpa", "masked"]
SECOND = ["auto", "sdpa", "masked"]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def drawn(batch=2, tokens=30, heads=4, kv_heads=2):
    torch.manual_seed(0)
    shapes = (heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 3)
    return [torch.randn(batch, tokens, *shape, dtype=torch.float64) for shape in shapes]


def attend(backend, **options):
    return lambda *given: nsa_attention(*given, TINY, backend=backend, **options)


def loss(backend, **options):
    return lambda *given: attend(backend, **options)(*given).square().sum()


def gradients(function, given):
    leaves = [x.clone().requires_grad_() for x in given]
    return torch.autograd.grad(function(*leaves), leaves)


def one_by_one(function):
    """Returns a function of one sequence [T, ...], made of one of a batch [B, T, ...]."""
    return lambda *given: function(*(x[None] for x in given))


def same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("backend", FIRST)
def test_grad_vmap_and_the_gradient_of_each_sample_are_those_of_plain_calls(backend):
    given = drawn(batch=3)
    wanted = gradients(loss("masked"), given)
    same(grad(loss(backend), argnums=(0, 1, 2, 3))(*given), wanted)
    each = vmap(grad(one_by_one(loss(backend)), argnums=(0, 1, 2, 3)))
    same(each(*given), wanted)  # the samples of a batch do not see each other
    o = vmap(one_by_one(attend(backend)))(*given)[:, 0]
    torch.testing.assert_close(o, attend("masked")(*given), **TOLERANCE)


@pytest.mark.parametrize("backend", FIRST)
def test_what_is_not_vmapped_is_the_same_for_all(backend):
    q, k, v, gates = drawn()
    many = torch.stack([q, 2 * q, -q], dim=2)
    found = vmap(lambda x: attend(backend)(x, k, v, gates), in_dims=2)(many)
    wanted = [attend("masked")(x, k, v, gates) for x in many.unbind(2)]
    same(found, wanted)
    twice = vmap(vmap(lambda a, b: attend(backend)(a * q, k, b * v, gates), (None, 0)), (0, None))
    scales = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found = twice(scales, scales)
    wanted = [[attend("masked")(a * q, k, b * v, gates) for b in scales] for a in scales]
    torch.testing.assert_close(found, torch.stack([torch.stack(x) for x in wanted]), **TOLERANCE)


@pytest.mark.parametrize("backend", FIRST)
def test_a_jacobian_is_the_gradients_of_its_rows(backend):
    q, k, v, gates = drawn(batch=1, tokens=20)
    few = lambda x: attend(backend)(x, k, v, gates).sum((0, 2, 3))[-4:]  # noqa: E731
    leaf = q.clone().requires_grad_()
    rows = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in few(leaf)]
    same(jacrev(few)(q), rows)
    _, back = vjp(few, q)  # called when the transform is over
    same(back(torch.ones(4, dtype=torch.float64)), [sum(rows)])


@pytest.mark.parametrize("backend", SECOND)
def test_forward_mode_and_second_derivatives_are_those_of_small_steps(backend):
    given, step = drawn(batch=1, tokens=20), 1e-5
    blocks = torch.zeros(1, 20, 2, 1, dtype=torch.int32)  # no step changes the selection
    ways = [torch.randn_like(x) for x in given]

    def moved(by):
        return [x + by * way for x, way in zip(given, ways, strict=True)]

    function = loss(backend, blocks=blocks)
    _, slope = jvp(function, tuple(given), tuple(ways))
    gradient = gradients(loss("masked", blocks=blocks), given)
    wanted = sum((x * way).sum() for x, way in zip(gradient, ways, strict=True))
    torch.testing.assert_close(slope, wanted, **TOLERANCE)
    bend = hessian(lambda by: function(*moved(by)))(torch.zeros((), dtype=torch.float64))
    slopes = [
        sum((x * w).sum() for x, w in zip(gradients(function, moved(at)), ways, strict=True))
        for at in (step, -step)
    ]
    torch.testing.assert_close(bend, (slopes[0] - slopes[1]) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", FIRST)
def test_sinks_are_learned_by_sample_and_lse_is_returned(backend):
    sinks, given = torch.randn(4, 3, dtype=torch.float64), drawn(batch=3)

    def told(backend):
        def function(sinks, *sample):
            return attend(backend, sinks=sinks, return_lse=True)(*(x[None] for x in sample))

        return function

    def squared(backend):
        return lambda *sample: told(backend)(*sample)[0].square().sum()

    each = vmap(grad(squared(backend), argnums=(0, 1, 2)), in_dims=(None, 0, 0, 0, 0))
    found = each(sinks, *given)
    o, *lse = vmap(told(backend), in_dims=(None, 0, 0, 0, 0))(sinks, *given)
    for i in range(3):
        sample = [x[i] for x in given]
        same([x[i] for x in found], gradients(squared("masked"), [sinks, *sample])[:3])
        same([o[i], *(x[i] for x in lse)], told("masked")(sinks, *sample))


@pytest.mark.parametrize("backend", ["packed", "gather"])
def test_packed_sequences_are_vmapped_too(backend):
    given = [x[:, None] for x in drawn()]
    borders = torch.tensor([0, 11, 30], dtype=torch.int32)
    found = vmap(attend(backend, cu_seqlens=borders))(*given)
    for i, o in enumerate(found):
        wanted = attend("masked", cu_seqlens=borders)(*(x[i] for x in given))
        torch.testing.assert_close(o, wanted, **TOLERANCE)
    with pytest.raises(ValueError, match="cu_seqlens is vmapped"):
        vmap(lambda x: attend(backend, cu_seqlens=x)(*(y[0] for y in given)))(borders[None])


@pytest.mark.parametrize("phi", ["mean", "mlp"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gradients_of_each_sample_of_a_layer(phi, gate):
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, TINY, phi=phi, gate=gate).double()
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    x = torch.randn(3, 30, 32, dtype=torch.float64)

    def squared(parameters, sample):
        return functional_call(layer, parameters, (sample[None],)).square().sum()

    each = vmap(grad(squared), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        layer.zero_grad()
        squared(dict(layer.named_parameters()), sample).backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(each[name][i], parameter.grad, **TOLERANCE)


@pytest.mark.parametrize("backend", [name for name in NAMES if name not in SECOND])
def test_who_cannot_says_who_can(backend):
    given = [x.float() for x in drawn()]
    ways = tuple(torch.ones_like(x) for x in given)
    with pytest.raises(Declined, match=rf"'{backend}' .* has no .* torch.func; .*'masked'.* can"):
        hessian(loss(backend))(*given)
    if backend != "sequential":
        with pytest.raises(Declined, match=r"has no .*jvp of torch.func; .*'masked'.* can"):
            jvp(attend(backend), tuple(given), ways)
    if backend not in FIRST:
        with pytest.raises(Declined, match=r"has no .*vmap of torch.func; 'packed', 'gather'"):
            vmap(one_by_one(attend(backend)))(*given)


def test_auto_tells_whom_it_takes_under_a_transform():
    told = []

    def tell(q, *others):
        told.append(explain(q, *others, TINY))
        return q

    jvp(tell, tuple(drawn()), tuple(drawn()))
    assert told[0].startswith("auto takes sdpa") and "gather declined: has no jvp" in told[0]


def test_strict_under_vmap_and_a_fused_kernel_of_sdpa_are_refused():
    given = drawn()
    with pytest.raises(ValueError, match="strict=False would do"):
        vmap(one_by_one(attend("masked", strict=True)))(*given)
    with pytest.raises(Declined, match="needs sdpa's math kernel, not flash"):
        vmap(lambda q: scaled_dot_product_attention(q, q, q, "flash")[0])(given[0])
