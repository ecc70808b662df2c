"""Trainings whose ranks share sequences are those of one process."""

import cp_training
import pytest
import torch
from processes import run_ranks
from tiny_models import tiny, tokens

from nsa.model import parallel
from nsa.model.data import share_of
from nsa.model.llama import LanguageModel
from nsa.model.parallel import SINGLE, Parallel
from nsa.model.train import check_shared
from nsa.model.train_config import TrainConfig
from nsa.parallel.mesh import ContextParallel


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "compiler"), [pytest.param(2, "inductor", marks=pytest.mark.long), (4, "aot_eager")]
)
def test_ranks_that_share_sequences_train_as_one_process_does(tmp_path, count, compiler):
    """Losses, gradients, a loss on other batches, and a checkpoint that one process goes on from;
    four ranks are also two groups of two."""
    run_ranks(count, "cp_training.py", tmp_path, compiler)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(count)]
    for name in cp_training.WAYS:
        one, trainer = cp_training.train(name, SINGLE)
        for seen in (rank[name] for rank in ranks):
            assert seen["losses"] == pytest.approx(one["losses"], rel=1e-6), name
            assert seen["held out"] == pytest.approx(one["held out"], rel=1e-6), name
            assert seen["gradients"].keys() == one["gradients"].keys()
            for parameter, gradient in one["gradients"].items():
                off = (seen["gradients"][parameter] - gradient).norm()
                assert off <= 1e-12 * gradient.norm() + 1e-16, (name, parameter)
            said = ["tokens=57 are padded to 64" in text for text in seen["said"]]
            assert said == [True] * ("padded" in name)
        resumed = cp_training.trainer_of(name, SINGLE)
        resumed.load(tmp_path / f"{name}.pt")
        assert resumed.run(1) == pytest.approx(trainer.run(1), rel=1e-6), name


def test_weights_of_all_ranks_are_those_of_the_scored_targets():
    """A rank without a scored target has weight 0; the mean over ranks of the rest is the loss."""
    targets = torch.full((2, 16), -100)
    targets[:, 13:] = 1
    places = [Parallel("ddp", rank, 4, cp=2) for rank in range(4)]
    shares = [share_of(targets, targets, p, 1, p.rows(2)) for p in places]
    assert [float(share.weights) for share in shares] == [2, 0, 2, 0]
    assert [share.tokens.shape for share in shares] == [(1, 8)] * 4


def test_ranks_of_a_group_have_the_same_rows():
    rows = [Parallel("fsdp", rank, 4, cp=2).rows(6) for rank in range(4)]
    assert rows == [slice(0, 3), slice(0, 3), slice(3, 6), slice(3, 6)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Parallel("ddp", 0, 4, cp=3).rows(4), "cp=3 does not divide 4 .*may be 1, 2, 4"),
        (lambda: Parallel("ddp", 0, 4, cp=2).rows(3), "over 2 group.s. of 2 rank.s. x 1 .*2 and 4"),
        (lambda: parallel.check("none", cp=2), "cp=2 needs several ranks: parallel='ddp' or"),
        (lambda: parallel.check("ddp", cp=0), "cp=0 must be at least 1"),
        (lambda: parallel.check("ddp", cp_method="ring"), "cp_method='ring' is unknown; known are"),
        (lambda: check_shared(TrainConfig(1, 64, cuda_graph=True), 2, 8), "cuda_graph=True with c"),
        (lambda: check_shared(TrainConfig(1, 64), 16, 8), "64 tokens are 8 block.s. of 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_rank_of_a_context_is_the_plain_model():
    model = LanguageModel(tiny())
    _, wanted = model(tokens(), tokens(seed=1))
    model.share_sequences(ContextParallel())
    _, loss = model(tokens(), tokens(seed=1))
    assert torch.equal(loss, wanted)
    _, none = model(tokens(), torch.full_like(tokens(), -100))
    assert none.item() == 0, "a mean of no target would be NaN"
    model.share_sequences(None)
    assert torch.equal(model(tokens(), tokens(seed=1))[1], wanted)


def test_a_model_that_cannot_share_sequences_says_so():
    four = ContextParallel(ranks=4, method="ulysses")
    with pytest.raises(ValueError, match="attention='dense' does not share sequences"):
        LanguageModel(tiny(attention="dense", backend="auto")).share_sequences(four)
    with pytest.raises(ValueError, match="4 ranks as many of the HKV=2 KV heads"):
        LanguageModel(tiny()).share_sequences(four)
