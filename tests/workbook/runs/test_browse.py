"""The run browser: what lies on one curve, what is laid over what, and what is not alike."""

import pytest

for needed in ("ipywidgets", "matplotlib", "pandas"):
    pytest.importorskip(needed)

from places import committed_root, committed_runs  # noqa: E402
from stored_runs import store_run  # noqa: E402

from workbook.runs import browse, load, loaded, metrics, store  # noqa: E402
from workbook.runs.live import LivePanel  # noqa: E402


def row(x, backend="b", median=1.0, metric="latency", **config):
    return {"operation": "f", "metric": metric, "unit": "ms", "backend": backend, "mode": "forward",
            "x_name": "tokens", "x_value": x, "median": median, "config": config}  # fmt: skip


def table(*rows):
    facts = {"device": "a GPU"}
    return metrics.with_settings(metrics.table([metrics.row(r, facts) for r in rows]))


def added(frame):
    return {name: list(frame[name]) for name in frame if name not in metrics.COLUMNS}


def test_points_of_different_sizes_at_different_x_are_no_curve():
    assert added(table(row(8, heads=64), row(2, heads=12))) == {"heads": [64, 12]}


@pytest.mark.parametrize(
    "configs",
    [
        ({"heads": 4}, {"heads": 4}),  # the same
        ({"tokens": 8}, {"tokens": 16}),  # the axis itself
        ({"share": 0.5}, {"share": 0.7}),  # measured
        ({"parameters": 9}, {}),  # known only where it ended well
        ({"outcome": "ok"}, {"outcome": "oom", "message": "out of memory"}),
    ],
)
def test_what_does_not_tell_curves_apart_is_no_setting(configs):
    first, second = configs
    assert added(table(row(8, **first), row(16, **second))) == {}


def test_of_two_settings_that_tell_the_same_rows_apart_one_is_named():
    rows = [row(8, layers=n, size=10 * n, kind=k) for n in (1, 2) for k in "ab"]
    assert list(added(table(*rows))) == ["layers", "kind"]


@pytest.fixture
def runs(tmp_path):
    """Two of 02_x, of another torch and T, and one of 03_y whose rows are over nothing."""

    def kind(t, scale):
        return [row(t, "triton", scale * t, queries=q) for q in ("random", "correlated")]

    first = [r for t in (8, 16, 32) for r in kind(t, 1.0)]
    second = [r for t in (8, 16) for r in kind(t, 2.0)] + [row(8, metric="peak", queries="random")]
    return [
        store_run(tmp_path, "02_x", [("PASS", "a")], first, parameters={"tokens": [8, 16, 32]}),
        store_run(tmp_path, "02_x", [("FAIL", "a")], second, started="2026-11-02", torch="2.12.0",
                  parameters={"tokens": [8, 16]}),
        store_run(tmp_path, "03_y", [], [row(None, median=2.0)], started="2026-11-03"),
    ]  # fmt: skip


def lines(panel, **values):
    (axes,) = panel.views["curves"](**{**panel.start, **values}).axes
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }


def test_two_runs_are_laid_over_each_other_and_a_setup_can_be_chosen(runs):
    panel = loaded.browser(*runs[:2])
    assert panel.start["quantity"] == "f, forward: latency (ms) over tokens"
    ids = [folder.name.rpartition("-")[2] for folder in runs]
    whole = lines(panel)
    assert set(whole) == {f"{id}, queries {q}" for id in ids[:2] for q in ("random", "correlated")}
    chosen = lines(panel, setup="queries random")
    assert chosen == {ids[0]: ([8, 16, 32], [8, 16, 32]), ids[1]: ([8, 16], [16, 32])}


def test_what_keeps_two_runs_from_being_alike_is_said(runs):
    assert browse.unlike([load(run) for run in runs[:1]]) == []
    assert browse.unlike([load(run) for run in runs[:2]]) == [
        "they differ in torch: 2.11.0, 2.12.0",
        "they differ in parameter tokens: [8, 16, 32], [8, 16]",
    ]


def test_the_browser_of_a_folder_goes_from_notebook_to_runs_to_quantities(runs):
    live = LivePanel(loaded.browser(root=runs[0].parents[1]))
    widgets = live.controls
    assert widgets["notebook"].options == ("02_x", "03_y")
    assert widgets["runs"].options == (runs[1].name, runs[0].name)  # the newest first
    assert live.values()["runs"] == (runs[0].name,)  # whose rows are curves
    before = bytes(live.picture.value)
    widgets["runs"].value = (runs[0].name, runs[1].name)
    assert "they differ in torch" in live.words.value and bytes(live.picture.value) != before
    widgets["quantity"].value = "f, forward: peak (ms) over tokens"
    assert widgets["setup"].options == (browse.EVERY,)
    widgets["runs"].value = ()
    assert "choose a run" in live.message.value
    widgets["notebook"].value = "03_y"
    assert live.message.value == "" and widgets["runs"].value == (runs[2].name,)


def test_rows_over_nothing_stand_beside_one_another(tmp_path):
    run = store_run(
        tmp_path, "03_y", [], [row(None, median=m, name=n) for m, n in ((1, "a"), (3, "b"))]
    )
    panel = loaded.browser(run)
    found = lines(panel, quantity="f, forward: latency (ms) over tokens")
    assert sorted(y for _, ys in found.values() for y in ys) == [1, 3]


def test_runs_of_two_notebooks_and_runs_without_rows_are_refused(runs):
    with pytest.raises(ValueError, match="02_x and 03_y measured different things"):
        loaded.browser(runs[0], runs[2])
    (runs[0] / "metrics.csv").unlink()
    with pytest.raises(ValueError, match=f"no rows to look through in {runs[0].name}"):
        load(runs[0]).explore()


def test_a_folder_without_runs_says_so_in_place_of_a_picture(tmp_path, capsys):
    panel = loaded.browser(root=tmp_path / "nothing")
    (figure,) = panel.figures().values()
    said = figure.axes[0].texts[0].get_text()
    assert said.startswith("no rows to look through in runs below")
    assert LivePanel(panel).message.value == ""
    panel.show()
    assert f"in runs below {tmp_path}/nothing; a run that ended well has some" in (
        capsys.readouterr().out
    )


def test_a_damaged_run_says_so_when_it_is_chosen_and_the_others_stay(runs):
    (runs[1] / "metrics.csv").write_text('operation,backend\n"half')
    live = LivePanel(loaded.browser(root=runs[0].parents[1]))
    before = bytes(live.picture.value)
    live.controls["runs"].value = (runs[1].name,)
    assert "metrics.csv is no table as a run writes it" in live.message.value
    assert bytes(live.picture.value) == before
    live.controls["runs"].value = (runs[0].name,)
    assert live.message.value == ""


@pytest.mark.full
@pytest.mark.processes
def test_every_notebook_of_the_committed_runs_has_a_picture():
    if not committed_runs():
        pytest.skip("no runs are committed here")
    live = LivePanel(loaded.browser(root=committed_root()))
    notebooks = {str(store.load(folder).get("notebook")) for folder in committed_runs()}
    seen = set()
    for notebook in live.controls["notebook"].options:
        live.controls["notebook"].value = notebook
        assert live.message.value == "", notebook
        seen.add(notebook)
    assert seen <= notebooks and {"01_memory_scaling", "02_backend_comparison"} <= seen
