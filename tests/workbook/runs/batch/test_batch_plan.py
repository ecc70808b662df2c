"""Plans of batches: what they stand for, and what is refused before anything runs."""

import pytest
from batches import NAMES, PLAN, write_plan
from places import NOTEBOOKS

from workbook.runs.batch.plan import read_plan

pytestmark = pytest.mark.processes  # git, which is asked for the commit


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_is_each_combination_of_the_grid_and_each_repeat(place):
    plan = read_plan("plan.yaml")
    assert plan.name == "plan"
    assert [entry.name for entry in plan.jobs] == NAMES
    first, *_, last = plan.jobs
    own = {"layers": 2, "rate": 2.0, "precision": "fp32", "deep": False}
    assert first.planned.given == own  # of the file, which the plan's own win over, and of the grid
    assert (first.timeout_s, first.after) == (None, ())
    assert (last.timeout_s, last.after, last.repeat) == (120.0, ("first",), 2)
    runs = [entry.planned.name for entry in plan.jobs]
    assert runs[4] == runs[5] and len(set(runs)) == 5
    assert len({entry.key for entry in plan.jobs}) == 6


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("jobs: []", "jobs is .*wants a list of at least one job"),
        ("jobs: 3", "jobs is 3; it wants a list"),
        ("phases: []", "unknown key 'phases'"),
        ("question: x", "has no 'jobs'"),
        (PLAN + "mode: fast", "unknown key 'mode'"),
        ("jobs: [tiny]", "job 1: job is 'tiny'; it wants a mapping"),
        ("jobs: [{name: a}]", r"job 1 \(a\) has no 'notebook'"),
        ("jobs: [{name: 3, notebook: tiny}]", "name is 3; it wants words, in quotes"),
        (PLAN.replace("tiny", "tinny"), r"job 1 \(first\): no notebook 'tinny'"),
        (PLAN.replace("layers: 5", "layer: 5"), r"\(second\): unknown parameter 'layer'.*'layers'"),
        (PLAN.replace("layers: 5", "layers: 500"), "layers=500 is outside 1..64"),
        (PLAN.replace("{layers: 5}", "5"), r"\(second\): parameters is 5; it wants `name: value`"),
        (PLAN.replace("two.yaml", "three.yaml"), r"\(first\): cannot read .*three.yaml"),
        (PLAN.replace("file:", "files:"), r"\(first\): unknown key 'files'; .*'file'"),
        (PLAN.replace("second", "first"), r"job 2 \(first\): this name comes twice"),
        (PLAN.replace("[fp32, bf16]", "fp32"), "grid.precision is 'fp32'; it wants `name: "),
        (PLAN.replace("[fp32, bf16]", "[]"), "grid.precision is .*; it wants"),
        (PLAN.replace("bf16]", "fp64]"), "precision='fp64' is unknown"),
        (PLAN.replace("rate: 2", "deep: true"), "'deep' is in parameters and in grid"),
        (PLAN.replace("repeats: 2", "repeats: 0"), "repeats is 0; it wants a number of runs"),
        (PLAN.replace("2m", "2 days"), "timeout is '2 days'; it wants a time"),
        (PLAN.replace("2m", "0"), "timeout is 0; it wants a time"),
        (PLAN.replace("after: first", "after: fist"), "second is after 'fist', which is no job"),
        (PLAN.replace("file: two.yaml", "after: second"), "wait for each other: first, second"),
        (PLAN.replace("[false, true]", "[false, false]"), "are the same run; .*`repeats: 2`"),
        (PLAN.replace("repeats: 2", "repeats: 200000"), "200,004 jobs, 100,000 are the most"),
        (PLAN + "gpus: -1", "gpus is -1; it wants a number of GPUs"),
        ("jobs: [", "is not YAML"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_with_its_place_and_what_would_do(place, plan, message):
    (place / "plan.yaml").write_text(plan)
    with pytest.raises(ValueError, match=message) as error:
        read_plan("plan.yaml")
    assert "plan.yaml" in str(error.value)
    assert not (place / "runs").exists()


def test_a_notebook_without_a_parameters_cell_is_refused(place):
    write_plan(place)
    from sample_notebooks import SET_UP, write_notebook

    write_notebook(place / "notebooks" / "01_tiny.ipynb", SET_UP, parameters=None)
    with pytest.raises(ValueError, match=r"job 1 \(first\).*0 cells tagged 'parameters'"):
        read_plan("plan.yaml")


def test_values_that_a_notebook_knows_better_are_refused_with_the_plan(place):
    plan = "jobs: [{name: a, notebook: '02', grid: {shapes: [[tiny], [vast]]}}]"
    (place / "plan.yaml").write_text(plan)
    with pytest.raises(ValueError, match=r"job 1 \(a\).*vast"):
        read_plan("plan.yaml", NOTEBOOKS)


def test_thousands_of_jobs_are_read_with_one_look_at_their_notebook(place, monkeypatch):
    from workbook.runs import identity

    looks = []
    source = identity.source
    monkeypatch.setattr(identity, "source", lambda path: looks.append(path) or source(path))
    (place / "plan.yaml").write_text(PLAN.replace("repeats: 2", "repeats: 5000"))
    assert len(read_plan("plan.yaml").jobs) == 5004
    assert len(looks) == 1
