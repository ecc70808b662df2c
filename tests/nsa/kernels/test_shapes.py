"""Drawn shapes on a GPU, and what their judge must catch anywhere."""

import json
from dataclasses import replace

import pytest
import shapes
import torch
from backend_calls import DEVICE
from cases import TINY, Case, draw
from shape_draws import BRANCHES, Form, Shape, legal

from nsa.attention.api import nsa_attention
from nsa.attention.registry import Declined
from whyhung.process.trial import run_child
from workbook.lab.sweep import measure

SMALL = Shape(Form(16, 24, 1, "fp32", TINY), 5)


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.long)])
def test_drawn_shapes_are_right(count):
    drawn = legal(7, count, forms=max(8, min(36, count // 4)))
    parts = [[shape.to_dict() for shape in drawn[first::4]] for first in range(4)]

    def spec(part, share_s):
        return {"shapes": part, "device": "cuda"}

    ended = measure("shapes:in_turn", parts, spec, deadline_s=850, workers=4, progress=False)
    bad = [one.result["bad"] if one.status == "ok" else one for one in ended]
    assert not any(bad), bad


def test_what_is_drawn_is_of_every_kind():
    drawn = legal(41, 300)
    assert drawn == legal(41, 300) and drawn != legal(42, 300) and len(set(drawn)) == 300
    assert {1, 2, 3} <= {shape.tokens for shape in drawn}
    assert {1, 3, 5, 6, 7, 16} <= {shape.form.group for shape in drawn}
    assert {shape.form.dtype for shape in drawn} == {"bf16", "fp16", "fp32"}
    assert any(0 in shape.lengths and 1 in shape.lengths for shape in drawn)
    assert {shape.branches for shape in drawn} >= {(b,) for b in BRANCHES}
    long = [shape for shape in drawn if shape.tokens >= 8192]
    assert len(long) >= 15 and {shape.kernels for shape in long} == {"auto", "warps"}
    for shape in drawn:
        assert Shape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
        assert not shape.lengths or sum(shape.lengths) == shape.tokens


@pytest.mark.parametrize("layout", ["heads first", "part of wider rows", "late"])
def test_a_layout_changes_where_tensors_lie_and_not_what_they_hold(layout):
    shape = replace(SMALL, kv_heads=2)
    plain, other = (x.draw("cpu").leaves for x in (shape, replace(shape, layout=layout)))
    for name, x in plain.items():
        assert torch.equal(x, other[name])
    q = other["q"]
    assert not q.is_contiguous() or q.data_ptr() % 8


def zero_gradient(found):
    o, grads = found
    return o, grads | {"k": torch.zeros_like(grads["k"])}


def raising(found):
    raise RuntimeError("no such launch")


FAULTS = {
    "one percent too large": (lambda found: (found[0] * 1.01, found[1]), "inaccurate", "o: "),
    "a gradient of zeros": (zero_gradient, "inaccurate", "dk: "),
    "an exception": (raising, "raised", "no such launch"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, monkeypatch):
    spoil, outcome, said = FAULTS[fault]
    plain, calls = shapes.outcome, []

    def first_spoilt(*args):
        calls.append(args)
        found = plain(*args)
        return spoil(found) if len(calls) == 1 else found

    monkeypatch.setattr(shapes, "outcome", first_spoilt)
    monkeypatch.setattr(shapes, "DRAWS", 1)
    record = shapes.one(SMALL, "cpu")
    assert record["outcome"] == outcome and said in record["why"]


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.processes
@pytest.mark.full
def test_shapes_are_judged_in_a_process_that_names_them(tmp_path):
    spec = {"shapes": [SMALL.to_dict()], "device": "cpu"}
    ended = run_child("shapes:in_turn", spec, deadline_s=300, folder=tmp_path)
    assert ended.status == "ok" and ended.result == {"bad": []}
    assert str(SMALL) in (tmp_path / "stderr.txt").read_text()


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        ({"dim": 264}, torch.float16, "D and DV in 16..256, got 264 and 16"),
        ({"value_dim": 300}, torch.float16, "D and DV in 16..256, got 16 and 300"),
        ({"dim": 8}, torch.float16, "D and DV in 16..256, got 8 and 16"),
        ({}, torch.float64, "bf16, fp16 or fp32, got torch.float64"),
    ],
)
def test_what_no_kernel_takes_is_declined_before_a_launch(sizes, dtype, message, monkeypatch):
    """Limits of the kernels alone; tests/nsa/attention/test_inputs.py refuses bad input."""
    monkeypatch.setattr("nsa.kernels.ops.attend", lambda *_: pytest.fail("it was launched"))
    args, kwargs = draw(Case(20, **sizes), dtype, DEVICE).arguments()
    with pytest.raises(Declined, match=message):
        nsa_attention(*args, **kwargs, backend="triton")
