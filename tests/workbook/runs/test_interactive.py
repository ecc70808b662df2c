"""Run All in JupyterLab: a run of its own, and a committed notebook that stays as it is."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from processes import environment_with_package
from sample_notebooks import PARAMETERS, write_notebook

from workbook.runs import interactive, opening
from workbook.runs.files import read_json
from workbook.runs.loaded import StoredRun
from workbook.runs.opening import Planned, open_folder
from workbook.runs.parameters import read_file
from workbook.runs.record import load
from workbook.runs.store import Store

SET_UP = """\
import os
from workbook.runs import store
run = store.current(globals(), notebook="tiny")
machine = run.device("cpu")"""
MEASURE = """\
run.add_rows([{"operation": "toy", "metric": "time", "unit": "s", "median": 1.0}])
print("measured")"""
JUDGE = """\
from workbook.runs.claim import Claim
run.judge([Claim("it runs", "PASS", 1)])"""


def in_git(folder):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def dirty(folder):
    command = ["git", "-C", str(folder), "status", "--porcelain", "notebooks"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_all(path):
    """Run all as a kernel of Jupyter's server does; what the cells left is not saved."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    env = environment_with_package() | {"JPY_SESSION_NAME": str(path)}
    env.pop("NSA_HEADLESS", None)
    where = {"metadata": {"path": str(path.parent)}}
    book = nbformat.read(path, as_version=4)
    with contextlib.suppress(CellExecutionError):
        NotebookClient(book, timeout=120, resources=where).execute(env=env)
    return book


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("cells", "status", "message"),
    [
        ([MEASURE, JUDGE], "ok", ""),
        ([MEASURE, "raise RuntimeError('no')", JUDGE], "failed", "RuntimeError: no"),
        ([MEASURE, "raise KeyboardInterrupt", JUDGE], "interrupted", "the run was interrupted"),
        ([SET_UP, MEASURE, JUDGE], "ok", ""),  # the first is interrupted by the second
    ],
)
def test_a_kernel_that_a_person_opened_makes_a_run_which_ends_as_its_cells_do(
    tmp_path, cells, status, message
):
    path = write_notebook(tmp_path / "notebooks" / "tiny.ipynb", SET_UP, *cells)
    run_all(path)
    runs = Store(tmp_path / "runs")
    table = runs.runs()
    assert table["status"].tolist()[-1] == status and len(table) == 1 + (cells[0] == SET_UP)
    folder = runs.find("latest")
    assert load(folder).get("message", "") == message
    assert read_file(folder / "parameters.yaml")["lengths"] == [128, 256]
    assert len(StoredRun(folder).rows) == 1
    if len(table) > 1:
        assert (
            table["status"][0] == "interrupted"
            and "run again" in load(runs.folders()[0])["message"]
        )


@pytest.mark.slow
@pytest.mark.processes
def test_a_bad_value_in_an_edited_cell_leaves_no_run(tmp_path):
    bad = PARAMETERS.replace("[128, 256]", "[8]")
    path = write_notebook(tmp_path / "notebooks" / "tiny.ipynb", SET_UP, JUDGE, parameters=bad)
    book = run_all(path)
    [error] = [
        o for cell in book.cells for o in cell.get("outputs", []) if o.output_type == "error"
    ]
    assert "lengths=8 is outside 16..inf" in error.evalue
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def opened(tmp_path):
    """A committed notebook, the folder of a run that its kernel has made, and what Lab shows."""
    path = write_notebook(tmp_path / "notebooks" / "tiny.ipynb", SET_UP, MEASURE, JUDGE)
    in_git(tmp_path)
    planned = Planned(path, {}, {}, {}, "tiny-12345678", "")
    facts = {opening.SESSION: opening.named(path)}
    folder, record = open_folder(tmp_path / "runs", planned, **facts)
    shown = nbformat.read(path, as_version=4)
    shown.cells[-1].outputs = [nbformat.v4.new_output("stream", text="PASS: it runs\n")]
    shown.cells[-1].execution_count = 4
    shown.metadata.kernelspec = {"name": "another", "display_name": "Another"}
    yield path, folder, shown
    record.close("ok")


class Manager:
    def __init__(self, root_dir):
        self.root_dir = str(root_dir)


def saved(path, shown):
    """File as Jupyter writes it."""
    model = {"type": "notebook", "content": copy.deepcopy(shown)}
    manager = Manager(path.parent.parent)
    interactive.keep_outputs_in_the_run(model=model, path="notebooks/tiny.ipynb",
                                        contents_manager=manager)  # fmt: skip
    return nbformat.from_dict(model["content"])


def outputs_of(notebook):
    return [cell.get("outputs", []) for cell in notebook.cells]


@pytest.mark.processes
def test_what_is_shown_is_saved_in_the_run_and_the_committed_file_stays(opened):
    path, folder, shown = opened
    before = path.read_bytes()
    nbformat.write(saved(path, shown), path)
    assert path.read_bytes() == before
    kept = nbformat.read(folder / "notebook.ipynb", as_version=4)
    assert outputs_of(kept) == outputs_of(shown)


@pytest.mark.processes
def test_an_edited_cell_is_saved_with_the_outputs_that_were_stored(opened):
    path, folder, shown = opened
    shown.cells[-1].source = "run.judge([])"
    found = saved(path, shown)
    assert found.cells[-1].source == "run.judge([])" and not any(outputs_of(found))
    assert found.metadata == nbformat.read(path, as_version=4).metadata
    assert outputs_of(nbformat.read(folder / "notebook.ipynb", as_version=4)) == outputs_of(shown)


@pytest.mark.processes
def test_notebooks_that_are_not_in_git_or_have_no_run_are_saved_as_they_are(opened):
    path, folder, shown = opened
    record = read_json(folder / "record.json")
    (folder / "record.json").write_text(json.dumps(record | {"pid_started": 1.0}))  # it is gone
    assert outputs_of(saved(path, shown)) == outputs_of(shown)
    assert not (folder / "notebook.ipynb").exists()
    (folder / "record.json").write_text(json.dumps(record))
    command = ["git", "-C", str(path.parent), "rm", "-q", "--cached", path.name]
    subprocess.run(command, check=True)
    assert outputs_of(saved(path, shown)) == outputs_of(shown)
    assert (folder / "notebook.ipynb").exists()


BAR = """\
import time
from workbook.lab import progress
with progress.lines(2, True) as say:
    for number in (1, 2):
        say(f"cell {number}", f"[{number}/2] ")"""


@pytest.mark.slow
@pytest.mark.processes
def test_run_all_in_jupyterlab_keeps_the_run_and_does_not_touch_the_committed_notebook(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("jupyterlab")
    write_notebook(tmp_path / "notebooks" / "tiny.ipynb", SET_UP, BAR, MEASURE, JUDGE)
    (tmp_path / ".gitignore").write_text(".ipynb_checkpoints/\n")
    in_git(tmp_path)
    env = environment_with_package() | {"NSA_HEADLESS": "0", "HOME": str(tmp_path / "home")}
    port = 18800 + os.getpid() % 1000
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={tmp_path}",
        "--ServerApp.jpserver_extensions={'workbook.runs.interactive': True}",
    ]  # fmt: skip
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: answers(f"http://localhost:{port}/api"), 90)
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            page = browser.new_page()
            page.goto(f"http://localhost:{port}/lab/tree/notebooks/tiny.ipynb?reset")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
            page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=60_000)
            page.click("text=Run >> nth=0")
            page.click("li[data-command='runmenu:run-all'] >> nth=0")
            page.wait_for_selector("text=PASS: it runs", timeout=60_000)
            assert page.locator(".jupyter-widgets.widget-container").count() >= 1
            assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
            page.keyboard.press("Control+s")
            until(lambda: list(tmp_path.glob("runs/*/tiny-*/report.html")), 60)
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        log.close()
    assert dirty(tmp_path) == ""
    folder = Store(tmp_path / "runs").find("latest")
    assert load(folder)["status"] == "ok"
    assert "PASS: it runs" in (folder / "notebook.ipynb").read_text()
    assert "PASS" in (folder / "report.html").read_text()


def answers(address):
    try:
        return urllib.request.urlopen(address, timeout=2).status == 200
    except OSError:
        return False


def until(so, limit_s):
    end = time.monotonic() + limit_s
    while not (found := so()):
        assert time.monotonic() < end, f"not so after {limit_s} s"
        time.sleep(0.3)
    return found
