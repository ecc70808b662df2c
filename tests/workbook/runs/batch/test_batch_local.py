"""Jobs as processes of this machine: who gets which GPU, who is adopted, and how they end."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from batches import write_plan
from places import SUPPORT
from processes import alive, environment_with_package, wait_until_there
from sample_notebooks import errors_of

from whyhung.process.gpus import Gpus
from workbook.runs import record
from workbook.runs.batch import job as job_module
from workbook.runs.batch import local
from workbook.runs.batch.job import Job
from workbook.runs.batch.local import Local
from workbook.runs.files import read_json, write_json

pytestmark = pytest.mark.processes


@pytest.fixture
def machine(monkeypatch):
    """With three GPUs; children, of which none is left behind, do nothing but wait."""
    children = []

    class Known(subprocess.Popen):
        def __init__(self, *args, **options):
            children.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(job_module.subprocess, "Popen", Known)
    monkeypatch.setattr(local, "all_visible", lambda: Gpus(("3", "5", "7")))
    monkeypatch.setattr(job_module, "CHILD", "batch_child")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    yield
    for each in children:
        each.wait(30)


@pytest.fixture
def jobs(tmp_path, machine):
    """Makes jobs of a name; those that are left are ended."""
    made = []

    def make(name, gpus=None, stubborn=False):
        job = Job(name, tmp_path / name, gpus=gpus)
        job.folder.mkdir()
        write_json(job.folder / "job.json", {"stubborn": stubborn})
        made.append(job)
        return job

    yield make
    for job in made:
        end(job)


def end(job):
    (job.folder / "end").touch()


def seen(job):
    """Content that the child holding the job's lock wrote."""
    return waited(lambda: read_json(job.folder / "started.json"))


def waited(what, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_each_job_has_gpus_of_its_own_and_gives_them_to_the_next(jobs):
    place = Local()
    assert place.at_a_time == 3
    pair, one, none, last = jobs("pair", 2), jobs("one"), jobs("none", 0), jobs("last")
    started = [*place.start([pair, one, none], [])]
    assert started == [pair, one, none]
    assert [seen(job)["gpus"] for job in started] == ["3,5", "7", ""]
    assert [*place.start([last], started)] == []
    end(one)
    assert waited(lambda: place.poll(started)) == {one: ""}
    assert [*place.start([last], [pair, none])] == [last] and seen(last)["gpus"] == "7"


def test_a_job_that_wants_more_gpus_than_there_are_is_refused(jobs):
    with pytest.raises(ValueError, match=r"many wants 4 GPUs, and this machine has 3"):
        Local().check([jobs("few", 3), jobs("many", 4)])


def test_without_gpus_one_runs_at_once_unless_more_are_wished(jobs, monkeypatch):
    monkeypatch.setattr(local, "all_visible", Gpus)
    assert Local().at_a_time == 1 and Local(2).at_a_time == 2
    with pytest.raises(ValueError, match="wants 1 GPUs, and this machine has none"):
        Local().check([jobs("one", 1)])


@pytest.mark.parametrize("seen", [seen, lambda job: None])
def test_another_driver_adopts_what_runs_with_its_gpus(jobs, seen):
    job = jobs("a")
    list(Local().start([job], []))
    seen(job)  # or it is still to reach its first line
    later = Local()
    assert later.free([job]) == ["5", "7"] and later.poll([job]) == {}
    end(job)
    assert waited(lambda: later.poll([job])) == {job: "its process is gone"}


def test_a_job_that_another_child_has_is_left_to_that_one(jobs):
    job = jobs("a")
    first, second = Local(), Local()
    list(first.start([job], []))
    pid = seen(job)["pid"]
    assert [*second.start([job], [])] == [job] and second.poll([job]) == {}
    assert job.start_child(os.environ) is None
    assert second.free([job]) == ["5", "7"] and alive(pid)
    end(job)
    assert waited(lambda: second.poll([job])) == {job: "its process is gone"}


def test_a_disk_that_fills_up_between_two_starts_keeps_what_began(jobs, monkeypatch):
    first, second = jobs("a"), jobs("b")

    def full(path, content):
        if path.parent == second.folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, content)

    monkeypatch.setattr(local, "write_json", full)
    place = Local()
    starts = place.start([first, second], [])
    assert next(starts) is first and seen(first)
    with pytest.raises(OSError, match="No space left"):
        next(starts)


def test_a_job_that_was_taken_back_while_its_child_was_in_a_queue_is_not_run(tmp_path):
    assert job_module.main(tmp_path / "job.json") == 1 and not list(tmp_path.iterdir())


def test_a_job_is_cancelled_and_one_that_does_not_listen_is_killed(jobs, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    place = Local()
    started = [*place.start([jobs("a"), jobs("b", stubborn=True)], [])]
    assert all(seen(job) for job in started)
    place.cancel(started)
    gone = {}
    waited(lambda: gone.update(place.poll([job for job in started if job not in gone]))
           or len(gone) == 2)  # fmt: skip
    assert [gone[job] for job in started] == [
        "its process was ended by SIGTERM",
        "its process was ended by SIGKILL",
    ]


COUNTED = """\
import os, time
with open(os.environ["COUNT"], "a") as file:
    file.write(f"{os.environ['NSA_RUN']}\\n")
time.sleep(0.2)"""
MANY = """\
jobs:
  - {name: wide, notebook: tiny, grid: {layers: LAYERS, lengths: [[16], [32], [64]]}}
  - {name: again, notebook: tiny, parameters: {deep: true}, grid: {layers: LAYERS}, repeats: N}
  - {name: last, notebook: tiny, parameters: {seed: 2}, after: again}
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("layers", "repeats", "kills"),
    [([1], 2, 2), pytest.param([1, 2, 3, 4, 5], 8, 10, marks=pytest.mark.long)],
)
def test_many_runs_survive_sigkills_of_their_driver_and_none_is_done_twice(
    layers, repeats, kills, tmp_path
):
    """The moments are drawn anew each time; a failure names its seed."""
    import random

    seed = int(os.environ.get("NSA_KILL_SEED", time.time()))
    draw, count = random.Random(seed), tmp_path / "count"
    runs_due = 3 * len(layers) + len(layers) * repeats + 1
    plan = MANY.replace("LAYERS", str(layers)).replace("repeats: N", f"repeats: {repeats}")
    write_plan(tmp_path, plan, COUNTED)
    command = [sys.executable, "-m", "nsa", "batch", "plan.yaml", "--at-once", "2"]
    options = {"cwd": tmp_path, "env": environment_with_package() | {"COUNT": str(count)}}
    with (tmp_path / "said").open("w") as said:
        early = range(runs_due * 3 // 4)  # so that none is at the end
        for runs_begun in sorted(draw.choices(early, k=kills)):
            driver = subprocess.Popen(command, **options, stdout=said, stderr=said)
            while driver.poll() is None and len(lines_of(count)) < runs_begun:
                time.sleep(0.02)
            time.sleep(draw.uniform(0.0, 1.5))
            driver.send_signal(signal.SIGKILL)
            assert driver.wait(30) == -signal.SIGKILL
        ended = subprocess.run(command, **options, stdout=said, stderr=said)
    told = f"seed {seed}: {(tmp_path / 'said').read_text()}"
    assert ended.returncode == 0, told
    runs = [file.parent for file in tmp_path.glob("runs/*/*/record.json")]
    assert [record.load(run)["status"] for run in runs] == ["ok"] * runs_due, told
    assert all((run / "report.html").is_file() for run in runs), told
    ran = count.read_text().splitlines()
    assert sorted(ran) == sorted(map(str, runs)), told
    ends = tmp_path.glob("runs/batches/plan/jobs/*/started.json")
    assert len({read_json(file)["run"] for file in ends}) == runs_due
    assert not list(tmp_path.glob("runs/batches/plan/.manifest*"))


def lines_of(file):
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
def test_a_batch_of_real_runs_tells_what_failed_where_and_is_cancelled_from_outside(tmp_path):
    hang = "open('started', 'w').close()\nimport time; time.sleep(600 * (layers == 9))"
    write_plan(
        tmp_path,
        "timeout: 60\njobs:\n"
        "  - {name: some, notebook: tiny, grid: {layers: [2, 7]}}\n"
        "  - {name: late, notebook: tiny, parameters: {layers: 9}}\n",
        "1 / (layers - 7)",
        hang,
    )
    command = [sys.executable, "-m", "nsa", "batch", "plan.yaml"]
    options = {"cwd": tmp_path, "env": environment_with_package(), "text": True}
    pipe = subprocess.PIPE
    driver = subprocess.Popen(command, **options, stdout=pipe, stderr=pipe)
    wait_until_there(tmp_path / "notebooks" / "started", driver)
    (tmp_path / "notebooks" / "started").unlink()
    wait_until_there(tmp_path / "notebooks" / "started", driver)
    second = subprocess.run(command, **options, capture_output=True)
    assert second.returncode == 2 and "is being run already, by process" in second.stderr
    cancelled = subprocess.run([*command, "--cancel"], **options, capture_output=True)
    assert cancelled.returncode == 0, cancelled.stderr
    assert "1 ok, 1 failed, 1 stopped" in cancelled.stdout
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert "code cell 3 of 4: 1 / (layers - 7)" in out, out
    assert "ZeroDivisionError: division by zero" in out
    assert "the same command goes on" in out and "waiting for 1 to end" in err
    (started,) = tmp_path.glob("runs/batches/plan/jobs/late-*/started.json")
    run = Path(read_json(started)["run"])
    assert record.load(run)["stop_reason"] == "terminated"
    cells = nbformat.read(run / "notebook.ipynb", as_version=4).cells
    assert [errors_of(cell) for cell in cells if cell.get("outputs")][-1] == ["Terminated"]
    shown = subprocess.run([*command, "--status"], **options, capture_output=True).stdout
    assert "1 ok, 1 failed, 1 stopped" in shown


@pytest.mark.slow
def test_a_job_over_its_time_leaves_the_partial_notebook_and_is_failed(tmp_path):
    plan = "jobs: [{name: long, notebook: tiny, timeout: 30s}]"
    write_plan(tmp_path, plan, "print('so far')", "import time; time.sleep(600)")
    command = [sys.executable, "-m", "nsa", "batch", "plan.yaml", "--runs", "elsewhere"]
    options = {"cwd": tmp_path, "env": environment_with_package(), "text": True}
    ended = subprocess.run(command, **options, capture_output=True)
    assert ended.returncode == 1 and "long: failed in " in ended.stderr
    assert "code cell 4 of 4: import time; time.sleep(600)" in ended.stdout
    run = next(Path(tmp_path).glob("elsewhere/*/01_tiny-*"))
    assert record.load(run)["status"] == "timeout"
    assert "so far" in (run / "notebook.ipynb").read_text()
