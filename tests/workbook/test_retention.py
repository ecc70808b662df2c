"""Which runs may go by rules, what must stay, and how one goes."""

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from nsa.cli import main as cli
from nsa.workbook import record, retention
from nsa.workbook.files import write_json
from nsa.workbook.store import open_store

DAY_S = 86400.0


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def store_run(name, status="ok", days=0.0, size=0, day="2026-11-01", **more):
    """A run that began so many days ago, with a file of so many bytes."""
    folder = open_store("runs").root / day / name
    folder.mkdir(parents=True)
    started = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    about = {"run_id": name, "notebook": name[:9], "status": status, "started": started}
    write_json(folder / "record.json", about | more)
    (folder / "bulk.bin").write_bytes(b"x" * size)
    return folder


def alive():
    """Of a record whose runner is this process."""
    mine = {"pid": os.getpid(), "pid_started": record.process_start(os.getpid())}
    return mine | {"machine": record.machine()}


def chosen(**rules):
    return [run.folder.name for run in retention.Rules(**rules).choose(retention.runs("runs"))]


def kept():
    return {run.folder.name: run.kept for run in retention.runs("runs") if run.kept}


def nsa(capsys, *words, code=0):
    assert cli.main([*words]) == code
    return capsys.readouterr()


@pytest.mark.processes
def test_rules_of_age_size_and_status_must_all_hold(place):
    store_run("01_one-00000001", days=40, size=5000)
    store_run("01_one-00000002", "failed", days=40)
    store_run("01_one-00000003", "failed", days=1)
    store_run("01_one-00000004", "timeout", days=50, size=9000)
    assert chosen(older_s=30 * DAY_S) == ["01_one-00000004", "01_one-00000001", "01_one-00000002"]
    assert chosen(older_s=30 * DAY_S, statuses=("failed",)) == ["01_one-00000002"]
    assert chosen(larger=4000) == ["01_one-00000004", "01_one-00000001"]
    assert chosen(larger=4000, statuses=("ok",)) == ["01_one-00000001"]
    assert chosen(statuses=("lost",)) == []


@pytest.mark.processes
def test_the_oldest_go_until_all_take_no_more_than_they_may(place):
    for number in range(4):
        store_run(f"01_one-0000000{number}", days=number, size=10_000)
    total = sum(run.size for run in retention.runs("runs"))
    assert chosen(down_to=total) == []
    assert chosen(down_to=total - 1) == ["01_one-00000003"]
    assert chosen(down_to=total // 2) == ["01_one-00000003", "01_one-00000002"]
    assert chosen(down_to=0, older_s=2.5 * DAY_S) == ["01_one-00000003"]


@pytest.mark.processes
def test_a_run_that_runs_stays_and_one_whose_runner_is_gone_is_lost_at_once(place):
    now = datetime.now(UTC).isoformat()
    store_run("01_one-00000001", "running", days=40, heartbeat=now, **alive())
    store_run("01_one-00000002", "running", heartbeat=now, **alive() | {"pid_started": 1})
    assert kept() == {"01_one-00000001": "it runs"}
    assert chosen(statuses=("lost",)) == ["01_one-00000002"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", "as `01_one-0000000a` shows."),
        ("docs/deep/log.md", "in runs/2026-11-01/01_one-0000000a/verdicts.json"),
        ("docs/log.md", "the run …-0000000a; later"),
        ("figures/memory.svg", "<desc>run 01_one-0000000a</desc>"),
        ("figures/01_one--a.json", '{"run": "2026-11-01/01_one-0000000a"}'),
        ("notebooks/06.ipynb", '{"cells": ["01_one-0000000a"]}'),
    ],
)
def test_what_a_document_or_figure_names_stays_and_what_is_only_like_it_does_not(place, file, text):
    store_run("01_one-0000000a", days=40)
    store_run("01_one-0000000a-2", days=39)
    store_run("01_one-000000ab", days=38)
    (place / file).parent.mkdir(parents=True, exist_ok=True)
    (place / file).write_text(text)
    assert kept() == {"01_one-0000000a": f"{file} names it"}
    assert chosen(older_s=DAY_S) == ["01_one-0000000a-2", "01_one-000000ab"]


@pytest.mark.processes
def test_a_run_of_a_given_name_is_cited_with_its_day_alone(place):
    store_run("r", days=40)
    (place / "README.md").write_text("r is a letter")
    assert kept() == {}
    (place / "README.md").write_text("see runs/2026-11-01/r/report.html")
    assert kept() == {"r": "README.md names it"}


@pytest.mark.processes
def test_what_git_tracks_stays_and_what_a_tracked_run_names(place):
    committed = store_run("01_one-00000001", days=40)
    store_run("01_one-00000002", days=40)
    store_run("01_one-00000003", days=40)
    (committed / "verdicts.json").write_text('[{"evidence": "runs/x/01_one-00000002"}]')
    git = ["git", "-C", str(place)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", str(committed)], check=True)
    named = "runs/2026-11-01/01_one-00000001/verdicts.json names it"
    assert kept() == {"01_one-00000001": "git tracks it", "01_one-00000002": named}


@pytest.mark.processes
def test_what_a_batch_that_goes_on_has_run_stays_until_its_driver_ends(place, capsys):
    store_run("01_one-00000001", days=40)
    jobs, manifest = [{"run": "2026-11-01/01_one-00000001"}], place / "runs/batches/all"
    manifest.mkdir(parents=True)
    write_json(manifest / "manifest.json", {"driver": alive(), "jobs": jobs})
    assert kept() == {"01_one-00000001": "runs/batches/all/manifest.json names it"}
    assert "no run" in nsa(capsys, "rm", str(manifest), code=2).err and manifest.is_dir()
    gone = alive() | {"pid_started": 1}
    write_json(manifest / "manifest.json", {"driver": gone, "jobs": jobs})
    assert kept() == {}


@pytest.mark.processes
def test_pruning_names_runs_and_removes_none_until_it_is_told_to(place, capsys):
    old, cited = store_run("01_one-00000001", days=40), store_run("01_one-00000002", days=40)
    (place / "README.md").write_text("01_one-00000002")
    words = ["runs", "--prune", "--older", "30d", "--status", "ok"]
    told = nsa(capsys, *words)
    assert "01_one-00000001" in told.out and "01_one-00000002" not in told.out
    assert "1 of 2 runs may go" in told.err and "nothing was removed" in told.err
    assert old.is_dir()
    (row,) = json.loads(nsa(capsys, *words, "--json").out)
    assert row["run"].endswith("01_one-00000001") and row["age_days"] == pytest.approx(40, abs=0.1)
    assert "removed runs/2026-11-01/01_one-00000001" in nsa(capsys, *words, "--yes").out
    assert not old.exists() and cited.is_dir()


@pytest.mark.processes
def test_a_run_is_removed_with_its_empty_day_and_is_never_half_there(place, capsys, monkeypatch):
    gone = store_run("01_one-00000001", day="2026-10-01", size=10)
    store_run("01_one-00000002")
    assert "removed" in nsa(capsys, "rm", "01_one-00000001").out
    assert not gone.parent.exists()

    def cut_off(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention.shutil, "rmtree", cut_off)
        assert cli.main(["rm", "latest"]) == 1
    assert open_store("runs").folders() == [] and len(retention.leftovers("runs")) == 1
    store_run("01_one-00000003", "failed", day="2026-10-02")
    nsa(capsys, "runs", "--prune", "--status", "failed", "--yes")
    assert list((place / "runs").iterdir()) == []


@pytest.mark.processes
def test_rm_refuses_all_where_one_must_stay_and_takes_what_is_cited_when_told_to(place, capsys):
    free, cited = store_run("01_one-00000001"), store_run("01_one-00000002")
    runs = store_run("01_one-00000003", "running", **alive())
    (place / "README.md").write_text("01_one-00000002")
    told = nsa(capsys, "rm", "01_one-00000001", "01_one-00000002", code=2).err
    assert "README.md names it; --cited removes it all the same" in told
    assert "it runs; end it first" in nsa(capsys, "rm", "01_one-00000003", "--cited", code=2).err
    assert free.is_dir() and cited.is_dir() and runs.is_dir()
    nsa(capsys, "rm", "01_one-00000001", "01_one-00000002", "--cited")
    assert not free.exists() and not cited.exists()


@pytest.mark.processes
def test_a_folder_whose_record_is_gone_is_removed_by_its_path_alone(place, capsys):
    damaged = store_run("01_one-00000001")
    (damaged / "record.json").unlink()
    store_run("01_one-00000002")
    assert "no run '01_one-00000001'" in nsa(capsys, "rm", "01_one-00000001", code=2).err
    outside = place / "mine" / "precious"
    outside.mkdir(parents=True)
    assert "no run" in nsa(capsys, "rm", str(outside), code=2).err and outside.is_dir()
    nsa(capsys, "rm", str(damaged))
    assert not damaged.exists()


@pytest.mark.processes
def test_a_link_is_not_followed(place, capsys):
    real = store_run("01_one-00000001")
    elsewhere = place / "elsewhere"
    real.rename(elsewhere)
    real.symlink_to(elsewhere)
    assert "is a link to" in nsa(capsys, "rm", "latest", code=1).err
    assert (elsewhere / "bulk.bin").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prune"], "needs to know what may go: --older 30d"),
        (["--older", "3d"], "--older is a rule of --prune; nsa runs --prune --older"),
        (["--yes"], "--yes is a rule of --prune"),
        (["--prune", "--status", "faild"], "status='faild' is unknown; the nearest is 'failed'"),
        (["--prune", "--status", "running"], "status='running' is unknown"),
    ],
)
def test_rules_that_are_none_are_refused(place, capsys, words, message):
    assert message in nsa(capsys, "runs", *words, code=2).err


@pytest.mark.parametrize("words", [["--older", "30"], ["--larger", "big"], ["--down-to=-3G"]])
def test_an_age_or_size_without_sense_is_refused(place, capsys, words):
    with pytest.raises(SystemExit):
        cli.main(["runs", "--prune", *words])
    assert "write " in capsys.readouterr().err


def test_sizes_and_ages_have_units():
    from nsa.cli import retention as command

    assert [command.size(x) for x in ("500", "2k", "1.5M", "1GiB", "1 gb")] == [
        500,
        2048,
        1.5 * 2**20,
        2**30,
        2**30,
    ]
    assert [command.age(x) for x in ("12h", "30d", "2w")] == [12 * 3600, 30 * DAY_S, 14 * DAY_S]
    assert [command._size(x) for x in (5, 999, 1500, 3 * 2**20, 50 * 2**30)] == [
        "5 B",
        "999 B",
        "1.46 KiB",
        "3 MiB",
        "50 GiB",
    ]
