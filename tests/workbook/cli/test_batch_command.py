"""`nsa batch`: what it tells before, during and after, and what it refuses. Runs are made up."""

import json

import pytest
import yaml
from batches import NAMES, PLAN, MadeUp, opened, write_plan

from workbook.cli import batch as command
from workbook.cli import main as cli
from workbook.runs import opening
from workbook.runs.batch import show
from workbook.runs.files import write_json

pytestmark = pytest.mark.processes  # git, which is asked for the commit


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a plan, and the place where the command's runs are made up."""
    write_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    made_up = MadeUp()
    monkeypatch.setattr(command, "_place", lambda arguments, plan: made_up)
    return made_up


def nsa(capsys, *words):
    """(exit code, stdout, stderr) of `nsa batch plan.yaml WORDS`."""
    code = cli.main(["batch", "plan.yaml", *words])
    return code, *capsys.readouterr()


def test_a_dry_run_writes_nothing_and_tells_how_many_and_how_long(place, capsys, tmp_path):
    code, out, _ = nsa(capsys, "--dry-run")
    assert code == 0 and "6 jobs: 6 to run" in out and "no stored run" in out
    assert all(name in out for name in NAMES)
    assert not place.ran and not (tmp_path / "runs").exists()


def stored(name, full, seconds, **facts):
    folder = opening.create_folder("runs", name)
    kept = {"notebook": "01_tiny", "status": "ok", "seconds": seconds, "started": "2026"}
    write_json(folder / "record.json", kept)
    write_json(folder / "environment.json", {"gpus": [], **facts})
    (folder / "parameters.yaml").write_text(yaml.safe_dump(full))


def test_the_estimate_is_the_median_of_stored_runs_of_the_notebook_on_such_a_device(place):
    first = opened().jobs[0].planned
    stored("01_tiny-a", first.full, 100.0)
    stored("01_tiny-b", {"layers": 9}, 40.0)
    stored("01_tiny-c", first.full, 9000.0, gpus=[{"name": "another"}])
    told = show.estimate(opened(), 1)  # of the six, 70 s each
    assert told == "6 to run: about 7.0 min (6 of them known from stored runs)"
    assert show.estimate(opened(), 2) == (
        "6 to run, 2 at once: about 3.5 min (6 of them known from stored runs)"
    )


def test_a_run_tells_of_each_job_and_status_and_json_tell_it_again(place, capsys):
    place.ends["second #2"] = "error"
    code, out, err = nsa(capsys)
    assert code == 1 and "[6/6] second #2: failed" in err
    assert "5 ok, 1 failed" in out and "run again with --retry" in out
    code, out, _ = nsa(capsys, "--status")
    assert code == 0 and "5 ok, 1 failed" in out and "second #2: error" in out
    rows = json.loads(nsa(capsys, "--status", "--json")[1])["jobs"]
    assert [row["job"] for row in rows] == NAMES and rows[5]["status"] == "failed (was there)"
    place.ends.clear()
    assert nsa(capsys, "--retry")[0] == 0 and len(place.ran) == 7
    assert nsa(capsys)[0] == 0 and len(place.ran) == 7


def test_thousands_are_begun_only_when_somebody_says_so(place, capsys, monkeypatch, tmp_path):
    write_plan(tmp_path, PLAN.replace("repeats: 2", "repeats: 3000"))
    code, _, err = nsa(capsys)
    assert code == 2 and "3,004 to run" in err and "--yes" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    code, _, err = nsa(capsys)
    assert code == 2 and "nothing was begun" in err and "3,004 to run" in asked[0]
    assert not place.ran and not (tmp_path / "runs").exists()
    assert "3,004 jobs: 3,004 to run" in nsa(capsys, "--dry-run")[1]


def test_what_changed_since_is_told_and_anew_begins_again(place, capsys, tmp_path):
    nsa(capsys)
    write_plan(tmp_path, PLAN, "print('another')")
    assert "changed since it began: second #2: 01_tiny.ipynb or nsa/" in nsa(capsys, "--dry-run")[1]
    code, _, err = nsa(capsys)
    assert code == 2 and "are not mixed" in err and "--anew" in err
    assert nsa(capsys, "--anew")[0] == 0 and len(place.ran) == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at-once", "0"], "--at-once 0: write how many"),
        (["--cancel"], "was never run"),
        (["--runs", "plan.yaml"], "cannot write to"),
        (["--notebooks", "nowhere"], "no notebooks in nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused_with_one_line(place, capsys, words, message):
    code, out, err = nsa(capsys, *words)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err
    assert not place.ran


def test_evidence_is_refused_before_anything_runs(place, capsys):
    code, _, err = nsa(capsys, "--evidence")
    assert code == 2 and "evidence is made from one tree" in err and not place.ran


def test_a_plan_of_trials_and_one_of_notebooks_are_told_apart(place, capsys, tmp_path):
    assert cli.main(["trial", "sweep", "plan.yaml"]) == 2
    assert "plan.yaml is a plan of notebooks: nsa batch plan.yaml" in capsys.readouterr().err
    (tmp_path / "plan.yaml").write_text("factors: {layers: [1, 2]}")
    assert "unknown key 'factors'" in nsa(capsys)[2]


def test_a_terminal_shows_a_bar_and_what_a_running_job_printed_last(place, capsys, monkeypatch):
    batch = opened()
    job = batch.jobs[0]
    run = opening.create_folder("runs", "01_tiny-x")
    (run / "stdout.log").write_text("one\ntwo of three\n")
    job.folder.mkdir(parents=True)
    write_json(job.folder / "started.json", {"run": str(run)})
    job.status = "running"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with show.live(batch) as (picture, say):
        picture(batch)
        say("a line")
    shown = capsys.readouterr().err
    assert "two of three" in shown and "1 running, 5 to run" in shown and "a line" in shown
