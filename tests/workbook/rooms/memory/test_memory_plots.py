import matplotlib
import numpy as np
import pytest

from workbook.rooms.memory import plots
from workbook.runs import looks, metrics, store

matplotlib.use("agg")
TOKENS = (128, 256, 512, 1024)


def row(backend, tokens, mib, metric="peak_memory", mode="step", **config):
    given = {"operation": "train", "backend": backend, "mode": mode, "metric": metric}
    given |= {"unit": "MiB", "x_name": "tokens", "x_value": tokens, "median": mib, "device": "cpu"}
    return metrics.row(given | {"config": {"preset": "repro", "layers": 5, **config}}, {})


def frame(*extra):
    rows = [row("gather", t, 0.5 * t) for t in TOKENS]
    rows += [row("masked", t, 0.001 * t**2) for t in TOKENS[:-1]]
    rows += [row("masked", TOKENS[-1], None, outcome="oom")]
    return metrics.table([*rows, *extra])


TWELVE = [row("gather", t, 1.5 * t, layers=12) for t in TOKENS]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def crosses(axes):
    return [line for line in axes.get_lines() if line.get_marker() == "x"]


def test_each_backend_is_one_line_with_its_values_on_two_log_axes():
    before = dict(matplotlib.rcParams)
    (axes,) = plots.scaling(frame()).axes
    assert dict(matplotlib.rcParams) == before  # the user's style is left alone
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    np.testing.assert_allclose(lines(axes)["gather"].get_xdata(), TOKENS)
    np.testing.assert_allclose(lines(axes)["gather"].get_ydata(), [0.5 * t for t in TOKENS])
    assert axes.get_title(loc="left").endswith(": repro, 5 layers") and "MiB" in axes.get_ylabel()


def test_a_point_measured_twice_is_drawn_once_and_as_the_last_time():
    df = frame(row("gather", 512, 300.0))
    (axes,) = plots.scaling(df).axes
    np.testing.assert_allclose(lines(axes)["gather"].get_xdata(), TOKENS)
    np.testing.assert_allclose(lines(axes)["gather"].get_ydata(), [64, 128, 300, 512])
    assert len(plots.exponents(df).axes) == 1


def test_large_memory_is_drawn_in_gib():
    (axes,) = plots.scaling(frame(row("gather", 2048, 4096.0))).axes
    assert lines(axes)["gather"].get_ydata()[-1] == pytest.approx(4.0)
    assert "GiB" in axes.get_ylabel()


def test_a_failed_point_is_a_cross_at_the_top_with_its_outcome():
    (axes,) = plots.scaling(frame()).axes
    (cross,) = crosses(axes)
    assert list(cross.get_xdata()) == [1024]
    assert cross.get_ydata()[0] > 0.9 and cross.get_color() == looks.look("masked")[0]
    assert "masked: oom" in [text.get_text() for text in axes.texts]
    rows = [row("sdpa", t, None, outcome="timeout") for t in TOKENS]  # nothing but failures
    (axes,) = plots.scaling(metrics.table(rows)).axes
    assert [len(cross.get_xdata()) for cross in crosses(axes)] == [4]


def test_the_headline_names_each_line_at_its_end_and_what_cards_have():
    long = {"preset": "production", "layers": 12}
    rows = [row("triton", t, 16.0 * t, **long) for t in (1024, 2048, 8192, 65536, 131072)]
    rows += [row("dense", t, 12.0 * t, **long) for t in (1024, 2048, 8192, 65536)]
    rows += [row("dense", 131072, None, outcome="oom", **long)]
    fig = plots.headline(frame(*rows), note="NVIDIA H200")
    (axes,) = fig.axes
    texts = [text.get_text() for text in axes.texts]
    assert "triton: 2.05e+03 GiB" in texts and "dense: 768 GiB" in texts and "dense: oom" in texts
    assert "an H100 of 80 GB: 79 GiB" in texts and "an H200 of 141 GB: 140 GiB" in texts
    assert axes.get_title(loc="left") == "A training step, production, 12 layers, one sequence"
    assert not fig.legends and lines(axes)["dense: 768 GiB"].get_linestyle() == ":"


def test_other_modes_metrics_and_categories_stay_out():
    others = [row("flex", 128, 7.0, mode="forward")]
    others += [row("flex", 128, 7.0, metric) for metric in ("latency", "memory_parameters")]
    assert "flex" not in lines(plots.scaling(frame(*others)).axes[0])


def test_each_model_has_a_panel_with_what_stands_beside_all_or_that_one():
    fig = plots.scaling(
        frame(*TWELVE),
        prediction={"repro, 5 layers": {"gather": (TOKENS, [0.4 * t for t in TOKENS])}},
        case_study={"case study": ([128, 1024], [100, 900])},
    )
    shown = [axes.get_title(loc="left").partition(": ")[2] for axes in fig.axes]
    assert shown == ["repro, 5 layers", "repro, 12 layers"]
    first, second = (lines(axes) for axes in fig.axes)
    assert first["predicted: gather"].get_linestyle() == "--"
    assert first["predicted: gather"].get_color() == looks.look("gather")[0]
    assert "predicted: gather" not in second
    assert list(first["case study"].get_ydata()) == list(second["case study"].get_ydata())


def test_a_case_study_far_above_our_points_has_a_panel_of_its_own_with_its_ticks():
    ours, beside = plots.scaling(frame(), case_study={"case study": ([64, 2048], [5e3, 5e5])}).axes
    assert "case study" not in lines(ours) and max(ours.get_ylim()) < 5e3
    assert list(lines(beside)["case study"].get_ydata()) == [5e3, 5e5]
    assert {"64", "2k"} <= {tick.get_text() for tick in beside.get_xticklabels()}
    assert {"gather", "masked"} <= set(lines(beside))


def test_a_backend_looks_the_same_in_every_plot_and_none_like_another():
    names = "sequential masked gather packed sdpa flex flash triton dense-flash dense-cudnn"
    assert set(looks.LOOKS) == {*names.split(), "dense-fa4", "fla", "dense"}
    assert looks.look("dense") == looks.look("dense-flash")  # a training's, by that kernel
    for seen in zip(*looks.LOOKS.values(), strict=True):  # colours, markers
        assert len(set(seen)) == len(looks.LOOKS) - 1
    assert looks.look("something new") == looks.look("something new")


def test_local_exponents_are_drawn_between_neighbours():
    (axes,) = plots.exponents(frame()).axes
    gather, masked = lines(axes)["gather"], lines(axes)["masked"]
    np.testing.assert_allclose(gather.get_ydata(), 1.0)
    np.testing.assert_allclose(masked.get_ydata(), 2.0)
    np.testing.assert_allclose(gather.get_xdata(), [128 * 2**0.5 * 2**i for i in range(3)])


def test_categories_stack_to_the_sum():
    parts = {"parameters": 20.0, "activations": 50.0, "optimizer": 30.0}
    rows = [row("gather", t, mib, f"memory_{name}") for t in TOKENS for name, mib in parts.items()]
    (axes,) = plots.categories(frame(*rows), tokens=512).axes
    tops = [bars[0].get_y() + bars[0].get_height() for bars in axes.containers]
    assert tops == [20.0, 70.0, 100.0]
    assert [bars.get_label() for bars in axes.containers] == list(parts)


def test_categories_are_shown_at_the_largest_length_that_all_finished():
    rows = [row("gather", t, 5.0, "memory_all") for t in TOKENS]
    rows += [row("masked", t, 5.0, "memory_all") for t in TOKENS[:2]]
    assert "T 256" in plots.categories(metrics.table(rows)).axes[0].get_title(loc="left")


def step_of(backend, tokens, mib):
    timeline = {"events": [0, 1, 2], "phases": [["forward", 0], ["backward", 2]]}
    timeline["mib"] = {"parameters": [1.0] * 3, "temporaries": [0.0, mib, 0.0]} if mib else {}
    same = {"preset": "repro", "layers": 1, "backend": backend, "tokens": tokens}
    return same | {"timeline": timeline if mib else {}}


def test_a_step_is_drawn_at_the_largest_length_that_all_finished_with_its_peak():
    rows = [step_of("gather", 128, 5.0), step_of("masked", 128, 9.0), step_of("masked", 256, 20.0)]
    masked, gather = plots.through_a_step([*rows, step_of("sdpa", 256, None)]).axes
    assert masked.get_title(loc="left") == "masked, T = 128"
    said = [text.get_text() for text in gather.texts]
    assert "6 MiB" in said and {"forward"} <= set(said), "1 MiB of parameters lie below"
    assert plots.through_a_step([step_of("gather", 128, None)]).axes, "which says why there is none"


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="mode 'step'"):
        plots.scaling(metrics.table([]))
    with pytest.raises(ValueError, match="category"):
        plots.categories(frame())
    with pytest.raises(ValueError, match="no categories at T = 7"):
        plots.categories(frame(row("gather", 128, 1.0, "memory_a")), tokens=7)


@pytest.mark.full
@pytest.mark.processes
def test_a_saved_figure_is_svg_or_png_and_names_the_run(tmp_path):
    from PIL import Image

    run = store.Run(tmp_path, "01_tiny")
    fig = plots.scaling(frame())
    run.show(fig, "memory")
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["memory.svg"]
    (written,) = looks.write(fig, tmp_path, "memory", run.source(), ["png"])
    with Image.open(written) as png:
        assert png.info["Description"] == run.source() and round(png.info["dpi"][0]) == 120
    svg = (tmp_path / "figures" / "memory.svg").read_text()
    assert "run 01_tiny" in svg
    run.show(fig, "memory")  # its foot is there already
    assert (tmp_path / "figures" / "memory.svg").read_text() == svg


def test_a_log_axis_of_less_than_a_decade_keeps_its_labels():
    fig, (axes,) = looks.panels(1, 3.0)
    axes.plot(TOKENS, [0.3, 0.4, 0.6, 0.7])
    axes.set(xscale="log", yscale="log")
    looks.plain_ticks(axes, TOKENS)
    fig.canvas.draw()
    low, high = axes.get_ylim()
    said = [tick for tick in axes.yaxis.get_ticklabels(which="both") if tick.get_text()]
    assert sum(low <= tick.get_position()[1] <= high for tick in said) >= 2
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["128", "256", "512", "1k"]
    assert not len(axes.xaxis.get_minorticklocs())
