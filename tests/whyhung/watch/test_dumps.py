"""A folder of dumps: which files are read for which ranks, and what is said of the others."""

import json
import os
import pickle

import pytest
from recorder_entries import Runs, entry

from whyhung.watch.dumps import read

CONFIG = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}


def dump(*calls, **more):
    return {"version": "2.9", "pg_config": CONFIG, "entries": list(calls), **more}


def put(file, dumped):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(dumped if isinstance(dumped, bytes) else pickle.dumps(dumped))


@pytest.mark.parametrize(
    "name", ["_dump_7", "nccl_trace_rank_7", "node3/trace7.pickle", "a/b/comm_lib_trace_rank_7"]
)
def test_a_name_that_ends_in_a_rank_is_read_wherever_it_lies(name, tmp_path):
    put(tmp_path / name, dump(entry(4)))
    put(tmp_path / "fault_injection.log", b"Rank 12")
    told = read(tmp_path)
    assert [row["seq"] for row in told.flights[7]] == [4]
    assert told.files == {7: tmp_path / name} and not told.refused
    assert told.world == (0, 1, 2, 3, 7)


def test_json_is_read_beside_pickles(tmp_path):
    put(tmp_path / "trace_0", dump(entry(4)))
    put(tmp_path / "trace_1.json", json.dumps(dump(entry(5))).encode())
    assert {rank: rows[0]["seq"] for rank, rows in read(tmp_path).flights.items()} == {0: 4, 1: 5}


def test_damaged_dumps_are_named_and_nothing_else_is_lost(tmp_path):
    put(tmp_path / "_dump_0", dump(entry(4)))
    put(tmp_path / "_dump_1", pickle.dumps(dump(*[entry(4)] * 9))[:80])
    put(tmp_path / "_dump_2", dump(Runs()))
    put(tmp_path / "_dump_3", b"")
    put(tmp_path / "_dump_4", {"version": "9.1", "entries": ["all_reduce"]})
    put(tmp_path / "_dump_5", {"something": "else"})
    put(tmp_path / "_dump_6", {"version": "9.1", "entries": [{"call": "all_reduce"}]})
    told = read(tmp_path)
    assert list(told.flights) == [0] and told.unread == (1, 2, 3, 4, 5, 6)
    why = {file.name: text for file, text in told.refused.items()}
    assert "is not plain data" in why["_dump_2"] and why["_dump_3"] == "it is empty"
    assert "version 9.1" in why["_dump_4"] and "no calls" in why["_dump_5"]
    assert "none of its entries" in why["_dump_6"]
    assert all(any(name in note for note in told.said()) for name in why)


def test_a_version_that_is_not_known_is_read_and_named(tmp_path):
    put(tmp_path / "_dump_0", dump(entry(4), version="3.1"))
    told = read(tmp_path)
    assert told.flights[0] and "version 3.1" in " ".join(told.said())


def test_of_two_files_of_a_rank_the_one_with_the_later_call_counts(tmp_path):
    put(tmp_path / "first/_dump_0", dump(entry(90, time_created_ns=100)))
    put(tmp_path / "second/_dump_0", dump(entry(5, time_created_ns=200)))
    os.utime(tmp_path / "first/_dump_0", (4e9, 4e9))  # as copies have any time
    told = read(tmp_path)
    assert [row["seq"] for row in told.flights[0]] == [5]
    assert "first/_dump_0 is left out" in " ".join(told.said())
    put(tmp_path / "third/_dump_0", dump())
    os.utime(tmp_path / "third/_dump_0", (5e9, 5e9))  # without a call its own time is all there is
    assert read(tmp_path).flights[0] == []


def test_who_left_no_dump_is_said(tmp_path):
    put(tmp_path / "_dump_0", dump(entry(4)))
    put(tmp_path / "_dump_2", b"cut")
    assert "no dump of rank 1, 3" in read(tmp_path).said()


@pytest.mark.parametrize(
    ("after_s", "moving", "said"), [(0.1, True, True), (2.0, False, True), (600, False, False)]
)
def test_a_dump_that_was_written_while_the_job_ran_is_known(after_s, moving, said, tmp_path):
    put(tmp_path / "_dump_0", dump(entry(4, time_created_ns=1_000 * 10**9)))
    os.utime(tmp_path / "_dump_0", (1_000 + after_s, 1_000 + after_s))
    told = read(tmp_path)
    assert told.moving is moving
    assert any("after the last call" in note for note in told.said()) is said


def status(enqueued, completed):
    return {"last_enqueued_collective": enqueued, "last_completed_collective": completed}


@pytest.mark.parametrize(
    ("ended", "seqs"),
    [
        (status(52, 52), [52]),  # it has completed what the other is in
        (status(49, 49), []),  # it has not come there
        (status(52, 51), []),  # something of it is open
        (status(70, 70), []),  # farther than the other has called: of another group
    ],
)
def test_who_has_completed_all_of_a_group_is_told_from_its_status(ended, seqs, tmp_path):
    calls = [entry(n, process_group=("0", "default_pg"), pg_id=0) for n in (50, 51, 52)]
    put(tmp_path / "_dump_0", dump(*calls, pg_status={"0": status(52, 49)}))
    put(tmp_path / "_dump_1", dump(pg_status={"5": ended}))
    rows = read(tmp_path).flights[1]
    assert [row["seq"] for row in rows] == seqs
    assert all(row["state"] == "completed" for row in rows)
    # nothing is added for who has open calls of its own there, and for who is no member
    put(tmp_path / "_dump_1", dump(calls[2], pg_status={"0": status(52, 51), "5": status(52, 52)}))
    put(tmp_path / "_dump_9", dump(pg_status={"5": ended}))
    told = read(tmp_path)
    assert [row["state"] for row in told.flights[1]] == ["scheduled"] and told.flights[9] == []
    put(tmp_path / "_dump_1", dump(pg_status={"5": ended}))
    # where older open calls have been dropped, nothing can be told of the others
    put(tmp_path / "_dump_0", dump(*calls, pg_status={"0": status(52, 30)}))
    assert read(tmp_path).flights[1] == []


def test_without_a_dump_that_can_be_read_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds no dump that can be read$"):
        read(tmp_path)
    put(tmp_path / "_dump_0", dump(Runs()))
    with pytest.raises(ValueError, match=r"_dump_0: .*not plain data"):
        read(tmp_path)
