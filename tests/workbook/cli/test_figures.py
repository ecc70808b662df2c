"""The headline plots are of the newest run that has what they show, drawn from its records."""

import re

import pytest
import yaml
from places import ROOT, UNKNOWN, in_git, tracked
from stored_runs import store_run

from workbook.cli import figures
from workbook.cli.main import main
from workbook.runs.results import Stored, committed, open_stored

matplotlib = pytest.importorskip("matplotlib")
PIN = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), re.M).group(1)
RULES = yaml.safe_load(figures.RULES.read_text())
SHOWS = {"notebook": "01", "metric": "peak_memory", "has": {"backend": ["gather"], "layers": [5]}}


def row(tokens, mib, **more):
    given = {"operation": "train", "backend": "gather", "mode": "step", "metric": "peak_memory"}
    given |= {"unit": "MiB", "x_name": "tokens", "x_value": tokens, "median": mib}
    return given | {"config": {"preset": "repro", "layers": 5}} | more


def stored(root, **runs):
    """Runs by day, each of the rows given for it."""
    for day, rows in runs.items():
        store_run(root, "01_memory_scaling", [], rows, started=f"2026-11-{day[1:]}")
    return open_stored(root)


def chosen(found, rule):
    return [str(run.record["started"])[8:10] for run in found.of("01") if figures.fits(run, rule)]


def test_a_figure_is_of_the_newest_run_that_has_all_its_values(tmp_path):
    other = row(128, 1.0, backend="flex")
    found = stored(tmp_path, d01=[row(128, 1.0)], d02=[row(128, 2.0), other], d03=[other])
    assert chosen(found, SHOWS) == ["02", "01"]
    both = SHOWS | {"has": {"backend": ["gather", "flex"]}}
    assert chosen(found, both) == ["02"]


@pytest.mark.parametrize(
    "spoilt",
    [
        row(128, None),
        row(128, 1.0, device="cpu: some model"),
        row(128, 1.0, metric="time"),
        row(128, 1.0, config={"layers": 12}),
    ],
    ids=["not measured", "on a CPU", "of another metric", "of another model"],
)
def test_a_run_without_such_rows_is_passed_over(tmp_path, spoilt):
    assert chosen(stored(tmp_path, d01=[spoilt]), SHOWS) == []


@pytest.mark.processes
def test_what_no_run_has_is_told_with_the_command_that_would_make_it(tmp_path, capsys):
    root, to = tmp_path / "runs", tmp_path / "figures"
    values = RULES["memory_growth"]["has"]
    rows = [row(t, t / 8, backend=b) for b in values["backend"] for t in values["x_value"]]
    stored(root, d01=rows)
    assert main(["runs", "figures", "--all", "--runs", str(root), "--to", str(to)]) == 0
    drawn = {"memory_growth"}
    assert {file.stem for file in to.glob("*.svg")} == {file.stem for file in to.glob("*.png")}
    assert {file.stem for file in to.glob("*.svg")} == drawn
    page = (to / "README.md").read_text()
    (run,) = root.glob("*/*")
    assert f"](../runs/{run.parent.name}/{run.name})" in page and "NVIDIA H200" in page
    drawing = (to / "memory_growth.svg").read_text()
    assert f"run {run.name}, NVIDIA H200, torch 2.11.0, commit" in drawing
    printed = capsys.readouterr().out
    for name in RULES.keys() - drawn:
        wanted = f"run of {RULES[name].get('notebook')} has its rows"
        if "records" in RULES[name]:
            wanted = f"record {RULES[name]['records']} in {root}"
        assert f"{name}: no {wanted}" in printed
        assert RULES[name]["command"] in page
    assert main(["runs", "figures", "--runs", str(tmp_path / "none"), "--to", str(to)]) == 2


@pytest.mark.processes
@pytest.mark.skipif(not in_git(), reason=UNKNOWN)
def test_every_figure_has_its_run_and_the_results_page_cites_those_it_shows():
    found = Stored(committed(ROOT / "runs"))
    runs = {
        name: next(
            (run.folder.name for run in found.of(rule["notebook"]) if figures.fits(run, rule)),
            f"Wants `{rule['command']}`",
        )
        for name, rule in RULES.items()
        if "records" not in rule
    }
    of_records = [rule["records"] for rule in RULES.values() if "records" in rule]
    files = [figures.kept(ROOT / "runs", f"*/{name}.json") for name in of_records]
    records = [file.stem for kept in files for file in kept]
    readme, page = (ROOT / "figures/README.md").read_text(), (ROOT / "docs/results.md").read_text()
    assert records and [run for run in (*runs.values(), *records) if run not in readme] == []
    shown = re.findall(r"\(\.\./figures/(\w+)\.svg\)", page)
    assert shown and [name for name in shown if runs[name] not in page] == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not in_git(), reason=UNKNOWN)
@pytest.mark.skipif(matplotlib.__version__ != PIN, reason="another matplotlib draws other bytes")
def test_the_headline_plots_are_redrawn_from_the_records_alone(tmp_path):
    from matplotlib.image import imread

    words = ["--runs", str(ROOT / "runs"), "--to", str(tmp_path / "figures")]
    assert main(["runs", "figures", *words]) == 0
    kept = {file.name: file for file in tracked("figures/*").values()}
    drawn = {file.name: file for file in (tmp_path / "figures").iterdir()}
    assert sorted(drawn) == sorted(kept)
    links = re.compile(r"\]\([./\w-]*?((?:runs|workbook)/)")
    changed = [
        name
        for name, file in drawn.items()
        if (
            (imread(file) != imread(kept[name])).any()
            if name.endswith("png")
            else links.sub(r"](\1", file.read_text()) != links.sub(r"](\1", kept[name].read_text())
        )
    ]
    assert not changed, f"look at {', '.join(changed)}, which `nsa runs figures` changed"
