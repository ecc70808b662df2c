"""What is said of Slurm before there is one: settings, times, a machine without it."""

import os
import sys

import pytest
from batches import write_plan

from workbook.runs.batch.job import Job
from workbook.runs.batch.plan import read_plan
from workbook.runs.batch.slurm import Slurm


@pytest.fixture
def with_sbatch(tmp_path, monkeypatch):
    """A machine that has a program of that name, and submitit."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "submitit", os)


def test_a_machine_without_slurm_is_told_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no Slurm .there is no `sbatch`.; start .* login node"):
        Slurm()


def test_without_submitit_it_is_said_what_to_install(with_sbatch, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ModuleNotFoundError) as error:
        Slurm()
    assert error.value.name == "submitit"  # of which the command says the extra


def test_a_job_is_queued_for_its_own_time_and_what_its_start_and_end_need(with_sbatch):
    def minutes(timeout_s, settings):
        return Slurm(settings)._shape(Job("one", timeout_s=timeout_s, gpus=2))

    assert minutes(600, {}) == (2, 13)
    assert minutes(600, {"time": "2h"}) == (2, 13)
    assert minutes(9000, {"time": "2h"}) == minutes(None, {"time": "2h"}) == (2, 120)
    with pytest.raises(ValueError, match=r"one has no time.*--slurm time=2h"):
        minutes(None, {})
    with pytest.raises(ValueError, match=r"time is 2m, and 180 s .* write 5m or more"):
        Slurm({"time": "2m"})


@pytest.mark.processes  # git, which is asked for the commit
def test_settings_of_the_command_win_over_those_of_the_plan(tmp_path):
    file = write_plan(
        tmp_path,
        "slurm: {partition: debug, time: 30m}\njobs: [{name: one, notebook: tiny}]\n",
    )
    plan = read_plan(file, tmp_path / "notebooks", {"partition": "gpu", "cpus": 8})
    assert plan.slurm == {"partition": "gpu", "time": "30m", "cpus": 8}
    for given, words in (
        ({"tme": "2h"}, "unknown key 'tme'; the nearest is 'time'"),
        ({"time": "soon"}, "slurm.time is 'soon'; it wants the longest time of a job"),
        ({"cpus": 0}, "slurm.cpus is 0; it wants cores of a job, 1 or more"),
        ({"setup": [3]}, "slurm.setup is 3; it wants a list of shell lines"),
    ):
        with pytest.raises(ValueError, match=words):
            read_plan(file, tmp_path / "notebooks", given)


@pytest.mark.processes
def test_a_driver_that_is_a_job_itself_hands_none_of_its_limits_on(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    for name in ("sbatch", "srun"):  # which refuses all, and shows its environment
        (tmp_path / name).write_text(f"#!/bin/sh\nexport -p >{tmp_path}/seen\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    names = ["SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF", "SBATCH_PARTITION", "RANK"]
    for name in names:
        monkeypatch.setenv(name, "7")
    before, job = dict(os.environ), Job("one", tmp_path / "jobs" / "one", timeout_s=60)
    with pytest.raises(OSError, match="Slurm took no job"):
        list(Slurm().start([job], []))
    seen = (tmp_path / "seen").read_text()
    assert [name for name in names if f"{name}='7'\n" in seen] == ["SLURM_CONF", "SBATCH_PARTITION"]
    assert dict(os.environ) == before
