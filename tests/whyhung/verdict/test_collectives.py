"""Collectives that do not match are told with each rank's operation and sizes."""

from whyhung.verdict.collectives import unlike
from whyhung.verdict.flights import first_mismatch as mismatch
from whyhung.watch.evidence import End, Evidence


def call(seq, op="gloo:all_reduce", sizes=((3,),), at="train.py:12 step", group="0"):
    frames = [at] if at else []
    return {"seq": seq, "op": op, "sizes": [list(x) for x in sizes], "frames": frames,
            "group": group, "state": "started"}  # fmt: skip


def test_other_sizes_or_another_operation_are_told_of_every_rank():
    flights = {0: [call(1), call(2)], 1: [call(1), call(2, sizes=[(5,)], at="train.py:14 step")]}
    assert mismatch(flights) == (
        "collective number 2 does not match: rank 0 calls all_reduce of [3] at train.py:12 step, "
        "rank 1 all_reduce of [5] at train.py:14 step"
    )
    flights[1] = [call(1), call(2, op="gloo:broadcast", at="", group="0")]
    assert mismatch(flights).endswith("rank 1 broadcast of [3]")


def test_what_matches_and_what_may_differ_is_not_told():
    assert not mismatch({0: [call(1), call(2)], 1: [call(1)]})
    assert not mismatch({0: [call(1, "nccl:recv 0<-1")], 1: [call(1, "nccl:all_reduce")]})
    assert not mismatch({r: [call(1, "gloo:all_to_all", sizes=[(r + 1,)])] for r in range(2)})
    assert not mismatch({0: [call(1)], 1: [call(1, sizes=[(7,)], group="1")]})
    assert not mismatch({})


def test_the_bytes_that_gloo_names_are_told_with_what_the_others_called_last():
    said = "enforce fail at pair.cc:461 op.preamble.length <= op.nbytes. 5000 vs 4"
    end = End("signal", type="SIGABRT", traceback=said, first_rank=0)
    found = unlike(Evidence(end=end, flights={1: [call(3), call(4, sizes=[(5000,)], at="")]}))
    assert found == [
        "rank 0 was sent 5,000 bytes where it has room for 4: sizes differ",
        "the last recorded: rank 1 all_reduce of [5000]",
    ]
    assert unlike(Evidence(end=End("exception", type="KeyError"))) == []
