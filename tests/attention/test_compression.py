"""phi by strides, held to the reference: outputs and the gradients of keys and weights."""

import pytest
import torch
from accuracy import assert_as_accurate
from cases import EVEN, ODD, SMALL, TINY, Case, draw

from nsa.attention.backends.triton import compress_by_strides
from nsa.reference import compress as reference
from nsa.reference.compress import PhiWeights


def wide(weights: PhiWeights) -> PhiWeights:
    return PhiWeights(*(x if x is None else x.detach().double() for x in vars(weights).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("config", [TINY, SMALL, EVEN, ODD], ids=["TINY", "SMALL", "EVEN", "ODD"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_strides_add_up_to_the_blocks_of_the_reference(config, kind, dtype, tokens):
    case = Case(tokens, kv_heads=2, dim=16, value_dim=16, batch=2, config=config, phi=kind)
    _, kwargs = draw(case, dtype).arguments()
    weights = kwargs["phi"].key
    x = torch.randn(2, tokens, 2, 16).to(dtype).requires_grad_()

    def results(function, x, weights):
        inputs = [x, *(t for t in vars(weights).values() if t is not None)]
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        o = function(inputs[0], kind, PhiWeights(*inputs[1:]), config)
        if o.numel() == 0:
            return [o]
        push = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
        return [o.detach(), *torch.autograd.grad(o, inputs, push)]

    got = results(compress_by_strides, x, weights)
    same = results(reference.compress, x, weights)
    exact = results(reference.compress, x.double(), wide(weights))
    names = ("o", "x", "position", "weight1", "bias1", "weight2", "bias2")
    for name, ours, torchs, truth in zip(names, got, same, exact, strict=False):
        if truth.numel():
            assert_as_accurate(f"{kind} {name}", ours, torchs, truth)
        assert ours.shape == truth.shape
