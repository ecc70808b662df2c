"""The panel follows what is chosen, and refuses what does not fit."""

import io
import time

import pytest

for needed in ("ipywidgets", "matplotlib", "pandas"):
    pytest.importorskip(needed)

import matplotlib.pyplot as plt  # noqa: E402

from workbook.rooms.explore import panels  # noqa: E402 - they import them
from workbook.runs.live import LivePanel  # noqa: E402

SLOW_S = 0.060  # for a plain picture


@pytest.fixture
def live():
    return LivePanel(panels.definition("repro", 128))


def test_a_moved_slider_changes_the_picture_and_the_words(live):
    before, words = live.picture.value, live.words.value
    live.controls["query"].value = 30
    assert live.picture.value != before and bytes(live.picture.value).startswith(b"\x89PNG")
    assert "query 30 of T = 128" in live.words.value != words


def test_each_view_has_a_picture_of_its_own(live):
    pictures = set()
    for name in live.view.options:
        live.view.value = name
        pictures.add(bytes(live.picture.value))
    assert len(pictures) == len(live.view.options) == 3


CHANGES = (
    {"query": 30}, {"window": 8}, {"tokens": 256}, {"select_count": 3}, {"group": 1, "query": 5},
    {"queries": "correlated"}, {"query": 0}, {"tokens": 128},
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("view", ["keys seen", "selection", "gates"])
def test_a_picture_of_which_parts_were_kept_is_the_one_drawn_whole(live, view):
    live.view.value = view
    for change in CHANGES:
        for name, value in change.items():
            live.controls[name].value = value
        fresh = live.panel.kept[view]().png(**live.values())
        assert live.picture.value == fresh, change


def test_the_query_follows_a_hand_on_the_maps(live):
    live.grips["keys seen"].value = 100  # of 0..127, upwards
    assert live.controls["query"].value == live.grips["selection"].value == 27
    assert "query 27 of" in live.words.value
    live.controls["tokens"].value = 64
    held = live.grips["keys seen"]
    assert (held.max, held.max - held.value) == (63, live.controls["query"].value)
    for view in live.view.options:
        live.view.value = view
        shown = [name for name, grip in live.grips.items() if grip.layout.display != "none"]
        assert shown == [view][: view != "gates"]


def test_a_preset_sets_all_sizes_and_draws_once(live):
    drawn = []
    live.redraw = lambda: drawn.append(live.values())
    live.controls["model"].value = "production"
    (values,) = drawn
    assert {name: values[name] for name in panels.sizes_of("production")} == {
        "compress_block": 32, "compress_stride": 16, "select_block": 64, "select_count": 16,
        "window": 512, "group": 6,
    }  # fmt: skip


def test_sizes_that_do_not_fit_are_told_and_the_picture_stays(live):
    before = live.picture.value
    live.controls["compress_block"].value = 64
    assert "compress_block=64 is larger than select_block=32" in live.message.value
    assert live.picture.value == before
    live.controls["compress_block"].value = 32
    assert live.message.value == "" and live.picture.value != before


@pytest.mark.parametrize(("tokens", "query"), [(32, 24), (1024, 772)])
def test_another_t_keeps_the_query_inside_at_the_same_share_of_it(live, tokens, query):
    assert live.controls["query"].value == 96
    live.controls["tokens"].value = tokens
    assert (live.controls["query"].value, live.controls["query"].max) == (query, tokens - 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_blocks_are_still_a_selection(live, count):
    live.controls["select_count"].value = count
    assert live.message.value == "" and f"selects {count} of the 4" in live.words.value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "repr"}, "no preset 'repr'; the nearest is 'repro'"),
        ({"query": 128}, r"query=128 must be in 0\.\.127"),
        ({"queries": "white"}, "queries='white' is unknown; known are random, correlated"),
        ({"compress_stride": 24}, "not a multiple of compress_stride=24"),
        ({"weights": "nowhere.pt"}, r"no weights in nowhere\.pt"),
        ({"weights": "nosuch"}, "no preset 'nosuch'; "),
        ({"tokens": 0}, "tokens=0 must be a whole number of at least 1"),
        ({"tokens": 1 << 20}, "at most 8192"),
        ({"group": 65}, "at most 64"),
    ],
)
def test_parameters_that_cannot_be_drawn_are_refused_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        panels.definition(**{"model": "repro", "tokens": 128, **given})


def plain_picture_s() -> float:
    """Seconds of this process for a picture of one line: how fast it is just now."""
    before = time.process_time()
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(range(512), label="a line")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)
    return time.process_time() - before


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    ["selection", *(pytest.param(x, marks=pytest.mark.long) for x in ("keys seen", "gates"))],
)
def test_a_picture_follows_a_slider_within_150_ms_of_this_processes_time(view, tokens=4096):
    """Not judged where a plain picture takes so long that a miss would tell of the machine."""
    live = LivePanel(panels.definition("production", tokens))
    live.view.value = view
    spent, plain = [], []
    for query in range(tokens // 2, tokens // 2 + 8):
        before = time.process_time()
        live.controls["query"].value = query
        spent.append(time.process_time() - before)
        plain.append(plain_picture_s())
    if min(spent) >= 0.150 and min(plain) > SLOW_S:
        pytest.skip(f"a slow machine: a plain picture takes it {min(plain):.3f} s")
    assert min(spent) < 0.150
