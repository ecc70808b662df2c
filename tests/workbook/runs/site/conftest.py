"""A real browser for tests of the site: one of its own, which resolves no name of another host."""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium; name it by the variable CHROMIUM")
    alone = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=alone)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, site):
    """Opens a page of the site; what it asked other hosts for, and its errors, are kept with it."""
    contexts = []

    def visit(path, width=1280, scheme="light", base=site):
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.asked, page.errors = [], []
        page.on("request", lambda r: page.asked.append(r.url))
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.set_default_timeout(240_000)  # on a busy machine a page takes its time
        page.goto(f"file://{base}/{path}")  # until all that it asks for is loaded
        return page

    yield visit
    for context in contexts:
        context.close()
