"""A soak that is read from the folder of a run, also of one that was ended before it judged."""

import json
import shutil

import pytest
from places import ROOT

from workbook.rooms.soak import claims, trials

KEPT = ROOT / "runs/2026-11-25/10_allocator_and_soak-5f645610"
WHOLE = ROOT / "runs/2026-11-25/10_allocator_and_soak-9bdcad85"


def test_a_run_that_was_ended_early_tells_what_it_sampled():
    soak = trials.stored(KEPT, 2000, 20)
    assert [len(part.rows) for part in soak.parts] == [1020, 920]
    assert [part.ended.status for part in soak.parts] == ["ok", "not run"]
    assert soak.limits_gib == (60.0, 65.0) and soak.cell.tokens == 2048
    ended = claims.comes_to_its_end(soak)
    assert (ended.verdict, soak.whole) == ("INCONCLUSIVE", False)


def test_a_leak_in_stored_samples_is_told(tmp_path):
    folder = shutil.copytree(KEPT, tmp_path / "run")
    file = folder / "trials/soak/before-the-restart/samples.csv"
    head, *rows = file.read_text().splitlines()
    grown = []
    for row in rows:
        step, seconds, tensors, *rest = row.split(",")
        grown.append(",".join([step, seconds, str(float(tensors) + 0.05 * int(step)), *rest]))
    file.write_text("\n".join([head, *grown, ""]))
    said = {f: claims.memory_does_not_grow(trials.stored(f, 2000, 20), "tensors").verdict
            for f in (KEPT, folder)}  # fmt: skip
    # 80 steps of the stored one were never taken; what grows before that is refuted all the same
    assert said == {KEPT: "INCONCLUSIVE", folder: "FAIL"}


def test_a_whole_run_is_judged_again_and_one_other_loss_after_the_restart_is_told(tmp_path):
    folder = shutil.copytree(WHOLE, tmp_path / "run")
    shutil.rmtree(folder / "trials/soak", ignore_errors=True)  # as it is in git
    soak = trials.stored(folder, 2000, 20)
    assert soak.whole and [len(part.rows) for part in soak.parts] == [1020, 1000]
    assert claims.goes_on_after_the_restart(soak).verdict == "PASS"
    assert claims.speed_does_not_drift(soak).verdict == "AIM MISSED"
    file = folder / "trials/after-the-restart/samples.csv"
    lines = file.read_text().splitlines()
    *row, loss, norm = lines[3].split(",")
    lines[3] = ",".join([*row, str(float(loss) * (1 + 2**-22)), norm])
    file.write_text("\n".join([*lines, ""]))
    assert claims.goes_on_after_the_restart(trials.stored(folder, 2000, 20)).verdict == "FAIL"


def test_a_folder_without_a_soak_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"before-the-restart"):
        trials.stored(tmp_path, 4, 1)
    assert json.loads((KEPT / "record.json").read_text())["status"] == "killed"
