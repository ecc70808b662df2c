import base64
import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from sample_notebooks import write_notebook

from workbook.runs import opening, report, store
from workbook.runs.files import write_json

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n pixel").decode()


@pytest.fixture
def folder(tmp_path):
    """A run's folder with one of every kind of output a notebook makes."""
    folder = opening.create_folder(tmp_path, "01_tiny-12345678", "2026-11-21")
    v4, failed = nbformat.v4, "ZeroDivisionError: division by zero"
    printed = v4.new_output("stream", name="stdout", text="printed <b>not bold</b>\n")
    shown = (
        {"image/png": PIXEL, "text/plain": "<Figure>"},
        {"text/html": "<table><tr><td onclick='x()'>cell</td></tr></table>"},
        {"application/javascript": "fetch('//x')"},
    )
    displayed = [v4.new_output("display_data", data=data) for data in shown]
    content = dict(zip(("ename", "evalue"), failed.split(": "), strict=True))
    content["traceback"] = ["\x1b[31mZeroDivisionError\x1b[39m: division by zero"]
    error = v4.new_output("error", **content)
    book = v4.new_notebook()
    book.cells = [
        v4.new_markdown_cell(
            "# Title\n\n[paper](https://arxiv.org/abs/2502.11089) and [below](#Title)\n\n"
            "![far](https://example.org/a.png) ![near](near.png)\n\n"
            "<script>alert(1)</script><iframe src='https://example.org'></iframe>"
        ),
        v4.new_code_cell("x = 1  # the code", outputs=[printed, *displayed]),
        v4.new_code_cell("1 / 0", outputs=[error], metadata={"papermill": {"status": "failed"}}),
        v4.new_code_cell("print('never')", metadata={"papermill": {"status": "pending"}}),
    ]
    nbformat.write(book, folder / "notebook.ipynb")
    (folder / "near.png").write_bytes(b"\x89PNG near")
    (folder / "parameters.yaml").write_text("layers: 3\n")
    write_json(folder / "environment.json", {"torch": "2.13.0", "gpus": [], "git": None})
    record = {"run_id": folder.name, "notebook": "01_tiny", "status": "failed", "seconds": 3.2}
    record |= {"started": "2026-11-21T10:00:00+00:00", "message": failed}
    write_json(folder / "record.json", record)
    store.Run(folder).verdict("it grows <linearly>", "FAIL", None)
    return folder


def page(path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def fetched(path) -> list[str]:
    """Everything in a page that makes a browser ask the network, or run code."""
    html = page(path)
    found = [tag.name for tag in html.find_all(["script", "link", "iframe", "object", "embed"])]
    for tag in html.find_all(True):
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if re.match(r"(https?:)?//", tag.get(name, "")):
                found.append(f"{tag.name} {name}={tag[name]}")
        found += [name for name in tag.attrs if name.startswith("on")]
    styles = "".join(tag.text for tag in html.find_all("style"))
    return found + re.findall(r"@import|url\(|https?://", styles)


def test_a_report_fetches_nothing_though_its_notebook_would(folder, monkeypatch):
    path = report.render(folder)
    assert path == folder / "report.html"
    assert fetched(path) == []
    assert not re.search("https?://", path.read_text())
    monkeypatch.setattr(report, "closed", lambda html, _: html)
    found = fetched(report.render(folder))
    assert {"iframe", "onclick", "a href=https://arxiv.org/abs/2502.11089"} <= set(found)
    assert "img src=https://example.org/a.png" in found


def test_links_become_text_and_pictures_come_in(folder):
    html = page(report.render(folder))
    assert "paper (arxiv.org/abs/2502.11089)" in html.text
    assert html.find("a", href="#Title").text == "below"
    assert "[picture left out: example.org/a.png]" in html.text
    near = base64.b64encode(b"\x89PNG near").decode()
    sources = [tag["src"] for tag in html.find_all("img")]
    assert f"data:image/png;base64,{near}" in sources
    assert f"data:image/png;base64,{PIXEL}" in sources


def test_the_header_names_run_status_verdicts_parameters_and_environment(folder):
    header = page(report.render(folder)).find("header", class_="report")
    assert "01_tiny-12345678 · 2026-11-21 10:00:00 UTC · 3 s" in header.text
    assert header.find(class_="status-failed").text == "failed"
    assert "it grows <linearly>" in header.find("table", class_="verdicts").text
    assert header.find(class_="verdict-FAIL").text == "FAIL"
    assert "ZeroDivisionError: division by zero" in header.text
    facts = {row.th.text: row.td.text for row in header.find_all("tr") if row.th}
    assert facts["layers"] == "3" and facts["torch"] == "2.13.0"
    assert facts["gpu"] == "none" and facts["commit"] == "not in a git repository"


def test_a_report_begins_with_question_answer_and_three_figures_at_most(folder):
    record = report.load(folder) | {"status": "ok", "message": "", "question": "Does it <grow>?"}
    write_json(folder / "record.json", record)
    (folder / "figures").mkdir()
    for name in ("a", "b", "c", "d"):
        (folder / "figures" / f"{name}.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    header = page(report.render(folder)).find("header", class_="report")
    assert header.find(class_="question").text == "Does it <grow>?"
    assert header.find(class_="answer").text == "FAIL it grows <linearly>"
    images = header.find_all("img")
    assert [image["alt"] for image in images] == ["Figure a", "Figure b", "Figure c"]
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in images)


@pytest.mark.parametrize(
    ("status", "verdicts", "word", "text"),
    [
        ("ok", "PASS a [0123456789ab]|PASS b", "PASS", "a; 2 of 2 claims hold"),
        ("ok", "PASS a|AIM_MISSED b", "AIM MISSED", "b; 1 of 2 claims hold"),
        ("failed", "PASS a", "failed", "it broke; 1 of 1 claims hold"),
        ("lost", "", "lost", "it broke"),
        ("ok", "", "ok", "it broke."),
    ],
)
def test_the_answer_of_a_run_is_its_worst_verdict_in_one_line(status, verdicts, word, text):
    pairs = [one.split(" ", 1) for one in verdicts.split("|") if one]
    given = [{"verdict": v.replace("_", " "), "claim": claim} for v, claim in pairs]
    assert report.answer(status, given, "it broke.") == {"word": word, "text": text}


def test_code_is_folded_but_that_of_a_failed_cell_and_what_was_printed_is_text(folder):
    path = report.render(folder)
    cells = page(path).find_all("details", class_="code")
    assert [cell.has_attr("open") for cell in cells] == [False, True, False]
    assert "x = 1" in cells[0].text
    assert "failed" in cells[1].summary.text and "did not run" in cells[2].summary.text
    assert "printed <b>not bold</b>" in page(path).text
    assert page(path).find("td", string="cell").attrs == {}
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text and 'content="light dark"' in text


def test_a_notebook_without_run_has_a_page_too_and_a_folder_without_notebook_none(tmp_path):
    notebook = write_notebook(tmp_path / "03_plain.ipynb", "1")
    path = report.render(notebook)
    assert path == tmp_path / "03_plain.html" and "Does it" in path.read_text()
    with pytest.raises(ValueError, match=r"holds no notebook\.ipynb"):
        report.render(tmp_path)


def test_the_index_lists_runs_newest_first_and_links_what_is_there(folder):
    root = folder.parents[1]
    assert "nsa run" in report.index(root / "none").read_text(), (
        "of no runs it says how to make one"
    )
    cloned = page(report.index(root))
    assert [tag.text for tag in cloned.find_all("a")] == [
        folder.parent.name + "/" + folder.name,
        "notebook",
    ]
    report.render(folder)
    newer = opening.create_folder(root, "02_speed-aaaaaaaa", "2026-11-22")
    started = "2026-11-22T10:00:00+00:00"
    write_json(newer / "record.json", {"status": "ok", "started": started})
    html = page(report.index(root))
    rows = [row.find("td").text for row in html.find_all("tr")[1:]]
    assert rows == ["2026-11-22/02_speed-aaaaaaaa", "2026-11-21/01_tiny-12345678"]
    links = [tag["href"] for tag in html.find_all("a")]
    there = [f"2026-11-21/01_tiny-12345678/{name}" for name in ("report.html", "notebook.ipynb")]
    assert links == [there[0], *there]
    assert all((root / link).is_file() for link in links)
    assert "http" not in (root / "index.html").read_text()
