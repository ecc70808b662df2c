"""A sequence on several ranks has the output and gradients of one process; bad input ends it."""

import subprocess
import sys

import pytest
import torch
from places import SUPPORT
from processes import environment_with_package, run_ranks


def ranks_said(count, folder, *arguments, left=None):
    """Run an entry of cp_entries.py; its result on each rank, or on the first `left` of them."""
    run_ranks(count, "cp_entries.py", folder, *arguments)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(left or count)]


def check_equal(ranks):
    for found in ranks:
        for case, distances in found.items():
            assert "o" in distances and max(distances.values()) <= 1e-12, (case, distances)
        for how in ("ulysses", "pooled", "gathered"):
            assert any(how in case for case in found), f"no case by {how}"


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_equal_the_definition_in_fp64(tmp_path):
    """Forward and every gradient, of 1, 2 and 4 ranks, both methods, packed documents included."""
    check_equal(ranks_said(4, tmp_path, "cases", 0, 24))


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_the_definition_in_fp64_over_200_drawn_cases(tmp_path, count):
    ranks = ranks_said(count, tmp_path, "cases", 1000 * count, 200)
    assert len(ranks[0]) >= 200
    check_equal(ranks)


@pytest.mark.processes
@pytest.mark.slow
def test_the_backend_that_attends_also_compresses(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for found in ranks_said(2, tmp_path, "interpreted"):
        assert found.pop("calls")["compress"] == 2 * len(found)  # once a chunk
        for case, distances in found.items():
            assert max(distances.values()) <= 2e-5, (case, distances)


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_leaves_nothing_for_the_garbage_collector(tmp_path):
    """Cycles of the graph and its collectives held each layer's input until they were found."""
    for said in ranks_said(2, tmp_path, "frees"):
        for how, held in said.items():
            assert held[2] - held[1] < 1024, (how, held)


EQUAL = "need equal sizes and options, and "
BAD = {
    "other lengths": EQUAL + "q is [1, 16, 4, 16] torch.float64 on rank 0 and [1, 18, 4, 16]",
    "an odd chunk": "15 rows on a rank are not a head and a tail chunk",
    "heads": "each of 2 ranks as many of the HKV=3 KV heads, which cannot be; 1, 3 rank(s)",
    "heads at once": "heads_at_once=2 does not divide HKV=3 KV heads; 1, 3 would",
    "borders": "cu_seqlens=[0, 16] must rise from 0 to T=32",
    "other borders": EQUAL + "cu_seqlens is (0, 8, 32) on rank 0 and (0, 9, 32) on rank 1",
    "other options": EQUAL + "scale is 0.5 on rank 0 and 1.5 on rank 1",
    "other tokens": EQUAL + "tokens is [1, 16] torch.int64 on rank 0 and [1, 18]",
    "too many tokens": "64 tokens are more than max_tokens=60",
    "a mesh": "needs a DeviceMesh with a dimension 'cp', got dimensions None",
}


@pytest.mark.processes
@pytest.mark.full
def test_bad_input_of_one_rank_is_an_error_on_each_and_none_is_left_waiting(tmp_path):
    ranks = ranks_said(2, tmp_path, "bad")
    for said in ranks:
        assert said.pop("good after all") == "no error"
        for name, message in BAD.items():
            assert said[name].startswith("ValueError: ") and message in said[name], name
    theirs = [said["a dtype of one rank"] for said in ranks]
    assert theirs[0].startswith("ValueError: rank 1 of 2 refused its inputs: k['win'] is torch.fl")
    assert theirs[1].startswith("ValueError: k['win'] is torch.float32 and q is torch.float64")
    assert set(ranks[0]) == {*BAD, "a dtype of one rank"}


@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_ends_in_the_middle_is_an_error_on_the_others(tmp_path):
    (said,) = ranks_said(2, tmp_path, "dies", left=1)
    assert said.startswith("RuntimeError: context parallelism: rank 0 of 2 failed while ")
    assert "another of ranks [0, 1] has ended" in said


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_exchange_that_waits_for_it(tmp_path):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*ranks, str(SUPPORT / "cp_entries.py"), str(tmp_path), "hangs"]
    watch = [sys.executable, "-m", "whyhung", "watch", "--folder", str(tmp_path / "seen")]
    ends = ["--on-stall", "kill", "--on-hang", "kill", "--limit", "240s"]
    options = {"env": environment_with_package(), "capture_output": True, "text": True}
    ended = subprocess.run([*watch, *ends, "--", *program], timeout=300, **options)
    (said,) = [line for line in ended.stderr.splitlines() if "waits in" in line]
    assert "rank 0 waits in all_gather" in said and "collectives.py" in said
    assert "for rank 1, which is in cp_entries.py" in said and "wait_for_an_answer" in said
