"""Committed runs say today what they said when the snapshot was stored: tables, verdicts, plots.

A change of what is drawn or tabulated on purpose stores the snapshot anew:
`NSA_FREEZE_WRITE=1 pytest tests/house/test_freeze.py`, and the diff shows what it changed.
Sentences, titles, labels and colours are not compared.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from places import ROOT, UNKNOWN, committed_runs, in_git

pandas = pytest.importorskip("pandas")
plt = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("scipy")
import freeze_calls  # noqa: E402 - it imports all of them

pytestmark = [
    pytest.mark.environment(of="freeze"),
    pytest.mark.skipif(not in_git(), reason=UNKNOWN),
]
SNAPSHOT = Path(__file__).with_name("freeze.json")
RUNS = [folder.relative_to(ROOT).as_posix() for folder in committed_runs()]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table(df) -> str:
    """Shape, columns and a digest of the values, floats to six digits."""
    text = df.to_csv(float_format="%.6g")
    columns = [str(c) for c in df.columns]
    shown = ", ".join(columns) if len(columns) <= 8 else f"{len(columns)} columns"
    return f"{len(df)} x [{shown}] {digest(text)}"


def numbers(values) -> str:
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        return digest(",".join(map(str, values)))
    return digest(",".join(f"{x:.5g}" for x in np.ravel(array)))


def figure(fig) -> list[str]:
    """The data of every line of more than two points, each once, sorted; no words, no places."""
    found = []
    for axes in fig.axes:
        lines = [line.get_data() for line in axes.lines]
        found += [f"{len(x)} points: {numbers(x)} {numbers(y)}" for x, y in lines if len(x) > 2]
    plt.close(fig)
    return sorted(set(found))


def read(folder: Path) -> dict[str, dict]:
    again = freeze_calls.again(folder)
    return {
        "tables": {name: table(df) for name, df in again["tables"].items()},
        "verdicts": {name: claim.verdict for name, claim in again["claims"].items()},
        "figures": {name: figure(fig) for name, fig in again["figures"].items() if fig},
    }


@pytest.mark.parametrize("run", RUNS)
def test_a_committed_run_says_what_it_said(run):
    stored = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.is_file() else {}
    found = read(ROOT / run)
    if os.environ.get("NSA_FREEZE_WRITE"):
        there = {name: said for name, said in stored.items() if name in RUNS} | {run: found}
        SNAPSHOT.write_text(json.dumps(there, indent=1, sort_keys=True) + "\n")
    else:
        assert found == stored[run]


def test_every_stored_run_is_there_and_every_run_is_stored():
    assert sorted(json.loads(SNAPSHOT.read_text())) == RUNS


@pytest.fixture
def copied(tmp_path):
    """A copy of one run, and what it says."""
    run = next(run for run in RUNS if "/01_" in run)
    folder = tmp_path / run
    shutil.copytree(ROOT / run, folder, ignore=shutil.ignore_patterns("*.ipynb", "figures"))
    return folder, json.loads(SNAPSHOT.read_text())[run]


@pytest.mark.parametrize("change", ["a number", "a row"])
def test_a_change_is_noticed(copied, change):
    folder, before = copied
    df = pandas.read_csv(folder / "metrics.csv")
    peaks = df.index[(df["metric"] == "peak_memory") & df["median"].notna()]
    if change == "a number":
        df.loc[peaks, "median"] *= 1.001
    else:
        df = df.drop(peaks[0])
    df.to_csv(folder / "metrics.csv", index=False)
    after = read(folder)
    assert after["tables"] != before["tables"]
    assert after["figures"] != before["figures"]
