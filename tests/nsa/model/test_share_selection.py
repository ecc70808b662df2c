"""Layers that attend to the blocks of an earlier one, against the definition layer by layer."""

import pytest
import torch
from observed import trainer
from tiny_models import TOKENS, gradients, tiny, tokens

from nsa.attention.witness import recording
from nsa.model.cache import NSACache
from nsa.model.llama import LanguageModel
from nsa.model.saving import load_model
from nsa.reference.nsa import nsa

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def model_of(share, layers=5, **changes):
    torch.manual_seed(0)
    model = LanguageModel(tiny(share_selection=share, layers=layers, **changes)).double()
    with torch.no_grad():  # large enough that each layer would select something else
        for block in model.blocks:
            for parameter in block.attention.parameters():
                parameter.normal_(std=0.3)
    return model


def written_out(model, ids, borders=None):
    """(logits, the selection of each layer) by the definition."""
    x, chosen = model.embed_tokens(ids), []
    for index, block in enumerate(model.blocks):
        given = block.attention.arguments(block.norm1(x), cu_seqlens=borders)
        first = index // model.config.share_selection * model.config.share_selection
        blocks = None if first == index else chosen[first]
        found = nsa(**given, blocks=blocks)
        chosen.append(found.blocks)
        x = x + block.attention.o_proj(found.o.flatten(2))
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)), chosen


CHANGES = [
    {"backend": "masked", "shared_kv": True},
    {"backend": "packed", "phi": "mlp", "compress_rope": "after"},
    {"gate": "softmax"},
    {"backend": "sdpa", "sinks": "learned"},
    {"force_branch": "slc"},
    {"strict": True, "checkpoint": "1:4"},
    {"backend": "auto", "kv_heads": 1},
]


@pytest.mark.parametrize(("share", "borders"), [(2, [0, 7, 7, 66, 80]), (3, None)], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_model_and_its_gradients_are_the_definition(changes, share, borders):
    model, ids = model_of(share, **changes), tokens(1, 80)
    borders = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    (got, _), (want, chosen) = model(ids, cu_seqlens=borders), written_out(model, ids, borders)
    torch.testing.assert_close(got, want, **EXACT)
    assert not torch.equal(chosen[0], chosen[share]), "another layer would select the same"
    of, leaves = torch.randn_like(want), list(model.parameters())
    grads = (torch.autograd.grad(o, leaves, of, materialize_grads=True) for o in (got, want))
    for (name, _), g, w in zip(model.named_parameters(), *grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_where_all_blocks_are_selected_sharing_changes_nothing():
    few, many = tokens(1, 32), tokens(1, 40)  # 4 blocks of 8 are selected
    plain, shared = model_of(1), model_of(2)
    torch.testing.assert_close(shared(few)[0], plain(few)[0], **EXACT)
    assert not torch.allclose(shared(many)[0], plain(many)[0], **EXACT)


@pytest.mark.parametrize(("share", "scored"), [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
def test_only_every_kth_layer_scores_and_ranks(share, scored):
    with recording() as seen:
        model_of(share)(tokens())
    paths = seen.record()["paths"]
    assert (sum(paths["score"].values()), sum(paths["slc"].values())) == (scored, 5)


@pytest.mark.parametrize("text", ["all", "0:1", "1:3", "3:"])
def test_recomputed_layers_use_the_blocks_of_the_forward(text):
    """The gradients have the same bits, and a layer that selects none scores none again either."""
    off = gradients(model_of(2))
    with recording() as seen:
        on = gradients(model_of(2, checkpoint=text))
    assert off.keys() == on.keys()
    assert all(torch.equal(off[name], on[name]) for name in off)
    again = model_of(2).recompute(text)
    assert sum(seen.record()["paths"]["score"].values()) == 3 + sum(
        index % 2 == 0 for index in again
    )


@pytest.mark.parametrize("decode", ["auto", "gather", "masked", "reference", "prefix"])
@pytest.mark.parametrize(
    ("changes", "page"), [({"force_branch": "slc"}, None), ({"sinks": "learned"}, 8)], ids=str
)
@torch.no_grad()
def test_logits_from_a_cache_are_those_of_the_whole(changes, page, decode):
    """A long prompt, then pieces that are shorter and longer than the slack."""
    model, ids = model_of(2, layers=3, **changes), tokens(2)
    cache = NSACache(model.config, 2, 64, dtype=torch.float64, page=page, backend=decode, slack=4)
    found = [model(part, cache=cache)[0] for part in ids.split([19, 1, 1, 7, 3, 17], 1)]
    torch.testing.assert_close(torch.cat(found, 1), model(ids)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("decode", ["auto", "gather", "masked", "reference", "prefix"])
@torch.no_grad()
def test_sequences_of_several_lengths_share_within_each(decode):
    model, ids = model_of(2, layers=2), tokens(3)
    cache = NSACache(model.config, 3, 64, dtype=torch.float64, backend=decode)
    lengths = torch.tensor([TOKENS, 20, 31])
    for first in range(0, TOKENS, 12):
        counts = (lengths - first).clamp(0, 12)
        found = model(ids[:, first : first + 12], cache=cache, counts=counts)[0]
        for b, count in enumerate(counts.tolist()):
            whole = model(ids[b : b + 1, : int(lengths[b])])[0][:, first : first + count]
            torch.testing.assert_close(found[b : b + 1, :count], whole, rtol=0, atol=1e-10)


def test_a_cache_of_a_model_that_shares_otherwise_is_refused():
    model = model_of(2)
    with pytest.raises(ValueError, match="share_selection: 2, 1"):
        model(tokens(), cache=NSACache(tiny(layers=5), 1, 64, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_selection": 0}, "share_selection=0 must be at least 1"),
        ({"share_selection": "two"}, "share_selection"),
        ({"share_selection": 2, "attention": "dense", "backend": "auto"}, "with attention='dense'"),
        ({"share_selection": 2, "force_branch": "win"}, "with force_branch='win' no layer selects"),
        ({"share_selection": 3, "force_branch": "cmp"}, "share_selection=1 would do"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tiny(**changes)


def test_a_checkpoint_goes_on_with_the_share_that_it_was_trained_with(tmp_path):
    first = trainer(config=tiny(share_selection=2))
    first.run(1)
    first.save(tmp_path / "a.pt")
    other = LanguageModel(tiny(share_selection=2))
    other.load_state_dict(first.model.state_dict())
    model = load_model(tmp_path / "a.pt")
    assert model.config.share_selection == 2
    assert torch.equal(model(tokens())[0], other(tokens())[0])
