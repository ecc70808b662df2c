"""Choice of a backend: who takes a call, who declines and why, and which kernel ran."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from backend_calls import DEVICE, WITH_GRADIENT, attend
from cases import Case, draw
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import known, registry, witness
from nsa.attention.api import explain, nsa_attention
from nsa.attention.backends import triton
from nsa.config import NSAConfig

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def test_auto_takes_the_first_that_can_and_says_why_the_others_declined():
    args, kwargs = draw(Case(30), torch.float32).arguments()
    with witness.recording() as seen:
        nsa_attention(*args, **kwargs)
    assert list(seen.backends) == ["packed"]
    why = explain(*args)
    assert why.startswith("auto takes packed:") and "flex declined: flex_attention has no" in why
    with torch.no_grad():
        assert "flex declined: computes T x T scores on a CPU" in explain(*args)
    with pytest.raises(TypeError, match=r"explain takes no 'backend', since it reports what"):
        explain(*args, backend="gather")


def kernels_that_ran(drawn, backend):
    """(torch's own names of the attention operators that the profiler saw, the witness's)."""
    with torch.profiler.profile() as profiler, witness.recording() as seen:
        attend(drawn, backend)
    ran = {event.key for event in profiler.key_averages() if "_scaled_dot_product" in event.key}
    return ran, {served for (branch, served) in seen.paths if branch != "score"}


OPERATORS = {"math": "_attention_math", "flash": "_flash_", "mem_efficient": "_efficient_"}

OPERATORS |= {"cudnn": "_cudnn_"}


@pytest.mark.parametrize("backend", ["sdpa", "sdpa:math", "sdpa:flash", "sdpa:mem_efficient"])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_sdpa_runs_the_kernel_that_it_is_told_to_and_the_witness_names_the_one_that_ran(
    backend, value_dim
):
    drawn = draw(Case(64, group=2, dim=16, value_dim=value_dim), torch.float32, DEVICE)
    try:
        ran, served = kernels_that_ran(drawn, backend)
    except registry.Declined as refusal:
        kernel = backend.partition(":")[2]
        assert kernel and f"torch has no {kernel} kernel for q" in str(refusal)
        return
    assert len(ran) == len(served) == 1
    kernel = served.pop().removeprefix("sdpa:")
    assert OPERATORS[kernel] in ran.pop()
    assert backend in ("sdpa", f"sdpa:{kernel}")


def test_a_kernel_is_part_of_a_models_backend_and_an_unknown_one_is_refused():
    assert registry.check_name("sdpa:math") == "sdpa:math" not in registry.names()
    with pytest.raises(ValueError, match="'sdpa:mth' is unknown; the nearest is 'sdpa:math'"):
        registry.check_name("sdpa:mth")
    with pytest.raises(ValueError, match="'gather:math' is unknown"):
        registry.get("gather:math")


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU has two of torch's kernels")
def test_on_a_cpu_torch_has_no_memory_efficient_kernel_and_says_so():
    assert attend(draw(Case(24), torch.float32), "sdpa:math").isfinite().all()
    with pytest.raises(registry.Declined, match=r"'sdpa:cudnn' does not .* no cudnn kernel for q"):
        attend(draw(Case(24), torch.float32), "sdpa:cudnn")


def test_auto_never_takes_the_exhibit(monkeypatch):
    busy = [replace(b, why_not=lambda x: ["busy"]) for b in registry.backends()]
    busy[-1] = registry.get("sequential")
    monkeypatch.setattr(registry, "backends", lambda: busy)
    args, kwargs = draw(Case(5), torch.float32).arguments()
    with pytest.raises(ValueError, match=r"(?s)no backend takes.*gather: busy.*an exhibit"):
        nsa_attention(*args, **kwargs)


@pytest.mark.skipif(DEVICE != "cpu", reason="says what flex declines on a CPU")
@pytest.mark.parametrize("learning", ["", "phi_"], ids=["everything", "phi"])
def test_a_named_backend_runs_or_raises_with_its_reason(learning):
    drawn = draw(Case(30, phi="linear"), torch.float32)
    for name, leaf in drawn.leaves.items():
        leaf.requires_grad_(name.startswith(learning))
    message = r"'flex' does not take these inputs: .* no backward on cpu"
    with pytest.raises(registry.Declined, match=message):
        attend(drawn, "flex")


@pytest.mark.full
def test_the_witness_tells_backends_apart():
    drawn, paths = draw(Case(20), torch.float32, DEVICE), []
    for backend in WITH_GRADIENT:
        with witness.recording() as seen:
            attend(drawn, backend)
        assert seen.record()["paths"] not in paths
        paths.append(seen.record()["paths"])


@pytest.mark.parametrize(
    ("versions", "fails"),
    [
        (("3.6.0", "2.5.2"), True),
        (("3.6.0+git1", "2.5.0"), True),
        (("3.6.0", "2.4.6"), False),
        (("3.7.1", "2.5.2"), False),
        (("4.0", "3.0.1"), False),
    ],
)
def test_an_interpreter_that_fails_on_everything_is_told_by_its_versions(versions, fails):
    why = triton._not_interpreted(*versions)
    assert all(version in why for version in versions) if fails else why == ""


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
    config = NSAConfig(32, 32, 64, select_count=3, window=64)
    drawn = draw(Case(tokens, kv_heads=1, group=1, dim=16, config=config), torch.float32)
    with LargestTensor() as seen:
        attend(drawn, backend).sum().backward()
    return seen.elements


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gather", "packed"])
def test_a_linear_backend_never_makes_a_tensor_of_t_times_t(backend):
    tokens = 8192  # T x T is four times the largest chunk that a linear backend works on
    assert not registry.get(backend).quadratic
    assert largest(backend, tokens) <= tokens**2 // 2


@pytest.mark.parametrize("backend", ["masked", "sdpa"])
def test_the_control_makes_one_and_is_seen(backend):
    assert registry.get(backend).quadratic
    assert largest(backend, 512) >= 512**2


@pytest.mark.parametrize("backend", registry.names())
def test_a_backend_that_holds_t_times_t_says_so_and_no_other_claims_to(backend):
    module = import_module(known.MODULES[backend])
    says = " ".join(module.__doc__.split())
    assert says.startswith(f"{backend}:")
    if registry.get(backend).quadratic:
        assert "olds T x T" in says or "olds a T x T" in says
    else:
        assert "nothing T x T" in says or "holds no T x T tensor" in says
