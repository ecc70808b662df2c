"""Mean compression and <do, o> as kernels, against their definitions in plain torch."""

import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from cases import EVEN, ODD, SMALL, TINY
from kernel_inputs import DTYPES, means, normal, sequences_of

from nsa.kernels.combine import delta_of
from nsa.kernels.compress import compress_backward, compress_forward
from nsa.kernels.sequences import dense

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


DENSE = [((37, 37), TINY), ((70,), ODD), ((41,), SMALL)]
PACKED = [((33, 1, 0, 21, 0), TINY), ((3, 55), SMALL), ((17, 30), EVEN)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize(("lengths", "config"), DENSE + PACKED)
def test_means_and_their_gradients_are_the_references(lengths, config, dtype):
    tokens, dims = sum(lengths), (24, 16)
    sequences = sequences_of(lengths, config)
    x = [normal(tokens, 2, dim, dtype=dtype).requires_grad_() for dim in dims]
    got = compress_forward(*(part.detach() for part in x), sequences)
    assert [part.shape[0] for part in got] == [sequences.compressed.rows] * 2
    for ours, source in zip(got, x, strict=True):
        want = means(source, lengths, config)
        exact = means(source.detach().double(), lengths, config)
        rows = len(exact)
        assert_as_accurate("means", ours[:rows], want, exact)
        assert not ours[rows:].any()
    grads = [normal(*part.shape, dtype=dtype) for part in got]
    ours = compress_backward(*grads, sequences)
    for got_grad, grad, source in zip(ours, grads, x, strict=True):
        wide = source.detach().double().requires_grad_()
        cut = grad[: len(exact)]
        (want,) = torch.autograd.grad(means(source, lengths, config), source, cut)
        (exact_grad,) = torch.autograd.grad(means(wide, lengths, config), wide, cut.double())
        assert got_grad.dtype == dtype
        assert_as_accurate("gradient", got_grad, want, exact_grad)


def test_keys_alone_give_the_same_keys():
    sequences = dense(1, 40, SMALL)
    k, v = normal(40, 3, 16), normal(40, 3, 48)
    both, alone = compress_forward(k, v, sequences), compress_forward(k, None, sequences)
    assert torch.equal(both[0], alone[0]) and alone[1] is None
    dk = compress_backward(both[0], both[1], sequences)[0]
    assert torch.equal(dk, compress_backward(both[0], None, sequences)[0])


@pytest.mark.parametrize("tokens", [1, 15])
def test_a_sequence_shorter_than_a_block_has_no_compressed_key_and_no_gradient(tokens):
    sequences = dense(2, tokens, SMALL)
    k_cmp, v_cmp = compress_forward(*[normal(2 * tokens, 2, 16)] * 2, sequences)
    assert k_cmp.shape == v_cmp.shape == (0, 2, 16)
    dk, dv = compress_backward(k_cmp, v_cmp, sequences)
    assert dk.shape == dv.shape == (2 * tokens, 2, 16)
    assert not dk.any() and not dv.any()


def test_strided_heads_and_tokens_are_read_where_they_are():
    sequences = dense(1, 50, TINY)
    both = normal(2, 50, 4, 32)[:, :, ::2, :16].transpose(0, 1)  # [50, 2, 2, 16]
    k, v = both.unbind(1)
    got = compress_forward(k, v, sequences)
    want = compress_forward(k.contiguous(), v.contiguous(), sequences)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    strided = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in got)
    back = compress_backward(*strided, sequences)
    same = compress_backward(*got, sequences)
    assert all(torch.equal(a, b) for a, b in zip(back, same, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 16), (19, 3, 48), (8, 16, 40)])
def test_delta_is_the_product_of_do_and_o_and_the_gates_gradient(tokens, heads, dim, dtype):
    do, o = normal(tokens, heads, dim, dtype=dtype), normal(heads, tokens, dim, dtype=dtype)
    o = o.transpose(0, 1)
    dgates = normal(tokens, heads, 3, dtype=dtype)
    before = dgates.clone()
    delta = delta_of(do, o, dgates, 1)
    exact = (do.double() * o.double()).sum(-1)
    want = (do.float() * o.float()).sum(-1)
    assert_as_accurate("delta", delta, want.T, exact.T, magnitude=float(dim))
    assert torch.equal(dgates[..., 1], delta.T.to(dtype))
    assert torch.equal(dgates[..., ::2], before[..., ::2])
    assert torch.equal(delta_of(do, o, None, 1), delta)
