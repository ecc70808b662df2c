"""The notebook in JupyterLab in a real browser: it opens, sliders move, pictures change."""

import contextlib

import pytest

pytest.importorskip("jupyterlab")
pytest.importorskip("ipywidgets")

from jupyter import browser_page, lab, run_all

NOTEBOOK = "90_explore.ipynb"
PANELS = 2  # definition, browser
# Resolves with the ms from an arrow key on a slider to the decoded picture that follows; where a
# busy machine has drawn two keys as one picture, none does.
FOLLOWS = """(image) => new Promise((resolve, reject) => {
  setTimeout(() => reject(new Error("no other picture within 60 s")), 60000);
  const begin = performance.now(), before = image.src;
  new MutationObserver(async (_, observer) => {
    if (image.src === before) return;
    observer.disconnect();
    await image.decode();
    resolve(performance.now() - begin);
  }).observe(image, {attributes: true, attributeFilter: ["src"]});
})"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.environment(of="browser")
def test_a_slider_moves_and_the_picture_follows_without_an_error(tmp_path, record_property):
    with lab(tmp_path, NOTEBOOK) as address, browser_page() as (page, wrong):
        from playwright.sync_api import TimeoutError as Late

        page.goto(address)
        run_all(page)
        pictures = page.locator("img.nsa-picture")
        pictures.nth(PANELS - 1).wait_for(timeout=120_000)
        assert pictures.count() == PANELS
        words = page.locator("[role=status]").first

        def press(slider, key):
            """Milliseconds until the first picture is another one."""
            slider.focus()
            image = pictures.first.element_handle()
            waiting = image.evaluate_handle("(i) => { window.follows = (" + FOLLOWS + ")(i); }")
            page.keyboard.press(key)
            found = page.evaluate("() => window.follows")
            waiting.dispose()
            return found

        sliders = page.locator(".noUi-handle")
        # below the picture, after T, l, d, l', w, n, G
        query = page.locator(".noUi-horizontal .noUi-handle:visible").nth(7)
        before = words.inner_text()
        spent = [press(query, "ArrowLeft") for _ in range(12)]
        assert "query 372 of T = 512" in words.inner_text() != before
        record_property("query_ms", [round(ms) for ms in spent])
        sizes = {}
        for number, name in enumerate(("T", "l", "d", "l'", "w", "n", "G")):
            key = "ArrowLeft" if name in ("l", "d") else "ArrowRight"
            sizes[name] = round(press(sliders.nth(number), key))
        record_property("sizes_ms", sizes)
        print("slider to picture, ms:", [round(ms) for ms in spent], sizes)
        assert "of T = 1024" in words.inner_text()

        # dragged by the mouse, as people do
        box = query.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] - 200, box["y"], steps=5)
        page.mouse.up()
        page.wait_for_function("!document.querySelector('[role=status]').innerText"
                               ".startsWith('query 744 of')")  # fmt: skip

        # on the map itself, by the line that is drawn there
        there = (
            "[...Array(160).keys()].some((n) => document.querySelector('[role=status]').innerText"
            ".startsWith(`query ${400 + n} of`))"
        )
        for _ in range(10):  # the line may be on its way when it is looked for
            line = page.locator(".nsa-grip .noUi-handle:visible").first.bounding_box()
            middle = line["x"] + line["width"] / 2, line["y"] + line["height"] / 2
            page.mouse.move(*middle)
            page.mouse.down()
            page.mouse.move(middle[0], middle[1] - 60, steps=5)
            page.mouse.up()
            with contextlib.suppress(Late):
                page.wait_for_function(there, timeout=10_000)  # the picture may go on from there
                break
        else:
            pytest.fail(f"the query does not follow the map: {words.inner_text()}")

        # a size that does not fit is told, and the way back works
        handle = sliders.nth(1)
        handle.focus()
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        page.locator("[role=alert]").first.wait_for()
        assert "compress_block" in page.locator("[role=alert]").first.inner_text()
        handle.focus()
        for _ in range(4):
            page.keyboard.press("ArrowLeft")
        page.wait_for_function("!document.querySelector('[role=alert]')")

        for view in ("selection", "gates"):
            source = pictures.first.get_attribute("src")
            page.get_by_role("button", name=view, exact=True).click()
            page.wait_for_function(
                "(s) => document.querySelector('img.nsa-picture').src !== s", arg=source
            )
        source = pictures.nth(1).get_attribute("src")
        # Whichever notebook ran last is shown first.
        notebook = page.get_by_label("notebook", exact=True)
        other = notebook.evaluate("(s) => [...s.options].find((o) => !o.selected).value")
        notebook.select_option(other)
        page.wait_for_function(
            "(s) => document.querySelectorAll('img.nsa-picture')[1].src !== s", arg=source
        )
        assert wrong == []
