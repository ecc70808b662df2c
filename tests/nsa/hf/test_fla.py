"""A model of flash-linear-attention's NSA is the same model here: held against its definition, and
against fla itself where it is installed."""

import json
import sys
import warnings

import fla_oracle
import pytest
import torch
from fla_oracle import SIZES, drawn
from torch import nn

pytest.importorskip("transformers")

from hf_models import assert_same_weights
from safetensors.torch import save_file
from transformers import AutoConfig

from nsa.hf import NSAConfig, NSAForCausalLM, from_fla, to_fla
from nsa.model.llama import LanguageModel

IDS = torch.randint(97, (1, 120), generator=torch.Generator().manual_seed(5))
EXACT = {"rtol": 0, "atol": 3e-5}  # angles are fp32 here, of up to 350


class Theirs(nn.Module):
    """Stands for a model of fla's: the parts that the conversion reads."""

    def __init__(self, weights, **config):
        super().__init__()
        self.config = type("Config", (), {"to_dict": lambda _: config})()
        self.weights = weights

    def state_dict(self):
        return self.weights


def theirs(seed=0, **changes):
    """(config, weights, the model)."""
    config = SIZES | changes
    weights = drawn(config, seed)
    return config, weights, Theirs(weights, **config).eval()


ONE_B = {"head_dim": 64, "block_counts": 16, "window_size": 128, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 120),
        ({"block_counts": 3, "tie_word_embeddings": True}, 120),
        ({"block_size": 64, "window_size": 128, "num_hidden_layers": 1}, 350),
        pytest.param(ONE_B, 330, id="NSA-1B's sizes"),
    ],
)
def test_a_converted_model_computes_what_its_definition_says(changes, count):
    config, weights, source = theirs(**changes)
    model = from_fla(source, backend="gather")
    ids = torch.randint(97, (1, count), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        found = model(ids).logits[0]
    torch.testing.assert_close(found, fla_oracle.logits(config, weights, ids[0]), **EXACT)


@pytest.mark.parametrize(
    "other",
    [{"select_initial": 0}, {"select_local": 1}, {"window": 23}, {"select_count": 5}],
    ids=lambda other: next(iter(other)),
)
def test_another_rule_would_be_noticed(other):
    _, _, source = theirs()
    with torch.no_grad():
        wanted = from_fla(source, backend="gather")(IDS).logits
        found = from_fla(source, backend="gather", nsa=other)(IDS).logits
    assert (found - wanted).abs().max() > 0.1


def test_each_branch_may_have_a_copy_that_is_trained_apart():
    _, weights, source = theirs()
    one, three = (from_fla(source, backend="gather", shared_kv=s) for s in (True, False))
    torch.testing.assert_close(one(IDS).logits, three(IDS).logits, rtol=0, atol=1e-12)
    three(IDS, labels=IDS).loss.backward()
    layer = three.model.blocks[0].attention
    assert torch.equal(layer.cmp.k_proj.weight, layer.win.k_proj.weight)
    assert not torch.equal(layer.cmp.k_proj.weight.grad, layer.win.k_proj.weight.grad)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    assert weights["model.layers.0.attn.q_proj.weight"].any()  # theirs are their own


def test_a_padded_and_a_cached_sequence_say_what_it_says_alone():
    _, _, source = theirs()
    model = from_fla(source, backend="gather")
    padded = torch.cat([torch.zeros_like(IDS[:, :7]), IDS], 1)
    mask = torch.arange(127)[None] >= 7
    with torch.no_grad():
        alone = model(IDS).logits
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 7:], alone)
        new = model.generate(IDS[:, :90], max_new_tokens=8, do_sample=False)
        assert torch.equal(new[:, 90:], model(new).logits[:, 89:-1].argmax(-1))


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_theirs_comes_and_goes_back(tmp_path, tied):
    config, weights, _ = theirs(tie_word_embeddings=tied, eos_token_id=3)
    names = sorted(weights)
    for part, some in enumerate((names[:5], names[5:])):
        save_file({n: weights[n] for n in some}, tmp_path / f"model-{part}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_fla(tmp_path, max_tokens=500)
    assert not model.training and model.config.eos_token_id == 3
    assert model.config.max_tokens == 500
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    back = from_fla(to_fla(model, tmp_path / "back"))
    told = json.loads((tmp_path / "back/config.json").read_text())
    assert [told[name] for name in config if name in told] == [
        config[name] for name in config if name in told
    ]
    assert_same_weights(back, model)


def test_widths_are_read_off_the_weights_because_configs_were_wrong_about_heads():
    config, weights, _ = theirs()
    del config["head_dim"], config["intermediate_size"]
    model = from_fla(Theirs(weights, **config | {"head_dim": 32}))
    assert (model.config.head_dim, model.config.intermediate_size) == (16, 96)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"qkv_bias": True, "window_size": 0}, {}, "no qkv_bias=True, window_size=0"),
        ({"hidden_act": "powlu"}, {}, "the model has no hidden_act='powlu'"),
        ({"attnres_block_size": 1}, {}, "the model has no attnres_block_size=1"),
        ({"block_counts": None}, {}, "the model has no block_counts=None"),
        ({"block_counts": 2}, {}, "select_count=2 has no room for"),
        ({}, {"gate": "softmax"}, "gate follows from the model; options are"),
    ],
)
def test_what_cannot_be_taken_is_named(changes, options, message):
    config, weights, _ = theirs()
    with pytest.raises(ValueError, match=message):
        from_fla(Theirs(weights, **config | changes), **options)


def test_strangers_and_missing_weights_are_named(tmp_path):
    config, weights, _ = theirs()
    with pytest.raises(ValueError, match="no folder with config"):
        from_fla(tmp_path)
    more = weights | {"model.layers.0.attn.q_proj.bias": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"that NSA here has not: model.*q_proj.bias"):
        from_fla(Theirs(more, **config))
    del weights["model.layers.1.attn_norm.weight"]
    with pytest.raises(ValueError, match=r"has no model\.layers\.1\.attn_norm\.weight"):
        from_fla(Theirs(weights, **config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"nsa\.hf\.from_fla\(folder\) takes such a model"):
        AutoConfig.from_pretrained(tmp_path)
    del config["block_counts"]
    with pytest.raises(ValueError, match="is no NSA of flash-linear-attention"):
        from_fla(Theirs(weights, **config))


def test_a_model_of_another_layout_is_not_written(tmp_path):
    _, _, source = theirs()
    model = from_fla(source, shared_kv=False, nsa={"select_count": 6})
    with pytest.raises(ValueError, match=r"no shared_kv=False, nsa\.select_count=6; it has"):
        to_fla(model, tmp_path / "none")
    shares = from_fla(source).language_model().config.with_(share_selection=2)
    with pytest.raises(ValueError, match=r"no share_selection=2; it has"):
        to_fla(NSAForCausalLM.of(LanguageModel(shares)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def fla(monkeypatch):
    """fla's models on a CPU: its model, its layer and its plain forms of the three branches, with
    torch in the place of the Triton and flash-attn kernels that those call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = pytest.importorskip("fla.models.nsa", reason="flash-linear-attention is missing")
        from fla.layers import nsa as layer
        from fla.modules import mlp
        from fla.ops.nsa import naive
    # Both call their model "nsa", and the last to register is the one.
    AutoConfig.register(NSAConfig.model_type, NSAConfig, exist_ok=True)

    rotary = sys.modules[layer.RotaryEmbedding.__module__]  # which moved

    def turned(x, cos, sin, interleaved=False, *_, **__):
        return rotary.rotary_embedding_ref(x, *(y[: x.shape[1]] for y in (cos, sin)), interleaved)

    def windowed(q, k, v, causal, window_size):
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (back >= 0) & (back <= window_size[0])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return o.transpose(1, 2)

    monkeypatch.setattr(rotary, "rotary_embedding", turned)
    monkeypatch.setattr(mlp, "swiglu", lambda x, y: nn.functional.silu(x) * y)
    monkeypatch.setattr(layer, "parallel_nsa", naive.naive_nsa)
    monkeypatch.setattr(naive, "flash_attn_func", windowed)
    monkeypatch.setattr(
        naive,
        "mean_pooling",
        lambda x, size, _=None: torch.stack([part.mean(1) for part in x.split(size, 1)], 1),
    )
    return models


@pytest.mark.parametrize("changes", [{}, {"block_size": 64, "num_hidden_layers": 1}], ids=str)
def test_it_computes_what_fla_computes(fla, changes, tmp_path):
    config = SIZES | changes | {"fuse_norm": False, "fuse_swiglu": False, "use_cache": False}
    made = fla.NSAForCausalLM(fla.NSAConfig(**config)).eval()
    made.load_state_dict(drawn(config))
    ids = IDS if not changes else IDS.repeat(1, 3)[:, :330]
    with torch.no_grad():
        wanted = made.float()(ids, use_cache=False).logits
        found = from_fla(made, backend="gather")(ids).logits
    assert wanted.std() > 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5)
    made.save_pretrained(tmp_path)
    again = from_fla(tmp_path, backend="gather")
    assert_same_weights(again, from_fla(made))
    back = fla.NSAForCausalLM.from_pretrained(to_fla(again, tmp_path / "back"))
    assert_same_weights(back, made)
