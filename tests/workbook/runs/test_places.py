"""Folders of notebooks and runs: in a clone, below it, after `nsa notebooks init`, anywhere."""

import pytest
from places import NOTEBOOKS as SHIPPED
from places import ROOT
from sample_notebooks import write_notebook

from workbook.cli.main import main
from workbook.runs import places

NOTEBOOKS = ROOT / "notebooks"  # as whoever works here has left it


@pytest.fixture
def workbook(tmp_path):
    """A folder that `nsa notebooks init` made, with one below it."""
    places.init(tmp_path / "mine")
    (tmp_path / "mine" / "a" / "b").mkdir(parents=True)
    return tmp_path / "mine"


def test_init_copies_every_notebook_and_parameter_file(workbook):
    for pattern in ("*.ipynb", "params/*.yaml"):
        shipped = {file.name: file.read_bytes() for file in NOTEBOOKS.glob(pattern)}
        copied = {file.name: file.read_bytes() for file in (workbook / "notebooks").glob(pattern)}
        assert copied == shipped and shipped
    assert not list(workbook.glob(".notebooks-*"))


def test_init_leaves_what_is_there(workbook, capsys):
    mine = workbook / "notebooks" / "01_memory_scaling.ipynb"
    mine.write_text("changed")
    assert main(["notebooks", "init", str(workbook)]) == 2
    assert "is there already, and is left as it is" in capsys.readouterr().err
    assert mine.read_text() == "changed"


def test_init_says_what_it_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["notebooks", "init", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_below_a_workbook_its_notebooks_are_found_and_runs_go_beside_them(workbook, monkeypatch):
    monkeypatch.chdir(workbook)
    assert (places.notebooks(), places.beside("runs")) == ("notebooks", "runs")
    monkeypatch.chdir(workbook / "a" / "b")
    assert (places.notebooks(), places.beside("runs")) == ("../../notebooks", "../../runs")


def test_anywhere_else_the_shipped_ones_are_found_and_runs_stay_here(tmp_path, monkeypatch):
    write_notebook(tmp_path / "notebooks" / "of_somebody.ipynb", "1")  # no workbook's
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert (places.notebooks(), places.beside("runs")) == (str(NOTEBOOKS), "runs")


def test_the_list_of_notebooks_says_where_they_lie_and_where_runs_go(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "shipped", lambda: SHIPPED)
    assert main(["notebooks"]) == 0
    printed = capsys.readouterr().out
    assert all(file.stem in printed for file in SHIPPED.glob("*.ipynb"))
    assert printed.endswith(f"They lie in {SHIPPED}, and runs go to runs.\n")


@pytest.mark.parametrize("name", ["h200", "h200.yaml", "notebooks/params/h200.yaml"])
def test_a_shipped_file_of_parameters_is_found_by_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert places.parameter_file(name, NOTEBOOKS) == NOTEBOOKS / "params" / "h200.yaml"
    own = tmp_path / name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("{}")
    assert places.parameter_file(name, NOTEBOOKS).resolve() == own  # a file that is there wins


@pytest.mark.parametrize("name", ["other/h200.yaml", "h20", "../params/h200.yaml"])
def test_no_other_path_leads_to_a_shipped_file_and_the_nearest_is_told(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message = rf"none here or in {NOTEBOOKS}/params; the nearest is '\w*h200\.yaml'"
    with pytest.raises(ValueError, match=message):
        places.parameter_file(name, NOTEBOOKS)
