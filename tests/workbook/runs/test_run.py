"""`run_notebook`: what is refused before anything starts, and what a run leaves behind."""

import json
import os
import signal
import subprocess
import uuid

import nbformat
import pytest
import yaml
from processes import python, wait_until_there
from sample_notebooks import (
    SET_UP,
    code_cells,
    errors_of,
    hang_after,
    marked_sleepers,
    sleeper,
    statuses,
    text_of,
    write_notebook,
)
from warm_children import SERVED

from workbook.runs import identity, record, run, store
from workbook.runs.files import read_json
from workbook.runs.run import run_notebook

MEASURE = """\
run.add_rows([{"operation": "o", "metric": "peak_memory", "median": layers}])
run.figure("plot.png").write_bytes(b"png")
run.figure("plot.svg").write_bytes(b"svg")
run.figure("notes.txt").write_bytes(b"no figure")
run.verdict("it ran", "PASS", {"rows": 1})
print("measured", layers, lengths, precision)
"""


def notebook(place, *cells):
    """The project's notebook, which sets up a run and goes on with these cells."""
    return write_notebook(place / "notebooks" / "01_tiny.ipynb", SET_UP, *cells)


@pytest.fixture
def place(tmp_path):
    """A project folder with one notebook."""
    notebook(tmp_path, MEASURE)
    return tmp_path


def start(place, given=None, name="tiny", **options):
    options = {"progress": False, "root": place / "runs", **options}
    return run_notebook(name, given or {}, notebooks=place / "notebooks", **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(a project folder, the result of a good run there)."""
    place = tmp_path_factory.mktemp("project")
    notebook(place, MEASURE)
    return place, start(place, {"layers": 3, "lengths": [64, 128]})


@pytest.mark.processes
def test_a_good_run_leaves_everything_that_is_promised_and_its_figures_with_its_name(good):
    place, result = good
    folder = result.folder
    assert (result.status, result.stop_reason, result.cached) == ("ok", "ok", False)
    assert result.good and result.verdicts[0]["verdict"] == "PASS"
    assert folder.parent.parent == place / "runs" and folder.name.startswith("01_tiny-")
    assert text_of(code_cells(folder / "notebook.ipynb")[-1]) == "measured 3 [64, 128] fp32\n"
    assert (folder / "stdout.log").read_text() == "measured 3 [64, 128] fp32\n"
    stored = yaml.safe_load((folder / "parameters.yaml").read_text())
    assert stored["layers"] == 3 and stored["seed"] == 1337
    assert read_json(folder / "environment.json")["seed"] == 1337
    kept = record.load(folder)
    assert kept["schema"] == 1 and kept["question"] == "Does it run?"
    assert (kept["run_id"], kept["notebook"]) == (folder.name, "01_tiny")
    assert kept["status"] == "ok" and kept["ended"] and kept["seconds"] > 0
    assert store.Run(folder).metrics()["median"].tolist() == [3.0]
    assert result.report == folder / "report.html" and result.report.is_file()
    assert (place / "runs" / "index.html").is_file()
    for name in ("notebook.ipynb", "record.json", "environment.json", "parameters.yaml"):
        assert str(place) not in (folder / name).read_text(), f"{name} names this machine"
    assert str(place) not in result.report.read_text()
    figures = place / "figures"
    assert (figures / "01_tiny--plot.png").read_bytes() == b"png"
    names = sorted(path.name for path in figures.iterdir())
    assert names == [f"01_tiny--plot.{end}" for end in ("json", "png", "svg")]
    origin = read_json(figures / "01_tiny--plot.json")
    assert origin["run"] == result.folder.relative_to(place / "runs").as_posix()
    assert {"date", "torch", "triton", "commit"} <= set(origin) and origin["device"][:3] == "cpu"


@pytest.mark.processes
def test_figures_that_cannot_be_copied_are_said_and_a_failed_claim_is_a_finished_run(place):
    notebook(place, MEASURE, "run.verdict('c', 'FAIL', 1)")
    (place / "figures").write_text("a file in its place")
    said = []
    result = start(place, say=said.append)
    assert result.status == "ok" and result.report.is_file()
    assert said[-1] == f"no figures in {place / 'figures'}: File exists"
    assert [entry["verdict"] for entry in result.verdicts] == ["PASS", "FAIL"] and not result.good


@pytest.mark.processes
@pytest.mark.full
def test_every_figure_of_a_notebook_is_shown_not_only_the_first(place):
    draw = """
from workbook.rooms.memory import plots
row = {"operation": "o", "backend": "gather", "mode": "step", "metric": "peak_memory",
       "unit": "MiB", "x_name": "tokens"}
run.add_rows([{**row, "x_value": t, "median": t} for t in (128, 256, 512)])
run.show(plots.scaling(run.metrics()), "memory")"""
    again = "run.show(plots.exponents(run.metrics()), 'exponents')"
    notebook(place, draw, again)
    result = start(place)
    for cell in code_cells(result.folder / "notebook.ipynb")[-2:]:
        assert ["image/png" in output.data for output in cell.outputs] == [True]
    assert (place / "figures" / "01_tiny--exponents.svg").is_file()


@pytest.mark.full
@pytest.mark.real_starts
@pytest.mark.processes
def test_a_failed_run_says_so_and_publishes_no_figure(place):
    notebook(place, MEASURE, "1 / 0", "print(1)")
    result = start(place)
    assert (result.status, result.stop_reason) == ("failed", "error") and not result.good
    assert result.message == "ZeroDivisionError: division by zero"
    assert record.load(result.folder)["status"] == "failed"
    assert statuses(result.folder / "notebook.ipynb")[-2:] == ["failed", "pending"]
    assert not (place / "figures").exists()
    assert "division by zero" in result.report.read_text()


@pytest.mark.processes
@pytest.mark.full
def test_a_run_past_its_deadline_and_a_dead_kernel_have_their_own_status(place):
    notebook(place, "import time; time.sleep(600)")
    slow = start(place, cell_timeout_s=1.0)
    assert (slow.status, slow.stop_reason) == ("timeout", "timeout")
    assert slow.message == "the cell ran longer than its 1 s"
    notebook(place, "import os; os.kill(os.getpid(), 9)")
    dead = start(place)
    assert (dead.status, dead.stop_reason) == ("killed", "kernel_died")
    assert dead.message == "the kernel died of SIGKILL"


@pytest.mark.processes
@pytest.mark.full
def test_a_notebook_with_a_timeout_ends_its_budgets_before_it(place):
    budget = "from workbook.lab.sweep import Budget; print(round(Budget(3600).share(3600)))"
    notebook(place, budget)
    for timeout_s, least, most in ((None, 3599, 3600), (300.0, 200, 270)):
        folder = start(place, timeout_s=timeout_s, again=True).folder
        assert least <= int((folder / "stdout.log").read_text()) <= most


@pytest.mark.processes
@pytest.mark.full
def test_the_same_run_is_a_cache_hit_and_again_runs_it_beside(place):
    said = []
    first = start(place)
    second = start(place, {"layers": 2}, say=said.append)  # 2 is the default: the same run
    assert second.cached and second.folder == first.folder and second.good
    assert said == [f"this run exists: {first.folder} (run it again with --again)"]
    assert second.report == first.report and second.verdicts == first.verdicts
    third = start(place, again=True)
    assert not third.cached and third.folder.name == f"{first.folder.name}-2"
    assert first.folder.is_dir()
    assert not start(place, {"layers": 3}).cached
    # a failed run is none
    marker = place / "marker"
    cell = f"import os\nassert os.path.exists({str(marker)!r})"
    notebook(place, cell)
    assert start(place).status == "failed"
    marker.touch()
    second = start(place)
    assert second.status == "ok" and not second.cached
    assert start(place).folder == second.folder


def test_the_id_names_parameters_source_and_environment_and_not_outputs(tmp_path, monkeypatch):
    path = write_notebook(tmp_path / "a.ipynb", "print(1)")
    facts = {"torch": "2.13.0", "gpus": [{"name": "H200"}], "date": "today"}

    def run_id(layers=2, **changes):
        return identity.run_id(path, {"layers": layers}, facts | changes)

    first = run_id()
    assert len(first) == 8 and int(first, 16) >= 0
    assert run_id(date="tomorrow") == first
    content = json.loads(path.read_text())
    content["cells"][-1]["execution_count"] = 7
    path.write_text(json.dumps(content))
    assert run_id() == first
    found = {first, run_id(layers=3), run_id(torch="2.11.0"), run_id(gpus=[])}
    write_notebook(path, "print(2)")
    found.add(run_id())
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(identity, "PACKAGE", tmp_path / "package")
    for text in ("one", "two"):
        (tmp_path / "package" / "m.py").write_text(text)
        found.add(run_id())
    assert len(found) == 7


@pytest.mark.parametrize("name", ["01_tiny", "tiny", "01", "1", "ti", "iny", "01_tiny.ipynb"])
def test_a_notebook_is_found_by_name_number_or_part_and_by_its_path(place, name):
    for other in ("02_speed", "10_soak", "11_decode"):
        write_notebook(place / "notebooks" / f"{other}.ipynb", "1")
    assert identity.find_notebook(name, place / "notebooks").stem == "01_tiny"
    path = place / "notebooks" / "01_tiny.ipynb"
    assert identity.find_notebook(path, "nowhere") == path
    with pytest.raises(ValueError, match=r"there is no file other/01_tiny\.ipynb"):
        identity.find_notebook("other/01_tiny.ipynb", place / "notebooks")


def test_an_unknown_or_unclear_notebook_is_refused_with_the_nearest(place):
    write_notebook(place / "notebooks" / "02_tidy.ipynb", "1")
    with pytest.raises(ValueError, match=r"no notebook .*; known are 01_tiny, 02_tidy"):
        start(place, name="tyni")
    with pytest.raises(ValueError, match="'ti' fits 01_tiny, 02_tidy"):
        start(place, name="ti")
    with pytest.raises(ValueError, match="'t' fits 01_tiny, 02_tidy"):  # not 03_most
        write_notebook(place / "notebooks" / "03_most.ipynb", "1")
        start(place, name="t")
    with pytest.raises(ValueError, match="no notebooks in"):
        run_notebook("tiny", {}, notebooks=place / "none")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"layer": 1}, {}, "unknown parameter 'layer'; the nearest is 'layers'"),
        ({"layers": "x"}, {}, "layers wants int"),
        ({"layers": 65}, {}, "outside 1..64"),
        ({}, {"timeout_s": 0}, "timeout must be more than 0 s"),
        ({}, {"cell_timeout_s": -1}, "cell timeout must be more than 0 s"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(place, given, options, message):
    with pytest.raises(ValueError, match=message):
        start(place, given, **options)
    assert not (place / "runs").exists()


@pytest.mark.processes
def test_an_unwritable_root_is_refused_and_a_kernel_that_does_not_start_is_a_failed_run(
    place, monkeypatch
):
    def broken(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(run, "_execute", broken)
    result = start(place)
    assert (result.status, result.message) == ("failed", "RuntimeError: no kernel")
    assert record.load(result.folder)["status"] == "failed"
    monkeypatch.setattr(run, "_execute", lambda *_: pytest.fail("it started"))
    (place / "file").write_text("a file in the place of runs")
    for root in (place / "file", "/proc/runs"):
        with pytest.raises(ValueError, match=f"cannot write runs to {root}"):
            start(place, root=root)


RUNNER = """\
{}from workbook.runs.run import run_notebook
place = {!r}
result = run_notebook("tiny", root=place + "/runs", notebooks=place + "/notebooks", progress=False)
print(result.folder.name, result.status)
"""


def runner(place) -> subprocess.Popen:
    return python(RUNNER.format(SERVED, str(place)), stdout=subprocess.PIPE)


@pytest.mark.processes
@pytest.mark.full
def test_two_runs_of_one_thing_at_once_both_survive(place):
    # each waits for the other to be inside its notebook, so the two really overlap
    meet = (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(place)!r})\n"
        "(folder / f'here-{os.getpid()}').touch()\n"
        "end = time.monotonic() + 60\n"
        "while len(list(folder.glob('here-*'))) < 2:\n"
        "    assert time.monotonic() < end\n"
        "    time.sleep(0.05)\n"
    )
    notebook(place, meet, MEASURE)
    both = [runner(place), runner(place)]
    printed = sorted(process.communicate(timeout=120)[0].split() for process in both)
    first = printed[0][0]
    assert printed == [[first, "ok"], [f"{first}-2", "ok"]]
    folders = sorted(store.Store(place / "runs").folders())
    assert [[folder.name, record.load(folder)["status"]] for folder in folders] == printed
    for folder in folders:
        assert store.Run(folder).metrics()["median"].tolist() == [2.0]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "status", "stop_reason", "ename"),
    [
        (signal.SIGTERM, "killed", "terminated", "Terminated"),
        (signal.SIGINT, "interrupted", "interrupted", "KeyboardInterrupt"),
    ],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_stopped_run_is_recorded_and_leaves_no_process(place, number, status, stop_reason, ename):
    mark = f"mark-{uuid.uuid4().hex}"
    ready = place / "ready"
    notebook(place, MEASURE, sleeper(mark), hang_after(ready), "1")
    process = runner(place)
    wait_until_there(ready, process)
    assert len(marked_sleepers(mark)) == 2
    os.kill(process.pid, number)
    printed = process.communicate(timeout=60)[0]
    assert printed.split()[1] == status
    (folder,) = store.Store(place / "runs").folders()
    kept = record.load(folder)
    assert (kept["status"], kept["stop_reason"]) == (status, stop_reason)
    assert statuses(folder / "notebook.ipynb")[-2:] == ["failed", "pending"]
    assert errors_of(code_cells(folder / "notebook.ipynb")[-2]) == [ename]
    assert len(store.Run(folder).metrics()) == 1
    assert marked_sleepers(mark) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Memory\n\n## Question\n\nHow does memory\ngrow with `T`?\n\nMore.",
         "How does memory grow with T?"),
        ("# Only a title\n\nText.", "Only a title"),
        ("# Tiny\n\n**Question.** Does it *run*?\n\nMore text.", "Does it run?"),
    ],
)  # fmt: skip
def test_the_question_is_the_sentence_after_the_word_or_the_title(tmp_path, text, expected):
    path = tmp_path / "a.ipynb"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a notebook"):
        identity.question(path)
    cell = {"cell_type": "markdown", "source": text, "metadata": {}}
    path.write_text(json.dumps({"cells": [cell]}))
    assert identity.question(path) == expected


@pytest.mark.parametrize(("stop_reason", "left"), [("timeout", "pending"), ("ok", "completed")])
def test_what_never_ran_is_called_complete_only_after_a_good_end(stop_reason, left):
    import papermill  # noqa: F401 - before the engine, which it loads itself

    from workbook.runs import engine

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text")])
    book.metadata.papermill = {}
    seen = engine.TruthfulManager(book, progress_bar=False)
    seen.notebook_start()
    book.metadata.papermill["stop_reason"] = stop_reason
    seen.notebook_complete()
    assert book.cells[0].metadata.papermill["status"] == left


def test_while_it_runs_its_lines_and_progress_are_shown_and_its_verdicts_once_at_the_end(capsys):
    shown = run.Shown("tiny")
    for name, text in (
        ("stdout", "18 cases on a CPU\nPASS: it is linear\nAIM MISSED: it is fast: 9 s\n"),
        ("stderr", "[1/18] gather T=256: 3.2 MiB, 1.2 s\n"),
    ):
        shown(nbformat.v4.new_output("stream", name=name, text=text))
    shown.close()
    told = capsys.readouterr().err
    assert "18 cases on a CPU\n" in told and "[1/18] gather T=256: 3.2 MiB, 1.2 s\n" in told
    assert "PASS" not in told and "AIM" not in told and "tiny: 1 of 18 measured |" in told


def test_the_bar_counts_what_is_measured_over_all_cells():
    shown = run.Shown("tiny")
    seen = []
    for done, of in ((1, 18), (18, 18), (1, 4), (2, 4), (1, 4), (4, 4)):
        shown.count(done, of)
        seen.append((shown.bar.n, shown.bar.total))
    shown.close()
    assert seen == [(1, 18), (18, 18), (19, 22), (20, 22), (23, 26), (26, 26)]
