"""The path witness and the look-out for non-finite values."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from cases import Case, draw
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import registry, witness
from nsa.attention.api import nsa_attention


class Operations(TorchDispatchMode):
    """The names of all operations inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def call(poison="", value=float("nan"), dtype=torch.float32, fill=(), **options):
    """A call whose leaf `poison` holds the value once, and those of `fill` theirs everywhere."""
    torch.manual_seed(7)
    drawn = draw(Case(24), dtype)
    with torch.no_grad():
        for name, all_ in dict(fill).items():
            drawn.leaves[name].fill_(all_)
        if poison:
            drawn.leaves[poison][0, 5, 0, 0] = value
    args, kwargs = drawn.arguments()
    return nsa_attention(*args, **kwargs, **({"backend": "gather"} | options))


def test_every_call_is_counted_by_branch_and_implementation():
    with witness.recording() as seen:
        for _ in range(3):
            call()
        call(backend="masked", branches=("win",))
    assert seen.record() == {
        "backends": {"gather": 3, "masked": 1},
        "paths": {
            "cmp": {"span-chunks": 3},
            "score": {"score-chunks": 3},
            "slc": {"gather-chunks": 3},
            "win": {"dense-mask-matmul": 1, "span-chunks": 3},
        },
        "declined": {},
        "non_finite": {},
    }
    assert json.loads(json.dumps(seen.record())) == seen.record()


def test_what_auto_declined_is_counted_by_backend_and_reason(monkeypatch):
    def declined():
        with witness.recording() as seen:
            call(backend="auto")
        return seen.record()["declined"]

    before = declined()
    assert before and "packed" not in before
    packed = registry.get("packed")
    busy = replace(packed, why_not=lambda inputs: ["busy", "tired"])
    monkeypatch.setitem(registry._loaded, "packed", busy)
    assert declined() == before | {"packed": {"busy; tired": 1}}
    with pytest.raises(registry.Declined, match="'packed' does not take these inputs: busy; tired"):
        call(backend="packed")
    with witness.recording() as seen:
        call(backend="gather")
    assert seen.record()["declined"] == {}, "who was named was not chosen"


def test_recordings_nest_and_close_and_the_process_counts_every_call():
    before = witness.process().backends["gather"]
    with witness.recording() as outer:
        call()
        with witness.recording() as inner:
            call()
    call()
    assert inner.backends["gather"] == 1 and outer.backends["gather"] == 2
    assert witness.process().backends["gather"] == before + 3


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_strict_mode_names_branch_layer_and_step(branch, value):
    with (
        witness.where(step=5),
        witness.where(layer=3),
        pytest.raises(FloatingPointError, match=rf"branch '{branch}' at layer 3, step 5: \d+ of"),
    ):
        call(f"v_{branch}", value, strict=True)


@pytest.mark.parametrize("backend", ["gather", "packed", "sdpa"])
@pytest.mark.parametrize("branches", [("win",), ("cmp", "slc", "win")])
def test_strict_mode_waits_once_a_value_it_looks_at_and_without_it_nothing_does(
    backend, branches, monkeypatch
):
    def waits(**options):
        with Operations() as seen:
            call(backend=backend, branches=branches, **options)
        return seen.names.count("aten._local_scalar_dense.default")

    monkeypatch.setattr(witness, "saw_output", lambda o: None)  # which on a CPU looks at once
    assert waits() == 0
    assert waits(strict=True) == len(branches) + 2  # each branch, the gates and the sum


def test_a_non_finite_output_warns_once_and_is_counted():
    with witness.recording() as seen, witness.where(layer=2, step=7):
        with pytest.warns(RuntimeWarning, match=r"not finite \(layer 2, step 7\).*strict=True"):
            call("v_win")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call("v_win")
            call()
    assert seen.record()["non_finite"] == {"layer 2": 2}


def test_outputs_are_counted_across_looks_dtypes_and_places():
    bad, good = torch.tensor([1.0, float("inf")]), torch.ones(3)
    calls = [bad, good, bad.double(), bad, good.half()] * witness.TOGETHER
    with witness.recording() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, o in enumerate(calls):
            with witness.where(layer=number % 2):
                witness.saw_output(o)
        assert sum(map(len, seen._norms.values())) < 2 * 3 * witness.TOGETHER
        for _ in range(2):  # to read them changes nothing
            assert seen.non_finite() == {"layer 0": 12, "layer 1": 12}


def test_most_outputs_are_kept_for_a_look_at_several():
    seen, norm = witness.Witness(), torch.ones(())
    with Operations() as operations:
        for _ in range(witness.TOGETHER - 1):
            seen.saw_output(norm)
        assert operations.names == []
        seen.saw_output(norm)
    assert 0 < len(operations.names) < witness.TOGETHER and seen.non_finite() == {}


def test_a_tensor_without_values_is_not_looked_at():
    with witness.recording() as seen:
        witness.saw_output(torch.ones(4, device="meta"))
    assert seen.non_finite() == {}


def test_a_gate_of_zero_does_not_hide_a_nan():
    with witness.recording() as seen, pytest.warns(RuntimeWarning):
        call("v_win", fill={"gates": 0}, backend="auto")
    assert seen.non_finite() == {"no place named": 1}


def test_places_end_with_their_block_also_after_an_error():
    with pytest.raises(KeyError), witness.where(layer=1):
        raise KeyError
    assert witness.place() == "no place named"


def test_autocast_does_not_reach_the_scores():
    plain = call()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(), plain)


def test_every_open_recording_hears_of_a_non_finite_output():
    with witness.recording() as outer:
        with witness.recording() as inner, pytest.warns(RuntimeWarning):
            call("v_win")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert outer.non_finite() == inner.non_finite() == {"no place named": 1}


def test_strict_mode_sees_a_gate_that_is_not_finite():
    with pytest.raises(FloatingPointError, match="the gates at no place named: 1 of 288"):
        call("gates", strict=True)


def test_strict_mode_asks_a_backend_about_this_device_before_it_computes(monkeypatch):
    def wrong(inputs):
        raise RuntimeError(f"wrong for D {inputs.q.shape[-1]}")

    unproven = replace(registry.get("masked"), first_use=wrong)
    monkeypatch.setitem(registry._loaded, "masked", unproven)
    call(backend="masked")
    with pytest.raises(RuntimeError, match="wrong for D"):
        call(backend="masked", strict=True)


def test_strict_mode_sees_a_sum_that_overflows():
    fill = {"v_cmp": 40000, "v_slc": 40000, "v_win": 40000, "gates": 1}
    with pytest.raises(FloatingPointError, match="the gated sum"):
        call(dtype=torch.float16, fill=fill, strict=True, backend="auto")
