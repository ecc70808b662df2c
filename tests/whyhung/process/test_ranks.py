"""Ranks under torchrun: how each ended, which was the first to fail, and that none is left."""

import time
from pathlib import Path

import pytest

from whyhung.process.ranks import run_ranks

pytest.importorskip("torch.distributed.run")


def run(folder, how, entry="end_as_told", deadline_s=120):
    return run_ranks(f"trial_entries:{entry}", how, ranks=2, deadline_s=deadline_s, folder=folder)


@pytest.mark.real_starts
@pytest.mark.processes
@pytest.mark.full
def test_every_rank_returns_its_own_result_and_leaves_what_it_printed(tmp_path):
    rows = run(tmp_path, {"word": "x"}, "greet")
    ended = [(row["rank"], row["status"], row["first"], row["result"]) for row in rows]
    assert ended == [(r, "ok", False, {"rank": r, "of": 2, "word": "x"}) for r in (0, 1)]
    assert len(list(tmp_path.glob("logs/*/*/*/stderr.log"))) == 2


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("culprit", "how", "status", "message"),
    [
        (1, "raise", "error", "ValueError: the planted mistake"),
        (0, "kill", "crash", "ended by SIGKILL"),
        (1, "leave", "error", "exited with 7 before it had a result"),
    ],
)
def test_the_rank_that_fails_is_named_first_and_takes_the_others_down(
    tmp_path, culprit, how, status, message
):
    begin = time.monotonic()
    rows = run(tmp_path, {str(culprit): how, "others_s": 300})
    assert time.monotonic() - begin < 60
    failed, other = rows[culprit], rows[1 - culprit]
    assert (failed["status"], failed["first"], failed["message"]) == (status, True, message)
    assert (other["status"], other["first"]) == ("ended", False)
    if how == "raise":
        assert "end_as_told" in failed["evidence"] and failed["place"] == "work"


@pytest.mark.processes
@pytest.mark.slow
def test_at_the_deadline_each_rank_says_where_it_stands_and_nobody_is_left(tmp_path):
    for row in run(tmp_path, {"others_s": 300}, deadline_s=12):
        assert row["status"] == "timeout" and row["place"] == "work"
        assert "end_as_told" in row["evidence"]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        assert not (str(tmp_path) in command and "process.child" in command)


def test_wrong_calls_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        run_ranks("trial_entries:greet", {}, ranks=0, deadline_s=60, folder=tmp_path)
    with pytest.raises(ValueError, match="there is no module nowhere"):
        run_ranks("nowhere:greet", {}, ranks=1, deadline_s=60, folder=tmp_path)
    assert not list(tmp_path.iterdir())
