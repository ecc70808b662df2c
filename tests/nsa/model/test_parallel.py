"""Two ranks train as one process does: DDP and FSDP2, accumulated, checkpointed, loaded again."""

import socket
from unittest.mock import Mock

import pytest
import rank_entries
import torch
from processes import free_port, only_rank, run_ranks
from tiny_models import tiny

from nsa.model import parallel
from nsa.model.llama import LanguageModel
from nsa.model.parallel import SINGLE, Parallel


def two_ranks(folder, backend):
    """Records of both ranks."""
    run_ranks(2, "rank_entries.py", folder, backend)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpus2)])
def ranks(request, tmp_path_factory):
    """(what both ranks saw, the device on which one process is held against them)."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    return two_ranks(tmp_path_factory.mktemp("ranks"), backend), request.param


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("name", rank_entries.WAYS)
def test_two_ranks_train_and_are_stored_as_one_process_is(ranks, name):
    seen, device = ranks
    _, _, changes = rank_entries.WAYS[name]
    one = rank_entries.train(Parallel(device=device), 1, changes)
    # the first step's: AdamW would then enlarge the rounding of gradients near 0
    for rank in seen:
        torch.testing.assert_close(rank[name]["losses"], one["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(rank[name]["norms"], one["norms"], rtol=1e-5, atol=0)
        mine, whole = rank[name]["gradients"][0], one["gradients"][0]
        assert mine.keys() == whole.keys()
        for parameter, gradient in whole.items():
            assert (mine[parameter] - gradient).norm() <= 1e-6 * gradient.norm(), parameter
    state = seen[0][name]["state"]
    assert seen[1][name]["state"] == {}, "the state belongs to rank 0"
    assert state["model"].keys() == one["state"]["model"].keys()
    for parameter, weight in one["state"]["model"].items():
        torch.testing.assert_close(state["model"][parameter], weight.cpu(), rtol=0, atol=1e-4)
    alone = rank_entries.loss_with(Parallel(device=device), 1, changes, state)
    for loaded in (*(rank[name]["loss after"] for rank in seen), one["loss after"]):
        torch.testing.assert_close(loaded, alone, rtol=1e-5, atol=0)


def relative(mine, whole):
    """Distance of gradients from others, in units of their norm, of the furthest parameter."""
    assert mine.keys() == whole.keys()
    return max(float((mine[n] - g).norm() / g.norm()) for n, g in whole.items())


@pytest.mark.processes
@pytest.mark.full
def test_gradients_are_the_same_to_the_bit_whether_they_are_views_of_the_buckets_or_not(ranks):
    for rank in ranks[0]:
        for mine, view in zip(rank["ddp, copied gradients"]["gradients"],
                              rank["ddp"]["gradients"], strict=True):  # fmt: skip
            assert all(torch.equal(mine[name], view[name]) for name in view)


@pytest.mark.processes
@pytest.mark.full
def test_gradients_averaged_in_bf16_are_the_mean_but_for_bf16s_rounding(ranks):
    seen, device = ranks
    one = rank_entries.train(Parallel(device=device), 1, {})["gradients"][0]
    for rank in seen:
        off = relative(rank["bf16 hook"]["gradients"][0], one)
        assert 1e-4 < off < 2**-8  # rounded twice, by up to 2^-9 each; a sum would be off by 1
        assert rank["bf16 hook"]["gradients"][0]["head.weight"].dtype == torch.float32
    assert all(rank["second hook"].startswith("DDP takes one communication hook") for rank in seen)


@pytest.mark.processes
@pytest.mark.full
def test_views_of_the_buckets_save_as_many_bytes_as_there_are_gradients(ranks):
    gradients = sum(p.nbytes for p in LanguageModel(tiny()).parameters())
    for rank in ranks[0]:
        assert rank["held"] == {"view": gradients, "copied": 2 * gradients}


@pytest.mark.processes
@pytest.mark.full
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(ranks):
    assert [rank["overflow"] for rank in ranks[0]] == 2 * [{"kept": True, "scale": 2.0}]


@pytest.mark.processes
@pytest.mark.full
def test_linear_weights_gathered_in_bf16_give_the_bits_that_autocast_gives(ranks):
    for rank in ranks[0]:
        (loss, gradients), *others = rank["gathered"]
        for other, found in others:
            assert torch.equal(other, loss)
            assert all(torch.equal(found[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("finding", [False, True])
def test_ddp_looks_for_unused_parameters_only_where_asked(monkeypatch, finding):
    made = Mock(return_value=torch.nn.Identity())
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", made)
    Parallel("ddp", find_unused_parameters=finding).wrap(torch.nn.Linear(2, 2))
    assert made.call_args.kwargs["find_unused_parameters"] is finding


def test_rows_of_all_ranks_are_the_batch():
    batch = list(range(12))
    taken = [batch[Parallel("ddp", rank, 3).rows(12, 2)] for rank in range(3)]
    assert [row for rows in taken for row in rows] == batch
    assert batch[SINGLE.rows(12)] == batch


@pytest.mark.parametrize(("batch", "accumulate", "near"), [(6, 2, "4 and 8"), (1, 1, "2 and 4")])
def test_a_batch_that_ranks_and_micro_batches_do_not_divide_is_refused(batch, accumulate, near):
    with pytest.raises(ValueError, match=rf"batch={batch} cannot be split over 2 .*can: {near}"):
        Parallel("ddp", 0, 2).rows(batch, accumulate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "dpp"}, "parallel='dpp' is unknown; known are none, ddp, fsdp"),
        ({"kind": "ddp", "backend": "mpi"}, "backend='mpi' is unknown; known are gloo, nccl"),
        (
            {"kind": "ddp", "static_graph": True, "find_unused_parameters": True},
            "static_graph=True alone also trains a model with unused parameters",
        ),
        ({"kind": "fsdp", "static_graph": True}, "are DDP's; parallel='fsdp' has no use"),
        ({"kind": "fsdp", "comm_hook": "bf16"}, "comm_hook: options that are DDP's"),
        ({"kind": "ddp", "fsdp_blocks": 2}, "fsdp_blocks=2: options that are FSDP2's; .*'ddp' has"),
        ({"kind": "none", "fsdp_reshard": False}, "parallel='fsdp' would do"),
        ({"kind": "fsdp", "fsdp_blocks": 0}, "fsdp_blocks=0 must be at least 1 block"),
        ({"kind": "fsdp", "fsdp_gather": "fp16"}, "known are fp32, bf16"),
        ({"kind": "none", "gradient_as_bucket_view": False}, "gradient_as_bucket_view=False: opt"),
        ({"kind": "ddp", "comm_hook": "fp16"}, "comm_hook='fp16' is unknown; known are none, bf16"),
        ({"kind": "ddp", "bucket_mb": 0}, "bucket_mb=0 must be more than 0"),
        ({"kind": "ddp"}, "starts under torchrun, which sets RANK, WORLD_SIZE"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_reason(monkeypatch, options, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        parallel.start(**options)
    assert not torch.distributed.is_initialized()


def test_a_group_that_another_joined_is_used_and_left_open(monkeypatch):
    only_rank(monkeypatch, free_port())
    dist = torch.distributed
    first = parallel.start("ddp", backend="gloo")
    try:
        second = parallel.start("ddp", backend="gloo")
        assert (first.joined, second.joined) == (True, False)
        second.close()
        assert dist.is_initialized()
        monkeypatch.setattr(parallel, "devices", lambda *_: (False, "nccl"))
        with pytest.raises(ValueError, match="meets the others by gloo, not by nccl"):
            parallel.start("ddp", backend="nccl")
    finally:
        first.close()
    assert not dist.is_initialized()


def test_nccl_without_a_gpu_for_each_rank_is_refused():
    many = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=rf"backend='nccl' needs a GPU for each of {many} rank"):
        parallel.devices(many, "nccl")
    with pytest.raises(ValueError, match=rf"device='cuda' needs a GPU for each of {many} rank"):
        parallel.devices(many, device="cuda")
    with pytest.raises(ValueError, match="backend='gloo' runs on CPUs"):
        parallel.devices(2, "nccl", "cpu")
    assert parallel.devices(many) == (False, "gloo")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((1,), (True, "nccl")),
        ((2,), (True, "nccl")),
        ((3,), (False, "gloo")),
        ((2, "gloo"), (True, "gloo")),
        ((2, None, "cpu"), (False, "gloo")),
    ],
)
def test_ranks_are_on_gpus_where_each_has_one(asked, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parallel.devices(*asked) == found


def test_a_port_in_use_is_said(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        only_rank(monkeypatch, port)
        with pytest.raises(ValueError, match=f"port {port} is in use; give torchrun"):
            parallel.start("ddp", backend="gloo", device="cpu", timeout_s=5)


def test_one_process_needs_no_group():
    model = LanguageModel(tiny())
    assert parallel.start("none") is SINGLE
    assert SINGLE.wrap(model) is model
    loss = torch.tensor(2.0)
    assert SINGLE.mean(loss) is loss
    SINGLE.barrier()
    SINGLE.close()
