"""The program that draws shapes: a short form of it on a GPU, and what it must catch anywhere."""

import json
import sys
from dataclasses import replace

import pytest
import shapes
import torch
from backend_calls import DEVICE
from shape_draws import BRANCHES, Form, Shape, legal, tiny

from nsa.config import NSAConfig

TINY = NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=4, window=6)
SMALL = Shape(Form(16, 24, 1, "fp32", TINY), 5)


@pytest.mark.gpu
@pytest.mark.processes
def test_a_dozen_drawn_shapes_are_right():
    records = shapes.run(legal(7, 12, forms=8), processes=4, device="cuda")
    bad = [record for record in records if record["outcome"] != "ok"]
    assert not bad, json.dumps(bad, indent=1)


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


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
def test_a_shape_that_is_right_is_ok():
    record = shapes.one(SMALL, "cpu")
    assert record["outcome"] == "ok" and set(record["ratios"]) == {"o", "dq", "dk", "dv", "dgates"}


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


# Stands in for a sanitizer: it runs the command that follows, and has two shapes go wrong.
PREFIX = """
import os, runpy, sys
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import shape_draws
plain = shape_draws.Shape.draw
def draw(shape, device):
    if shape.seed == 1:
        os.abort()
    if shape.seed == 2:
        print("========= Invalid __shared__ read of size 512 bytes", flush=True)
    return plain(shape, device)
shape_draws.Shape.draw = draw
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.processes
@pytest.mark.full
def test_a_shape_that_kills_its_process_is_named_and_the_others_go_on():
    given = [replace(SMALL, seed=seed) for seed in range(4)]
    prefix = sys.executable, "-c", PREFIX
    records = shapes.run(given, processes=1, device="cpu", mode="launch", prefix=prefix)
    assert [record["outcome"] for record in records] == ["ok", "died", "died", "ok"]
    assert "exit code -6" in records[1]["why"] and "Invalid __shared__" in records[2]["why"]


def test_shapes_past_the_time_are_said_to_be_not_run():
    records = shapes.run(tiny(1, 2), processes=1, device="cpu", until=0)
    assert [record["outcome"] for record in records] == ["not run"] * 2


def test_what_no_kernel_takes_is_declined_by_name_before_a_launch():
    records = shapes.declined(DEVICE)
    assert len(records) >= 15
    assert {record["outcome"] for record in records} == {"declined"}, records
