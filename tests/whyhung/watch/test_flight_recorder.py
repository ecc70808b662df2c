"""Rows that are made of what torch's recorders dump, by NCCL, gloo and older versions."""

import json
import pickle

import pytest
from recorder_entries import Runs, entry

from whyhung.watch.flight_recorder import entries, everybody, kept, loads


def states(dumped):
    return [row["state"] for row in entries(dumped)]


def test_a_row_has_what_is_recorded_and_none_for_what_is_not():
    told = entry(
        4, p2p_seq_id=2, record_id=90, input_sizes=[[3]], output_sizes=[[6]],
        input_dtypes=["Half"], retired=False, time_created_ns=11,
        time_discovered_started_ns=12, timeout_ms=5000,
        frames=[
            {"filename": "/x/torch/distributed/c10d.py", "line": 1, "name": "all_reduce"},
            {"filename": "/me/train.py", "line": 9, "name": "step"},
        ],
    )  # fmt: skip
    config = {"7": {"name": "7", "desc": "data", "ranks": "[2, 5]"}}
    (row,) = entries({"entries": [told], "pg_config": config})
    assert row == {
        "seq": 4, "p2p_seq": 2, "id": 90, "op": "nccl:all_reduce", "p2p": False,
        "state": "scheduled", "group": "7", "desc": "data", "ranks": [2, 5], "sizes": [[3]],
        "out_sizes": [[6]], "dtypes": ["Half"], "frames": ["/me/train.py:9 step"],
        "retired": False, "created_ns": 11, "started_ns": 12, "timeout_ms": 5000,
    }  # fmt: skip
    (bare,) = entries({"entries": [{"seq_id": 4, "profiling_name": "nccl:all_reduce"}]})
    assert (bare["seq"], bare["group"], bare["retired"], bare["sizes"]) == (4, "", None, None)
    assert "ranks" not in bare and json.loads(json.dumps(row)) == row


def test_gloo_says_by_its_status_or_by_retiring_that_a_call_is_over():
    status = {"3": {"last_completed_collective": 4}, "7": {"last_completed_collective": 9}}
    calls = [entry(n, "gloo:all_reduce") for n in (4, 5)]
    assert states({"entries": calls, "pg_status": status}) == ["completed", "scheduled"]
    # a key of the status is no group's name: 9 is of another group
    named = [{**call, "pg_id": None} for call in calls]
    assert states({"entries": named, "pg_status": status}) == ["scheduled", "scheduled"]
    assert states({"entries": [entry(5, "gloo:all_reduce", retired=True)]}) == ["completed"]


def test_nccl_says_it_itself_and_gives_up_on_calls_that_did_not_end():
    assert states({"entries": [entry(5, retired=True)]}) == ["scheduled"]
    # a communicator ends its calls in their order
    calls = [entry(1), entry(2, state="completed"), entry(3)]
    assert states({"entries": calls}) == ["completed", "completed", "scheduled"]
    others = [entry(1, "gloo:x"), entry(2, "gloo:x", "completed")]
    assert states({"entries": others}) == ["scheduled", "completed"]


@pytest.mark.parametrize("state", ["scheduled", "completed"])
def test_of_calls_made_as_one_the_last_tells_for_all(state):
    parts = [entry(0, f"nccl:recv 0<-{n}", is_p2p=True, p2p_seq_id=6) for n in (1, 2)]
    whole = entry(0, "nccl:coalesced", state, is_p2p=True, p2p_seq_id=6, retired=True)
    other = entry(0, "nccl:recv 0<-1", is_p2p=True, p2p_seq_id=7)
    rows = entries({"entries": [*parts, whole, other]})
    assert [row["state"] for row in rows] == [state] * 3 + ["scheduled"]


def test_members_are_those_of_the_group_of_that_name():
    config = {"": {"ranks": "[0, 1]"}, "7": {"ranks": [4, 5]}, "8": {"ranks": "none"}}
    given = [entry(1), entry(1, process_group=("0", "")), entry(1, process_group=("8", ""))]
    rows = entries({"entries": given, "pg_config": config})
    assert [row.get("ranks") for row in rows] == [[4, 5], [0, 1], None]
    assert everybody({"pg_config": config}) == [0, 1, 4, 5]
    assert everybody({}) == [] and entries({}) == []


def test_what_is_kept_tells_the_oldest_open_calls_and_the_last_of_each_group():
    rows = [{"group": "0", "state": "scheduled", "n": 0}]
    rows += [{"group": "1", "state": "completed", "n": n} for n in (1, 2)]
    rows += [{"group": "0", "state": "completed", "n": n} for n in range(3, 20)]
    assert [row["n"] for row in kept(rows, 3)] == [0, 2, 16, 17, 18, 19]
    assert kept(rows[:3], 3) == rows[:3] and kept([], 3) == []
    many = [{"group": "0", "state": "scheduled", "n": n} for n in range(500)]
    assert [row["n"] for row in kept(many, 2)][:2] == [0, 1] and len(kept(many, 2)) < 200


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps({"entries": [Runs()]}), r"pytest\.outcomes\.\w+ is not plain data"),
        (pickle.dumps({"entries": [entry(1)] * 99})[:60], "ran out|truncated|EOFError"),
        (b"", "EOFError"),
        (b'{"entries": [1', "JSONDecodeError"),
        (pickle.dumps([1, 2]), "it holds list"),
        (pickle.dumps({"entries": 5}), "it holds dict"),
        (b"no dump at all", "Error"),
    ],
)
def test_what_is_no_plain_dump_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        loads(data)


def test_pickles_and_json_hold_the_same():
    dumped = {"version": "2.9", "entries": [{"collective_seq_id": 3}]}
    assert loads(pickle.dumps(dumped)) == loads(json.dumps(dumped).encode()) == dumped
