import json
import re

import matplotlib.pyplot as plt
import nbformat
import pytest

from workbook.runs.site import pages

PNG = "iVBORw0KGgo="


def drawn(tmp_path, name="speed"):
    """An SVG as a run keeps it, of two panels."""
    fig, (left, right) = plt.subplots(1, 2)
    left.plot([512, 1024], [1, 2], label="triton")
    left.set(title="forward", xlabel="T (tokens)", ylabel="ms")
    right.plot([512, 1024], [3, 4], label="gather")
    right.set(title="backward", xlabel="T (tokens)", ylabel="GiB")
    fig.legend()
    (tmp_path / "figures").mkdir(exist_ok=True)
    fig.savefig(tmp_path / "figures" / f"{name}.svg")
    plt.close(fig)
    return (tmp_path / "figures" / f"{name}.svg").read_text()


def made(folder, *cells, **run):
    """The cells of a run's page."""
    facts = {"run": "2026-11-21/01_tiny-1", "notebook": "01_tiny", "status": "ok", "damaged": [],
             "started": "2026-11-21T10:00:00+00:00", "device": [], "verdicts": [], "facts": {},
             "parameters": {}}  # fmt: skip
    if cells:
        book = nbformat.v4.new_notebook(cells=list(cells))
        nbformat.write(book, folder / "notebook.ipynb")
    page = pages.run_page(folder, facts | run)
    nbformat.validate(nbformat.reads(page, as_version=4))
    return json.loads(page)["cells"]


def code(source, *outputs, **metadata):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def picture():
    return nbformat.v4.new_output("display_data", data={"image/png": PNG, "text/plain": "<Figure>"})


def test_a_figure_is_the_svg_that_the_run_keeps_with_its_words(tmp_path):
    svg = drawn(tmp_path)
    cell = made(tmp_path, code('run.show(plots.speed(df), "speed")', picture()))[-1]
    assert cell["outputs"][0]["data"] == {"image/svg+xml": svg}
    alt = cell["metadata"]["mystnb"]["image"]["alt"]
    assert "forward, backward" in alt and "across: T (tokens)" in alt and "up: ms, GiB" in alt
    assert "shown: triton, gather" in alt and "512" not in alt


def test_a_figure_without_svg_stays_and_has_words(tmp_path):
    cell = made(tmp_path, code('run.show(figure, "speed_over_T")', picture()))[-1]
    assert cell["outputs"][0]["data"] == {"image/png": PNG}
    assert cell["metadata"]["mystnb"]["image"]["alt"].startswith("Figure")


def test_mathematics_in_a_figure_is_told_without_tex():
    comment = r"<!-- $\mathdefault{10^{0}}$ of $T$ -->"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><g id="text_1">{comment}</g></svg>'
    assert pages.alternative(svg, "a") == "Figure a; 10^0 of T."
    assert pages.alternative("<svg", "no_svg") == "Figure no svg"


def test_code_is_folded_unless_it_failed(tmp_path):
    error = nbformat.v4.new_output("error", ename="E", evalue="e", traceback=["E: e"])
    cells = made(tmp_path, code("x = 1"), code("1 / 0", error), code(""))
    tags = {c["source"]: c["metadata"]["tags"] for c in cells if c["cell_type"] == "code"}
    assert tags == {"x = 1": ["hide-input"], "1 / 0": []}


def test_progress_is_folded_and_no_widget_is_left(tmp_path):
    stderr = nbformat.v4.new_output("stream", name="stderr", text="a <b>\nc\n")
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    cell = made(tmp_path, code("x", stderr, nbformat.v4.new_output("display_data", data=widget)))[
        -1
    ]
    html = cell["outputs"][0]["data"]["text/html"]
    assert "2 lines of progress" in html and "a &lt;b&gt;" in html
    assert "widget" in cell["outputs"][1]["data"]["text/markdown"]
    assert "widget-view" not in json.dumps(cell)


def test_sentences_lead_to_the_trials_that_the_run_carries(tmp_path):
    (tmp_path / "trials" / "0123456789ab").mkdir(parents=True)
    (tmp_path / "trials" / "0123456789ab" / "explain.txt").write_text("SLOW: it <moves>\n")
    claim = "none hangs <really> [0123456789ab, ffffffffffff]"
    cells = made(tmp_path, code("x"), verdicts=[{"verdict": "PASS", "claim": claim}])
    assert '<a href="#trial-0123456789ab">0123456789ab</a>, ffffffffffff' in cells[0]["source"]
    assert "&lt;really&gt;" in cells[0]["source"] and "<really>" not in cells[0]["source"]
    assert 'id="trial-0123456789ab"' in cells[-1]["source"]
    assert "it &lt;moves&gt;" in cells[-1]["source"]


def test_the_title_comes_before_the_header_and_the_rest_of_its_cell_after(tmp_path):
    cells = made(tmp_path, nbformat.v4.new_markdown_cell("# Memory\n\n**Question.** How much?"))
    assert cells[0]["source"].startswith("# Memory\n")
    assert cells[1]["source"].strip() == "**Question.** How much?"


@pytest.mark.parametrize("content", ["", "{", '{"cells": 3}', '{"cells": ["x"]}', "[]"])
def test_a_notebook_that_cannot_be_read_leaves_a_page_that_says_so(tmp_path, content):
    (tmp_path / "notebook.ipynb").write_text(content)
    (tmp_path / "stderr.log").write_text("Killed\n")
    (cell,) = made(tmp_path)
    assert "Damaged: notebook.ipynb cannot be read" in cell["source"]
    assert "Killed" in cell["source"]


def test_a_run_that_died_before_its_notebook_has_a_page_with_its_log(tmp_path):
    (tmp_path / "stdout.log").write_text("step 1\n")
    (cell,) = made(tmp_path, status="lost", message="the node is gone")
    assert "there is no notebook.ipynb" in cell["source"] and "step 1" in cell["source"]
    assert re.search("status-lost.*lost", cell["source"]) and "the node is gone" in cell["source"]
