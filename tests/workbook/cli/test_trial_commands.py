import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab_entries import make_up_trials
from processes import environment_with_package

from nsa.spelling import settings
from whyhung.process import preflight, runner
from whyhung.watch.evidence import End, Evidence
from workbook.cli import main as cli
from workbook.cli.trials import gpus_of
from workbook.lab.search.plan import Plan

SUBJECT = "lab_entries:broken_pair"
PLAN = f"""
subject: {SUBJECT}
factors:
  cache: [false, true]
  fast: [false, true]
oracles: []
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder has a plan; trials are made up, and crash where both are on."""

    def run(spec, *, folder, **options):
        folder.mkdir(parents=True, exist_ok=True)
        if spec.settings.get("sticks"):
            report = {"label": "STALLED:socket", "headline": "STALLED for 9 s: rank 0 reads"}
            for withdrawn in (None, 12.0):
                options["tell"](report | {"withdrawn": withdrawn})
        bad = spec.settings.get("cache") and spec.settings.get("fast")
        end = End("exception", 1, "raised") if bad else End("returned", 0)
        return Evidence(end=end, seconds=2.0)

    make_up_trials(monkeypatch, run)
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_trial_prints_its_verdict_and_exits_with_it(place, capsys):
    words = ["trial", f"subject={SUBJECT}", "cache=true"]
    assert cli.main([*words, "fast=false"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("PASS  trial ") and "nsa explain" in first
    assert cli.main([*words, "fast=false"]) == 0
    assert "(was there)" in capsys.readouterr().out
    assert cli.main([*words, "fast=true"]) == 1
    assert "CRASH:raised" in (printed := capsys.readouterr().out)
    assert "it was made up" in printed and len(list((place / "trials").glob("[0-9a-f]*"))) == 2


def test_a_trial_can_be_run_again_and_both_are_explained(place, capsys):
    words = ["trial", f"subject={SUBJECT}", "cache=false", "fast=false"]
    assert [cli.main([*words, *more]) for more in ([], ["--again"])] == [0, 0]
    printed = capsys.readouterr().out
    id = printed.split()[2]
    assert "(was there)" not in printed and printed.count(f"PASS  trial {id}") == 2
    for name in (id, id[:5], f"{id}-1"):
        assert cli.main(["explain", name]) == 0
    assert f"trial {id}-1\n" in capsys.readouterr().out
    plan = ["trial", "sweep", "plan.yaml", "--again"]
    assert cli.main(plan) == cli.main(plan) == 1
    assert "(was there)" not in capsys.readouterr().err


def test_a_stall_is_told_at_once_in_plain_words_and_what_is_done_then_makes_no_other_trial(
    place, capsys
):
    words = ["trial", f"subject={SUBJECT}", "sticks=true"]
    assert cli.main(words) == 0
    printed, said = capsys.readouterr()
    withdrawn = "nsa: it moves again: STALLED:socket is withdrawn"
    assert said.splitlines() == ["nsa: STALLED for 9 s: rank 0 reads", withdrawn]
    assert cli.main([*words, "on_hang=kill", "on_stall=kill"]) == 0
    again, said = capsys.readouterr()
    assert "(was there)" in again and again.split()[2] == printed.split()[2] and not said
    assert cli.main([*words, "on_hang=end"]) == 2
    assert "on_hang='end' is unknown" in capsys.readouterr().err


def test_a_script_is_a_subject_with_its_words(place, capsys):
    (place / "train.py").write_text("print('never run here')")
    words = ["trial", "subject=train.py", "argv=--lr {lr} --name 'a b'"]
    assert cli.main([*words, "lr=0.1", "ranks=2"]) == 0
    assert "PASS  trial" in capsys.readouterr().out
    assert cli.main([*words, "lr=0.1", "ranks=2"]) == cli.main([*words, "lr=0.2"]) == 0
    assert capsys.readouterr().out.count("(was there)") == 1


def test_the_factors_can_be_listed(place, capsys):
    assert cli.main(["trial", "--factors"]) == 0
    printed = capsys.readouterr().out
    assert "selected_backend" in printed and "CUDA_LAUNCH_BLOCKING" in printed


@pytest.mark.processes
def test_a_sweep_prints_its_table_and_goes_on(place, capsys):
    assert cli.main(["trial", "sweep", "plan.yaml", "--budget", "20m"]) == 1  # one of them crashed
    printed, said = capsys.readouterr()
    assert printed.count("PASS") == 3 and printed.count("CRASH:raised") == 1
    assert printed.splitlines()[0].split() == ["trial", "verdict", "cache", "fast", "seconds"]
    assert "(was there)" not in said
    assert cli.main(["trial", "sweep", "plan.yaml"]) == 1
    assert capsys.readouterr().err.count("(was there)") == 4
    (place / "plan.yaml").write_text(PLAN + "never: [{cache: true, fast: true}]\n")
    assert cli.main(["trial", "sweep", "plan.yaml"]) == 0


@pytest.mark.parametrize(("device", "lent"), [("cuda", ("0", "1")), ("cpu", None)])
def test_a_sweep_uses_all_gpus_where_a_trial_of_it_can(monkeypatch, device, lent):
    monkeypatch.setattr(preflight, "gpus", lambda fields: [["H200"], ["H200"]])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = Plan({"one": [1, 2]}, subject=SUBJECT, settings={"device": device})
    found = gpus_of(plan)
    assert lent == (found.names if found else None)


def test_a_sweep_can_be_listed_without_running(place, capsys):
    assert cli.main(["trial", "sweep", "plan.yaml", "--list"]) == 0
    assert "4 trials of 4 combinations" in capsys.readouterr().out
    assert not (place / "trials").exists()


def test_a_bisection_prints_its_ledger_and_the_cause(place, capsys):
    assert cli.main(["bisect", "plan.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "CRASH:raised is caused by cache=true with fast=true" in printed
    head = printed.splitlines()[0].split()
    assert head == ["number", "trial", "verdict", "hypothesis", "eliminated", "left", "changed"]
    assert "the defaults show it" in printed and "more: nsa explain" in printed


def test_a_bisection_that_finds_nothing_exits_with_1(place, capsys):
    (place / "plan.yaml").write_text(PLAN + "kind: HANG\n")
    assert cli.main(["bisect", "plan.yaml"]) == 1
    assert "no HANG in 4 trials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trial", "layer=2"], "unknown factor 'layer'; the nearest is 'layers'"),
        (["trial", "layers"], "'layers' is not of the form name=value"),
        (["trial", "layers=1", "layers=2"], "layers is given twice"),
        (["trial", "layers=two"], "layers='two': must be a whole number"),
        (["trial", "steps=0"], "steps=0 must be a whole number"),
        (["trial", "subject=nowhere:make"], "there is no module nowhere"),
        (["trial", "subject=train.py"], "is no file in"),
        (["trial", "subject=there.py", "steps=2"], "is a script, which has its own"),
        (["trial", "subject=there.py", "lr=2"], "argv='--lr {lr}' hands it on"),
        (["trial", "subject=there.py", "calibrate=true"], "there.py is a script"),
        (["trial", "subject=there.py", "argv='open"], "cannot be split into words"),
        (["trial", "oracles=finit"], "no oracle 'finit'; the nearest is 'finite'"),
        (["trial", "sweep", "gone.yaml"], "cannot read the parameter file gone.yaml"),
        (["bisect", "bad.yaml"], "bad.yaml: unknown factor 'layer'; the nearest is 'layers'"),
        (["bisect", "other.yaml"], "a plan has no 'factor'; the nearest is 'factors'"),
    ],
)
def test_bad_input_is_one_clear_line_and_exits_with_2(place, capsys, words, message):
    (place / "bad.yaml").write_text("factors: {layer: [1, 2]}\n")
    (place / "other.yaml").write_text("factor: {layers: [1, 2]}\n")
    (place / "there.py").write_text("")
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("nsa: ") and message in error
    assert not (place / "trials").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [["trial", "sweep", "plan.yaml"], ["bisect", "plan.yaml"], ["trial", f"subject={SUBJECT}"]],
)
def test_a_full_disk_is_told_of_and_exits_with_1(place, capsys, monkeypatch, words):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "run", full)
    assert cli.main(words) == 1
    assert "the disk of trials is full: trial" in "".join(capsys.readouterr())


@pytest.mark.processes
def test_a_place_that_cannot_hold_trials_is_one_line_and_exits_with_2(place, capsys):
    (place / "file").write_text("")
    assert cli.main(["trial", "sweep", "plan.yaml", "--trials", "file/trials"]) == 2
    assert "cannot keep trials in file/trials (Not a directory)" in capsys.readouterr().err


def test_words_of_the_command_line_become_values():
    found = {
        "a=1": 1, "b=1.5": 1.5, "c=true": True, "d=none": None, "e=0:2": "0:2", "f=[1, 2]": [1, 2],
        "g={'phi': 'mlp'}": {"phi": "mlp"}, "h=x=y": "x=y", "env.FLAG=1": "1",
    }  # fmt: skip
    values = {word.partition("=")[0]: value for word, value in found.items()}
    assert settings(found, "layers=2") == values


STUCK = "import threading\nlock = threading.Lock()\nwith lock, lock:\n    pass\n"


@pytest.mark.processes
@pytest.mark.slow
def test_a_hang_is_reported_at_once_and_ctrl_c_keeps_its_page(tmp_path):
    (tmp_path / "train.py").write_text(STUCK)
    command = [sys.executable, "-m", "nsa", "trial", "subject=train.py", "stall_s=1"]
    how = {"cwd": tmp_path, "env": environment_with_package(), "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **how, **pipes) as trial:
        assert trial.stderr.readline().startswith("nsa: HANG: rank 0")
        trial.send_signal(signal.SIGINT)
        printed, _ = trial.communicate(timeout=60)
    assert trial.returncode == 1 and printed.startswith("HANG:lock  trial ")
    again = subprocess.run([*command[:3], "explain", "latest"], capture_output=True, **how)
    assert "Who waits for whom" in again.stdout and "train.py:3" in again.stdout


@pytest.mark.processes
def test_a_memory_snapshot_of_a_strangers_trial_names_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["trial", "--memory-snapshot", "subject=quadratic:Training", "steps=2"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "memory of step 1" in printed and "quadratic.py:16 Scores.forward" in printed
    (folder,) = (tmp_path / "trials").glob("[0-9a-f]*")
    assert (folder / "memory-rank0.svg").read_text().startswith("<?xml")
    assert cli.main([*words, "memory_snapshot=2"]) == 2
    assert "memory_snapshot" in capsys.readouterr().err


def test_a_trials_snapshot_of_a_step_that_never_comes_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trial", "subject=quadratic:Training", "--memory-snapshot", "3"]) == 2
    said = "memory_snapshot=3 is never reached: a trial of steps=3 ends with step 2"
    assert said in capsys.readouterr().err and not (tmp_path / "trials").exists()


@pytest.mark.full
@pytest.mark.processes
def test_a_snapshot_that_a_script_never_reaches_is_told_and_nothing_is_lost(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parents[2] / "support" / "stranger_train.py"
    shutil.copy(script, "train.py")
    words = ["trial", "subject=train.py", "argv=--steps 2 --width 8", "--memory-snapshot", "9"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "step 9 was never reached" in printed and "--memory-snapshot 1 would do" in printed
