"""Promises of every figure: its source at the foot, clear of all else, and numbers in full."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
from stored_runs import store_run

from workbook.runs import looks
from workbook.runs.store import Run

matplotlib.use("agg")
SHORT = "run 01_tiny-12345678, NVIDIA H200, torch 2.11.0, commit abcdef012345, 2026-11-24"
LONG = SHORT.replace("NVIDIA", " and ".join(["cpu: a processor with a name of many words"] * 3))


def drawn(tmp_path, source, *, panels=1, names=9):
    with looks.figure(panels, 2.0) as (fig, axes_list):
        for axes in axes_list:
            for name in range(names):
                axes.plot([1, 2], [name, 1], label=f"a backend of the name {name}")
            axes.set_xlabel("T (tokens)")
    looks.write(fig, tmp_path, "plot", source)
    fig.canvas.draw()
    return fig


@pytest.mark.parametrize("source", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("panels", "names"), [(1, 9), (2, 9), (4, 2), (1, 0)])
def test_a_figure_names_its_source_below_all_else(tmp_path, source, panels, names):
    fig = drawn(tmp_path, source, panels=panels, names=names)
    (foot,) = fig.texts
    assert " ".join(foot.get_text().split()) == source
    box = foot.get_window_extent()
    assert box.y0 >= 0 and box.x0 >= 0 and box.x1 <= fig.bbox.x1
    floor = box.y1
    for legend in fig.legends:
        assert legend.get_window_extent().y0 >= floor
        floor = legend.get_window_extent().y1
    lowest = min(axes.get_tightbbox().y0 for axes in fig.axes if axes.get_visible())
    assert lowest >= floor
    assert source in (tmp_path / "plot.svg").read_text()


def test_a_foot_takes_nothing_from_the_panels(tmp_path):
    with looks.figure(1, 2.0) as (fig, (axes,)):
        axes.plot([1, 2], label="a")
    fig.canvas.draw()
    before = axes.get_window_extent().height
    looks.write(fig, tmp_path, "plot", LONG)
    fig.canvas.draw()
    assert axes.get_window_extent().height > 0.9 * before


def test_a_source_is_the_run_with_its_machine_versions_and_day(tmp_path):
    folder = store_run(tmp_path, "01_tiny", started="2026-11-24", gpu="NVIDIA H200")
    text = Run(folder, "01_tiny").source()
    assert text.endswith(f"NVIDIA H200, torch 2.11.0, commit {'c' * 12}, 2026-11-24")


def test_a_source_of_a_scratch_run_is_the_same_tomorrow(tmp_path):
    (tmp_path / "environment.json").write_text('{"torch": "2.11.0", "git": {"commit": "abc"}}')
    assert Run(tmp_path, "01_tiny").source() == "run 01_tiny, torch 2.11.0"


@pytest.mark.parametrize(
    ("low", "high", "label"), [(1e-5, 0.5, "0.00001"), (1, 9, "5"), (1, 2e6, "1,000,000")]
)
def test_a_logarithmic_axis_writes_its_numbers_out(low, high, label):
    with looks.figure(1, 2.0) as (fig, (axes,)):
        axes.plot([1, 2], [low, high])
        looks.log_axis(axes.yaxis)
    fig.canvas.draw()
    said = [text.get_text() for text in axes.get_yticklabels()]
    assert label in said and not [text for text in said if "e" in text]


def test_a_legend_beside_the_axes_stays_there(tmp_path):
    with looks.style():
        fig, axes = plt.subplots(layout="none")
    axes.plot([1, 2], label="a backend")
    legend = fig.legend(loc="center left", bbox_to_anchor=(0.83, 0.5))
    looks.write(fig, tmp_path, "plot", SHORT)
    fig.canvas.draw()
    assert legend.get_window_extent().x0 > 0.8 * fig.bbox.x1


def test_a_picture_cut_to_what_is_drawn_keeps_its_source():
    """The picture is as a notebook shows it."""
    with looks.figure(1, 2.0) as (fig, (axes,)):
        axes.plot([1, 2], [1, 2])
    looks.caption(fig, SHORT)
    fig.draw_without_rendering()
    (foot,) = (text for text in fig.texts if text.get_gid() == "source")
    assert fig.get_tightbbox().y0 * fig.dpi <= foot.get_window_extent().y0
