"""Batches on a real Slurm of one node: what its jobs, its node and its controller may do."""

import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from batches import opened, statuses
from processes import environment_with_package
from sample_notebooks import statuses as cell_statuses
from sample_notebooks import text_of
from slurm_cluster import MISSING, Waiting, at_each_look, cluster, told, wait_for_state

from workbook.runs import record
from workbook.runs.batch import slurm
from workbook.runs.batch.driver import Driver
from workbook.runs.batch.slurm import Slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.environment(of="slurm"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}"),
]
CLI = "import sys; from workbook.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def one_node():
    pytest.importorskip("submitit")
    with cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch, one_node):
    monkeypatch.setenv("SLURM_CONF", str(one_node.conf))
    monkeypatch.setenv("PYTHONPATH", environment_with_package()["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    yield
    subprocess.run(["scancel", "-u", str(os.getuid())], check=False, timeout=60)


def drive(events=(), place=None, **options):
    """A driver of its own; the batch afterwards, and what it said."""
    batch, said = opened(), []
    place = place or Slurm(batch.plan.slurm, every_s=0.3)
    driver = Driver(batch, place, show=at_each_look(iter(events)), say=said.append, **options)
    driver.run()
    return batch, "\n".join(said)


def is_partial(run) -> bool:
    """Its notebook shows what was printed before the end, and no cell that came later."""
    path = run / "notebook.ipynb"
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    shown = [text_of(cell) for cell in cells]
    return shown[-2:] == ["before\n", ""] and cell_statuses(path)[-1] == "pending"


def test_jobs_of_one_kind_are_an_array_with_a_gpu_each_and_a_job_of_none_sees_none(tmp_path):
    plan = (
        "timeout: 5m\nslurm: {partition: debug, cpus: 1, memory_gb: 0.5}\njobs:\n"
        "  - {name: with, notebook: waits, grid: {layers: [1, 2]}}\n"
        "  - {name: without, notebook: waits, gpus: 0, parameters: {layers: 3}, after: with}\n"
    )
    waiting = Waiting(tmp_path, plan=plan)

    def events():
        yield from waiting.wait(2)
        assert waiting.begun() == ["1: 0", "2: 1"] or waiting.begun() == ["1: 1", "2: 0"]
        waiting.go.touch()

    batch, _ = drive(events())
    assert statuses(batch) == ["ok"] * 3 and waiting.begun()[2] == "3: "
    assert len(waiting.runs()) == 3
    assert [job.look() for job in batch.jobs] == ["ok"] * 3
    again, _ = drive()
    assert statuses(again) == ["ok"] * 3 and len(waiting.runs()) == 3


def test_a_driver_that_is_killed_leaves_jobs_that_the_next_one_takes_over(tmp_path):
    waiting = Waiting(tmp_path, "1, 2, 3")
    command = [sys.executable, "-c", CLI, "batch", "plan.yaml", "--on", "slurm", "--quiet"]
    driver = subprocess.Popen(command, env=environment_with_package())
    ends = time.monotonic() + 120
    for _ in waiting.wait(2):
        assert driver.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    waiting.go.touch()
    batch, _ = drive()
    assert statuses(batch) == ["ok"] * 3
    assert len(waiting.runs()) == 3 and len(waiting.begun()) == 3


@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_three_times_leaves_nothing_undone_and_nothing_done_twice(tmp_path):
    plan = (
        "timeout: 5m\nslurm: {at_once: 2}\njobs:\n"
        "  - {name: run, notebook: waits, grid: {layers: [1, 2, 3, 4, 5, 6]}}\n"
    )
    waiting = Waiting(tmp_path, plan=plan)
    waiting.go.touch()
    command = [sys.executable, "-c", CLI, "batch", "plan.yaml", "--on", "slurm", "--quiet"]
    for begun in (1, 3, 5):  # at most two are in the queue, so each driver has to send some
        driver = subprocess.Popen(command, env=environment_with_package())
        ends = time.monotonic() + 240
        for _ in waiting.wait(begun):
            assert driver.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        assert driver.wait() == -signal.SIGKILL
    batch, _ = drive()
    assert statuses(batch) == ["ok"] * 6
    assert len(waiting.runs()) == 6 and len(waiting.begun()) == 6


def test_jobs_that_somebody_cancels_by_scancel_stop_and_the_next_driver_does_them(tmp_path):
    waiting = Waiting(tmp_path, "1, 2, 3")

    def events():
        yield from waiting.wait(2)
        yield from until_saved(waiting, 2)
        told("scancel", "-u", str(os.getuid()))

    batch, said = drive(events())
    assert statuses(batch) == ["stopped"] * 3
    assert "its job on Slurm was cancelled" in said  # the one that waited
    assert [record.load(run)["status"] for run in waiting.runs()] == ["killed"] * 2
    assert all(is_partial(run) for run in waiting.runs())
    waiting.go.touch()
    assert statuses(drive()[0]) == ["ok"] * 3 and len(waiting.runs()) == 5


def test_on_a_drained_node_what_runs_ends_and_what_waits_begins_when_it_is_back(tmp_path):
    waiting, node = Waiting(tmp_path, "1, 2, 3"), told("sinfo", "-h", "-o", "%n").strip()
    drain = ("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=repair")
    resume = ("scontrol", "update", f"NodeName={node}", "State=RESUME")
    pending = lambda: len(told("squeue", "-h", "-r", "-t", "PENDING", "-o", "%i").split())  # noqa: E731

    def events():
        while pending() < 3:
            yield
        yield from pause(5)
        assert waiting.begun() == [] and pending() == 3
        told(*resume)
        yield from waiting.wait(2)
        told(*drain)
        waiting.go.touch()
        while statuses(opened()).count("ok") < 2:
            yield
        yield from pause(5)
        assert len(waiting.begun()) == 2 and pending() == 1
        told(*resume)

    told(*drain)
    try:
        batch, said = drive(events())
    finally:  # refused where it is in service
        subprocess.run(resume, check=False, timeout=60, stderr=subprocess.DEVNULL)
    assert statuses(batch) == ["ok"] * 3 and "stopped" not in said
    assert len(waiting.runs()) == 3 and len(waiting.begun()) == 3


def killed(*_):
    raise SystemExit


def test_jobs_that_no_file_knows_are_cancelled_before_they_are_sent_again(tmp_path, monkeypatch):
    waiting = Waiting(tmp_path, "1, 2")
    waiting.go.touch()
    told("scontrol", "update", "PartitionName=debug", "State=DOWN")
    try:
        with monkeypatch.context() as patched, pytest.raises(SystemExit):
            patched.setattr(slurm, "write_json", killed)
            drive()
        lost = told("squeue", "-h", "-r", "-t", "PENDING", "-o", "%i").split()
        assert len(lost) == 2
    finally:
        told("scontrol", "hold", lost[0].partition("_")[0])
        told("scontrol", "update", "PartitionName=debug", "State=UP")
    batch, _ = drive()
    assert statuses(batch) == ["ok"] * 2 and len(waiting.runs()) == 2
    assert not told("squeue", "-h", "-t", "PENDING", "-o", "%i")


def test_a_job_over_its_time_on_slurm_leaves_the_partial_notebook_and_a_record(tmp_path):
    waiting = Waiting(tmp_path)
    batch = opened()
    place = Slurm(every_s=0.3)

    def events():
        yield from waiting.wait()
        job = slurm._id(opened().jobs[0])
        told("scontrol", "update", f"JobId={job}", "TimeLimit=1")

    batch, said = drive(events(), place)
    (run,) = waiting.runs()
    content = record.load(run)
    assert content["status"] == "killed" and "SIGTERM" in content["message"] and is_partial(run)
    assert statuses(batch) == ["stopped"] and "SIGTERM" in said


def test_the_time_below_slurm_bounds_a_notebook_that_has_no_time_of_its_own(tmp_path):
    plan = "slurm: {time: 3.02m}\njobs: [{name: run, notebook: waits}]\n"
    waiting = Waiting(tmp_path, plan=plan)
    job = opened().jobs[0]
    place = Slurm(opened().plan.slurm)
    assert place._shape(job) == (1, 4)
    batch, said = drive()
    (run,) = waiting.runs()
    assert record.load(run)["status"] == "timeout" and is_partial(run)
    assert statuses(batch) == ["failed"] and "ran longer than its 60 s" in said


def test_a_node_that_dies_leaves_the_partial_notebook_and_its_job_begins_again(tmp_path, one_node):
    waiting = Waiting(tmp_path)
    place = Slurm(every_s=0.3)

    def events():
        yield from waiting.wait()
        yield from until_saved(waiting)
        job = slurm._id(opened().jobs[0])
        one_node.does("node-dies")
        yield from wait_for_state("PENDING", job)
        one_node.does("node")
        # Slurm would wait 2 minutes. At once is too early: the request to end the job's first
        # attempt, which the dead node did not hear, would end the second.
        yield from pause(15)
        told("scontrol", "update", f"JobId={job}", "StartTime=now")
        yield from waiting.wait(2)
        waiting.go.touch()

    batch, _ = drive(events(), place)
    first, second = waiting.runs()
    assert record.load(first)["status"] == "lost"
    assert "its process or its node died" in record.load(first)["message"] and is_partial(first)
    assert statuses(batch) == ["ok"] and batch.jobs[0].run == second


def pause(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        yield


def until_saved(waiting, count=1):
    """Yields until the notebooks of the first runs have what was printed."""
    while not all(is_partial(run) for run in waiting.runs()[:count]):
        yield


def test_where_jobs_are_not_queued_again_a_dead_node_is_told(tmp_path, one_node, monkeypatch):
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    waiting = Waiting(tmp_path)

    def events():
        yield from waiting.wait()
        yield from until_saved(waiting)
        one_node.does("node-dies")

    try:
        batch, said = drive(events())
    finally:
        one_node.does("node")
    (run,) = waiting.runs()
    content = record.load(run)
    assert content["status"] == "lost" and content["message"] == "its node died"
    assert is_partial(run) and statuses(batch) == ["stopped"] and "its node died" in said


def test_a_job_that_is_preempted_closes_its_run_and_begins_again(tmp_path):
    waiting = Waiting(tmp_path)
    place = Slurm(every_s=0.3)

    def events():
        yield from waiting.wait()
        job = slurm._id(opened().jobs[0])
        whole = ["-p", "urgent", "--cpus-per-task=2", "--output=/dev/null"]
        told("sbatch", *whole, "--wrap", "sleep 1")
        yield from wait_for_state("PENDING", job)
        told("scontrol", "update", f"JobId={job}", "StartTime=now")
        yield from waiting.wait(2)
        waiting.go.touch()

    batch, _ = drive(events(), place)
    first, second = waiting.runs()
    assert record.load(first)["status"] == "killed" and is_partial(first)
    assert statuses(batch) == ["ok"] and batch.jobs[0].run == second


def test_a_batch_that_is_cancelled_closes_what_runs_and_takes_what_waits_from_the_queue(tmp_path):
    waiting = Waiting(tmp_path, "1, 2, 3")

    def events():
        yield from waiting.wait(2)
        opened().folder.joinpath("cancel").touch()

    batch, said = drive(events())
    assert sorted(record.load(run)["status"] for run in waiting.runs()) == ["killed", "killed"]
    assert statuses(batch) == ["stopped"] * 3 and "waiting for 3 to end" in said
    assert not told("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i")
    waiting.go.touch()
    assert statuses(drive()[0]) == ["ok"] * 3


def test_without_an_answer_of_slurm_files_and_heartbeat_decide(tmp_path, one_node):
    waiting = Waiting(tmp_path, "1, 2")

    def events():
        yield from waiting.wait(2)
        one_node.does("controller-dies")
        killed = next(run for run in waiting.runs() if "layers: 1" in parameters(run))
        os.kill(record.load(killed)["pid"], signal.SIGKILL)
        waiting.go.touch()

    try:
        batch, said = drive(events())
    finally:
        one_node.does("controller")
    assert statuses(batch) == ["stopped", "ok"]
    assert "Slurm does not answer, and its run is gone" in said


def parameters(run) -> str:
    return (run / "parameters.yaml").read_text()


def test_what_slurm_would_never_begin_is_refused_before_anything_is_written(tmp_path):
    Waiting(tmp_path)
    for settings, words in (
        ({"partition": "nope"}, "Slurm would not take it: .*[Pp]artition.*debug .at most 1:00:00"),
        ({"constraint": "big"}, "Invalid feature specification"),
        ({"cpus": 400}, "it has debug"),
    ):
        with pytest.raises(ValueError, match=words):
            drive(place=Slurm(settings))
    assert not (tmp_path / "runs").exists()
    (tmp_path / "plan.yaml").write_text(
        "gpus: 3\ntimeout: 5m\njobs: [{name: run, notebook: waits}]\n"
    )
    with pytest.raises(ValueError, match="run wants 8 minutes and 3 GPUs"):
        drive()


def test_a_job_that_waits_for_ever_is_given_up_with_slurms_reason(tmp_path):
    plan = "timeout: 3h\njobs: [{name: run, notebook: waits}]\n"  # the partition ends at 1 h
    Waiting(tmp_path, plan=plan)
    batch, said = drive()
    assert statuses(batch) == ["stopped"]
    assert "Slurm would never begin it (PartitionTimeLimit)" in said
    assert not told("squeue", "-h", "-t", "PENDING", "-o", "%i")
