"""RESULTS.md: what it says of runs, and that each link opens what its sentence stands on."""

import json
import re
import shutil

import pytest
from places import ROOT
from stored_runs import store_run

pytest.importorskip("pandas")

from nsa.cli import main as cli
from nsa.workbook import age
from nsa.workbook.results import Stored, committed, open_stored, page

ID = "0123456789ab"


@pytest.fixture(autouse=True)
def no_history(request, monkeypatch):
    """Git is asked for no ages, but where a test starts processes."""
    if not request.node.get_closest_marker("processes"):
        monkeypatch.setattr(age, "newest", lambda: "d" * 40)
        monkeypatch.setattr(age, "since", lambda commit, at="HEAD": age.Age(commit))


def links(text, beside):
    """(what it names, line, the row it stands in) of every link of a page."""
    for row in text.splitlines():
        for to in re.findall(r"\]\(([^)]+)\)", row):
            name, _, line = to.partition("#L")
            yield beside / name, int(line or 0), row


def opens(text, beside):
    """That every link leads to something, and a line of verdicts.json to the row's own sentence."""
    seen = 0
    for path, line, row in links(text, beside):
        assert path.exists(), path
        if line:
            rest = path.read_text(encoding="utf-8").splitlines()[line - 1 :]
            claim = json.loads(rest[1].split(": ", 1)[1].rstrip(","))
            assert rest[0] == "  {" and claim.replace("|", "\\|") in row
        seen += 1
    return seen


def told(text):
    """{sentence: verdict} of all tables."""
    rows = re.findall(r"^\| ([A-Z]{4}[A-Z ]*) \| (.*?) \| ", text, re.M)
    return {sentence: verdict for verdict, sentence in rows}


def test_each_sentence_opens_its_evidence_and_the_trials_that_the_run_carries(tmp_path):
    sentence = f"it hangs | or not: 3 of 4 [{ID}, aaaaaaaaaaaa]"
    claims = [("PASS", sentence, {"trials": [ID, "aaaaaaaaaaaa"]}), ("FAIL", "it is fast: 9 s")]
    folder = store_run(tmp_path / "runs", "01_tiny", claims)
    (folder / "trials" / ID).mkdir(parents=True)
    text = page(open_stored(tmp_path / "runs"), tmp_path / "runs", tmp_path)
    assert opens(text, tmp_path) == 4 + text.count(f"[{folder.name}]") - 1
    (row,) = [line for line in text.splitlines() if "it hangs" in line]
    assert f"/trials/{ID})" in row and "1 of its trials are not carried" in row
    assert told(text)["it is fast: 9 s"] == "FAIL"
    assert (
        "NVIDIA H200; 2.11.0; cccccccccccc; 2026-11-01; of cccccccccccc" in text
        and "\nWhy?\n" in text
    )


def test_the_newest_run_that_decides_a_sentence_tells_it_and_what_nobody_decides_is_told_once(
    tmp_path,
):
    old = [("PASS", "it is fast: 9 s"), ("PASS", "it is small: 3 GiB"), ("INCONCLUSIVE", "open: a")]
    new = [("FAIL", "it is fast: 99 s"), ("INCONCLUSIVE", "it is small: not decided, why"),
           ("INCONCLUSIVE", "open: b")]  # fmt: skip
    store_run(tmp_path, "01_tiny", old)
    newer = store_run(tmp_path, "01_tiny", new, started="2026-11-02")
    text = page(open_stored(tmp_path), tmp_path, tmp_path)
    assert told(text) == {"it is fast: 99 s": "FAIL", "it is small: 3 GiB": "PASS",
                          "it is small: not decided, why": "INCONCLUSIVE",
                          "open: b": "INCONCLUSIVE"}  # fmt: skip
    assert f"2 of its sentences are told anew by [{newer.name}]" in text


@pytest.mark.parametrize(
    "other", [{"gpu": "cpu"}, {"gpu": "NVIDIA H100"}, {"parameters": {"steps": 2}}]
)
def test_no_run_of_another_device_or_other_parameters_takes_a_sentence_away(tmp_path, other):
    store_run(tmp_path, "01_tiny", [("FAIL", "it is fast: 99 s")])
    store_run(tmp_path, "01_tiny", [("PASS", "it is fast: 1 s")], started="2026-11-02", **other)
    stored = open_stored(tmp_path)
    text = page(stored, tmp_path, tmp_path)
    assert told(text) == {"it is fast: 99 s": "FAIL", "it is fast: 1 s": "PASS"}
    assert "told anew" not in text
    if "gpu" in other:
        assert stored.sentence("01", "it is fast").verdict == "FAIL"


def test_what_is_unknown_of_a_run_or_was_never_said_stands_with_it(tmp_path):
    known = store_run(tmp_path, "01_tiny", [("PASS", "it is fast: 9 s")], evidence=True)
    bare = store_run(tmp_path, "01_tiny", started="2026-11-02")
    (bare / "metrics.csv").unlink()
    (bare / "environment.json").unlink()
    (bare / "notes.txt").write_text("its host was slow\n")
    lost = store_run(tmp_path, "01_tiny", started="2026-11-03", status="killed", message="SIGTERM")
    text = page(open_stored(tmp_path), tmp_path, tmp_path)
    lines = {f.name: next(x for x in text.splitlines() if x.lstrip("- ").startswith(f"[{f.name}]"))
             for f in (known, bare, lost)}  # fmt: skip
    assert "which git has not here" in lines[known.name] and "not marked" not in lines[known.name]
    for label in ("no rows", "of no known commit", "its host was slow", "its commit is unknown",
                  "not marked as evidence", "it has no rows", "it has no verdicts"):  # fmt: skip
        assert label in lines[bare.name]
    assert "killed, SIGTERM" in lines[lost.name] and "it has no verdicts" in lines[lost.name]
    assert text.index("## Broken off") < text.index(f"[{lost.name}]")


def test_a_claim_without_evidence_stands_apart(tmp_path):
    store_run(tmp_path, "01_tiny", [("PASS", "shown", [1]), ("PASS", "merely said", {})])
    text = page(open_stored(tmp_path), tmp_path, tmp_path)
    before, after = text.split("## Without evidence")
    assert "| shown |" in before and "merely said" not in before and "| merely said |" in after


@pytest.mark.parametrize(
    ("ended", "counts"),
    [
        ({"status": "ok"}, True),
        ({"status": "failed", "stop_reason": "error", "message": "AssertionError: it is"}, True),
        ({"status": "failed", "stop_reason": "error", "message": "ValueError: what"}, False),
        ({"status": "timeout", "stop_reason": "timeout"}, False),
        ({"status": "interrupted", "stop_reason": "interrupted"}, False),
    ],
)
def test_only_runs_that_ended_count_and_a_refuted_claim_is_an_end(tmp_path, ended, counts):
    store_run(tmp_path, "01_tiny", [("FAIL", "it is fast")], **ended)
    assert bool(open_stored(tmp_path).runs) is counts


def test_verdicts_that_were_cut_by_hand_are_refused_and_not_taken_for_others(tmp_path):
    folder = store_run(tmp_path, "01_tiny", [("PASS", "one"), ("PASS", "two")])
    (folder / "verdicts.json").write_text('[{"claim": "one", "verdict": "PASS", "evidence": 1}]')
    with pytest.raises(ValueError, match="one claim after the other"):
        page(open_stored(tmp_path), tmp_path, tmp_path)


@pytest.mark.processes
def test_the_page_in_the_checkout_is_what_its_runs_say_and_all_of_it_opens():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no checkout: nothing tells what is committed")
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    at = re.search(r"^up to commit ([0-9a-f]{12})\.$", text, re.M)[1]
    runs = Stored(committed(ROOT / "runs"))
    if not age.since(runs.runs[0].commit, at).known:
        pytest.skip("a shallow clone: git has no history to tell ages by")
    wanted = page(runs, ROOT / "runs", ROOT, at)
    assert text == wanted, "write it anew: nsa results --committed --into RESULTS.md"
    assert opens(text, ROOT) > 100
    assert all(f"[{run.folder.name}]" in text for run in (*runs.runs, *runs.broken_off))


@pytest.mark.processes
def test_the_command_writes_the_page_beside_the_runs_and_names_what_is_wrong(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["results"]) == 2
    assert "no run below runs has ended" in capsys.readouterr().err
    store_run(tmp_path / "runs", "01_tiny", [("PASS", "it is fast: 9 s")])
    assert cli.main(["results", "--committed"]) == 2
    assert "lies in no git checkout" in capsys.readouterr().err
    assert cli.main(["results", "--into", "docs/R.md"]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    (tmp_path / "docs").mkdir()
    assert cli.main(["results", "--into", "docs/R.md"]) == 0
    assert opens((tmp_path / "docs" / "R.md").read_text(), tmp_path / "docs") == 2
    capsys.readouterr()
    assert cli.main(["results"]) == 0
    assert "| PASS | it is fast: 9 s | [evidence](runs/" in capsys.readouterr().out
