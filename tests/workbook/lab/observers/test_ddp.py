import json

import pytest
from processes import run_ranks
from torch import nn

from workbook.lab.observers.ddp import BucketTrace

pytestmark = pytest.mark.full

PARAMETERS = 64 * 48 + 48 + 48 * 32 + 32 + 32 * 16 + 16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Findings of both ranks, from one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, "bucket_ranks.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def of_step(rows, step):
    return [row for row in rows if row["step"] == step]


def test_the_traced_average_is_ddps_own_to_the_last_bit(ranks):
    assert ranks[0]["traced"] == ranks[0]["plain"] == ranks[1]["plain"] == ranks[1]["traced"]
    assert ranks[0]["accumulated"] == ranks[1]["accumulated plain"]


def test_every_element_is_in_one_bucket_of_each_traced_step(ranks):
    for rank, found in enumerate(ranks):
        assert {row["step"] for row in found["rows"]} == {0, 1}
        for step in (0, 1):
            rows = of_step(found["rows"], step)
            assert sum(row["elements"] for row in rows) == PARAMETERS
            assert [row["index"] for row in rows] == list(range(len(rows)))
            assert [row["is_last"] for row in rows] == [False] * (len(rows) - 1) + [True]
            assert len({name for row in rows for name in row["names"]}) == 6
        for row in found["rows"]:
            assert (row["rank"], row["dtype"]) == (rank, "float64")
            assert row["bytes"] == 8 * row["elements"]
            assert row["ms"] > 0


def test_the_steps_before_and_after_the_rebuilding_are_labelled(ranks):
    rows = ranks[0]["rows"]
    assert {row["buckets"] for row in of_step(rows, 0)} == {"initial"}
    assert {row["buckets"] for row in of_step(rows, 1)} == {"rebuilt"}
    assert len(of_step(rows, 1)) > 1
    first, second = ([row["names"] for row in of_step(rows, step)] for step in (0, 1))
    assert first != second
    flat = [name for names in second for name in names]
    assert flat == [row["name"] for row in ranks[0]["arrivals"]]


def test_where_unused_parameters_are_searched_buckets_are_never_rebuilt(ranks):
    assert set(ranks[0]["branch"]["labels"]) == {"initial"}


def test_an_accumulated_step_has_its_buckets_once(ranks):
    rows = ranks[1]["accumulated rows"]
    assert sum(row["elements"] for row in of_step(rows, 1)) == PARAMETERS
    assert {row["buckets"] for row in of_step(rows, 1)} == {"rebuilt"}


def test_what_the_hook_goes_on_costing_is_said_once(ranks):
    for found in ranks:
        assert found["said"].count("bucket trace: done") == 1
        assert "one more pass over the gradients" in found["said"]


def test_a_second_hook_is_refused_whoever_set_the_first(ranks):
    one = "DDP takes one communication hook only; wrap the model again to trace its buckets"
    assert ranks[0]["second"] == f"{one}: it has _average"
    assert ranks[0]["hooked"] == f"{one}: it has fp16_compress_hook"
    assert ranks[0]["built in"].startswith(one)


def test_long_traces_are_refused(ranks):
    assert "trace at most 8" in ranks[0]["long"]
    assert "name at least one, counted from 0" in ranks[0]["none"]
    assert {row["step"] for row in ranks[0]["accumulated rows"]} == {0, 1}  # 8 were asked for


def test_what_is_not_ddp_has_no_buckets():
    with pytest.raises(ValueError, match="buckets are DDP's; got a Linear"):
        BucketTrace(nn.Linear(2, 2))


NAMES = "state", "arrivals", "order"


def states(rows, name="state"):
    return {row["name"]: row[name] for row in rows}


def test_ranks_that_train_alike_see_gradients_and_modules_alike(ranks):
    first, second = ([states(found["arrivals"], name) for name in NAMES] for found in ranks)
    assert first == second and [*first[0].values()] == ["arrived"] * 6
    assert ranks[0]["modules"] == ranks[1]["modules"] == ["2", "1", "0"]


def test_a_branch_that_one_rank_takes_shows_only_in_the_comparison(ranks):
    first, second = (found["branch"] for found in ranks)
    assert second["gradient_there"]  # the other rank's, averaged: nothing looks wrong here
    assert second["unreachable"] == ["b.weight", "b.bias"]
    assert first["unreachable"] == []
    one, other = (states(found["arrivals"]) for found in (first, second))
    apart = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
    assert apart == dict.fromkeys(("b.weight", "b.bias"), ("arrived", "missing"))
