"""The oracle that computes a call's attention once more, in fp64."""

from dataclasses import replace

import pytest
import torch
from cases import TINY, Case, draw
from tiny_models import TOKENS, hidden, tiny, tokens

from nsa.attention import registry, witness
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.reference.nsa import BRANCHES
from workbook.lab.measure.accuracy import AccuracyError
from workbook.lab.oracles.reference import MOST, check_call, check_model


def checked(case, dtype=torch.float32, backend="gather", **changes):
    args, kwargs = draw(case, dtype).arguments()
    return check_call(*args, **(kwargs | changes), backend=backend)


@pytest.mark.parametrize("backend", ["gather", "packed", "sdpa", "masked", "sequential", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_right_passes(backend, dtype):
    assert checked(Case(70, group=2, config=TINY, phi="mlp"), dtype, backend) in registry.names()


def test_packed_sequences_handed_in_blocks_and_single_tokens_pass():
    checked(Case(70, group=2, phi="mlp", packed=(1, 40, 29), compress_rope=True, config=TINY))
    checked(Case(1, config=TINY))
    for branch in BRANCHES:
        checked(Case(40, config=TINY), branches=(branch,))


def planted(monkeypatch, **faults):
    """`gather` whose run(inputs, note) is spoilt: {branch: function of (o, inputs)}."""
    gather = registry.get("gather")

    def run(inputs, note):
        found = gather.run(inputs, note)
        return {b: (faults.get(b, lambda o, _: o)(o, inputs), lse) for b, (o, lse) in found.items()}

    monkeypatch.setitem(registry._loaded, "gather", replace(gather, run=run))


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_sees_the_future_is_named_with_the_query(branch, monkeypatch):
    def leak(o, inputs):  # every query mixes in a little of the value one later
        v = inputs.v[branch].repeat_interleave(inputs.group, 2)
        return o + 0.01 * torch.cat([v[:, 1:], v[:, -1:]], 1)

    planted(monkeypatch, **{branch: leak})
    said = rf"branch '{branch}' at no place named \(backend gather\): the query at position 9 sees "
    with pytest.raises(AccuracyError, match=said + "the future: .* when tokens from 10 on change"):
        checked(Case(40, config=TINY))


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_is_a_little_wrong_is_named(branch, monkeypatch):
    planted(monkeypatch, **{branch: lambda o, inputs: 1.0001 * o})
    with pytest.raises(AccuracyError, match=rf"branch '{branch}' .*: worst error .* > "):
        checked(Case(40, config=TINY))


def test_a_selection_of_its_own_that_is_wrong_is_found(monkeypatch):
    from nsa.attention import branches

    plain = branches.select_blocks

    def last_one_dropped(*args):
        blocks = plain(*args)
        return torch.cat([blocks[..., :-1], torch.full_like(blocks[..., -1:], -1)], -1)

    monkeypatch.setattr(branches, "select_blocks", last_one_dropped)
    with pytest.raises(AccuracyError, match=r"branch 'slc' .* with its own selection: worst error"):
        checked(Case(70, config=TINY))


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_nan_of_each_branch_is_named(branch, monkeypatch):
    def spoilt(o, inputs):
        o = o.clone()
        o[0, 3, 0, 0] = torch.nan
        return o

    planted(monkeypatch, **{branch: spoilt})
    with (
        witness.recording(),  # whoever warned before does not warn again
        pytest.warns(RuntimeWarning, match="not finite"),
        pytest.raises(AccuracyError, match=rf"branch '{branch}' .* 1 values are not finite, of"),
    ):
        checked(Case(40, config=TINY))


def test_what_is_too_large_says_how_many_tokens_would_do():
    q = torch.empty(2, 4096, 4, 8, device="meta")
    k, gates = q[:, :, :2], torch.empty(2, 4096, 4, 3, device="meta")
    would = int((MOST / 8) ** 0.5)
    with pytest.raises(ValueError, match=rf"134,217,728 scores a branch.* {would} tokens would do"):
        check_call(q, k, k, gates, TINY)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_every_layer_of_a_model_is_computed_again_as_it_was_called(dtype):
    model = LanguageModel(tiny(phi="linear", rope_scale=2.0, gate="softmax"))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        found = check_model(model, tokens())
    assert found == {f"blocks.{layer}.attention": "gather" for layer in (0, 1)}
    assert not any(m._forward_hooks for m in model.modules())


def test_the_layer_is_named_and_a_model_without_one_is_refused(monkeypatch):
    planted(monkeypatch, win=lambda o, _: 1.01 * o if witness.place() == "layer 1" else o)
    with pytest.raises(AccuracyError, match=r"branch 'win' at layer 1 \(backend gather\): worst"):
        check_model(LanguageModel(tiny()), tokens())
    with pytest.raises(ValueError, match="no NSAAttention to recompute"):
        check_model(torch.nn.Linear(2, 2), torch.ones(2))
    layer = NSAAttention(tiny(force_branch="cmp"))
    assert check_model(layer, hidden(layer.config, count=TOKENS)) == {"": "gather"}
