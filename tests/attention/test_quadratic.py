"""Who holds a T x T tensor: looked at in every operation, forward and backward, not believed."""

import pytest
import torch
from cases import Case, draw
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig

TOKENS = 8192  # T x T is four times the largest chunk that a linear backend works on
CONFIG = NSAConfig(
    compress_block=32, compress_stride=32, select_block=64, select_count=3, window=64
)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation inside returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                # An expanded view holds no more than its storage.
                held = min(x.numel(), x.untyped_storage().nbytes() // max(1, x.element_size()))
                self.elements = max(self.elements, held)
        return result


def largest(backend: str, tokens: int) -> int:
    case = Case(tokens, kv_heads=1, group=1, dim=16, config=CONFIG)
    args, kwargs = draw(case, torch.float32).arguments()
    with LargestTensor() as seen:
        nsa_attention(*args, **kwargs, backend=backend).sum().backward()
    return seen.elements


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gather", "packed"])
def test_a_linear_backend_never_makes_a_tensor_of_t_times_t(backend):
    assert not registry.get(backend).quadratic
    assert largest(backend, TOKENS) <= TOKENS**2 // 2


@pytest.mark.parametrize("backend", ["masked", "sdpa"])
def test_the_control_makes_one_and_is_seen(backend):
    assert registry.get(backend).quadratic
    assert largest(backend, 512) >= 512**2


@pytest.mark.parametrize("backend", registry.names())
def test_a_backend_that_holds_t_times_t_says_so_and_no_other_claims_to(backend):
    module = __import__(f"nsa.attention.backends.{backend}", fromlist=["BACKEND"])
    says = " ".join(module.__doc__.split())
    assert says.startswith(f"{backend}:")
    if registry.get(backend).quadratic:
        assert "olds T x T" in says or "olds a T x T" in says
    else:
        assert "nothing T x T" in says or "holds no T x T tensor" in says
