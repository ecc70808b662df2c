import fcntl
import importlib.util
import re

import pytest
import stored_runs

from workbook.cli.main import main
from workbook.runs.site import build, data


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


@pytest.mark.processes
def test_what_sphinx_says_when_it_fails_is_told(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    failing = tmp_path / "python"
    failing.write_text(
        "#!/bin/sh\necho first >&2\necho OSError: No space left on device >&2\nexit 2\n"
    )
    failing.chmod(0o755)
    monkeypatch.setattr(build.sys, "executable", str(failing))
    with pytest.raises(ValueError, match=r"could not build the site: .*No space left on device"):
        build.build(runs, tmp_path / "site", docs=tmp_path)


@pytest.mark.processes  # git, for the age of a run's commit
def test_a_build_of_what_did_not_change_starts_no_sphinx(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    made, said, index = [], [], tmp_path / "site" / "index.html"

    def sphinx(source, to, work, say):
        made.append(source)
        index.write_text("front page")
        return ("a warning",)

    monkeypatch.setattr(build, "_sphinx", sphinx)

    def built():
        return len(made), build.build(
            runs, tmp_path / "site", docs=tmp_path, say=said.append
        ).warnings

    assert built() == (0, ("a warning",)) and built() == (1, ())
    stored_runs.store_run(runs, "01_tiny")
    assert built()[1] and not built()[1] and len(made) == 2
    assert said[-1] == "1 of 1 runs read, 0 of them new or changed"
    index.unlink()
    assert built()[1] and len(made) == 3


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


@pytest.mark.processes
def test_each_claim_stands_with_its_device_commit_and_age_and_replaces_none(tmp_path):
    root, claim = tmp_path / "runs", "it is fast: <9> s"
    for day, gpu, verdict in (("01", "NVIDIA H200", "FAIL"), ("02", "NVIDIA H200", "PASS"),
                              ("03", "NVIDIA H100", "PASS")):  # fmt: skip
        stored_runs.store_run(
            root, "01_tiny", [(verdict, claim)], gpu=gpu, started=f"2026-11-{day}"
        )
    (folder,) = root.glob("2026-11-01/*")
    (folder / "notes.txt").write_text("its host was slow\n")
    lost = stored_runs.store_run(
        root, "02_lost", started="2026-11-04", status="killed", message="SIGTERM"
    )
    (lost / "environment.json").unlink()
    runs = [data.collect(one, root) for one in sorted(root.glob("*/*"))]
    build._tables(runs[::-1], [], tmp_path)
    text = (tmp_path / "claims.md").read_text()
    told = re.findall(r'data-label="(?:verdict|device|commit|age)">(?:<.+?>)?([^<]+)', text)
    assert told[:12] == [
        "NVIDIA H100", "c" * 12, "unknown", "PASS",  # git has no such commit
        "NVIDIA H200", "c" * 12, "unknown", "PASS",
        "NVIDIA H200", "c" * 12, "unknown", "FAIL"]  # fmt: skip
    assert told[12:] == ["NVIDIA H200", "none", "unknown"]
    assert text.count("<details") == 4 and text.count(" open>") == 2  # the newest of each notebook
    assert text.count("it is fast: &lt;9&gt; s") == 3 and text.count("its host was slow") == 1
    assert text.index("## 01_tiny") < text.index("## 02_lost") < text.index("SIGTERM")
    assert text.count("/verdicts.json") == 3 and "It makes no claim." in text
