import pytest
import torch

from workbook.lab.observers import phases
from workbook.lab.observers.phases import BETWEEN, PhaseTimes

STEP = (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("optimizer", 3.0))


def watched(steps=3, phases=STEP, between=5.0):
    now = 0.0  # ms
    times = PhaseTimes(clock=lambda: now / 1e3)
    for step in range(steps):
        for name, ms in phases:
            times.on_phase(name, step)
            now += ms * (step + 1)
        times.on_phase("end", step)
        now += between
    return times


def test_a_phase_lasts_until_the_next_one_starts():
    times = watched()
    assert times.table() == times.table()
    table = {row["phase"]: row for row in times.table()}
    assert list(table) == ["data", "forward", "backward", "optimizer", BETWEEN]
    assert table["backward"]["median_ms"] == pytest.approx(8.0)
    assert table["backward"]["host_ms"] == pytest.approx(8.0)
    assert table["backward"]["steps"] == 3
    assert table["backward"]["share"] == pytest.approx(24.0 / 70.0)
    assert table[BETWEEN]["median_ms"] == pytest.approx(5.0)
    assert sum(row["share"] for row in table.values()) == pytest.approx(1.0)


def test_the_phases_of_micro_batches_add_up():
    phases = (("data", 1.0), *STEP[1:3], *STEP[1:])
    rows = [row for row in watched(1, phases).steps() if row["phase"] == "forward"]
    assert rows == [
        {"step": 0, "phase": "forward", "ms": pytest.approx(4), "host_ms": pytest.approx(4)}
    ]


def test_old_steps_are_forgotten(monkeypatch):
    monkeypatch.setattr(phases, "KEPT", 2)
    assert {row["step"] for row in watched(5).steps()} == {3, 4}
    assert watched(0).table() == []


@pytest.mark.gpu
def test_a_phase_takes_as_long_as_the_gpu_does():
    times = PhaseTimes("cuda")
    for step in range(70):  # more than are kept as events
        for name, cycles in (("forward", 20_000), ("backward", 2_000_000)):
            times.on_phase(name, step)
            torch.cuda._sleep(cycles)
        times.on_phase("end", step)
    table = {row["phase"]: row for row in times.table()}
    assert table["backward"]["steps"] == 70
    assert table["backward"]["median_ms"] > 10 * table["forward"]["median_ms"]
    assert table["backward"]["host_ms"] < table["backward"]["median_ms"]
