"""Plans of notebooks: what is refused at once, and what runs, waits and goes on again."""

import os
import signal
import subprocess
import sys

import pytest
from processes import environment_with_package, wait_until_there
from sample_notebooks import SET_UP, hang_after, write_notebook

from nsa.cli import main as cli
from nsa.workbook import phases, record, run, store
from nsa.workbook.files import write_json
from nsa.workbook.phases import Ended, read_phases, run_phases, stand

pytestmark = pytest.mark.processes  # git, which is asked for the commit

PLAN = """\
phases:
  - phase: first
    question: Does it
      run?
    notebook: tiny
    file: two.yaml
    parameters: {rate: 2}
  - {phase: second, question: "And again?", notebook: "01", parameters: {layers: 5}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder has a notebook, a plan of two phases and a parameter file beside it."""
    verdict = "run.verdict('layers are few', 'FAIL' if layers > 9 else 'PASS', {'layers': layers})"
    write_notebook(tmp_path / "notebooks" / "01_tiny.ipynb", SET_UP, verdict, "1 / (layers - 7)")
    (tmp_path / "two.yaml").write_text("layers: 2\nrate: 1\n")
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def past(phase, status, stop_reason="", **more):
    """A run of this phase that ended so, made up."""
    folder = store.create_folder("runs", phase.planned.name)
    kept = {"run_id": folder.name, "status": status, "stop_reason": stop_reason, **more}
    write_json(folder / "record.json", {"started": "2026-01-01", **kept})
    return folder.relative_to("runs").as_posix()


def test_a_phase_takes_its_parameters_from_files_and_then_its_own(place):
    first, second = read_phases("plan.yaml")
    assert (first.name, first.question) == ("first", "Does it run?")
    assert first.planned.given == {"layers": 2, "rate": 2.0}
    assert second.planned.given == {"layers": 5}
    assert first.planned.name.startswith("01_tiny-") and first.planned.name != second.planned.name


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("phases: []", "at least one phase"),
        ("phases: 3", "at least one phase"),
        ("phase: []", "unknown key 'phase'"),
        (PLAN + "mode: fast", "unknown key 'mode'"),
        ("phases: [tiny]", "phase 1 is 'tiny'"),
        ("phases: [{phase: a, question: b}]", r"phase 1 \(a\) has no 'notebook'"),
        (PLAN.replace("tiny", "tinny"), r"phase 1 \(first\): no notebook 'tinny'"),
        (PLAN.replace("layers: 5", "layer: 5"), r"\(second\): unknown parameter 'layer'.*'layers'"),
        (PLAN.replace("layers: 5", "layers: 500"), "layers=500 is outside 1..64"),
        (PLAN.replace("{layers: 5}", "5"), r"\(second\): parameters is 5"),
        (PLAN.replace("two.yaml", "three.yaml"), r"\(first\): cannot read .*three.yaml"),
        (PLAN.replace("file:", "files:"), r"\(first\): unknown key 'files'; the nearest is 'file'"),
        (PLAN.replace("second", "first"), r"phase 2 \(first\): this name comes twice"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_before_anything_runs(place, capsys, plan, message):
    (place / "plan.yaml").write_text(plan)
    with pytest.raises(ValueError, match=message):
        read_phases("plan.yaml")
    if "phases" in plan:
        assert cli.main(["sweep", "plan.yaml"]) == 2
        assert capsys.readouterr().err.startswith("nsa: plan.yaml")
    assert not (place / "runs").exists()


def test_a_finished_phase_is_taken_a_failed_one_waits_and_one_that_was_cut_runs_again(place):
    first, _ = read_phases("plan.yaml")
    assert stand(first, "runs") == Ended("first")
    for reason in ("timeout", "interrupted", "terminated"):
        past(first, "timeout", reason)
        assert stand(first, "runs") == Ended("first")
    past(first, "running", pid=-1, pid_started=1.0, machine=record.machine())
    assert stand(first, "runs") == Ended("first")  # its driver is gone
    failed = past(first, "failed", "error", started="2026-01-02")
    assert stand(first, "runs") == Ended("first", failed, "failed", cached=True)
    mine = {"pid": os.getpid(), "pid_started": record.process_start(os.getpid())}
    beside = past(first, "running", **mine, machine=record.machine())
    assert stand(first, "runs") == Ended("first", beside, "running", cached=True)
    done = past(first, "ok", "ok")
    assert stand(first, "runs") == Ended("first", done, "ok", cached=True)
    assert stand(first, "runs", evidence=True) == Ended("first")
    kept = past(first, "ok", "ok", evidence=True)
    assert stand(first, "runs", evidence=True) == Ended("first", kept, "ok", cached=True)


@pytest.fixture
def made_up(monkeypatch):
    """Runs are made up: the names of the notebooks' parameters that ran, and how the next end."""
    ran, ends = [], []

    def run_notebook(notebook, given, *, root, timeout_s, again, **options):
        assert options["ends_budgets"] is False
        ran.append((given["layers"], timeout_s))
        reason = ends.pop(0) if ends else "ok"
        folder = store.create_folder(root, run.plan_run(notebook, given).name)
        status = record.STATUS_OF[reason]
        write_json(folder / "record.json", {"status": status, "stop_reason": reason})
        return run.RunResult(folder, status, reason, 1.0)

    monkeypatch.setattr(phases, "run_notebook", run_notebook)
    return ran, ends


def test_a_plan_goes_on_behind_a_failure_and_runs_that_one_again_only_if_told(place, made_up):
    ran, ends = made_up
    ends[:] = ["error"]
    plan = read_phases("plan.yaml")
    assert [one.status for one in run_phases(plan)] == ["failed", "ok"]
    assert [one.status for one in run_phases(plan)] == ["failed", "ok"]
    assert ran == [(2, None), (5, None)]
    done = run_phases(plan, again=True)
    assert [(one.status, one.cached) for one in done] == [("ok", False), ("ok", True)]
    assert ran[2:] == [(2, None)]


def test_a_plan_that_is_stopped_or_out_of_time_goes_on_where_it_was(place, made_up):
    ran, ends = made_up
    ends[:] = ["interrupted"]
    plan = read_phases("plan.yaml")
    stopped = run_phases(plan)
    assert [one.status for one in stopped] == ["interrupted", "not run: stopped before it"]
    late = run_phases(plan, budget_s=1e-9)
    assert [one.status for one in late] == ["not run: the budget is spent"] * 2
    assert [one.status for one in run_phases(plan, budget_s=60.0)] == ["ok", "ok"]
    assert [layers for layers, _ in ran] == [2, 2, 5] and 0 < ran[-1][1] <= 60
    assert not any(one.good for one in (*stopped, *late))
    with pytest.raises(ValueError, match="more than 0"):
        run_phases(plan, budget_s=0)


def test_the_command_lists_runs_and_tells_of_each_phase(place, made_up, capsys):
    ran, ends = made_up
    assert cli.main(["sweep", "plan.yaml", "--list"]) == 0 and not ran
    assert capsys.readouterr().out.count("to run") == 2
    ends[:] = ["ok", "error"]
    assert cli.main(["sweep", "plan.yaml"]) == 1
    printed = capsys.readouterr()
    assert "[2/2] second: And again?" in printed.err
    header, first, second = printed.out.splitlines()
    assert header.split() == ["phase", "run", "status", "verdict"]
    assert "01_tiny-" in first and first.endswith(" ok") and second.endswith(" failed")
    assert cli.main(["sweep", "plan.yaml"]) == 1
    printed = capsys.readouterr().out
    assert "ok (was there)" in printed and "--again" in printed
    assert cli.main(["sweep", "plan.yaml", "--again"]) == 0 and len(ran) == 3


@pytest.mark.slow
def test_a_driver_that_is_killed_loses_its_phase_alone_and_the_next_one_goes_on(place, capsys):
    started = place / "started"
    write_notebook(place / "notebooks" / "02_long.ipynb", SET_UP, hang_after(started))
    last = "  - {phase: third, question: 'Longer?', notebook: '02'}\n"
    (place / "plan.yaml").write_text(PLAN.replace("rate: 2", "rate: 2, layers: 12") + last)
    command = [sys.executable, "-m", "nsa", "sweep", "plan.yaml"]
    for number in (signal.SIGKILL, signal.SIGINT):
        driver = subprocess.Popen([*command, "--quiet"], env=environment_with_package())
        wait_until_there(started, driver)
        driver.send_signal(number)
        assert driver.wait(60) != 0
        started.unlink()
    write_notebook(place / "notebooks" / "02_long.ipynb", SET_UP)
    assert cli.main(command[3:]) == 1  # for a verdict
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in shown[1:]] == [
        ["ok", "(was", "there)", "FAIL"],
        ["ok", "(was", "there)", "PASS"],
        ["ok"],
    ]
    assert len(list(place.glob("runs/*/01_tiny-*"))) == 2
