"""Promises of conftest.py and of the pytest options to every other test."""

import os

import pytest
import torch

MAKERS = {
    "empty": lambda **options: torch.empty(3, **options),
    "empty_like": lambda **options: torch.empty_like(torch.ones(3), **options),
    "empty_strided": lambda **options: torch.empty_strided((3,), (1,), **options),
    "new_empty": lambda **options: torch.ones(2).new_empty(3, **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_memory_that_nobody_wrote_is_nan(make, dtype):
    out = make(dtype=dtype)
    assert out.dtype == dtype
    assert out.isnan().all()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_memory_without_numbers_or_without_floats_is_left_alone(make):
    assert make(dtype=torch.int64).shape == (3,)
    assert make(device="meta").is_meta
    assert make(requires_grad=True).requires_grad


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_poisoned_memory_compiles():
    def written(x):
        return torch.empty_like(x).copy_(x) + x.new_empty(5).zero_()

    traced = torch.compile(written, backend="aot_eager")  # generated code makes no memory by name
    assert torch.equal(traced(torch.ones(5)), torch.ones(5))


def test_no_test_needs_a_display_or_a_device_for_triton():
    assert os.environ["NSA_HEADLESS"] == "1"
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


def test_seeds_are_set_the_first_time():
    assert torch.initial_seed() == 1337


@pytest.mark.types
def test_shapes_are_checked_in_the_layers_that_declare_them(request):
    if not request.config.getoption("jaxtyping_packages", None):
        pytest.skip("run without jaxtyping's hook")
    from jaxtyping import TypeCheckError

    from nsa.model.data import with_successors

    with pytest.raises(TypeCheckError):
        with_successors([1, 2], "cpu")
