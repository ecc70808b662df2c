"""The notebook's sentences on estimates, its tables and its figures, on rows made for them."""

import math

import matplotlib
import pytest

from workbook.lab.training import TrainingSpec
from workbook.rooms.estimate import claims, plots, table, trials
from workbook.runs import metrics

matplotlib.use("agg")
MIB = 2**20


def frame(*cells, device="cpu"):
    """Rows of cells: (T, estimated MiB, measured MiB, changes of either side)."""
    specs, ours, theirs = [], [], []
    for tokens, estimated, measured, *more in cells:
        specs.append(TrainingSpec("repro", tokens, backend="gather", device=device))
        changes = more[0] if more else {}
        ours.append({"outcome": "ok", "message": "", "how": "traced", "processor_s": 1.0})
        theirs.append({"outcome": "ok", "message": ""})
        for row, mib, name in ((ours[-1], estimated, "ours"), (theirs[-1], measured, "theirs")):
            if mib is not None:
                size = int(mib * MIB)
                row |= {"allocated": size, "reserved": 2 * size if device == "cuda" else None}
                row["phases"] = {"forward": size // 2, "backward": size, "optimizer": size // 4}
            row |= changes.get(name, {})
    rows = trials.to_metrics(specs, ours, theirs)
    known = {"device": "NVIDIA H200"} if device == "cuda" else {}
    return metrics.table([metrics.row(row | known, {}) for row in rows])


def test_the_worst_cell_decides_and_not_the_mean():
    good = [(t, 100.0, 100.0) for t in (64, 128, 256)]
    claim = claims.peak_is_estimated(frame(*good, (512, 100.9, 100.0)))
    assert claim.verdict == "PASS" and claim.claim.endswith("the worst of 4 is +0.90%")
    claim = claims.peak_is_estimated(frame(*good, (512, 98.9, 100.0)))
    assert claim.verdict == "AIM MISSED" and "-1.10%" in claim.claim
    assert claim.evidence["worst"] == "repro gather T=512 fp32"
    assert claim.evidence["over the aim"] == 1


def test_a_gpu_is_allowed_five_percent_and_has_reserved_memory():
    df = frame((512, 104.9, 100.0), device="cuda")
    assert claims.peak_is_estimated(df).verdict == "PASS"
    assert claims.reserved_is_estimated(df).verdict == "PASS"
    assert claims.peak_is_estimated(frame((512, 94.0, 100.0), device="cuda")).verdict != "PASS"
    df = frame((512, 111.0, 100.0), device="cuda")
    assert claims.reserved_is_estimated(df).verdict == "AIM MISSED"
    assert claims.reserved_is_estimated(frame((512, 1.0, 1.0))).verdict == "NOT APPLICABLE"


def test_a_phase_is_judged_by_its_own_peak_and_the_named_one_by_what_it_holds():
    phases = {"forward": 100 * MIB, "backward": 90 * MIB, "optimizer": 10 * MIB}
    df = frame((64, 100.0, 100.0, {"ours": {"phases": phases}}))
    assert claims.peak_is_estimated(df).verdict == "PASS"
    assert claims.phase_is_estimated(df, "backward").verdict == "AIM MISSED"
    claim = claims.phase_of_the_peak_is_estimated(df)  # the forward holds half of the real peak
    assert claim.verdict == "AIM MISSED" and claim.evidence["short by"] == 0.5
    assert claims.phase_of_the_peak_is_estimated(frame((64, 9.0, 9.0))).verdict == "PASS"


def test_what_is_refused_counts_and_nothing_at_all_decides_nothing():
    refused = {"ours": {"outcome": "refused", "message": "shapes"}}
    df = frame((64, 10.0, 10.0), (128, None, 10.0, refused))
    claim = claims.nothing_is_left_out(df)
    assert claim.verdict == "AIM MISSED"
    assert claim.evidence["not estimated"] == {"repro gather T=128 fp32": "shapes"}
    assert list(table.not_compared(df)["refusal"]) == ["shapes"]
    df = frame((128, None, 10.0, refused))
    assert claims.peak_is_estimated(df).verdict == "INCONCLUSIVE"
    assert claims.phase_of_the_peak_is_estimated(df).verdict == "INCONCLUSIVE"


def test_a_cell_that_ran_out_of_memory_must_be_estimated_above_all_that_fitted():
    out = {"theirs": {"outcome": "oom", "message": "no more"}}
    df = frame((64, 60.0, 60.0), (128, 90.0, None, out))
    assert claims.what_does_not_fit_is_estimated(df).verdict == "PASS"
    df = frame((64, 60.0, 60.0), (128, 50.0, None, out))
    claim = claims.what_does_not_fit_is_estimated(df)
    assert claim.verdict == "AIM MISSED" and claim.evidence["wrong"] == ["repro gather T=128 fp32"]
    assert claims.what_does_not_fit_is_estimated(frame((64, 1.0, 1.0))).verdict == "NOT APPLICABLE"


def test_an_estimate_of_more_than_three_seconds_is_too_slow():
    slow = {"ours": {"processor_s": 3.1}}
    assert claims.estimates_are_quick(frame((64, 1.0, 1.0))).verdict == "PASS"
    claim = claims.estimates_are_quick(frame((64, 1.0, 1.0), (65, 1.0, 1.0, slow)))
    assert claim.verdict == "AIM MISSED" and claim.evidence["longest, s"] == 3.1


def test_the_case_studys_own_errors_stand_beside_ours():
    ours = [{"tokens": 512, "mib": 5100.0, "how": "h"}, {"tokens": 2048, "mib": 20000.0, "how": ""}]
    shown = table.beside_the_case_study(ours)
    assert list(shown["its error"]) == ["-52.6%", "-71.2%", "-54.2%", "+5.1%"]
    assert list(shown["our error"]) == ["", "-1.2%", "", "-2.7%"]
    assert claims.nearer_than_the_case_study(ours).verdict == "PASS"
    worse = [*ours, {"tokens": 128, "mib": 400.0, "how": ""}]
    assert claims.nearer_than_the_case_study(worse).verdict == "AIM MISSED"
    assert claims.nearer_than_the_case_study([]).verdict == "NOT APPLICABLE"


def test_committed_peaks_are_estimated_or_missed():
    rows = [{"run": "r", "cell": f"c{i}", "backend": "gather", "error": e, "message": ""}
            for i, e in enumerate((0.01, -0.049))]  # fmt: skip
    claim = claims.committed_peaks_are_estimated(rows)
    assert claim.verdict == "PASS" and claim.evidence["worst"] == "r: c1"
    assert table.recalled(rows).loc["gather", "lowest"] == "-4.90%"
    lost = rows[0] | {"cell": "c2", "error": math.nan}
    assert claims.committed_peaks_are_estimated([*rows, lost]).verdict == "AIM MISSED"
    assert claims.committed_peaks_are_estimated([lost]).verdict == "INCONCLUSIVE"
    assert claims.committed_peaks_are_estimated([]).verdict == "NOT APPLICABLE"
    assert table.recalled([]).empty


def found(estimated, fits, does_not, **more):
    row = {"boundary": f"b{estimated}", "foretold": estimated, "fits": fits, "does_not": does_not}
    tried = [[fits or 1, False], [does_not or 999, True]]
    return row | {"monotone": True, "tried": tried, "outcome": "ok", "message": ""} | more


@pytest.mark.parametrize(
    ("row", "error", "verdict"),
    [
        (found(100, 99, 101), 0.0, "PASS"),
        (found(100, 104, 105), 100 / 104 - 1, "PASS"),
        (found(100, 94, 95), 100 / 95 - 1, "AIM MISSED"),
        (found(100, 106, 107), 100 / 106 - 1, "AIM MISSED"),
        (found(100, None, 90), None, "INCONCLUSIVE"),
        (found(100, 99, 101, monotone=False), None, "INCONCLUSIVE"),
    ],
)
def test_a_estimated_boundary_is_held_to_the_real_bracket(row, error, verdict):
    assert claims.boundary_is_estimated([row]).verdict == verdict
    apart = table.boundary_error(row)
    assert math.isnan(apart) if error is None else apart == pytest.approx(error)


def test_boundaries_without_a_gpu_are_estimated_and_not_judged():
    row = {"boundary": "b", "foretold": 7, "outcome": "not run", "message": "there is no GPU"}
    assert claims.boundary_is_estimated([row]).verdict == "NOT APPLICABLE"
    shown = table.boundaries([row])
    assert list(shown.iloc[0]) == ["7", "there is no GPU", ""]
    assert claims.boundary_is_estimated([found(9, 9, 10), row]).verdict == "AIM MISSED"


def test_figures_show_every_cell_and_mark_what_did_not_run():
    out = {"theirs": {"outcome": "oom", "message": "no more"}}
    df = frame((64, 60.0, 61.0), (128, 90.0, None, out), device="cuda")
    allocated, reserved = plots.against(df).axes
    dots = [line for line in allocated.get_lines() if line.get_marker() == "o"]
    assert [list(dots[0].get_xdata()), list(dots[0].get_ydata())] == [[61.0], [60.0]]
    assert [t.get_text() for t in allocated.texts] == ["oom"]
    assert "reserved" in reserved.get_title(loc="left")
    (axes,) = plots.errors(df).axes
    assert [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() != "None"] == [
        pytest.approx(100 * (60 / 61 - 1))
    ]
    (axes,) = plots.boundaries([found(100, 94, 95)]).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["b100"]
    assert plots.boundaries([]).axes and plots.errors(frame()).axes


def test_facts_and_errors_are_lines_of_text():
    df = frame((64, 60.0, 60.0), (128, 90.0, 100.0))
    assert table.facts(df)[-1] == "1 of 2 are estimated to 1 %"
    shown = table.errors(df)
    assert list(shown["step"]) == ["+0.00%", "-10.00%"] and "reserved" not in shown
    assert table.worst(df).loc["gather", "step: lowest"] == "-10.00%"
