import matplotlib
from tracing_rows import SETUP, healthy

from nsa.experiments.tracing import plots
from nsa.experiments.tracing.trials import TRIALS, Traced

matplotlib.use("agg")


def test_a_pause_is_cut_out_of_the_timeline_and_told():
    traced = healthy()
    for row in traced.modules:
        row["ms"] = 5.0 + row["order"] + (18_000 if row["order"] > 1 else 0)
    (axes,) = plots.module_timeline(traced, "ddp").axes
    lines = axes.get_lines()
    assert max(max(line.get_xdata()) for line in lines) < 10
    assert lines[0].get_xdata()[0] == 0  # the axis begins with the first module
    (told,) = axes.texts
    assert told.get_text() == " 18 s are left out here"
    assert "began 5 ms after" in axes.get_title(loc="right")
    assert not plots.module_timeline(healthy(), "ddp").axes[0].texts


def test_every_bucket_has_a_look_and_a_legend_entry():
    traced = healthy()
    traced.buckets = [
        {"trial": "ddp", "rank": 0, "step": 1, "index": index, "elements": 1000}
        for index in range(12)
    ]
    figure = plots.buckets(traced, ["ddp"])
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}
    assert len(looks) == len(figure.legends[0].get_texts()) == 12


def test_what_was_not_traced_is_said_in_the_figures_place():
    nothing = Traced(SETUP, TRIALS)
    for figure in (
        plots.arrival_order(nothing, ["ddp"]),
        plots.buckets(nothing, ["ddp"]),
        plots.module_timeline(nothing, "ddp"),
    ):
        assert figure.axes[0].texts[0].get_text().endswith("of ddp: not traced to its end")


def test_arrivals_mark_missing_and_zero_gradients():
    figure = plots.arrival_order(healthy(), ["rank branch", "gate x 0", "win alone"])
    said = {text.get_text() for text in figure.legends[0].get_texts()}
    assert said == {"rank 0", "rank 1", "missing on rank 1", "arrives as zero", "rightly none"}
