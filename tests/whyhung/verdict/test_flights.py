"""Analysis of open collectives: the ranks that have enqueued one, and if their calls match."""

import pytest

from whyhung.verdict.collectives import unlike
from whyhung.verdict.flights import first_mismatch, pairs, pending, ranks_said
from whyhung.watch.evidence import End, Evidence


def call(seq, op="nccl:all_reduce", state="completed", sizes=((3,),), group="0", **more):
    given = {"ranks": [0, 1], "desc": "", "dtypes": ["Float"], "frames": [], "id": seq}
    given |= {"out_sizes": [list(size) for size in sizes], "p2p": False}
    return {**given, "seq": seq, "op": op, "state": state, "group": group,
            "sizes": [list(size) for size in sizes], **more}  # fmt: skip


def line(*states, **more):
    """Calls 1, 2, ... of one group by their states' first letters."""
    words = {"c": "completed", "s": "scheduled", "d": "started"}
    return [call(n, state=words[state], **more) for n, state in enumerate(states, 1)]


def wide(flights, members):
    return {rank: [{**row, "ranks": members} for row in rows] for rank, rows in flights.items()}


def one(flights, world=()):
    (found,) = pending(flights, world)
    return found


def test_the_oldest_open_number_is_told_with_who_lacks():
    found = one(wide({0: line(*"cds"), 1: line(*"c"), 3: line(*"cc")}, [0, 1, 2, 3]))
    assert (found.number, found.op, found.members) == (2, "all_reduce", (0, 1, 2, 3))
    assert sorted(found.entries) == [0, 3] and found.entries[0]["state"] == "started"
    assert (found.missing, found.unseen, found.completed) == ((1,), (2,), (3,))
    assert found.started == (0,) and not found.differs
    assert pending({0: line(*"cc"), 1: line(*"c")}) == []


def test_a_rank_that_was_read_and_has_nothing_in_the_group_is_missing():
    found = one({0: line(*"s"), 1: []})
    assert (found.missing, found.unseen) == ((1,), ())
    found = one({0: line(*"s"), 1: line(*"c", group="7")})
    assert (found.group, found.missing) == ("0", (1,))


def test_in_a_dump_of_open_entries_alone_who_begins_later_has_completed():
    flights = {0: [call(n, state="scheduled") for n in (4, 5)], 1: [call(5, state="scheduled")]}
    found = one(flights)
    assert (found.number, found.completed, found.missing) == (4, (1,), ())


def test_of_what_a_recorder_may_have_dropped_nothing_is_said():
    mine = [call(9, state="scheduled", created_ns=50)]
    early = [call(1, group="7", created_ns=40, id=700), call(2, group="7", created_ns=60, id=701)]
    late = [{**row, "created_ns": row["created_ns"] + 20} for row in early]
    begins = [{**row, "id": row["id"] - 700} for row in late]
    assert [p.missing for p in pending({0: mine, 1: early})] == [(1,)]
    assert [(p.missing, p.unseen) for p in pending({0: mine, 1: late})] == [((), (1,))]
    assert [p.missing for p in pending({0: mine, 1: begins})] == [(1,)]
    still = [{**row, "state": "scheduled"} for row in late]  # it keeps open calls alone
    assert [p.missing for p in pending({0: mine, 1: still}) if p.group == "0"] == [(1,)]


def test_members_of_the_group_of_all_are_the_world_where_it_names_none():
    flights = {rank: line(*"s", ranks=None) for rank in (0, 1)}
    assert one(flights).members == (0, 1)
    assert one(flights, range(4)).unseen == (2, 3)
    others = {rank: line(*"s", ranks=None, group="5") for rank in (0, 1)}
    assert one(others, range(4)).members == (0, 1)
    half = {0: line(*"s"), 1: line(*"s", ranks=None)}  # one of two told them
    assert sorted(one(half).entries) == [0, 1]


def test_groups_of_one_name_are_told_apart_by_members_and_library():
    flights = {0: line("s", ranks=[0, 1]), 2: line("s", ranks=[2, 3])}
    assert [(p.members, sorted(p.entries)) for p in pending(flights)] == [
        ((0, 1), [0]),
        ((2, 3), [2]),
    ]
    both = [call(5, "gloo:barrier"), call(2, state="scheduled")]
    found = one({0: both, 1: [call(5, "gloo:barrier"), call(1)]})
    assert (found.number, found.missing) == (2, (1,))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (call(1), call(1, "nccl:broadcast")),
        (call(1), call(1, sizes=[(5,)])),
        (call(1, "nccl:broadcast"), call(1, "nccl:broadcast", sizes=[(4,)])),
        (call(1), call(1, dtypes=["Half"])),
        (call(1, "nccl:all_gather", out_sizes=[[4], [4]]), call(1, "nccl:all_gather")),
        (call(1, "nccl:reduce_scatter"), call(1, "nccl:reduce_scatter", sizes=[(3,), (3,)])),
        (call(1, "nccl:all_to_all"), call(1, "nccl:all_to_all", out_sizes=[[4]])),
        (call(1), call(1, "nccl:all_reduce_barrier", sizes=[(1,)])),
        (call(1, "gloo:reduce"), call(1, "gloo:reduce", sizes=[(4,)])),
    ],
)
def test_calls_that_cannot_meet_differ(mine, theirs):
    mine, theirs = ({**row, "state": "scheduled"} for row in (mine, theirs))
    assert one({0: [mine], 1: [theirs]}).differs
    assert first_mismatch({0: [mine], 1: [theirs]}).startswith("collective number 1 does not match")
    assert not one({0: [mine], 1: [mine]}).differs


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (call(1, sizes=[(2, 3)]), call(1, sizes=[(6,)])),
        (call(1, "nccl:all_gather", sizes=[(1,)], out_sizes=[[1], [5]]),
         call(1, "nccl:all_gather", sizes=[(5,)], out_sizes=[[1], [5]])),
        (call(1, "nccl:reduce_scatter", sizes=[(1,), (5,)], out_sizes=[[1]]),
         call(1, "nccl:reduce_scatter", sizes=[(1,), (5,)], out_sizes=[[5]])),
        (call(1, "gloo:gather", out_sizes=[[3], [3]]), call(1, "gloo:gather", out_sizes=[])),
        (call(1, "gloo:scatter", sizes=[(3,), (3,)]),
         call(1, "gloo:scatter", sizes=[], dtypes=[])),
        (call(1, "nccl:all_to_all", sizes=[(4, 2)], out_sizes=[[5, 2]]),
         call(1, "nccl:all_to_all", sizes=[(6, 2)], out_sizes=[[5, 2]])),
        (call(1), call(1, sizes=[(5,)], group="1")),
        (call(1), call(2, sizes=[(5,)])),
        (call(1, out_sizes=None, dtypes=None), call(1)),
        (call(1, "nccl:recv 0<-1"), call(1, "nccl:all_reduce")),
    ],
)  # fmt: skip
def test_calls_that_may_differ_are_not_told(mine, theirs):
    mine, theirs = ({**row, "state": "scheduled"} for row in (mine, theirs))
    assert not first_mismatch({0: [mine], 1: [theirs]})


def test_an_exchange_whose_members_are_not_all_there_is_not_added_up():
    rows = [call(1, "nccl:all_to_all", state="scheduled", out_sizes=[[4]], ranks=[0, 1, 2])]
    assert not one({0: rows, 1: rows}).differs


def test_the_rare_call_comes_first_and_is_odd():
    flights = {rank: [call(1, ranks=[0, 1, 2, 3])] for rank in range(4)}
    frames = ["/me/train.py:9 step"]
    flights[2] = [call(1, sizes=[(5,)], ranks=[0, 1, 2, 3], frames=frames, state="scheduled")]
    found = one(flights)
    assert found.differs == (
        "rank 2 calls all_reduce of [5] at train.py:9 step, ranks 0, 1 and 3 all_reduce of [3]"
    )
    assert found.odd == (2,)
    two = {0: line("s"), 1: [call(1, dtypes=["Half"])]}
    assert one(two).odd == ()
    assert one(two).differs == "rank 0 calls all_reduce of Float [3], rank 1 all_reduce of Half [3]"


def test_calls_that_were_made_as_one_are_one():
    parts = [call(1, sizes=[(3,)], id=0), call(1, sizes=[(4,)], id=1)]
    parts.append(call(1, "nccl:coalesced", sizes=[], id=2))
    assert pending({0: parts, 1: parts}) == []
    other = [*parts[:1], {**parts[1], "sizes": [[5]]}, {**parts[2], "state": "scheduled"}]
    found = one({0: parts, 1: other})
    assert (found.op, found.completed) == ("all_reduce", (0,))
    assert "rank 1 all_reduce of [3], [5]" in found.differs


def pair(name, number, state="scheduled", **more):
    return call(None, f"nccl:{name}", state, p2p=True, p2p_seq=number, **more)


def test_a_receive_knows_its_sender_and_whether_that_has_sent():
    flights = {
        4: [pair("recv 0<-1", 7, id=5, ranks=[4, 8]), pair("recv 0<-1", 8, id=6, ranks=[4, 8])],
        8: [pair("send 1->0", 3, id=9, ranks=[4, 8])],
    }
    found = pairs(flights)
    told = [(p.rank, p.peer, p.op, p.number, p.matched) for p in found]
    assert told == [(4, 8, "recv", 7, True), (4, 8, "recv", 8, False), (8, 4, "send", 3, True)]
    assert [p.matched for p in pairs({4: flights[4]})] == [None, None]
    assert [p.matched for p in pairs({4: flights[4], 8: []})] == [False, False]


def test_sends_are_counted_from_the_start_where_that_is_recorded():
    sent = [pair("send 0->1", n, "completed", id=n) for n in range(2)]
    taken = [pair("recv 1<-0", n, "completed" if n < 1 else "scheduled", id=n) for n in range(3)]
    assert [p.matched for p in pairs({0: sent, 1: taken})] == [True, False]
    later = [{**row, "id": row["id"] + 70} for row in sent]  # what came before was dropped
    assert [p.matched for p in pairs({0: later, 1: taken})] == [None, None]
    large = [{**row, "sizes": [[4096, 4096]]} for row in taken]  # no buffer takes so much
    assert [p.matched for p in pairs({0: later, 1: large})] == [False, False]


def test_without_names_of_peers_nothing_is_guessed():
    bare = [call(None, "gloo:recv", "scheduled", p2p=True, p2p_seq=1)]
    (found,) = pairs({0: bare, 1: []})
    assert (found.peer, found.matched, found.op) == (None, None, "recv")
    unknown = [pair("recv 0<-1", 1, ranks=None, group="7")]
    assert pairs({0: unknown, 1: []})[0].peer is None
    assert pairs({0: [pair("recv 0<-1", 1, ranks=None)], 1: []})[0].peer == 1


def test_ranks_are_told_in_runs():
    assert ranks_said([3]) == "rank 3"
    assert ranks_said([7, 0, 2, 5, 6, 8]) == "ranks 0, 2 and 5 to 8"
    assert ranks_said([1, 2]) == "ranks 1 and 2"


def test_the_bytes_that_gloo_names_are_told_with_what_the_others_called_last():
    said = "enforce fail at pair.cc:461 op.preamble.length <= op.nbytes. 5000 vs 4"
    end = End("signal", type="SIGABRT", traceback=said, first_rank=0)
    last = call(4, "gloo:all_reduce", "started", [(5000,)])
    assert unlike(Evidence(end=end, flights={1: [call(3, "gloo:all_reduce"), last]})) == [
        "rank 0 was sent 5,000 bytes where it has room for 4: sizes differ",
        "the last recorded: rank 1 all_reduce of [5000]",
    ]
    assert unlike(Evidence(end=End("exception", type="KeyError"))) == []
