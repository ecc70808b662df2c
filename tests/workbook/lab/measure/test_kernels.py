"""Tables made of a profile's events, given by hand."""

from types import SimpleNamespace

import pytest

from workbook.lab.measure import kernels


def test_gaps_are_where_no_stream_works():
    spans = [(1.0, 3.0), (2.0, 2.5), (5.0, 6.0), (6.0, 7.0), (10.0, 11.0)]
    assert kernels.gaps(reversed(spans)) == {
        "step_ms": 10.0, "busy_ms": 5.0, "idle_ms": 5.0, "gaps": 2, "longest_gap_ms": 3.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no kernel ran"):
        kernels.gaps([])


def test_the_most_expensive_kernels_come_first_and_the_rest_together():
    spans = {"a": [(0, 1)], "b": [(1, 4), (5, 6)], "c": [(7, 9)], "d": [(9, 10)]}
    rows = kernels.top(spans, count=2)
    told = [(row["name"], row["ms"], row["calls"]) for row in rows]
    assert told == [("b", 4, 2), ("c", 2, 1), ("2 others", 2, 2)]
    assert sum(row["share"] for row in rows) == 1


def test_kernels_of_torch_go_by_the_operator_that_launched_them():
    def launched(by, *kernels):
        found = [SimpleNamespace(name=name, duration=us) for name, us in kernels]
        return SimpleNamespace(name=by, kernels=found)

    events = [
        launched("aten::mm", ("nvjet_tst_256x128", 3000.0)),
        launched("aten::mm", ("nvjet_tst_64x64", 1000.0)),
        launched("nsa::attend", ("_selected_forward", 2000.0), ("_unions", 500.0)),
        SimpleNamespace(name="on the device"),
    ]
    work = {"nvjet": [(0.0, 4.0)], "ours": [(4.0, 6.5)]}
    found = kernels.by_operator(events, work)
    assert found["aten::mm"] == [(0.0, 3.0), (0.0, 1.0)]
    assert set(found) == {"aten::mm", "_selected_forward", "_unions"}
    assert kernels.by_operator(events[:1], work) is work  # most is not linked
