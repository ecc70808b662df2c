"""Calls of the backends for their tests, which hold each to the accuracy rule."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from accuracy import assert_as_accurate
from cases import Case, Drawn, draw

import workbook  # noqa: F401  adds the backend `sequential`
from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.reference.nsa import nsa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

FORWARD_ONLY = {"flex"} if DEVICE == "cpu" else set()

# flash takes fp16 and bf16 on a GPU alone, and has tests of its own.
NAMES = [name for name in registry.names() if name != "flash"]

WITH_GRADIENT = [name for name in NAMES if name not in FORWARD_ONLY]

# Triton's interpreter multiplies the bits of bf16, and tl.dot takes no fp64.
TRITON_TAKES = {torch.float32, torch.float16} | ({torch.bfloat16} if DEVICE == "cuda" else set())


def takes(backend: str, dtype: torch.dtype) -> bool:
    """True if the backend runs in this dtype on this machine."""
    return backend != "triton" or dtype in TRITON_TAKES


DOUBLE = [name for name in WITH_GRADIENT if takes(name, torch.float64)]

FAST = [name for name in WITH_GRADIENT if name != "sequential"]


def interpreted(backend: str) -> bool:
    """True if a program of its kernels takes milliseconds; fewer tokens then show a fact."""
    return (backend, DEVICE) == ("triton", "cpu")


def later(names: list[str]) -> list:
    """Mark the interpreted backend, which takes seconds a test, for `make test-all` alone."""
    return [pytest.param(x, marks=[pytest.mark.full] * interpreted(x)) for x in names]


def attend(drawn, backend, **changes):
    args, kwargs = drawn.arguments()
    return nsa_attention(*args, **(kwargs | changes), backend=backend)


def outcome(function, drawn, do=None):
    """(o, gradients by leaf) of `function`; a leaf that it does not reach has gradient 0."""
    o = function(drawn)
    if do is None:
        return o, {}
    leaves = list(drawn.leaves.values())
    grads = torch.autograd.grad(o, leaves, do.to(o.dtype), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return o, dict(zip(drawn.leaves, grads, strict=True))


def reference(drawn):
    args, kwargs = drawn.arguments()
    return nsa(*args, **kwargs).o


def exactly_selected(drawn: Drawn) -> Drawn:
    """The same with the blocks handed in that are selected in fp64."""
    args, kwargs = drawn.to(torch.float64).arguments()
    return replace(drawn, blocks=nsa(*args, **kwargs).blocks)


def refuses_a_second_derivative(backend: str, branch: str) -> None:
    drawn = draw(Case(20), torch.float32, DEVICE)
    o = attend(drawn, backend, branches=(branch,))
    with pytest.raises(RuntimeError, match=r"no second derivative .*'masked'"):
        torch.autograd.grad(o.square().sum(), drawn.leaves["q"], create_graph=True)


@cache
def measured(case: Case, dtype: torch.dtype):
    """Inputs in `dtype` with the exact selection handed in, dO, both results of the reference."""
    drawn = exactly_selected(draw(case, dtype, DEVICE))
    exact_inputs = drawn.to(torch.float64)
    do = torch.randn_like(reference(exact_inputs)).to(dtype)
    exact = outcome(reference, exact_inputs, do)
    same_dtype = outcome(reference, drawn.to(dtype), do)
    return drawn, do, exact, same_dtype


def check(backend, case, dtype):
    """Holds o to the rule, and every gradient of a backend that has any."""
    drawn, do, exact, same_dtype = measured(case, dtype)
    differentiated = backend not in FORWARD_ONLY
    with torch.set_grad_enabled(differentiated):
        given = drawn.to(dtype)
        got = outcome(lambda x: attend(x, backend), given, do if differentiated else None)
    assert got[0].dtype == dtype
    assert_as_accurate("o", got[0], same_dtype[0], exact[0])
    largest = max((float(x.abs().max()) for x in exact[1].values()), default=0.0)
    for name in got[1]:
        # Softmax does not see a shift of all keys: what shifts them has a gradient that is the
        # small difference of large terms, and twice of next to nothing is no measure for it.
        # And d_sinks is a number a head: the worst of three errors is twice that of three others
        # by chance, which depends on the order in which a processor adds.
        slack = 4.0 if name.startswith("phi_key_") or name == "sinks" else 2.0
        results = (got[1][name], same_dtype[1][name], exact[1][name])
        assert_as_accurate(f"d_{name}", *results, slack=slack, magnitude=largest)
