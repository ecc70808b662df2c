"""`nsa train --cp`: ranks that share sequences train as one process, and what they refuse."""

import json
import subprocess
import sys

import pytest
from processes import environment_with_package
from train_commands import TINY

from workbook.cli import main as cli
from workbook.lab.estimate.estimate import estimate
from workbook.lab.training import TrainingSpec

CP = ["--cp", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (CP, "cp=2 needs several ranks: parallel='ddp' or 'fsdp' would do"),
        (["--ranks", "3", *CP], "cp=2 does not divide 3 rank(s); cp may be 1, 3"),
        (["--ranks", "2", *CP, "--cuda-graph"], "cuda_graph=True with cp=2"),
        (["--ranks", "2", *CP, "--observe", "stats"], "look at whole sequences, and with --cp 2"),
        (["--ranks", "2", *CP, "--set", "attention=dense"], "'dense' does not share sequences"),
        (["--ranks", "4", "--cp", "4", "--cp-method", "ulysses"], "4 ranks as many of the HKV=2"),
        (["--ranks", "8", "--cp", "8", "--set", "nsa.select_block=64"], "are 2 block(s) of 64"),
    ],
)
def test_bad_input_is_one_clear_line_and_makes_no_run(place, capsys, words, message):
    assert cli.main([*TINY, "--tokens", "128", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(place.iterdir())


@pytest.mark.processes
@pytest.mark.real_starts
@pytest.mark.slow
def test_ranks_that_share_sequences_train_as_one_process_which_resumes_them(place):
    words = ["--ranks", "2", "--parallel", "fsdp", *CP, "--steps", "2", "--into", "two"]
    command = [sys.executable, "-m", "nsa", *TINY, "--tokens", "128", *words]
    options = {"env": environment_with_package(), "capture_output": True, "text": True}
    ended = subprocess.run(command, timeout=280, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((place / "two" / "job.json").read_text())["cp"] == 2
    assert cli.main([*TINY, "--tokens", "128", "--steps", "3", "--into", "one"]) == 0
    assert (
        cli.main([*TINY, "--tokens", "128", "--steps", "3", "--resume", "two", "--into", "more"])
        == 0
    )

    def losses(run):
        lines = (place / run / "losses.csv").read_text().splitlines()[1:]
        return [[float(x) for x in line.split(",")[1:]] for line in lines]  # loss and norm

    for mine, wanted in zip(losses("two") + losses("more"), losses("one"), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-4)


def spec(**changes):
    """One layer, whose activations are most of what it holds."""
    given = {"preset": "step5", "tokens": 256, "backend": "gather", "data": "synthetic"}
    return TrainingSpec(**given | {"batch": 2, "ranks": 2, "parallel": "fsdp"} | changes)


@pytest.mark.full
def test_an_estimate_has_less_for_a_rank_that_shares_a_sequence_with_another():
    """A rank has two rows of 256 tokens, or 128 tokens of two rows and the keys of the others."""
    alone, shared = estimate(spec(batch=4)), estimate(spec(batch=2, cp=2))
    assert shared.allocated < 0.7 * alone.allocated
    weights = [found.by_category["optimizer_state"] for found in (alone, shared)]
    assert weights[0] == weights[1], "FSDP2 shards over both dimensions"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 3}, "cp=3 does not divide 2 rank"),
        ({"cp": 2, "cuda_graph": True}, "cuda_graph=True with cp=2"),
        ({"cp": 2, "tokens": 32}, "32 tokens are 1 block"),
        ({"cp": 2, "attention": "dense", "backend": "sdpa"}, "'dense' does not share sequences"),
    ],
)
def test_a_training_that_cannot_be_shared_is_no_spec(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_a_spec_tells_how_many_ranks_share_a_sequence():
    assert spec(cp=2).told("x", "y").endswith("2 ranks fsdp cp 2")
    assert "cp" not in spec().told("x", "y")
    assert TrainingSpec.from_dict(spec(cp=2).to_dict()) == spec(cp=2)
