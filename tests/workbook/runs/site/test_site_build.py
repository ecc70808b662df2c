"""The site, built by Sphinx and looked at in a real browser that reaches no host."""

import http.server
import re
import shutil
import threading
import time
from html import unescape
from urllib.parse import unquote

import nbformat
import pytest
from site_runs import SHAPE, write_run
from test_site_answers import run as answered

from workbook.runs.site import build

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.environment(of="browser")]
pytest.importorskip("myst_nb", reason="needs the extra `site`")

PNG = "iVBORw0KGgo="


GREEDY_HTML = """
<img src='FAR/d.png'><script src='FAR/a.js'></script><iframe src='FAR'></iframe>
<style>@import url(FAR/a.css); td { background: url(FAR/b.png) }</style>
<table><tr><td>cell</td></tr></table><script>fetch('FAR/fetched')</script>
"""


class Host(http.server.BaseHTTPRequestHandler):
    """Another host, which remembers what it was asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def far():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.asked, server.address = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def greedy_cells(far):
    """A notebook that would ask another host in every way it can."""
    html = GREEDY_HTML.replace("FAR", far)
    v4 = nbformat.v4
    kinds = {"text/html": html, "image/png": PNG}
    kinds["application/javascript"] = f"fetch('{far}/js')"
    shown = [v4.new_output("display_data", data={kind: data}) for kind, data in kinds.items()]
    text = f"![far]({far}/c.png) and <img src='{far}/e.png'>\n{html}"
    return [v4.new_markdown_cell(text), v4.new_code_cell("show()", outputs=shown)]


@pytest.fixture(scope="module")
def root(tmp_path_factory, far):
    root = tmp_path_factory.mktemp("place") / "runs"
    slow = [(t, m, 0.9 * m, 1.1 * m, SHAPE) for t, m in ((8192, 3.0), (32768, 12.0))]
    fast = [(t, m / 2, 0.45 * m, 0.55 * m, SHAPE) for t, m in ((8192, 3.0), (32768, 12.0))]
    write_run(root, "2026-11-21/02_speed-11111111", slow)
    write_run(root, "2026-11-22/02_speed-22222222", fast, parameters="tokens: 1024\n")
    write_run(root, "2026-11-23/02_speed-33333333", slow, gpu="NVIDIA A100", torch="2.11.0")
    write_run(root, "2026-11-24/05_greedy-44444444", cells=greedy_cells(far.address), triton=None)
    broken = write_run(root, "2026-11-24/05_greedy-55555555")
    (broken / "notebook.ipynb").write_text("{")
    (broken / "record.json").write_text("")
    return root


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    to = root.parent / "site"
    made = build.build(root, to, docs=tmp_path_factory.mktemp("docs"))
    assert made.runs == made.written == 5
    assert made.warnings == ()
    return to


def foreign(page):
    return [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))]


PAGES = ("index.html", "runs.html", "claims.html", "compare.html", "speed.html", "fits.html",
         "hung.html", "explorer.html", "search.html", "genindex.html")  # fmt: skip
RUN = "runs/2026-11-22/02_speed-22222222.html"
GREEDY = "runs/2026-11-24/05_greedy-44444444.html"
COMPARED = "compare.html#runs=2026-11-21/02_speed-11111111,{}"


@pytest.mark.parametrize("path", [*PAGES, RUN])
def test_a_page_opens_without_a_network_and_without_an_error(visit, path):
    page = visit(path)
    assert foreign(page) == [] and page.errors == []
    assert "NSA workbook" in page.title()


def test_a_notebook_that_asks_another_host_is_not_let(visit, far, tmp_path):
    page = visit(GREEDY)
    assert page.locator("td", has_text="cell").count() == 2
    assert re.search(r"picture left out: 127.0.0.1:\d+/c.png", page.locator("article").inner_text())
    assert far.asked == []
    (tmp_path / "bare.html").write_text(GREEDY_HTML.replace("FAR", far.address))
    bare, wanted = visit("bare.html", base=tmp_path), {"/d.png", "/a.js", "/a.css", "/b.png"}
    ends = time.monotonic() + 60
    while not wanted | {"/fetched"} <= set(far.asked) and time.monotonic() < ends:
        bare.wait_for_timeout(50)
    assert wanted | {"/fetched"} <= set(far.asked)


def test_mathematics_is_drawn_by_the_browser(visit):
    assert visit(RUN).locator("math mfrac").count() == 1


def test_the_question_of_a_backend_at_32k_is_answered_in_two_clicks(visit):
    page = visit("index.html")
    assert "At T 32k triton is the fastest" in page.locator("article").inner_text()
    page.click("text=Every T, GPU and shape")
    page.wait_for_selector("form[data-ask=speed] option", state="attached")
    tables = page.locator("form[data-ask=speed] option")
    h200 = next(text for text in tables.all_inner_texts() if text.startswith("NVIDIA H200"))
    page.select_option("form[data-ask=speed] select", h200)
    line = page.locator("tr[data-tokens='32768.0']:visible")
    assert "triton" in line.inner_text() and "6 + 6" in line.inner_text()
    page.fill("form[data-ask=speed] input", "32k")
    assert page.locator("form[data-ask=speed] output").inner_text().startswith("T 32k: triton")
    page.fill("form[data-ask=speed] input", "20000")
    assert (
        "Not measured at 20000; the nearest is T 32k" in page.locator("output").first.inner_text()
    )
    page.fill("form[data-ask=speed] input", "long")
    assert "Write a length" in page.locator("output").first.inner_text()
    line.locator("a").first.click()
    assert page.url.endswith(RUN)


def test_the_question_of_1b_at_8k_in_80_gib_is_answered_on_the_front_page_and_its_table(visit):
    page = visit("index.html")
    said = page.locator("article").inner_text()
    assert re.search(r"of 1.6B parameters .* at T 8k needs 4\d\.\d GiB .* and fits 80 GiB", said)
    page.click("text=0.13B to 8.6B")
    page.wait_for_selector("table.fits .fits-yes")
    row = page.locator("table.fits").first.locator("tr", has_text="1.6B").first
    cell = row.locator("td[data-tokens='8192']")
    assert "fits-yes" in cell.get_attribute("class")
    page.fill("input[name=gib] >> nth=0", "40")
    assert "fits-no" in cell.get_attribute("class")
    assert "fits 40 GiB" in page.locator("table.fits thead").first.inner_text()


def test_the_question_of_a_hung_run_is_answered_by_a_command_in_one_click(visit):
    page = visit("index.html")
    assert "whyhung attach PID" in page.locator("article").inner_text()
    page.click("text=The verdicts, and what to do")
    page.wait_for_url("**/hung.html")
    assert "nobody is left who could end it" in page.locator("article").inner_text()


def test_the_explorer_follows_the_hand_without_a_kernel(visit):
    page = visit("index.html")
    page.click("text=what a query sees")
    page.wait_for_selector(".explorer canvas")
    said = page.locator(".explorer output")
    assert said.inner_text().startswith("Query 385 of T 512 sees")
    page.locator(".explorer input").fill("0")
    assert "sees 0 compressed keys, 2 selected tokens and 2 in its window" in said.inner_text()
    box = page.locator(".map canvas").first.bounding_box()
    page.mouse.click(box["x"] + 5, box["y"] + box["height"] / 2)
    assert "Query 257 of T 512" in said.inner_text()
    page.select_option(".explorer select", label="production, T 4096, correlated queries")
    assert "of T 4096" in said.inner_text() and page.errors == []
    inked = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    for canvas in page.locator(".explorer canvas").all():
        assert canvas.evaluate(inked) > 3


def test_the_front_page_takes_two_screens_at_most(visit):
    page = visit("index.html", width=1400)
    assert page.locator("article").evaluate("e => e.getBoundingClientRect().height") < 2 * 900


def test_titles_differ_and_every_link_leads_somewhere(site):
    pages = [p for p in site.rglob("*.html") if not {"_static", ".build"} & set(p.parts)]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    titles = [re.search(r"<title>(.*?)</title>", text, re.S)[1].strip() for text in texts.values()]
    assert len(set(titles)) == len(titles) > 10
    anchors = {p: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for p, text in texts.items()}
    dead, seen = [], 0
    for page, text in texts.items():
        for address in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            file, _, place = unescape(address).partition("#")
            if re.match(r"\w+:|//", address):
                continue
            there = (page.parent / unquote(file.partition("?")[0])).resolve() if file else page
            # a place with "=" is for a script: what to filter, or to compare
            found = "=" in place or not place or unquote(place) in anchors.get(there, ())
            dead += [] if there.exists() and found else [(page.name, address)]
            seen += 1
    assert dead == [] and seen > 100


def test_tables_are_read_without_javascript(browser, site):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    texts = {"speed": "6 + 6", "fits": "48.4", "runs": "02_speed", "claims": "it ran"}
    for path, said in (texts | {"compare": "needs JavaScript"}).items():
        page.goto(f"file://{site}/{path}.html")
        assert said in page.locator("article").inner_text(), path
    context.close()


def test_a_run_begins_with_its_answer_in_one_line(visit):
    line = visit(RUN).locator("article p").first
    assert line.inner_text() == "PASS it ran" and line.bounding_box()["y"] < 400


def test_the_table_sorts_filters_and_remembers(visit):
    page = visit("runs.html")
    shown = page.locator("table.runs tbody tr:visible")
    names = lambda: [row.get_attribute("id") for row in shown.all()]  # noqa: E731
    assert [name[:10] for name in names()] == sorted((n[:10] for n in names()), reverse=True)
    page.click("th button:has-text('date')")
    assert names()[0] == "2026-11-21/02_speed-11111111"
    page.select_option("select[name=notebook]", "02_speed")
    assert len(names()) == 3 and "3 of 5 runs" in page.locator(".count").inner_text()
    page.fill("input[name=text]", "a100")
    assert names() == ["2026-11-23/02_speed-33333333"]
    again = visit("runs.html" + re.search("#.*", page.url)[0])
    assert again.locator("table.runs tbody tr:visible").count() == 1


def test_ticked_runs_are_compared_and_only_those_of_one_notebook(visit):
    page = visit("runs.html")
    button = page.locator("button.compare")
    page.check("input[value='2026-11-21/02_speed-11111111']")
    assert button.is_disabled()
    page.check("input[value='2026-11-24/05_greedy-44444444']")
    assert button.is_disabled() and "one notebook" in button.inner_text()
    page.uncheck("input[value='2026-11-24/05_greedy-44444444']")
    page.check("input[value='2026-11-22/02_speed-22222222']")
    button.click()
    page.wait_for_selector(".fairness")
    assert page.locator(".runs-compared li").count() == 2


def test_a_comparison_shows_what_differs_and_its_spread(visit):
    page = visit(COMPARED.format("2026-11-22/02_speed-22222222"))
    page.wait_for_selector(".fairness")
    assert "a fair comparison" in page.locator(".fairness").inner_text()
    assert "tokens\t512\t1024" in page.locator(".result table").first.inner_text()
    line = page.locator("tr", has_text="triton, forward").filter(has_text="32k").inner_text()
    assert "12 (10.8 to 13.2)" in line and "6 (5.4 to 6.6)" in line
    assert "0.5 beyond the spread" in line
    assert page.locator("figure svg[role=img] path.line").count() == 4
    page.fill("input[name=series]", "backward")
    assert page.locator("figure svg[role=img] path.line").count() == 2
    assert page.errors == []


def test_three_runs_of_other_machines_and_versions_are_no_fair_comparison(visit):
    names = "2026-11-22/02_speed-22222222,2026-11-23/02_speed-33333333"
    page = visit(COMPARED.format(names))
    page.wait_for_selector(".fairness")
    said = page.locator(".fairness").inner_text()
    assert said.startswith("Not a fair comparison")
    assert "NVIDIA A100" in said and "torch differs: 2.13.0, 2.11.0" in said
    assert page.locator("figure svg[role=img] path.line").count() == 6


def test_what_cannot_be_compared_says_why(visit):
    page = visit(COMPARED.format("2026-11-24/05_greedy-44444444"))
    page.wait_for_selector(".result .message")
    assert "02_speed and 05_greedy" in page.locator(".result").inner_text()
    page = visit(COMPARED.format("2026-01-01/02_speed-99999999"))
    page.wait_for_selector(".result .message")
    assert "not in this site" in page.locator(".result").inner_text()


COMPARISON = COMPARED.format("2026-11-22/02_speed-22222222")


@pytest.mark.parametrize("path", [*PAGES[:4], RUN, GREEDY, COMPARISON])
def test_a_phone_shows_a_page_without_scrolling_sideways(visit, path):
    page = visit(path, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("path", ["index.html", RUN, COMPARISON])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_page(visit, path, scheme):
    brightness = """element => { const n = getComputedStyle(element).%s.match(/[\\d.]+/g);
        return (0.2126 * n[0] + 0.7152 * n[1] + 0.0722 * n[2]) / 255 }"""
    page = visit(path, scheme=scheme)
    paper = page.locator("body").evaluate(brightness % "backgroundColor")
    assert (paper > 0.9) if scheme == "light" else (paper < 0.1)
    for element in page.locator("article :is(p, td, th, label, a, summary):visible").all():
        assert abs(element.evaluate(brightness % "color") - paper) > 0.3, element.inner_text()


def test_every_picture_has_words(visit):
    for path in (*PAGES[:4], RUN, GREEDY, COMPARISON):
        page = visit(path)
        for image in page.locator("article img").all():
            assert image.get_attribute("alt")
        for drawn in page.locator("article svg[role=img]").all():
            assert drawn.get_attribute("aria-label")


def test_a_damaged_run_is_shown_as_such_beside_the_others(visit):
    page = visit("runs/2026-11-24/05_greedy-55555555.html")
    said = page.locator("article").inner_text()
    assert "Damaged: record.json" in said and "Damaged: notebook.ipynb cannot be read" in said
    row = visit("runs.html").locator("tr[id='2026-11-24/05_greedy-55555555']").inner_text()
    assert "lost" in row


def test_only_what_changed_is_written_and_what_is_gone_goes(root, tmp_path):
    runs, to, docs = tmp_path / "runs", tmp_path / "site", tmp_path / "docs"
    shutil.copytree(root, runs)
    build.build(runs, to, docs=docs)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "site"}
    pages = {path: path.stat().st_mtime_ns for path in to.glob("runs/*/*.html")}
    assert len(pages) == 5
    changed = runs / "2026-11-21" / "02_speed-11111111"
    (changed / "parameters.yaml").write_text("tokens: 99\n")
    shutil.rmtree(runs / "2026-11-23")
    made = build.build(runs, to, docs=docs)
    assert (made.runs, made.written) == (4, 1)
    after = {path: path.stat().st_mtime_ns for path in to.glob("runs/*/*.html")}
    assert {path.stem for path in after if after[path] != pages[path]} == {changed.name}
    assert {path.stem for path in set(pages) - set(after)} == {"02_speed-33333333"}
    assert not list(to.glob("data/*33333333*")) and not list(to.glob("files/*/*33333333"))
    assert "33333333" not in (to / "runs.html").read_text()
    assert ">99<" in (to / "runs/2026-11-21/02_speed-11111111.html").read_text()


def test_an_empty_folder_of_runs_says_how_to_make_one(tmp_path, visit):
    (tmp_path / "runs").mkdir()
    to = tmp_path / "site"
    assert build.build(tmp_path / "runs", to, docs=tmp_path).runs == 0
    for path in ("index.html", "speed.html"):
        assert "nsa run 02" in visit(path, base=to).locator("article").inner_text()
    assert "48.4" in visit("fits.html", base=to).locator("article").inner_text()
    assert "There are no runs yet" in visit("runs.html", base=to).locator("article").inner_text()


def test_the_speed_of_these_runs_is_what_the_answers_take(root):
    # the runs above must be such as the front page reads, or its test would show nothing
    assert answered("a", (32768, "triton", 6, 6))["rows"]["median"] == [6.0, 6.0]
