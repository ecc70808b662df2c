"""The FSDP2 recipe on two ranks trains as one process does, and its checkpoints go to one."""

import fsdp2_entries
import pytest
import torch
from fsdp2_entries import STEPS, made, trained
from processes import only_rank, run_ranks
from tiny_models import tokens

from nsa.recipes import fsdp2

pytestmark = [pytest.mark.processes, pytest.mark.full]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of both ranks."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(2, "fsdp2_entries.py", folder)
    return folder


def seen(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def test_two_ranks_have_the_losses_and_norms_of_one_process(folder):
    alone = trained(*made(), 0, STEPS)
    assert alone[-1][0] < alone[0][0] - 0.3
    for rank in seen(folder):
        torch.testing.assert_close(rank["fp32"][:1], alone[:1], rtol=1e-6, atol=0)
        torch.testing.assert_close(rank["fp32"], alone, rtol=1e-4, atol=0)


def test_in_bf16_they_are_near(folder):
    first, second = (torch.tensor(rank["bf16"])[:, 0] for rank in seen(folder))
    exact = torch.tensor(seen(folder)[0]["fp32"])[:, 0]
    assert torch.equal(first, second) and not torch.equal(first, exact)
    torch.testing.assert_close(first, exact, rtol=0.02, atol=0)


def test_one_process_goes_on_from_the_two_ranks_checkpoint(folder):
    model, optimizer = made()
    with pytest.warns(UserWarning, match="load in a single process"):
        done = fsdp2.load(folder / "fp32", model, optimizer)
    assert done == STEPS - 1
    found = trained(model, optimizer, done, STEPS)
    torch.testing.assert_close(found, seen(folder)[0]["fp32"][done:], rtol=1e-5, atol=0)


def test_a_transformers_model_is_sharded_alike(folder):
    rank = seen(folder)[0]
    if "hf" not in rank:
        pytest.skip("transformers is not installed")
    _, wanted = made()[0](tokens(2)[:, :-1], tokens(2)[:, 1:])
    assert rank["hf"] == pytest.approx(wanted.item(), rel=1e-6)


def test_the_script_goes_on_where_it_ended(folder, monkeypatch, capsys):
    only_rank(monkeypatch, 0)
    losses = fsdp2.main([*fsdp2_entries.SCRIPT, "--steps", "3", "--folder", str(folder / "script")])
    assert len(losses) == 1 and losses[0] < 5.6
    assert capsys.readouterr().out.startswith("step 3: loss ")
