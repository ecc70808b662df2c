"""A stored run is opened by whatever names it, part by part, and a damaged file says so itself."""

import pytest

pandas = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

from places import ROOT, committed_runs  # noqa: E402
from stored_runs import store_run  # noqa: E402

import workbook.runs  # noqa: E402
from workbook.runs import load, loaded  # noqa: E402

ROWS = [
    {"operation": "f", "metric": "latency", "unit": "ms", "backend": "b", "x_name": "tokens",
     "x_value": t, "median": t / 8, "config": {"heads": h, "outcome": "ok", "tokens": t}}
    for t in (8, 16) for h in (1, 4)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    claims = [("PASS", "it holds"), ("FAIL", "it does not", {"trial": 1})]
    made = store_run(tmp_path / "runs", "02_x", claims, ROWS, parameters={"tokens": [8, 16]})
    (made / "figures").mkdir()
    for name in ("latency.png", "latency.svg", "only.png"):
        (made / "figures" / name).write_bytes(b"")
    return made


def test_a_run_is_numbers_verdicts_parameters_and_figures(folder):
    run = load(folder)
    rows = run.metrics[run.metrics["metric"] == "latency"]
    assert list(rows["heads"]) == [1, 4, 1, 4] and list(rows["median"]) == [1.0, 1.0, 2.0, 2.0]
    assert list(run.verdicts["verdict"]) == ["PASS", "FAIL"] and run.verdict == "FAIL"
    assert run.verdicts["evidence"][1] == {"trial": 1}
    assert run.parameters == {"tokens": [8, 16]}
    assert {name: file.suffix for name, file in run.figures.items()} == {
        "latency": ".svg", "only": ".png",
    }  # fmt: skip
    assert (run.record["notebook"], run.status, run.environment["torch"]) == (
        "02_x",
        "ok",
        "2.11.0",
    )
    assert repr(run) == f"<run {folder.name}: ok, FAIL; NVIDIA H200, {'c' * 12}>"


@pytest.mark.parametrize("below", [".", "notebooks", "a/b"])
def test_a_run_is_found_by_its_name_from_any_folder_of_the_project(folder, below, monkeypatch):
    project = folder.parents[2]
    (project / below).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(project / below)
    day = folder.parent.name
    for name in (folder.name, folder.name[:6], "latest", f"{day}/{folder.name}",
                 f"runs/{day}/{folder.name}", f"runs/{day}/{folder.name}/", folder):  # fmt: skip
        assert load(name).folder.samefile(folder)


def test_what_is_no_run_says_what_is(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[2])
    with pytest.raises(ValueError, match=r"known are|the nearest is"):
        load("02_y")
    with pytest.raises(ValueError, match=r"no record\.json; `nsa runs` lists"):
        load(folder.parent)
    with pytest.raises(ValueError, match="there are no runs in"):
        load("02_x", root=folder / "figures")


@pytest.mark.parametrize(
    ("file", "part"), [("verdicts.json", "verdicts"), ("environment.json", "environment"),
                       ("metrics.csv", "metrics"), ("parameters.yaml", "parameters")],
)  # fmt: skip
def test_a_damaged_file_spoils_its_own_part_alone(folder, file, part):
    (folder / file).write_text('{"half: [')
    run = load(folder)
    with pytest.raises(ValueError, match=file):
        getattr(run, part)
    parts = {"verdicts", "environment", "metrics", "parameters"} - {part}
    assert all(len(getattr(run, name)) for name in parts)
    assert run.id in repr(run)


def test_a_run_without_rows_or_verdicts_has_empty_tables(folder):
    for name in ("metrics.csv", "verdicts.json", "parameters.yaml"):
        (folder / name).unlink()
    run = load(folder)
    assert (len(run.metrics), len(run.verdicts), run.parameters, run.verdict) == (0, 0, {}, "")


@pytest.mark.processes
def test_every_committed_run_opens():
    if not committed_runs():
        pytest.skip("no runs are committed here")
    for folder in committed_runs():
        run = load(folder)
        assert len(run.verdicts) or not len(run.metrics) or run.status
        assert run.id in repr(run)


def test_the_workbook_names_what_it_has():
    assert workbook.runs.load is load and callable(workbook.runs.explore)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        workbook.runs.lod  # noqa: B018


def test_without_any_runs_the_folder_is_named_where_they_would_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert loaded.runs_root() == tmp_path / "runs"
    if not (ROOT / "runs").is_dir():
        pytest.skip("there are no runs here, as in an sdist")
    monkeypatch.chdir(ROOT / "notebooks")
    assert loaded.runs_root() == ROOT / "runs"
