import fcntl
import importlib.util
import subprocess

import pytest

from nsa.cli.main import main
from nsa.workbook.site import build


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_a_folder_with_other_files_is_not_written_to(runs, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that no site has left there"):
        build.build(runs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "runs"]


def test_a_folder_of_runs_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing is no folder of runs; `nsa run` makes one"):
        build.build(tmp_path / "nothing", tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_of_two_builds_of_one_site_the_second_is_told(runs, tmp_path):
    work = tmp_path / "site" / build.WORK
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another `nsa site` is at work"):
            build.build(runs, tmp_path / "site")


def test_a_machine_without_sphinx_is_told_what_to_install(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["site", "--runs", str(runs), "--to", str(tmp_path / "site")]) == 2
    said = capsys.readouterr().err
    assert "sphinx, myst_nb, sphinx_book_theme is missing" in said and "nsa[site]" in said


def test_what_sphinx_says_when_it_fails_is_told(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    failed = subprocess.CompletedProcess([], 2, "", "first\nOSError: No space left on device\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"could not build the site: .*No space left on device"):
        build.build(runs, tmp_path / "site", docs=tmp_path)


def test_documents_lead_to_the_pages_of_the_site_or_nowhere(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "hangs.md").write_text("# Hangs\n")
    text = (
        "[a run](../runs/2026-11-21/01_x-1) [its rows](../runs/2026-11-21/01_x-1/metrics.csv) "
        "[one that is gone](../runs/2026-11-22/01_x-2) [code](../nsa/config.py) "
        "[page](hangs.md#hangs) [paper](https://arxiv.org/abs/2502.11089)"
    )
    (docs / "results.md").write_text(text)
    assert build._docs(docs, tmp_path / "to", {"2026-11-21/01_x-1"}) == ["hangs", "results"]
    page = "../runs/2026-11-21/01_x-1.ipynb"
    assert (tmp_path / "to" / "results.md").read_text() == (
        f"[a run]({page}) [its rows]({page}) one that is gone code "
        "[page](hangs.md#hangs) [paper](https://arxiv.org/abs/2502.11089)"
    )


def test_runs_of_one_notebook_are_told_apart_by_what_others_have_not():
    runs = [{"parameters": {"tokens": t, "seed": 1, "names": ["a"]}} for t in (1, 1, 2)]
    build._set_apart(runs)
    assert [run["apart"] for run in runs] == ["", "", "tokens 2"]
