"""Gloo's complaint of bytes that do not fit is told with the calls that were recorded."""

from whyhung.verdict.collectives import unlike
from whyhung.watch.evidence import End, Evidence


def call(seq, size):
    return {"seq": seq, "op": "gloo:all_reduce", "sizes": [[size]], "frames": [], "group": "0",
            "state": "started"}  # fmt: skip


def test_the_bytes_that_gloo_names_are_told_with_what_the_others_called_last():
    said = "enforce fail at pair.cc:461 op.preamble.length <= op.nbytes. 5000 vs 4"
    end = End("signal", type="SIGABRT", traceback=said, first_rank=0)
    found = unlike(Evidence(end=end, flights={1: [call(3, 3), call(4, 5000)]}))
    assert found == [
        "rank 0 was sent 5,000 bytes where it has room for 4: sizes differ",
        "the last recorded: rank 1 all_reduce of [5000]",
    ]
    assert unlike(Evidence(end=End("exception", type="KeyError"))) == []
