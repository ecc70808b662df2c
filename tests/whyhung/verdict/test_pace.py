import pytest
from evidences import STEPS, moving, p, resting, trial

from whyhung.verdict.pace import backward_eta_s, fraction, moves, pace
from whyhung.watch.evidence import P, Sample


def backward(rates, total=1000, until=0.5):
    """Samples inside one backward whose nodes run at these rates, one after the other."""
    fired, t, found = 0.0, 0.0, []
    for rate in rates:
        for _ in range(10):
            found.append(Sample(t, 0, P(0, "backward", 9, int(fired), total)))
            fired, t = fired + rate * 0.25, t + 0.25
    return [s for s in found if s.p.fired <= until * total]


@pytest.mark.parametrize("part", [0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("rates", [[40] * 40, [30] * 3 + [45] * 37, [60] * 2 + [42] * 38])
def test_from_its_half_on_the_end_of_a_backward_is_known_to_a_quarter(rates, part):
    whole = backward(rates, until=1.0)
    seen = [s for s in whole if s.p.fired <= part * 1000]
    left = whole[-1].t - seen[-1].t
    assert backward_eta_s(seen) == pytest.approx(left, rel=0.25)


def test_outside_of_a_backward_there_is_no_end_of_one():
    assert backward_eta_s([]) is None
    assert backward_eta_s([Sample(0, 0, P(0, "forward", 3))]) is None
    assert backward_eta_s([Sample(0, 0, P(0, "backward", 3, 7, 7))]) is None
    assert backward_eta_s([Sample(0, 0, P(0, "backward", 3, 4, 7))]) is None  # one look, no rate


def test_the_share_that_is_done_grows_with_steps_phases_and_nodes():
    way = [
        P(), P(0, "data"), P(0, "forward"), P(0, "backward", 9, 0, 100),
        P(0, "backward", 9, 50, 100), P(0, "optimizer", 9, 100, 100), P(0, "end"), P(1, "forward"),
    ]  # fmt: skip
    found = [fraction(one, 2) for one in way]
    assert found == sorted(found)
    assert found[0] == 0 and found[-2] == 0.5
    # nodes of a backward inside another may be counted before they are in the total
    assert fraction(P(0, "backward", 9, 900, 100), 2) == fraction(P(0, "optimizer"), 2)
    assert fraction(P(9, "end"), 2) == 1
    assert fraction(P(3, "data"), 0) == 0


def test_the_pace_is_that_of_the_slowest_rank_without_its_start():
    start = [Sample(t / 4, r, P(), 1, 0.0, "R") for r in (0, 1) for t in range(40)]
    fast = moving(6, each_s=1.0)
    slow = moving(6, each_s=3.0, rank=1)
    later = [Sample(s.t + 10, s.rank, s.p, s.beats, s.cpu_s, s.state) for s in [*fast, *slow]]
    found = pace(trial([*start, *later]))
    assert found["fraction"] == pytest.approx(2 / STEPS, abs=0.05)
    assert found["projected_s"] == pytest.approx(18, rel=0.1)
    assert found["eta_s"] == pytest.approx(12, rel=0.15)


def test_what_cannot_be_told_is_none():
    assert set(pace(trial()).values()) == {None}
    found = pace(trial(resting(0, 2, at=p(0))))
    assert found["eta_s"] is found["nodes_per_s"] is found["steps_per_s"] is None
    assert moves(resting(0, 2, at=p(0))) == 0
