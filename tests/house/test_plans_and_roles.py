"""Plans of notebooks that are shipped can be run, and the roles name sections that are there."""

import re

import nbformat
import pytest
from places import NOTEBOOKS, ROOT

pytest.importorskip("papermill")

from nsa.workbook.phases import read_phases

from nsa.workbook.identity import find_notebook

ROLES = re.findall(r"^\| (tester|engineer) \| ([ABC]) \| (.*?) \| (\w+), (.*?) \| `(.*?)` \|$",
                   (ROOT / "docs/roles.md").read_text(), re.M)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["phases", "phases_h200"])
def test_a_shipped_plan_is_right_and_goes_from_preflight_to_the_verdict(plan):
    phases = read_phases(NOTEBOOKS / f"params/{plan}.yaml", NOTEBOOKS)
    assert phases[0].name == "0 preflight" and phases[-1].name == "7 verdict"
    assert {phase.name[0] for phase in phases} == set("01234567")
    asked = {phase.planned.notebook.stem for phase in phases}
    assert len({phase.planned.name for phase in phases}) == len(phases)
    assert asked >= {path.stem for path in NOTEBOOKS.glob("0[0-8]_*.ipynb")}


def test_every_role_has_its_priorities():
    assert {(who, priority) for who, priority, *_ in ROLES} == {
        *(("tester", priority) for priority in "ABC"),
        *(("engineer", priority) for priority in "AB"),
    }


@pytest.mark.parametrize("role", ROLES, ids=lambda role: " ".join(role[2].split()[:3]))
def test_what_a_role_delivers_is_a_section_of_a_notebook_and_a_command_that_can_be_run(role):
    _, _, _, notebook, section, command = role
    cells = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    texts = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert section in re.findall(r"^#+ (.*)$", texts, re.M)
    for file in re.findall(r"notebooks/params/\S+", command):
        assert (ROOT / file).is_file(), file
    if number := re.search(r"nsa run (\S+)", command):
        assert find_notebook(number[1], NOTEBOOKS).stem == notebook


def test_no_row_of_the_roles_is_left_out():
    rows = re.findall(r"^\| (?:tester|engineer) \|.*$", (ROOT / "docs/roles.md").read_text(), re.M)
    assert len(rows) == len(ROLES) > 10
