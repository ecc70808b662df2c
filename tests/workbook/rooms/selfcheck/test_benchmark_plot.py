"""The figure of the hang benchmark counts what the records say."""

import pytest

pytest.importorskip("matplotlib")

from workbook.rooms.selfcheck import plots


def row(**changes):
    told = {"tool": "nsa", "valid": True, "healthy": False, "set": "first", "told": True}
    return told | {"seconds": 10.0, "within": 30.0, "right": True, "line": True} | changes


def test_reports_are_counted_by_place_and_set():
    late = row(set="late", told=False, seconds=None, right=False, line=False)
    slow, healthy = row(seconds=40.0), row(healthy=True, told=False, seconds=None)
    gpus = {"device": "two NVIDIA H100 80GB HBM3, 32 cores", "rows": [row(), slow, late, healthy]}
    others = {"device": "16 cores", "rows": [row(tool="attach"), row(valid=False), row(line=False)]}
    left, right = plots.benchmark([gpus, others]).axes
    names = left.get_legend_handles_labels()[1]
    assert "two H100: 2 of 2" in names and "two H100: 0 of 1, written late" in names
    assert "CPU: 1 of 1" in names
    said = [text.get_text() for text in right.texts]
    assert said == ["1 of 3", "2 of 3", "2 of 3", "0 of 1", "1 of 1", "1 of 1", "0 of 1", "0 of 0"]
