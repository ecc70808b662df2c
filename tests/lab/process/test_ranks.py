import time
from pathlib import Path

import pytest

from nsa.lab.process.ranks import run_ranks

pytest.importorskip("torch.distributed.run")


@pytest.mark.processes
@pytest.mark.full
def test_every_rank_returns_its_own_result_and_leaves_what_it_printed(tmp_path):
    rows = run_ranks("trial_entries:greet", {"word": "x"}, ranks=2, deadline_s=60, folder=tmp_path)
    assert [(row["rank"], row["status"], row["first"]) for row in rows] == [
        (0, "ok", False),
        (1, "ok", False),
    ]
    assert [row["result"] for row in rows] == [
        {"rank": 0, "of": 2, "word": "x"},
        {"rank": 1, "of": 2, "word": "x"},
    ]
    assert len(list(tmp_path.glob("logs/*/*/*/stderr.log"))) == 2


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_raises_takes_the_others_down_and_is_named_first(tmp_path):
    begin = time.monotonic()
    rows = run_ranks(
        "trial_entries:end_as_told", {"1": "raise", "others_s": 300}, ranks=2, deadline_s=120,
        folder=tmp_path,
    )  # fmt: skip
    assert time.monotonic() - begin < 60
    other, culprit = rows
    assert culprit["status"] == "error" and culprit["first"]
    assert culprit["message"] == "ValueError: the planted mistake"
    assert "end_as_told" in culprit["evidence"] and culprit["place"] == "work"
    assert other["status"] == "ended" and not other["first"]


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_a_signal_ends_is_named_first(tmp_path):
    rows = run_ranks(
        "trial_entries:end_as_told", {"0": "kill", "others_s": 300}, ranks=2, deadline_s=120,
        folder=tmp_path,
    )  # fmt: skip
    assert [(row["status"], row["first"]) for row in rows] == [("crash", True), ("ended", False)]
    assert rows[0]["message"] == "ended by SIGKILL"


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_leaves_without_a_word_is_named_first(tmp_path):
    rows = run_ranks(
        "trial_entries:end_as_told", {"1": "leave", "others_s": 300}, ranks=2, deadline_s=120,
        folder=tmp_path,
    )  # fmt: skip
    assert [(row["status"], row["first"]) for row in rows] == [("ended", False), ("error", True)]
    assert rows[1]["message"] == "exited with 7 before it had a result"


@pytest.mark.processes
@pytest.mark.slow
def test_at_the_deadline_each_rank_says_where_it_stands_and_nobody_is_left(tmp_path):
    rows = run_ranks(
        "trial_entries:end_as_told", {"others_s": 300}, ranks=2, deadline_s=12, folder=tmp_path
    )
    for row in rows:
        assert row["status"] == "timeout" and row["place"] == "work"
        assert "end_as_told" in row["evidence"]
    assert not _alive(str(tmp_path))


def test_wrong_calls_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        run_ranks("trial_entries:greet", {}, ranks=0, deadline_s=60, folder=tmp_path)
    with pytest.raises(ValueError, match="there is no module nowhere"):
        run_ranks("nowhere:greet", {}, ranks=1, deadline_s=60, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def _alive(word: str) -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if word in line and "process.child" in line]
