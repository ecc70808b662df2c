"""Plans of notebooks that are shipped can be run, and the roles name sections that are there."""

import re

import nbformat
import pytest
from places import NOTEBOOKS, ROOT

pytest.importorskip("papermill")


from workbook.runs.batch.plan import read_plan
from workbook.runs.identity import find_notebook
from workbook.runs.parameters import read_file

ROLES = re.findall(r"^\| (tester|engineer) \| ([ABC]) \| (.*?) \| (\w+), (.*?) \| `(.*?)` \|$",
                   (ROOT / "docs/roles.md").read_text(), re.M)  # fmt: skip

KEPT = pytest.mark.skipif(
    not (ROOT / "runs").is_dir(), reason="notebooks judge kept runs, of which an sdist has none"
)


@KEPT
@pytest.mark.processes
@pytest.mark.parametrize("plan", ["batch_phases", "batch_phases_h200"])
def test_a_shipped_plan_of_phases_goes_from_preflight_to_the_verdict(plan):
    entries = read_plan(NOTEBOOKS / f"params/{plan}.yaml", NOTEBOOKS).jobs
    assert entries[0].name == "0 preflight" and entries[-1].name == "7 verdict"
    assert {entry.name[0] for entry in entries} == set("01234567")
    asked = {entry.planned.notebook.stem for entry in entries}
    jobs = read_file(NOTEBOOKS / f"params/{plan}.yaml")["jobs"]
    assert all(job["question"] for job in jobs)
    assert asked >= {path.stem for path in NOTEBOOKS.glob("0[0-8]_*.ipynb")}


@KEPT
@pytest.mark.processes
def test_the_other_shipped_plans_can_be_run_and_hold_what_their_names_say():
    plans = {
        path.stem.removeprefix("batch_"): read_plan(path, NOTEBOOKS)
        for path in (NOTEBOOKS / "params").glob("batch_*.yaml")
        if "phases" not in path.stem
    }
    asked = {
        name: [entry.planned.notebook.stem[:2] for entry in plan.jobs]
        for name, plan in plans.items()
    }
    assert asked.keys() == {"all_h200", "card", "card_h200", "memory_h200", "backends_h200"}
    numbered = [path.stem[:2] for path in NOTEBOOKS.glob("*.ipynb") if path.stem != "90_explore"]
    assert sorted(asked["all_h200"]) == sorted(numbered)
    assert sorted(asked["card"]) == sorted(asked["card_h200"]) == ["01", "02", "03", "04"]
    assert {*asked["memory_h200"]} == {"01"} and {*asked["backends_h200"]} == {"02"}
    assert sum(entry.timeout_s for entry in plans["card_h200"].jobs) <= 16 * 60
    for name, plan in plans.items():
        on_gpu = {entry.planned.full.get("device", "auto") for entry in plan.jobs} - {"auto"} == {
            "cuda"
        }
        assert on_gpu == name.endswith("_h200")
        assert {entry.gpus for entry in plan.jobs} == ({1} if on_gpu else {None})


@pytest.mark.processes
def test_the_plan_in_the_documentation_is_one(tmp_path):
    written = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/batches.md").read_text(), re.S)[1]
    (tmp_path / "00_smoke.yaml").write_text("dtypes: [fp32]")
    (tmp_path / "plan.yaml").write_text(written)
    entries = read_plan(tmp_path / "plan.yaml", NOTEBOOKS).jobs
    assert len(entries) == 13 and entries[-1].name == "memory dtype=bf16 tokens=512 #3"
    assert entries[-1].after == ("correctness",) and entries[-1].timeout_s == 1200


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
