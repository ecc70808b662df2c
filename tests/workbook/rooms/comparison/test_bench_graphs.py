"""CUDA graphs come last, on leaves of their own, so that a capture that fails spoils nothing."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from workbook.lab.measure import timing
from workbook.lab.measure.attention_inputs import draw
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.lab.measure.timing import Clock, Latency
from workbook.rooms.comparison.cell import Runner, add_graphs, capture, empty
from workbook.rooms.comparison.implementations import of_backends

SHAPE = Shape(70, 4, 2, 16, 16, dtype="fp32", config=TINY_CONFIG)


@pytest.fixture
def runner():
    return Runner(torch.device("cpu"), Clock(None), cpu_memory=False)


def measured(name, shape=SHAPE, graph=True, **changes):
    implementation = replace(of_backends(["gather"])[0], name=name, graph=graph)
    ms = {"forward": [1.0, 1.0, 1.0], "backward": [2.0, 2.0, 2.0]}
    cell = empty(shape, implementation) | {"outcome": "ok", "latency_ms": ms} | changes
    return cell, shape, implementation


def test_a_capture_that_fails_is_a_remark_and_the_others_are_captured(runner, monkeypatch):
    seen = []

    def graph_latency(forward, leaves, do):
        seen.append([x.data_ptr() for x in leaves])
        if len(seen) == 1:
            raise RuntimeError("operation failed due to a previous error during capture")
        return Latency(1.0, 0.9, 1.1), Latency(2.0, 1.9, 2.1)

    monkeypatch.setattr(timing, "graph_latency", graph_latency)
    told = []
    lines = [measured("first"), measured("second")]
    add_graphs(lines, runner, told.append)
    first, second = (cell for cell, _, _ in lines)
    assert first["outcome"] == "ok" and set(first["latency_ms"]) == {"forward", "backward"}
    assert "no CUDA graph: RuntimeError: operation failed" in first["message"]
    assert second["latency_ms"]["graph_backward"] == [2.0, 1.9, 2.1] and second["message"] == ""
    assert told == [first, second] and seen[0] == seen[1]


def test_a_device_that_a_capture_broke_is_left_alone(runner, monkeypatch):
    def release(self):
        self.broken = "CUDA error: illegal address"

    monkeypatch.setattr(Runner, "release", release)
    monkeypatch.setattr(timing, "graph_latency", mock.Mock(side_effect=RuntimeError("CUDA error")))
    lines = [measured("first"), measured("second"), measured("third", replace(SHAPE, tokens=80))]
    add_graphs(lines, runner)
    for cell, _, _ in lines[1:]:
        assert cell["outcome"] == "ok" and set(cell["latency_ms"]) == {"forward", "backward"}
        assert "no CUDA graph" in cell["message"] and "illegal address" in cell["message"]


def test_only_what_ran_whole_is_short_and_fits_into_the_budget_is_captured(runner, monkeypatch):
    monkeypatch.setattr(timing, "graph_latency", lambda *args: pytest.fail("captured"))
    late = Runner(torch.device("cpu"), Clock(1e-9), cpu_memory=False)
    line = measured("triton")
    add_graphs([line], late)
    assert "no CUDA graph" in line[0]["message"] and "the budget" in line[0]["message"]
    lines = [
        measured("peer", graph=False),
        measured("red", outcome="red", latency_ms={}),
        measured("forward only", latency_ms={"forward": [1.0] * 3}),
        measured("slow", latency_ms={"forward": [30.0] * 3, "backward": [1.0] * 3}),
        measured("long", replace(SHAPE, tokens=8192)),
    ]
    add_graphs(lines, runner)
    assert not any(cell["message"] for cell, _, _ in lines)


@pytest.mark.parametrize("shared", [True, False])
def test_fresh_leaves_share_memory_but_no_graph(shared):
    drawn = draw(replace(SHAPE, shared_kv=shared))
    (backend,) = of_backends(["gather"])
    o = backend.call(drawn, None)  # keeps the nodes that gather the old leaves' gradients alive
    fresh = drawn.fresh()
    again = backend.call(fresh, None)
    assert torch.equal(o, again)
    for (name, old), new in zip(drawn.leaves().items(), fresh.leaves().values(), strict=True):
        assert new.is_leaf and new.requires_grad and new.data_ptr() == old.data_ptr(), name
        nodes = [torch.autograd.graph.get_gradient_edge(x).node for x in (old, new)]
        assert nodes[0] is not nodes[1], name
    assert fresh.do.data_ptr() == drawn.do.data_ptr() and not fresh.do.requires_grad


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_fingerprint_feels_one_bit_and_a_change_of_order(dtype):
    drawn = draw(replace(SHAPE, dtype=dtype))
    before = drawn.fingerprint()

    def same():
        return all(torch.equal(*pair) for pair in zip(before, drawn.fingerprint(), strict=True))

    gate = drawn.gates.data[0, 3, 1, 2]
    value = gate.clone()
    assert same()
    gate.copy_(torch.nextafter(value, torch.ones_like(value)))
    assert not same()
    gate.copy_(value)
    assert same()
    drawn.v.data.copy_(drawn.v.data.flip(1))
    assert not same()


def test_a_replay_that_gives_something_else_is_refused():
    want = [torch.ones(4), torch.full((4,), 2.0)]
    timing.same_as(want, [torch.ones(4), torch.full((4,), 2.01)])
    with pytest.raises(RuntimeError, match="replayed, gradient 1 differs by 1"):
        timing.same_as(want, [torch.ones(4), torch.ones(4)])
    with pytest.raises(RuntimeError, match="replayed, o differs by nan"):
        timing.same_as(want, [torch.full((4,), float("nan")), want[1]])


LARGER = Shape(512, heads=16, kv_heads=1, dim=64, value_dim=64)


@pytest.mark.gpu
def test_a_graph_is_captured_beside_a_graph_that_another_stream_made():
    drawn = draw(LARGER, "cuda")
    (backend,) = of_backends(["triton"])
    kept = backend.call(drawn, None)
    timing.gradients(kept, list(drawn.leaves().values()), drawn.do, keep=True)
    cell = empty(LARGER, backend)
    capture(cell, backend, drawn)
    assert set(cell["latency_ms"]) == {"graph_forward", "graph_backward"}


@pytest.mark.gpu
def test_a_capture_that_fails_is_a_remark_on_a_gpu_too():
    (good,) = of_backends(["triton"])

    def waits(drawn, blocks):
        torch.cuda.synchronize()  # which no capture allows
        return good.call(drawn, blocks)

    both = (replace(good, name="waits", call=waits), good)
    bad, after = (measured(one.name, LARGER)[0] for one in both)
    lines = [(bad, LARGER, both[0]), (after, LARGER, good)]
    add_graphs(lines, Runner(torch.device("cuda"), Clock(None), cpu_memory=False))
    assert "no CUDA graph" in bad["message"] and bad["outcome"] == "ok"
    assert "graph_forward" in after["latency_ms"] or "no CUDA graph" in after["message"]
