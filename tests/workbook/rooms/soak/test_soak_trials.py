"""Processes of a soak: the restart, limits that stop it, and unplanned ends."""

import errno
import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from soak_entries import KILLED_AFTER

from nsa.model import saving
from whyhung.process.trial import Outcome
from workbook.lab.measure.allocations import Stream
from workbook.lab.training import TrainingSpec
from workbook.rooms.soak import child, claims, table, trials
from workbook.rooms.soak.trials import Part, Setting, Soak

CELL = TrainingSpec("cpu_test", 32, layers=1, checkpoint="all")
LIMITS = (60.0, 65.0)


def trained(folder, name="part", **spec):
    """`child.train` in this process, as a Part."""
    place = folder / name
    place.mkdir()
    given = {"cell": CELL.to_dict(), "folder": str(place), "checkpoints": str(folder / "kept")}
    given |= spec
    result = child.train(given)
    (place / "spec.json").touch()
    (place / "result.json").touch()
    ended = Outcome("ok", result, 1.0, "", 0)
    return Part(given, ended, trials.read(place / trials.FILE))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    before = trained(folder, "before", until=26, save_at=22)
    after = trained(folder, "after", until=44, resume=str(before.saved))
    return Soak(CELL, 44, 4, LIMITS, (before, after))


@pytest.mark.full
def test_a_restarted_training_repeats_the_steps_of_the_one_that_went_on(whole):
    both = table.across(whole)
    assert both.index.tolist() == [22, 23, 24, 25]
    assert both["without"].tolist() == both["after"].tolist() and both["after"].is_unique
    assert [len(rows) for rows in whole.rows()] == [22, 22]
    assert whole.rows()[1]["step"].tolist() == list(range(22, 44))
    assert claims.comes_to_its_end(whole).verdict == "PASS"
    assert claims.goes_on_after_the_restart(whole).verdict == "PASS"


@pytest.mark.full
def test_a_loss_that_differs_by_its_last_bit_is_not_the_same(whole):
    before, after = whole.parts
    rows = after.rows.copy()
    rows.loc[1, "loss"] = np.nextafter(np.float32(rows.loc[1, "loss"]), np.float32(9))
    whole = Soak(CELL, 44, 4, LIMITS, (before, Part(after.spec, after.ended, rows)))
    claim = claims.goes_on_after_the_restart(whole)
    assert claim.verdict == "FAIL" and claim.evidence["furthest"] > 0


@pytest.mark.parametrize("ends", ["well", "late", "full"])
def test_the_second_process_starts_from_the_file_of_the_first(ends, tmp_path, monkeypatch):
    specs = []

    def part(name, spec, folder, entry, **options):
        specs.append(spec)
        kept = folder / "checkpoints"
        kept.mkdir(exist_ok=True)
        (kept / "step-000050.pt").touch()
        saved = "not kept: full" if ends == "full" else "checkpoints/step-000050.pt"
        status = "timeout" if ends == "late" and spec.get("resume") else "ok"
        result = {"saved": saved, "stop": None} if status == "ok" else None
        return Part(spec, Outcome(status, result, 1.0, "", 0), trials.read(tmp_path / "none.csv"))

    monkeypatch.setattr(trials, "part", part)
    found = trials.soak(CELL, steps=100, overlap=7, limits_gib=LIMITS, folder=tmp_path)
    first, *second = specs
    assert (first["until"], first["save_at"], first.get("resume")) == (57, 50, None)
    assert first["guard"] == ["memory=60.0000GiB:warn,65.0000GiB:stop"]
    kept = tmp_path / "checkpoints" / "step-000050.pt"
    assert [(one["until"], one["resume"]) for one in second] == [(100, str(kept))] * (
        ends != "full"
    )
    assert found.whole == (ends == "well") and kept.exists() == (ends != "well")


def test_every_step_has_its_line_and_tensors_are_counted_to_the_byte(whole):
    rows = whole.parts[0].rows
    assert rows["step"].tolist() == list(range(26))
    assert rows[["loss", "grad_norm", "tensors_mib", "host_mib"]].notna().all(axis=None)
    # A chunk begins with an idle device, which its first step would be charged with.
    starts = [0, child.CHUNK, 22]
    assert rows.loc[rows["seconds"].isna(), "step"].tolist() == starts
    parameters = whole.parts[0].result["parameters"]
    moments = 8 * parameters / 2**20
    assert moments <= rows["tensors_mib"].min() <= rows["tensors_mib"].max() < moments + 0.1
    assert gc.get_freeze_count() == 0, "what looked at them is gone"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """In a process of its own: this one has memory that others freed, and a leak fills that up."""
    folder = tmp_path_factory.mktemp("planted")
    spec = {"leak_mib": 4.0, "over_mib": [24.0, 32.0], "until": 40}
    spec |= {"cell": CELL.to_dict(), "checkpoints": str(folder / "kept")}
    return trials.part("part", spec, folder, deadline_s=120, progress=False)


@pytest.mark.full
@pytest.mark.processes
def test_a_leak_is_warned_of_and_stopped_within_a_step_and_its_evidence_stays(planted):
    warned, stopped = table.crossings(planted)
    # As many tensors of 4 MiB as reach 24 and 32 MiB, or one more for what else the process got.
    assert warned.told - trials.PLANT_AFTER in (4, 5, 6) and stopped.told - warned.told in (1, 2, 3)
    assert planted.stop["reason"] == "memory" and planted.outcome.startswith("stopped, memory: ")
    assert claims.limits_stop_a_run(planted).verdict == "PASS"
    assert claims.evidence_is_kept(planted).verdict == "PASS"
    assert saving.read(planted.saved)["steps_done"] == stopped.told + 1 < 40
    assert planted.rows["loss"].notna().all()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("spoil", ["no stop", "late warning", "no warning"])
def test_limits_that_do_not_hold_fail(planted, spoil):
    result = dict(planted.ended.result)
    if spoil == "no stop":
        result["stop"] = None
    else:
        late = [{**one, "step": one["step"] - 2} for one in result["warnings"]]
        result["warnings"] = late if spoil == "late warning" else []
    spoilt = Part(planted.spec, Outcome("ok", result, 1.0, "", 0), planted.rows)
    assert claims.limits_stop_a_run(spoilt).verdict == "FAIL"


@pytest.mark.processes
def test_evidence_that_is_gone_fails(planted, tmp_path):
    def verdict(rows=planted.rows, **spec):
        return claims.evidence_is_kept(Part(planted.spec | spec, planted.ended, rows)).verdict

    assert verdict() == "PASS"
    assert verdict(rows=planted.rows.iloc[:-1]) == "FAIL"
    assert verdict(folder=str(tmp_path)) == "FAIL"
    assert verdict(checkpoints=str(tmp_path / "kept")) == "FAIL"


def test_a_loss_that_is_not_finite_ends_a_soak_with_its_reason(tmp_path):
    part = trained(tmp_path, until=26, save_at=22, changes={"lr": 1e30, "warmup_steps": 1})
    assert part.stop["reason"] == "non_finite" and part.saved is None
    assert not (tmp_path / "kept").exists(), "weights that are not finite are no checkpoint"
    claim = claims.comes_to_its_end(Soak(CELL, 44, 4, LIMITS, (part,)))
    assert claim.verdict == "FAIL" and "stopped, non_finite: step" in claim.claim


def test_a_full_disk_costs_the_restart_and_not_what_was_measured(tmp_path, monkeypatch):
    def full(state, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write", full)
    part = trained(tmp_path, until=26, save_at=22)
    assert part.outcome == "ok" and part.saved is None and len(part.rows) == 26
    claim = claims.comes_to_its_end(Soak(CELL, 44, 4, LIMITS, (part,)))
    assert claim.verdict == "INCONCLUSIVE"
    assert "no checkpoint: not kept: No space left on device" in claim.claim


@pytest.mark.processes
def test_a_process_that_is_killed_leaves_its_steps_and_decides_nothing(tmp_path):
    found = trials.soak(
        CELL, steps=200, overlap=4, limits_gib=(3.0, 4.0), folder=tmp_path, deadline_s=60.0,
        threads=1, progress=False, entry="soak_entries:killed",
    )  # fmt: skip
    [part] = found.parts
    assert part.outcome == "crash: ended by SIGKILL"
    assert len(part.rows) == KILLED_AFTER // child.CHUNK * child.CHUNK
    claim = claims.comes_to_its_end(found)
    assert claim.verdict == "INCONCLUSIVE" and "ended by SIGKILL" in claim.claim
    assert claims.goes_on_after_the_restart(found).verdict == "INCONCLUSIVE"
    assert table.parts(found).loc["before the restart", "steps"] == "0 to 39"


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    file = tmp_path / trials.FILE
    file.write_text(",".join(trials.COLUMNS) + "\n0,nan,1.0,nan,nan,2.0,3.0,4.0\n1,0.5,1.0,na")
    rows = trials.read(file)
    assert rows["step"].tolist() == [0] and rows["loss"].tolist() == [3.0]
    assert trials.read(tmp_path / "none.csv").empty


def test_settings_take_turns_each_in_an_environment_of_its_own(monkeypatch, tmp_path):
    ran = []

    def run(entry, spec, *, env, **options):
        ran.append((spec["setting"], env))
        return Outcome("ok", {"reserved": [1.0] * 6, "losses": [1.0] * 6}, 1.0, "", 0)

    monkeypatch.setattr(trials, "run_child", run)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    names = ["", "max_split_size_mb:64"]
    found = trials.settings(
        CELL, names, steps=6, repeats=2, folder=tmp_path, deadline_s=9.0, progress=False
    )
    assert [name for name, _ in ran] == names * 2
    assert ran[0][1] == {"PYTORCH_CUDA_ALLOC_CONF": ""}
    assert set(ran[1][1].values()) == {"max_split_size_mb:64"} and len(ran[1][1]) == 2
    assert [(t.name, t.turn) for t in found] == [(n, turn) for turn in (0, 1) for n in names]
    assert found[0].steps("reserved") == [1.0], "the first five settle"


def test_each_setting_is_estimated_and_what_is_not_known_says_why(monkeypatch):
    step = Stream()
    step.mark("forward")
    for address in range(40):  # the next half of a power of two is 4 MiB
        step.alloc(address, 3 * 2**20 + 1)
    for address in range(40):
        step.free(address)
    step.mark("end")
    traced = SimpleNamespace(stream=step, streams={})
    monkeypatch.setattr("workbook.lab.estimate.trace.trace", lambda spec, gpu: traced)
    usual, powers, wrong = trials.estimates(
        CELL, ["", "roundup_power2_divisions:2", "a:1"], "NVIDIA H200"
    )
    assert 120 < usual.allocated < powers.allocated <= powers.reserved
    assert usual.reserved >= usual.allocated and not usual.why
    assert np.isnan(wrong.reserved) and "no setting 'a'" in wrong.why
    [unknown] = trials.estimates(CELL, [""], "NVIDIA Z9")
    assert np.isnan(unknown.reserved) and "'NVIDIA Z9' is none that is known" in unknown.why


GIVEN = {
    "preset": "cpu_test", "backend": "auto", "tokens": 32, "batch": 1, "precision": "fp32",
    "checkpoint": "", "data": "text", "seed": 1, "layers": 1, "steps": 120, "overlap": 10,
    "warn_gib": 60.0, "stop_gib": 65.0, "leak_mib": 4.0, "over_mib": [60.0, 65.0],
    "settings": [], "setting_steps": 25,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"settings": ["", "expandable"]}, "must be text as 'max_split_size_mb:64'"),
        ({"settings": ["max_split_size_mb:64", "a:1"]}, "must hold '', the usual one"),
        ({"settings": [""]}, "and another"),
        ({"settings": ["", "", "a:1"]}, "once"),
        ({"setting_steps": 5}, "setting_steps=5 must be more than 5"),
        ({"steps": 3}, "steps=3 must be at least 4"),
        ({"overlap": 61}, "overlap=61 must be 1 to 60"),
        ({"warn_gib": 66.0}, "60 and 65 would"),
        ({"over_mib": [60.0]}, r"\[60, 65\] and 4 would do"),
        ({"over_mib": [65.0, 60.0]}, r"\[60, 65\] and 4 would do"),
        ({"over_mib": [0.0, 5.0]}, r"\[60, 65\] and 4 would do"),
    ],
)
def test_parameters_that_could_not_be_run_are_refused(given, message):
    trials.check_parameters(GIVEN)
    with pytest.raises(ValueError, match=message):
        trials.check_parameters(GIVEN | given)


def test_a_leak_that_nothing_stops_ends_beyond_its_limits():
    assert trials.until(4.0, [60.0, 65.0]) == trials.PLANT_AFTER + 34


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_counts_and_a_leak_is_stopped(tmp_path):
    cell = TrainingSpec("cpu_test", 256, layers=1, checkpoint="all", device="cuda")
    held = trained(tmp_path, "held", cell=cell.to_dict(), until=60, save_at=50).rows.iloc[20:]
    assert held[["tensors_mib", "reserved_mib", "peak_mib", "seconds"]].notna().sum().min() >= 36
    assert (held["reserved_mib"] >= held["peak_mib"]).all()
    assert np.ptp(held["tensors_mib"]) < 0.1
    grown = trained(
        tmp_path, "grown", cell=cell.to_dict(), leak_mib=4.0, over_mib=[24, 32], until=40
    )
    assert claims.limits_stop_a_run(grown).verdict == "PASS"
    assert torch.cuda.memory_allocated() < 2**30


@pytest.mark.gpu
@pytest.mark.processes
def test_on_a_gpu_a_setting_reaches_the_allocator(tmp_path):
    cell = TrainingSpec("cpu_test", 256, layers=1, backend="gather", device="cuda")
    names = ["", "expandable_segments:True", "roundup_power2_divisions:2"]
    found = trials.settings(
        cell, names, steps=8, repeats=1, folder=tmp_path, deadline_s=120.0, progress=False
    )
    assert all(isinstance(t, Setting) and t.ended.status == "ok" for t in found)
    asked, held = ([table.middle(found, n, of) for n in names] for of in ("requested", "allocated"))
    assert max(asked) / min(asked) < 1.001 < held[2] / held[0], "halves of powers of two take more"
