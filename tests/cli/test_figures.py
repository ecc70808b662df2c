"""The headline plots in git are what the records of the cited runs give."""

import re

import pytest
from places import ROOT

from nsa.cli.main import main
from nsa.cli.notebooks import HEADLINES

matplotlib = pytest.importorskip("matplotlib")
PIN = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), re.M).group(1)


@pytest.mark.skipif(matplotlib.__version__ != PIN, reason="another matplotlib draws other bytes")
def test_the_headline_plots_are_redrawn_from_the_records_alone(tmp_path):
    assert main(["figures", "--runs", str(ROOT / "runs"), "--to", str(tmp_path)]) == 0
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_bytes() for file in (ROOT / "figures").glob("*.svg")
            if "--" not in file.name}  # fmt: skip
    assert sorted(drawn) == sorted(kept) == sorted(f"{name}.svg" for name, *_ in HEADLINES)
    changed = [name for name in drawn if drawn[name] != kept[name]]
    assert not changed, f"`nsa figures` writes {', '.join(changed)} anew: look at it and commit it"


def test_the_results_page_cites_every_run_that_is_drawn():
    page = (ROOT / "docs/results.md").read_text()
    assert [run for _, run, _ in HEADLINES if run not in page] == []
