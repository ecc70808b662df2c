"""A panel is widgets where somebody can move them, and pictures with words everywhere else."""

from types import SimpleNamespace

import pytest

IPython = pytest.importorskip("IPython")
pytest.importorskip("ipywidgets")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from processes import environment_with_package  # noqa: E402

from workbook.runs import live, store  # noqa: E402


def kernel(allow_stdin):
    return SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=allow_stdin))


@pytest.mark.parametrize(
    ("shell", "headless", "expected"),
    [
        (kernel(True), "", True),
        (kernel(True), "0", True),  # make lab says so
        (kernel(True), "1", False),
        (kernel(False), "", False),  # papermill, nbclient and nbval
        (SimpleNamespace(), "", False),  # IPython in a terminal
        (None, "", False),
    ],
)
def test_widgets_are_for_kernels_that_may_ask_their_user(shell, headless, expected, monkeypatch):
    monkeypatch.setenv("NSA_HEADLESS", headless)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert live.is_live() == expected


def draw(height):
    if height < 0:
        raise ValueError(f"height={height} must be at least 0 <cm>")
    figure = Figure(figsize=(2, 1))
    figure.subplots().bar([0], [height])
    return figure


def controls(start):
    import ipywidgets

    return {"height": ipywidgets.IntSlider(start["height"], -5, 9)}


@pytest.fixture
def panel():
    views = {"bars": draw, "more bars": lambda height: draw(2 * height)}
    return live.Panel({"height": 3}, views, lambda height: [f"{height} high"], controls)


@pytest.mark.processes
def test_where_nobody_can_move_them_every_view_is_shown_with_its_words(
    panel, tmp_path, monkeypatch, capsys
):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("ipywidgets.IntSlider", None)  # no widget may be made
    assert panel.show(store.Run(tmp_path), "height_") is None
    assert [picture.alt for picture in shown] == ["bars. 3 high", "more bars. 3 high"]
    assert all(picture.data.startswith(b"\x89PNG") for picture in shown)
    assert capsys.readouterr().out == "3 high\n"
    figures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert figures == ["height_bars.svg", "height_more_bars.svg"]


def test_where_somebody_can_they_are_widgets(panel, monkeypatch):
    monkeypatch.setattr(live, "is_live", lambda: True)
    assert type(panel.show()).__name__ == "VBox"


def test_a_value_that_cannot_be_drawn_is_told_as_text_until_another_can(panel):
    made = live.LivePanel(panel)
    before = made.picture.value
    made.controls["height"].value = -2
    assert "height=-2 must be at least 0 &lt;cm&gt;" in made.message.value
    assert (made.picture.value, "3 high" in made.words.value) == (before, True)
    made.controls["height"].value = 5
    assert (made.message.value, "5 high" in made.words.value) == ("", True)


def test_what_follows_from_one_movement_is_one_picture(panel):
    panel.adjust = lambda widgets, name, value: setattr(widgets["height"], "value", value % 4)
    made = live.LivePanel(panel)
    drawn = []
    made.redraw = lambda: drawn.append(made.values())
    made.controls["height"].value = 6
    assert drawn == [{"height": 2}]


def test_an_error_that_is_no_callers_fault_is_not_hidden(panel):
    panel.told = lambda height: 1 / (height - 3)
    with pytest.raises(ZeroDivisionError):
        live.LivePanel(panel)


KERNEL = """\
from workbook.rooms.explore import panels
from workbook.runs import live
made = live.LivePanel(panels.definition("repro", 64))
made.widget"""
MOVE = """\
made.grips["keys seen"].value = 60"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_front_end_that_knows_widgets_by_their_protocol_alone_gets_all_there_is():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in (KERNEL, MOVE)])
    client = nbclient.NotebookClient(book, timeout=120)
    with client.setup_kernel(env=environment_with_package()):
        client.execute_cell(book.cells[0], 0)
        before = {id: bytes(b[0]["data"], "ascii") for id, b in buffers(client).items()}
        client.execute_cell(book.cells[1], 1)
        after = {id: bytes(b[0]["data"], "ascii") for id, b in buffers(client).items()}
    assert len(before) == 1 and before.keys() == after.keys() and before != after
    states = client.widget_state.values()
    models = {each["_model_module"] for each in states}
    assert models <= {"@jupyter-widgets/base", "@jupyter-widgets/controls"}
    assert any("query 3 of T = 64" in str(each.get("value")) for each in states)
    shown = book.cells[0].outputs[-1].data["application/vnd.jupyter.widget-view+json"]
    assert shown["model_id"] in client.widget_state


def buffers(client):
    """Binary parts of the widgets by id, those of pictures."""
    return {
        id: list(found.values()) if isinstance(found, dict) else found
        for id, found in client.widget_buffers.items()
    }
