from pages import edge

from whyhung.verdict import picture

CYCLE = [
    edge("thread A", "train.py:31 f", "lock", "waits for lock 1", ["thread B"]),
    edge("thread B", "train.py:41 g", "lock", "waits for lock 2", ["thread A"]),
]
TIMED = [
    edge("rank 1", "train.py:40 step", "collective", "waits in all_reduce", ["rank 0"]),
    edge("rank 0", "upload.py:12 put", "timer", "sleeps", left_s=9.2),
]
CHAIN = [edge(f"t{n}", "", "lock", f"waits for lock {n}", [f"t{n + 1}"]) for n in range(30)]


def ranks(number, *, but, to):
    return [
        edge(f"rank {r}", "train.py:40 step", "collective", "waits in all_reduce", to(r))
        for r in range(number)
        if r not in but
    ]


def test_a_cycle_comes_round_again():
    assert picture.text(CYCLE) == [
        "thread A, at train.py:31 f",
        "│ waits for lock 1",
        "└─▶ thread B, at train.py:41 g",
        "    │ waits for lock 2",
        "    └─▶ thread A: round again",
    ]


def test_a_timer_tells_how_long_and_who_is_not_observed_is_said():
    assert picture.text(TIMED)[-1].endswith("└─▶ a timer: 9 s left")
    outside = [edge("rank 0", "", "socket", "reads a socket", outside=True)]
    assert picture.text(outside)[-1] == "└─▶ somebody who is not observed"
    assert picture.text([edge("rank 0", "", "lock", "waits")])[-1] == "└─▶ nobody else who was seen"


def test_whoever_waits_for_himself_is_told_so():
    assert picture.text([edge("rank 0", "", "lock", "waits", ["rank 0"])])[-1] == "└─▶ itself"


def test_ranks_that_wait_alike_are_one_node():
    lines = picture.text(ranks(64, but=[3], to=lambda r: ["rank 3"]))
    assert lines[0] == "ranks 0-2, 4-63, at train.py:40 step"
    assert lines[-1] == "└─▶ rank 3" and len(lines) == 3


def test_that_ranks_wait_for_each_other_is_told_only_where_nobody_else_is_missing():
    rest = picture.text(ranks(4, but=[3], to=lambda r: [f"rank {q}" for q in range(4) if q != r]))
    assert rest[2:] == ["└─▶ rank 3"]
    every = picture.text(ranks(3, but=[], to=lambda r: [f"rank {q}" for q in range(3) if q != r]))
    assert every[2:] == ["└─▶ one another"]


def test_who_waits_for_long_lists_of_ranks_is_told_by_arrows():
    edges = ranks(4, but=[2, 3], to=lambda r: ["rank 2", "rank 3"])
    edges[1]["to"] = ["rank 3"]
    edges[0]["text"] += " number 2 for rank 2, rank 3"
    edges[1]["text"] += " number 2 for rank 3"
    lines = picture.text(edges)
    assert lines[:2] == ["ranks 0-1, at train.py:40 step", "│ waits in all_reduce number 2"]
    assert lines[2:] == ["├─▶ rank 2", "└─▶ rank 3"]


def test_a_collective_that_may_still_end_has_no_arrow():
    assert len(picture.text(ranks(1, but=[], to=lambda r: []))) == 2


def test_ranks_in_different_collectives_are_not_taken_together():
    edges = ranks(2, but=[], to=lambda r: [f"rank {1 - r}"])
    edges[1]["text"] = "waits in broadcast"
    assert [node.name for node in picture.picture(edges)[0]] == ["rank 0", "rank 1"]


def test_a_large_graph_is_bounded_and_the_rest_is_counted():
    lines = picture.text(CHAIN)
    assert lines[-1] == "and 19 more" and len(lines) <= 2 * picture.MOST + 1
    assert max(map(len, lines)) <= picture.WIDTH


def test_a_thousand_threads_are_drawn_in_no_more_room():
    edges = [edge(f"thread {n}", "pool.py:3 work", "lock", "waits for a lock", ["thread 0"])
             for n in range(1, 3000)]  # fmt: skip
    assert picture.text(edges) == [
        "thread 1 and 2998 alike, at pool.py:3 work", "│ waits for a lock", "└─▶ thread 0",
    ]  # fmt: skip


def test_what_a_program_is_called_cannot_break_a_picture():
    bad = [edge('<b>"x"\x1b[31m&\x00', "a.py:1 <module>", "lock", "waits\nfor", ["]]>"])]
    lines = picture.text(bad)
    assert len(lines) == 3 and all(map(str.isprintable, lines))


def test_no_edges_make_no_picture():
    assert picture.text([]) == []


def test_numbers_in_a_row_are_a_span():
    assert picture.spans([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
