"""Runs of other versions, without figures, and a thousand of them: shown, and the site usable."""

import json
import re

import pytest
from site_runs import SHAPE, write_run

from workbook.runs.files import write_json
from workbook.runs.site import build, data, pages

pytest.importorskip("jinja2")
pytestmark = pytest.mark.processes  # git tells the age of commits


def collected(root, *folders):
    return [data.collect(folder, root) for folder in folders]


def tables(runs, to):
    build._tables(runs, [], to)
    return {path.stem: path.read_text() for path in to.glob("*.md")}


def test_a_run_of_another_version_is_shown_with_what_it_has(tmp_path):
    root = tmp_path / "runs"
    old = root / "2025-01-02" / "02_speed-00000001"
    old.mkdir(parents=True)
    write_json(old / "record.json", {"notebook": "02_speed", "status": "ok", "version": 0})
    (old / "metrics.csv").write_text("backend,gpu,median\ntriton,NVIDIA H200,1.5\n")
    write_json(old / "verdicts.json", [{"verdict": "MAYBE", "claim": "it is old"}, "a word"])
    (run,) = collected(root, old)
    page = pages.run_page(old, run)
    assert "Damaged: there is no notebook.ipynb" in page and "MAYBE" in page
    said = tables([run], tmp_path / "pages")
    assert "02_speed-00000001" in said["runs"] and "unknown" in said["runs"]
    assert "No run here has times of a GPU" in said["index"]


def test_a_run_without_figures_or_numbers_has_its_page_and_its_row(tmp_path):
    root = tmp_path / "runs"
    bare = write_run(root, "2026-11-20/01_bare-00000002")
    (run,) = collected(root, bare)
    assert run["damaged"] == [] and not (bare / "figures").exists()
    cells = json.loads(pages.run_page(bare, run))["cells"]
    assert "Run 01_bare-00000002" in cells[0]["source"] and "it ran" in cells[0]["source"]
    assert "01_bare-00000002" in tables([run], tmp_path / "pages")["runs"]


def test_a_thousand_runs_leave_the_front_page_as_it_is_and_are_all_in_the_list(tmp_path):
    root = tmp_path / "runs"
    rows = [(t, 1e-3 * t, 0.9e-3 * t, 1.1e-3 * t, SHAPE) for t in (8192, 32768)]
    one = write_run(root, "2026-11-20/02_speed-00000000", rows)
    (first,) = collected(root, one)
    few = tables([json.loads(json.dumps(first))], tmp_path / "few")
    names = [f"2026-11-20/02_speed-{n:08x}" for n in range(1000)]
    many = tables([json.loads(json.dumps(first)) | {"run": name} for name in names], tmp_path / "m")
    assert len(many["index"]) < len(few["index"]) + 200  # it says how many there are
    assert len(many["speed"]) < len(few["speed"]) + 200  # a point is one row, of the newest run
    listed = re.findall(r'<tr id="([^"]*)"', many["runs"])
    assert sorted(listed) == names
    assert len(many["runs"]) < 1_500_000
