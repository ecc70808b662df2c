"""The site of the committed runs, as a reader with a question meets it, and its size on a disk."""

import time

import pytest
from places import ROOT

from workbook.runs import results
from workbook.runs.site import build

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.environment(of="browser"),
              pytest.mark.timeout(1200)]  # fmt: skip
pytest.importorskip("myst_nb", reason="needs the extra `site`")
MIB = 2**20


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    to = tmp_path_factory.mktemp("place") / "site"
    folders = results.committed(ROOT / "runs")
    assert build.build(ROOT / "runs", to, folders=folders).runs == len(folders) > 50
    return to


class Reader:
    """Begins at the front page, counts clicks, and reads what is in the window."""

    def __init__(self, page) -> None:
        self.page, self.clicks, self.began = page, 0, time.monotonic()

    def click(self, words: str) -> None:
        self.page.locator("article").get_by_text(words).first.click()
        self.page.wait_for_load_state()
        self.clicks += 1

    def reads(self, *words: str) -> None:
        """Fails unless some visible line has all the words."""
        lines = self.page.locator("article :is(p, li, td, output, tr, pre):visible")
        for line in lines.all_inner_texts():
            if all(word in line for word in words):
                return
        raise AssertionError(f"no line has all of {words}")

    def ends(self, question: str) -> None:
        print(f"{question} {self.clicks} clicks, {time.monotonic() - self.began:.1f} s")
        assert self.clicks <= 2 and self.page.errors == []


@pytest.fixture
def reader(visit):
    return Reader(visit("index.html"))


def test_the_backend_at_32k_on_an_h200_is_read_at_once_and_slower_ones_two_clicks_on(reader):
    reader.reads("At T 32k", "triton", "NVIDIA H200", "ms for forward and backward")
    reader.click("Every T, GPU and shape")
    table = reader.page.locator("section.answer:visible").first
    assert "NVIDIA H200" in table.locator("h3").inner_text()
    row = table.locator("tr[data-tokens='32768.0']")
    assert row.locator("strong").first.inner_text() == "triton"
    row.locator("summary").first.click()
    reader.clicks += 1
    assert "dense-cudnn" in row.locator("details[open]").first.inner_text()
    reader.ends("Which backend at T 32k on an H200?")


def test_one_billion_parameters_at_8k_in_80_gib_is_read_at_once_and_in_a_table(reader):
    reader.reads("Llama 3's 1B", "at T 8k", "fits 80 GiB")
    reader.click("0.13B to 8.6B")
    row = reader.page.locator("table.fits").first.locator("tr", has_text="1.6B").first
    assert "fits-yes" in row.locator("td[data-tokens='8192']").get_attribute("class")
    reader.ends("Does 1B at T 8k fit 80 GB?")


def test_what_to_do_with_a_run_that_may_hang_is_read_at_once_and_explained_a_click_on(reader):
    reader.reads("whyhung attach PID", "healthy ones called HANG", "0 of ")
    reader.click("The verdicts, and what to do")
    reader.reads("HANG", "nobody is left who could end it", "end it")
    reader.reads("SLOW", "wait, or look at")
    reader.ends("Is my run hung?")


def test_the_site_with_its_cache_takes_at_most_60_mb_of_a_disk(site):
    files = [path.stat() for path in site.rglob("*") if path.is_file()]
    assert 512 * sum(about.st_blocks for about in files) <= 60 * MIB


def test_a_second_build_of_what_did_not_change_writes_no_page(site):
    pages = {path: path.stat().st_mtime_ns for path in site.rglob("*.html")}
    again = build.build(ROOT / "runs", site, folders=results.committed(ROOT / "runs"))
    assert again.written == 0
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*.html")} == pages


def test_older_claims_are_folded_and_a_click_opens_them(visit):
    page = visit("claims.html")
    folded = page.locator("details.claims:not([open])").first
    assert not folded.locator("table").is_visible()
    folded.locator("summary").click(position={"x": 4, "y": 8})
    assert folded.page.locator("details.claims[open] table").nth(1).is_visible()
    assert page.evaluate("document.documentElement.scrollHeight") < 40_000
