"""A measurement that is taken away lets no verdict of a committed run get better.

Each measurement of each run is blanked once, as one that was to be made and was not, and each row
of a table is taken out once; and all that a T has at once, so that both sides of a comparison are
gone. Better are PASS, AIM MISSED after FAIL, and NOT APPLICABLE: what was to be measured does not
become what was not to be. INCONCLUSIVE is never better, it may come of any verdict. And a claim
that passes, and says something else without a measurement, passes no longer: it had spoken of that.

`make test` takes the smallest run of each room, the one whose false PASS this is for, and a sample
of their rows, the same each time; `-m long` takes every row of every run.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import pandas
import pytest
from claim_calls import claims_of
from places import UNKNOWN, committed_runs, in_git

from workbook.rooms.selfcheck.judged import LATE, NOTHING
from workbook.rooms.soak.trials import Soak
from workbook.runs import metrics
from workbook.runs.claim import Claim

if not in_git():
    pytest.skip(UNKNOWN, allow_module_level=True)
RUNS = {folder.name: folder for folder in committed_runs()}
ROOMS = ("01", "02", "04", "06", "07", "09", "10", "11")
FALSE_PASS = "02_backend_comparison-502ac996"  # the run whose false PASS this is for
SAMPLE = 3
# One backend that fits, one T at which two differ, is enough for these, whatever others do. The
# memory over steps is the level beside which growth is told, of which one window more or less
# counts for nothing.
ONE_IS_ENOUGH = {("01", "production"), ("02", "0"), ("04", "flat")}
GONE = float("nan")


def better(before: str, after: str) -> bool:
    return after != before and (
        after in ("PASS", "NOT APPLICABLE") or (before, after) == ("FAIL", "AIM MISSED")
    )


def blanked(df, rows):
    """The table with these rows as they are when nobody measured them."""
    df = df.copy()
    df.loc[rows, ["median", "q20", "q80"]] = GONE
    configs = (json.loads(text) | {"outcome": "not run"} for text in df.loc[rows, "config"])
    df.loc[rows, "config"] = list(map(json.dumps, configs))
    return df


def some(items, every: bool) -> list:
    """All of them, or a sample."""
    items = list(items)
    return items if every else items[:: max(1, len(items) // SAMPLE)][:SAMPLE]


def without(of, every: bool) -> Iterator[tuple[str, object]]:
    """Cases of claims, each without something, by the name of that."""
    if isinstance(of, pandas.DataFrame):
        tokens = of[of["x_name"] == "tokens"]
        for at, rows in tokens.groupby("x_value").groups.items():
            yield f"T {at} blank", blanked(of, rows)
        for row in some(of.index, every):
            yield f"row {row} blank", blanked(of, [row])
            yield f"row {row} gone", of.drop(row)
    elif isinstance(of, Soak):
        for number, part in enumerate(of.parts):
            for row in some(part.rows.index, every)[::20]:
                parts = [*of.parts]
                parts[number] = replace(part, rows=part.rows.drop(row))
                yield f"{part.name}, row {row} blank", replace(of, parts=tuple(parts))
    elif isinstance(of, dict):
        for name in some(of, every):
            yield f"{name} blank", of | {name: replace(of[name], value=None)}
    elif of and hasattr(of[0], "skipped"):
        for i in some(range(len(of)), every):
            if not of[i].skipped:
                lost = {"found": NOTHING, "found_what": "", "skipped": LATE, "reports": ()}
                yield f"{of[i].name} blank", [*of[:i], replace(of[i], **lost), *of[i + 1 :]]
    else:
        places = [(i, k) for i, result in enumerate(of) for k in range(len(result.rows))]
        for i, k in some(places, every):
            rows = [*of[i].rows]
            same = {name: rows[k][name] for name in ("name", "operation", "layout")}
            rows[k] = same | {"outcome": "not run", "message": "", "ms": {}}
            yield f"{of[i].cell}, {same['name']} blank", [
                *of[:i], replace(of[i], rows=rows), *of[i + 1 :],
            ]  # fmt: skip


def smallest(room: str) -> str:
    mine = [
        name for name in RUNS if name.startswith(room) and (RUNS[name] / "metrics.csv").is_file()
    ]
    return min(mine, key=lambda name: (RUNS[name] / "metrics.csv").stat().st_size)


def flattered(folder, every: bool) -> dict[str, str]:
    """{what was taken away: claim, before and after} of all that got better."""
    of, calls = claims_of(folder)
    said = {name: call(of) for name, call in calls.items()}
    found = {}
    if not calls or not len(of if not isinstance(of, Soak) else of.parts):
        return found
    for what, less in without(of, every):
        for name, before in said.items():
            if before.verdict == "NOT APPLICABLE":
                continue
            now = calls[name](less)
            gone = what.endswith("gone")
            worse = not better(before.verdict, now.verdict)
            if gone and now.verdict == "NOT APPLICABLE":
                worse = True  # nothing tells any longer that it was to be measured
            stays = before.verdict == now.verdict == "PASS" and now != before
            if not worse or (stays and not gone and (folder.name[:2], name) not in ONE_IS_ENOUGH):
                found[f"{what}: {name}"] = f"{before} -> {now}"
    return found


@pytest.fixture
def quick(monkeypatch):
    """Configs are parsed once."""
    known: dict[str, dict] = {}

    def configs(frame):
        return [dict(known.setdefault(text, json.loads(text or "{}"))) for text in frame["config"]]

    monkeypatch.setattr(metrics, "configs", configs)


@pytest.mark.parametrize("run", [FALSE_PASS, *map(smallest, ROOMS)])
def test_no_verdict_gets_better_by_what_is_not_measured(run, quick):
    assert flattered(RUNS[run], every=False) == {}


def test_a_claim_that_speaks_of_what_nobody_measured_is_noticed(quick, monkeypatch):
    monkeypatch.setattr(Claim, "over", lambda claim, unmeasured: claim)
    assert any(" T " in f" {what}" for what in flattered(RUNS[FALSE_PASS], every=False))


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_no_verdict_gets_better_without_any_of_its_rows(run, quick):
    assert flattered(RUNS[run], every=True) == {}
