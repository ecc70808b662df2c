"""`whyhung dumps` on the command line: exit codes, the first lines, JSON."""

import json
import os
import pickle
import re

import pytest
from places import ROOT
from recorder_entries import entry

from whyhung import cli

AT = [{"filename": "/me/train.py", "line": 31, "name": "step"}]


def left(folder, numbers, damaged=None, **more):
    """Dumps of ranks that have called so many collectives, of which the last is open."""
    ranks = str(list(range(len(numbers))))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    for rank, number in enumerate(numbers):
        if number is None:
            continue
        calls = [entry(n, state="completed", process_group=("0", "default_pg"), record_id=n,
                       frames=AT, input_sizes=[[8]], **more) for n in range(1, number)]  # fmt: skip
        if number == max(n for n in numbers if n):
            calls.append({**calls[-1], "collective_seq_id": number, "state": "scheduled"})
        dumped = pickle.dumps({"version": "2.9", "pg_config": config, "entries": calls})
        cut = dumped[:40] if rank == damaged else dumped
        (folder / f"nccl_trace_rank_{rank}").write_bytes(cut)


def test_the_guilty_rank_stands_in_the_first_line_and_its_reason_in_the_second(tmp_path, capsys):
    left(tmp_path, [5, 4, 5, 5])
    assert cli.main(["dumps", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1 holds up the other 3 of this job"
    assert " ".join(line.strip() for line in lines[1:3]) == (
        "rank 1 has not called all_reduce number 5 of all ranks, in which ranks 0, 2 and 3 wait "
        "for it at train.py:31 step; the last that it called was all_reduce of [8] at "
        "train.py:31 step"
    )
    assert "  ranks 0, 2 and 3 wait for rank 1" in lines
    (row,) = [line for line in lines if line.startswith("  all ranks")]
    told = re.split(r"  +", row.strip())
    assert told == ["all ranks", "0 to 3", "all_reduce 5", "0, 2 and 3", "1", "train.py:31 step"]


def test_the_example_of_the_documentation_is_a_page(tmp_path, capsys):
    text = (ROOT / "docs" / "hangs.md").read_text().partition("## A job that is gone")[2]
    left(tmp_path, [14, 14, 13])
    cli.main(["dumps", str(tmp_path)])
    assert text.partition("```text\n")[2].partition("```")[0] == capsys.readouterr().out


def test_a_rank_without_a_dump_is_named_and_one_that_cannot_be_read_is_not(tmp_path, capsys):
    left(tmp_path, [5, None, 5])
    assert cli.main(["dumps", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1 holds up the other 2 of this job"
    assert lines[1].startswith("rank 1 left no dump") and "no dump of rank 1" in lines[-1]
    left(tmp_path, [5, 5, 5], damaged=1)
    assert cli.main(["dumps", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("calls are open, and no rank can be named")
    assert "rank 1's dump cannot be read" in said and "nccl_trace_rank_1 is not read" in said


def test_json_has_the_same(tmp_path, capsys):
    left(tmp_path, [5, 4, None])
    assert cli.main(["dumps", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(one["rank"], one["kind"]) for one in told["guilty"]] == [(1, "behind"), (2, "absent")]
    assert told["guilty"][0]["line"] == "train.py:31 step" and told["absent"] == [2]
    assert set(told["files"]) == {"0", "1"} and told["groups"][0]["not by"] == "1 and 2"


@pytest.mark.parametrize(("after_s", "code"), [(0, 0), (600, 1)])
def test_a_job_that_still_ran_is_not_accused(after_s, code, tmp_path, capsys):
    left(tmp_path, [5, 4], time_created_ns=10**12)
    for file in tmp_path.iterdir():
        os.utime(file, (1000 + after_s, 1000 + after_s))
    assert cli.main(["dumps", str(tmp_path)]) == code
    assert capsys.readouterr().out.startswith("the job still moved") is (code == 0)


def test_nothing_stands_where_every_call_is_over(tmp_path, capsys):
    left(tmp_path, [4, 4, 9])
    (tmp_path / "nccl_trace_rank_2").unlink()
    assert cli.main(["dumps", str(tmp_path)]) == 0
    assert "nothing stands: every call in the 2 dumps" in capsys.readouterr().out


def test_a_folder_without_dumps_is_refused(tmp_path, capsys):
    assert cli.main(["dumps", str(tmp_path)]) == 2
    assert "holds no dump that can be read" in capsys.readouterr().err
    (tmp_path / "_dump_0").write_bytes(b"")
    assert cli.main(["dumps", str(tmp_path / "_dump_0")]) == 2
    assert "is no folder" in capsys.readouterr().err
