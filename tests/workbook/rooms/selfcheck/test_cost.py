import math

import pytest
import torch

from whyhung.watch.evidence import P, Sample
from workbook.rooms.selfcheck import cost
from workbook.rooms.selfcheck.cost import (
    cost_of_counting,
    end_of_a_backward,
    errors_of,
    estimated_end,
)

SETTINGS = {"preset": "cpu_test", "layers": 1, "tokens": 64, "backend": "gather", "threads": 1}


def looks(fired, step=0, total=100, every_s=0.1):
    """One look every tenth of a second, the last one after the backward."""
    inside = [Sample(n * every_s, 0, P(step, "backward", 0, f, total)) for n, f in enumerate(fired)]
    return [*inside, Sample(len(fired) * every_s, 0, P(step, "optimizer", 0, total, total))]


def test_an_even_backward_is_estimated_to_the_look():
    found = errors_of(looks(range(10, 100, 10)), 0)
    assert found["worst"] == pytest.approx(0, abs=1e-9) and found["nodes"] == 100
    assert found["seconds"] == pytest.approx(0.9) and found["looks"] == 5


def test_one_that_slows_down_is_estimated_too_early():
    """At the look at 50 two looks a node of ten are left, and one was estimated."""
    found = errors_of(looks([10, 20, 30, 40, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95]), 0)
    assert found["left_at_half"] == pytest.approx(0.5)
    assert found["worst"] == pytest.approx(0.5 / 1.4, rel=0.01)


def test_only_the_backward_of_that_step_counts():
    before = looks([5, 6, 7, 8, 9, 60], step=0)
    after = [Sample(s.t + 5, 0, s.p) for s in looks(range(10, 100, 10), step=1)]
    assert errors_of([*before, *after], 1)["worst"] == pytest.approx(0, abs=1e-9)


def test_a_backward_between_two_looks_tells_nothing():
    assert errors_of(looks([10, 40], step=3), 3) is None
    assert errors_of(looks([60], step=3), 3) is None  # one look knows no pace
    assert errors_of(looks([10, 60], step=0), 1) is None
    assert errors_of(looks([10, 60], step=0)[:-1], 0) is None  # its end was not seen


def test_backwards_that_are_all_too_short_are_said_to_be(monkeypatch):
    monkeypatch.setattr(cost, "EVERY_S", 60.0)
    with pytest.raises(ValueError, match=r"any of 2 backwards, .* 60000 ms: .* more layers"):
        estimated_end({"settings": SETTINGS | {"threads": torch.get_num_threads()}, "steps": 2})


@pytest.mark.processes
@pytest.mark.full
def test_the_cost_of_counting_is_a_ratio_of_one_process():
    ended = cost_of_counting(SETTINGS, steps=4, rounds=5)
    assert ended.status == "ok", ended.message
    assert 0.5 < ended.result["ratio"] < 3 and ended.result["clock"] == "processor time"
    assert ended.result["plain_ms"] > 0 and ended.result["counted_ms"] > 0


@pytest.mark.processes
@pytest.mark.full
def test_a_real_backward_has_its_end_estimated():
    """Accuracy is not checked on a busy machine: see tests/whyhung/watch/test_progress.py."""
    settings = SETTINGS | {"backend": "sequential", "tokens": 128}
    ended = end_of_a_backward(settings, steps=3)
    assert ended.status == "ok", ended.message
    assert ended.result["nodes"] > 1000 and ended.result["looks"] >= 1
    assert ended.result["seconds"] > 0 and 0 <= ended.result["worst"] < math.inf
