"""Results of the tests' faster interpreter equal those of Triton's, bit by bit."""

import pytest
import quick_interpreter
import torch
import triton.language as tl
from span_cases import COMPRESSED, Case, Problem
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_computes_the_same_bits_and_looks_for_what_to_replace_once_a_launch(monkeypatch, dtype):
    problem, replaced, launched = Problem(Case((40,), COMPRESSED, 2, 1, 16, 16, dtype)), [], []
    plain, run = quick_interpreter._plain_patch_lang, interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda *a, **k: launched.append(1) or run(*a, **k)
    )
    monkeypatch.setattr(
        quick_interpreter, "_plain_patch_lang", lambda fn: replaced.append(fn) or plain(fn)
    )
    quick = problem.kernels()
    assert launched and len(replaced) <= 2 * len(launched)  # `triton.language`, and what it calls
    with monkeypatch.context() as patched:
        for owner, name, plain in quick_interpreter.PLAIN:
            if plain is None:
                patched.delattr(owner, name)
            else:
                patched.setattr(owner, name, plain)
        slow = problem.kernels()
    for name, value in quick.items():
        assert torch.equal(value.nan_to_num(7.0), slow[name].nan_to_num(7.0)), name


def test_what_a_launch_replaced_is_as_it_was_afterwards():
    before = tl.load, tl.range, tl.tensor.__add__
    Problem(Case((9,), COMPRESSED, 1, 1, 16, 16)).forward()
    assert (tl.load, tl.range, tl.tensor.__add__) == before
    assert not quick_interpreter._REPLACED
