"""What a driver runs, leaves, takes up again and refuses; runs are made up."""

import errno
import os
import shutil
import signal

import pytest
from batches import NAMES, PLAN, MadeUp, opened, statuses, write_plan

from workbook.runs import record
from workbook.runs.batch.driver import Driver
from workbook.runs.batch.plan import read_plan
from workbook.runs.batch.state import Batch
from workbook.runs.files import locked, read_json, write_json

pytestmark = pytest.mark.processes  # git, which is asked for the commit


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(place, said=None, **options):
    """A driver of its own, as each command has one; the batch afterwards."""
    batch = opened()
    Driver(batch, place, say=(said if said is not None else []).append, **options).run()
    return batch


def test_jobs_run_in_order_each_once_and_only_after_those_that_they_wait_for(here):
    place, said = MadeUp(at_a_time=3), []
    assert statuses(run(place, said)) == ["ok"] * 6
    assert place.ran == NAMES and place.most == 3
    assert len(said) == 6 and said[0].startswith(f"[1/6] {NAMES[0]}: ok in 2 s  ")
    again = MadeUp()
    batch = run(again)
    assert not again.ran and all(job.cached for job in batch.jobs)
    assert [job.look() for job in batch.jobs] == ["ok"] * 6
    assert len({job.run for job in batch.jobs}) == 6  # repeats too have a run each


def test_what_failed_is_run_again_only_if_asked_and_nothing_comes_after_it(here):
    place, said = MadeUp(ends={NAMES[1]: ["error", "ok"]}), []
    batch = run(place, said)
    missing = f"not run: after {NAMES[1]}, which is failed"
    assert statuses(batch) == ["ok", "failed", "ok", "ok", missing, missing]
    assert statuses(run(place)) == statuses(batch) and len(place.ran) == 4
    assert statuses(run(place, retry=True)) == ["ok"] * 6
    assert place.ran[4:] == [NAMES[1], *NAMES[4:]]


def test_a_child_that_is_gone_leaves_a_record_that_says_why_and_is_run_again(here):
    place = MadeUp(ends={NAMES[0]: ["dies", "ok"]})
    batch = run(place)
    assert batch.jobs[0].status == "stopped" and statuses(batch)[1:4] == ["ok"] * 3
    lost = record.load(batch.jobs[0].run)
    assert (lost["status"], lost["message"]) == ("lost", "its node died")
    assert statuses(run(place)) == ["ok"] * 6
    assert place.ran.count(NAMES[0]) == 2 and len(place.ran) == 7


def test_a_driver_that_is_told_to_stop_ends_what_runs_and_the_next_one_goes_on(here):
    class Interrupting(MadeUp):
        def start(self, ready, running):
            if len(self.ran) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().start(ready, running)

    place = Interrupting(ends={NAMES[2]: ["stays", "ok"]})
    batch = run(place)
    assert statuses(batch) == ["ok", "ok", "stopped", *["not run: stopped"] * 3]
    assert record.load(batch.jobs[2].run)["stop_reason"] == "terminated"
    assert statuses(run(MadeUp())) == ["ok"] * 6


def test_a_budget_that_is_spent_and_a_request_to_cancel_end_it_too(here):
    assert statuses(run(MadeUp(), budget_s=1e-9)) == ["not run: the budget is spent"] * 6

    class Cancelled(MadeUp):
        def start(self, ready, running):
            (opened().folder / "cancel").touch()
            return super().start(ready, running)

    batch = run(Cancelled(ends={NAMES[0]: "stays"}))
    assert statuses(batch) == ["stopped", *["not run: cancelled"] * 5]
    assert not (batch.folder / "cancel").exists()


def test_a_plan_has_one_driver(here):
    batch = opened()
    batch.folder.mkdir(parents=True)
    with locked(batch.lock), pytest.raises(ValueError, match=r"being run already.*--status"):
        run(MadeUp())
    assert statuses(run(MadeUp())) == ["ok"] * 6


def test_a_manifest_that_is_lost_or_damaged_costs_nothing(here):
    batch = run(MadeUp())
    for content in ("", "[]", "{", '{"plan": null}', '{"driver": null}'):
        (batch.folder / "manifest.json").write_text(content)
        place = MadeUp()
        assert statuses(run(place)) == ["ok"] * 6 and not place.ran
    shutil.rmtree(batch.folder)  # the runs alone are left
    place = MadeUp()
    assert statuses(run(place)) == ["ok"] * 6 and not place.ran
    assert len({job.run for job in opened().jobs}) == 6


@pytest.mark.parametrize("damage", ["removed", "emptied", "not JSON"])
def test_a_run_that_somebody_damaged_is_told_and_run_again(here, damage):
    run_folder = run(MadeUp()).jobs[1].run
    if damage == "removed":
        shutil.rmtree(run_folder)
    elif damage == "emptied":
        (run_folder / "record.json").unlink()
    else:
        (run_folder / "record.json").write_text("{")
    assert NAMES[1] in opened().notes[0] and "is damaged; it is run again" in opened().notes[0]
    place = MadeUp()
    assert statuses(run(place)) == ["ok"] * 6 and place.ran == [NAMES[1]]


def test_runs_of_a_notebook_that_changed_since_are_not_mixed_with_others(here):
    place = MadeUp(ends=dict.fromkeys(NAMES[4:], "error"))
    run(place)
    write_plan(here, PLAN, "print('another')")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not mixed.*01_tiny.ipynb.*--anew"):
            run(place)
    assert len(place.ran) == 6
    opened().put_aside()
    assert statuses(run(again := MadeUp())) == ["ok"] * 6 and len(again.ran) == 6
    assert len(list(here.glob("runs/batches/*/manifest.json"))) == 2


def test_what_only_failed_may_be_mended_and_run_again(here):
    run(MadeUp(ends=dict.fromkeys(NAMES, "error")))
    write_plan(here, PLAN, "print('mended')")
    assert statuses(run(MadeUp(), retry=True)) == ["ok"] * 6


def test_runs_that_are_no_evidence_are_run_again_where_that_is_wanted(here, monkeypatch):
    run(MadeUp())
    from workbook.runs import environment

    monkeypatch.setattr(environment, "check_evidence", lambda notebook: None)
    batch = Batch(read_plan("plan.yaml"), evidence=True)
    assert statuses(batch) == ["to run"] * 6 and "not made with --evidence" in batch.notes[0]
    Driver(batch, place := MadeUp()).run()
    assert place.ran == NAMES


def test_two_plans_of_one_name_do_not_share_a_batch(here):
    run(MadeUp())
    (here / "other").mkdir()
    write_plan(here / "other")
    batch = Batch(read_plan("other/plan.yaml"))
    with pytest.raises(ValueError, match=r"is the batch of .*/plan.yaml; give other/plan.yaml"):
        Driver(batch, MadeUp()).run()
    (here / "plan.yaml").rename(here / "other" / "plan.yaml")  # it moved, and is the same
    assert statuses(opened_in("other")) == ["ok"] * 6


def opened_in(folder):
    batch = Batch(read_plan(f"{folder}/plan.yaml"))
    Driver(batch, MadeUp()).run()
    return batch


def test_another_version_of_torch_is_another_batch(here, monkeypatch):
    run(MadeUp())
    from workbook.runs import environment

    facts = environment.snapshot() | {"torch": "2.0"}
    monkeypatch.setattr(environment, "snapshot", lambda seed=None: facts)
    with pytest.raises(ValueError, match="versions of Python or torch"):
        run(MadeUp())


def test_a_job_whose_parameters_changed_is_run_and_the_others_are_left(here):
    run(MadeUp())
    write_plan(here, PLAN.replace("layers: 5", "layers: 6"))
    assert statuses(run(place := MadeUp())) == ["ok"] * 6
    assert place.ran == NAMES[4:]


def test_a_disk_that_fills_up_ends_the_batch_and_loses_nothing(here, monkeypatch):
    place, said = MadeUp(), []
    place.ends[NAMES[1]] = ["error", "ok"]
    place.message = f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}"
    batch = run(place, said)
    assert statuses(batch)[:2] == ["ok", "stopped"] and place.ran == NAMES[:2]
    assert any("is full: nothing more is started" in line for line in said)
    place.message = ""
    assert statuses(run(place)) == ["ok"] * 6 and len(place.ran) == 7


def test_a_disk_so_full_that_not_even_the_record_can_be_closed_ends_it_in_order(here, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(MadeUp):
        def poll(self, running):
            for job in running:
                job.log.write_text(f"Traceback ...\nOSError: {os.strerror(errno.ENOSPC)}\n")
            return dict.fromkeys(super().poll(running), "")

    monkeypatch.setattr(record, "close_lost", full)
    batch = run(Full(ends={NAMES[1]: "dies"}))
    assert statuses(batch)[:2] == ["ok", "stopped"]
    assert statuses(batch)[2] == f"not run: the disk of {batch.root} is full"


def test_with_little_left_on_the_disk_nothing_is_begun(here, monkeypatch):
    usage = shutil.disk_usage(here)._replace(free=3 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    batch = run(place := MadeUp())
    assert statuses(batch) == [f"not run: 3 MiB are left on the disk of {batch.root}"] * 6
    assert not place.ran


def test_a_manifest_that_cannot_be_written_is_told_once_and_ends_nothing(here, monkeypatch):
    from workbook.runs.batch import state

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "write_json", full)
    said = []
    assert statuses(run(MadeUp(), said)) == ["ok"] * 6
    assert len([line for line in said if "no manifest: No space left" in line]) == 1


def test_a_later_driver_takes_over_what_waits_in_a_queue(here):
    class Killed(BaseException):
        pass

    class Queue(MadeUp):
        def start(self, ready, running):
            for job in super().start(ready, running):
                write_json(job.folder / "queued.json", {"job": job.name})
            raise Killed

        def poll(self, running):
            if running:
                self.seen = [job.name for job in running]
                raise Killed
            return {}

    for _ in range(2):
        place = Queue(at_a_time=2, ends=dict.fromkeys(NAMES, "stays"))
        with pytest.raises(Killed):
            Driver(opened(), place).run()
    assert not place.ran and place.seen == NAMES[:2]


def test_what_a_job_asks_of_a_child_stands_in_its_file(here):
    batch = run(MadeUp())
    asked = [read_json(job.folder / "job.json") for job in batch.jobs]
    options = [one["options"] for one in asked]
    assert [one["again"] for one in options] == [False] * 4 + [True] * 2
    assert [one["timeout_s"] for one in options] == [None] * 4 + [120.0] * 2
    assert asked[0]["parameters"]["layers"] == 2 and options[0]["root"] == str(here / "runs")


def test_a_run_that_had_ended_when_its_child_was_killed_is_not_run_again(here):
    batch = run(MadeUp())
    for job in batch.jobs:
        write_json(job.folder / "started.json", {"run": str(job.run)})
    assert statuses(run(place := MadeUp())) == ["ok"] * 6 and not place.ran


def test_jobs_of_an_older_batch_whose_end_is_in_a_file_of_its_own_are_known(here):
    batch = run(MadeUp(ends={NAMES[5]: "error"}))
    for job, status in zip(batch.jobs, ["ok"] * 5 + ["failed"], strict=True):
        write_json(job.folder / "started.json", {"pid": 1, "run": str(job.run)})
        write_json(job.folder / "ended.json", {"status": status, "run": str(job.run)})
    shutil.rmtree(batch.jobs[0].run)
    assert statuses(opened()) == ["to run", *["ok"] * 4, "failed"]
    assert "is damaged" in opened().notes[0]
    write_json(batch.jobs[5].folder / "ended.json", {"status": "failed", "stop_reason": "changed"})
    assert statuses(opened())[5] == "failed"
