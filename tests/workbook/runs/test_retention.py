"""Runs that may go by their age, what must stay, and how one goes."""

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from workbook.cli import main as cli
from workbook.runs import record, retention
from workbook.runs.files import write_json
from workbook.runs.store import Store

DAY_S = 86400.0


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def store_run(name, status="ok", days=0.0, size=0, day="2026-11-01", **more):
    """A run that began so many days ago, with a file of so many bytes."""
    folder = Store("runs").root / day / name
    folder.mkdir(parents=True)
    started = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    about = {"run_id": name, "notebook": name[:9], "status": status, "started": started}
    write_json(folder / "record.json", about | more)
    (folder / "bulk.bin").write_bytes(b"x" * size)
    return folder


def alive():
    """Record whose runner is this process."""
    mine = {"pid": os.getpid(), "pid_started": record.process_start(os.getpid())}
    return mine | {"machine": record.machine()}


def old(days=30):
    return [folder.name for folder in retention.older("runs", days * DAY_S)]


def track(*folders):
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", *map(str, folders)], check=True)


def nsa(capsys, *words, code=0):
    assert cli.main([*words]) == code
    return capsys.readouterr()


@pytest.mark.processes
def test_runs_are_chosen_by_age_oldest_first_whatever_names_them(place):
    store_run("01_one-00000001", days=40)
    store_run("01_one-00000002", "failed", days=50)
    store_run("01_one-00000003", days=1)
    damaged = store_run("01_one-00000004", started="soon")
    os.utime(damaged, (0, 0))
    (place / "README.md").write_text("as `01_one-00000001` shows")
    assert set(old()) == {"01_one-00000001", "01_one-00000002", "01_one-00000004"}
    names = [name for name in old() if name != damaged.name]
    assert names == ["01_one-00000002", "01_one-00000001"]
    assert old(60) == [damaged.name]


@pytest.mark.processes
def test_a_run_that_runs_is_not_pruned_and_one_whose_runner_is_gone_is(place):
    now = datetime.now(UTC).isoformat()
    store_run("01_one-00000001", "running", days=40, heartbeat=now, **alive())
    store_run("01_one-00000002", "running", days=40, heartbeat=now, **alive() | {"pid_started": 1})
    assert old() == ["01_one-00000002"]


@pytest.mark.processes
def test_what_git_tracks_stays_and_what_a_tracked_run_names_does_not(place, capsys):
    committed, named = (store_run(f"01_one-0000000{n}", days=40) for n in (1, 2))
    (committed / "verdicts.json").write_text('[{"evidence": "runs/x/01_one-00000002"}]')
    track(committed / "verdicts.json")
    assert old() == [named.name]
    told = nsa(capsys, "rm", committed.name, named.name, code=2).err
    assert f"{committed}: git tracks it; git rm -r removes it" in told.replace(str(place) + "/", "")
    assert named.name not in told and committed.is_dir() and named.is_dir()
    nsa(capsys, "runs", "prune", "--older", "1h", "--yes")
    assert committed.is_dir() and not named.exists()


@pytest.mark.processes
def test_nothing_goes_where_git_does_not_say_what_it_tracks(place, capsys):
    run = store_run("01_one-00000001", days=40)
    (place / ".git").write_text("gitdir: nowhere")
    for words in (["rm", "latest"], ["runs", "prune", "--older", "1h", "--yes"]):
        assert "git does not say what it tracks" in nsa(capsys, *words, code=2).err
    assert run.is_dir()


@pytest.mark.processes
def test_pruning_names_runs_and_removes_none_until_it_is_told_to(place, capsys):
    gone, young = store_run("01_one-00000001", days=40), store_run("01_one-00000002", days=2)
    words = ["runs", "prune", "--older", "30d"]
    told = nsa(capsys, *words)
    assert "01_one-00000001" in told.out and "01_one-00000002" not in told.out
    assert "1 runs may go; what git tracks stays" in told.err and "nothing was removed" in told.err
    assert gone.is_dir()
    (row,) = json.loads(nsa(capsys, *words, "--json").out)
    assert row["run"].endswith("01_one-00000001") and row["age_days"] == pytest.approx(40, abs=0.1)
    assert "removed runs/2026-11-01/01_one-00000001" in nsa(capsys, *words, "--yes").out
    assert not gone.exists() and young.is_dir()


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
    assert Store("runs").folders() == [] and len(retention.leftovers("runs")) == 1
    store_run("01_one-00000003", "failed", day="2026-10-02", days=1)
    nsa(capsys, "runs", "prune", "--older", "1h", "--yes")
    assert list((place / "runs").iterdir()) == []


@pytest.mark.processes
def test_rm_removes_what_git_does_not_track_also_where_a_document_names_it(place, capsys):
    free = [store_run("01_one-00000001"), store_run("01_one-00000002", "failed")]
    (place / "README.md").write_text("01_one-00000002")
    nsa(capsys, "rm", *(folder.name for folder in free))
    assert not any(folder.exists() for folder in free)


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


def test_ages_have_units_and_are_wanted(place, capsys):
    from workbook.cli.retention import age

    assert [age(x) for x in ("12h", "30d", "2w")] == [12 * 3600, 30 * DAY_S, 14 * DAY_S]
    for words, said in ((["--older", "30"], "write 12h, 30d or 8w"), ([], "required: --older")):
        with pytest.raises(SystemExit):
            cli.main(["runs", "prune", *words])
        assert said in capsys.readouterr().err
