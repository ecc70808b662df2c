"""Which of several ranks is to blame: whose own the cause is, not who noticed first."""

import json

import pytest

from whyhung.process.ranks import _rows
from whyhung.process.supervisor import _of_ranks
from whyhung.process.trial import Outcome

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30932"
STORE = "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed."


def ended(folder, raised=(), codes=(), left=(), cut=None, status="error"):
    """(rank, End) of three ranks: {rank: (message, time)}, {rank: exit code}, who returned."""
    for rank, (message, time) in dict(raised).items():
        said = {"status": "error", "message": message, "traceback": "", "time": time}
        (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    for rank in left:
        said = {"status": "ok", "result": {}}
        (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    exits = {"codes": dict(codes), "first": next(iter(codes), None)}
    (folder / "exits.json").write_text(json.dumps(exits))
    result = None if status == "timeout" else {"late": None, "stderr": ""}
    rows = _rows(Outcome(status, result, 9.0, "cut", 1), 3, folder, cut)
    return [row["rank"] for row in rows if row["first"]], _of_ranks(rows, killed=False)


@pytest.mark.parametrize(
    ("case", "first", "kind"),
    [
        # an own exception after others lost the connection that it closed
        ({"raised": {0: (f"RuntimeError: {LOST}", 1.0), 2: ("KeyError: 'x'", 1.5)}}, 2, "KeyError"),
        ({"raised": {0: (STORE, 1.0)}, "codes": {0: 1, 1: -9}}, 1, "SIGKILL"),
        ({"raised": {0: (STORE, 1.0)}, "codes": {0: 1, 2: 7}}, 2, ""),
        # a rank that torchrun killed because it stood still is no cause
        ({"raised": {1: ("ValueError: no", 2.0)}, "codes": {1: 1, 0: -15}}, 1, "ValueError"),
        # everybody lost somebody: whoever did first
        ({"raised": {r: (STORE, 9.0 - r) for r in range(3)}}, 2, "DistNetworkError"),
    ],
)
def test_a_rank_that_lost_another_is_a_witness_and_the_other_is_the_first(
    tmp_path, case, first, kind
):
    found, end = ended(tmp_path, **case)
    assert (found, end.first_rank, end.type) == ([first], first, kind)


def test_the_abort_of_a_watchdog_is_a_witness_too(tmp_path):
    logs = tmp_path / "logs" / "a" / "b" / "0"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("terminate called after throwing: remote process exited")
    found, end = ended(tmp_path, {1: ("ValueError: no", 2.0)}, {0: -6, 1: 1})
    assert (found, end.type) == ([1], "ValueError")
    (logs / "stderr.log").write_text("double free or corruption")
    found, end = ended(tmp_path, {1: ("ValueError: no", 2.0)}, {0: -6, 1: 1})
    assert (found, end.type) == ([0], "SIGABRT")


def test_where_only_witnesses_speak_nobody_is_first_and_who_left_is_named(tmp_path):
    found, end = ended(tmp_path, {0: (STORE, 1.0)}, {0: 1, 2: -15}, left=[1])
    assert not found and end.first_rank is None and end.type == "DistNetworkError"
    assert end.message.endswith("rank 1 had returned; rank 2 was ended before it could say why")
    found, end = ended(tmp_path, {2: (STORE, 1.0)}, {0: -15, 2: 1}, left=[1])
    assert not found and end.type == "DistNetworkError"


def test_a_network_of_the_users_own_is_a_cause(tmp_path):
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer"
    found, end = ended(tmp_path, {0: (f"RuntimeError: {LOST}", 1.0), 1: (reset, 2.0)})
    assert (found, end.type) == ([1], "ConnectionResetError")


def test_what_ranks_say_as_their_trial_is_ended_is_no_failure_of_theirs(tmp_path):
    found, end = ended(tmp_path, {1: (STORE, 20.0)}, cut=10.0, status="timeout")
    assert not found and end.how == "stopped by the supervisor"
    found, end = ended(tmp_path, {1: ("KeyError: 'x'", 9.0)}, cut=10.0, status="timeout")
    assert found == [1] and (end.how, end.type) == ("exception", "KeyError")
