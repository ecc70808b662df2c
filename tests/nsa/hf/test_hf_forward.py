"""A LanguageModel says the same as a transformers model: masks, labels, caches, files."""

import json
import subprocess
import sys

import pytest
import torch
from processes import told_by
from tiny_models import tiny, tokens

pytest.importorskip("transformers")

from hf_models import assert_same_weights, made
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from nsa.config import NSAConfig as Sizes
from nsa.hf import GenerationCache, NSAConfig, NSAForCausalLM
from nsa.model.llama import LanguageModel

IDS = tokens(3, 30)
LENGTHS = (30, 21, 2)


@pytest.fixture(scope="module")
def model():
    return made(phi="linear")


def padded(side):
    """(ids, mask): sequences of LENGTHS with padding before or behind them, whose ids are none."""
    ids, mask = torch.full_like(IDS, 999), torch.zeros_like(IDS)
    for b, n in enumerate(LENGTHS):
        columns = slice(30 - n, 30) if side == "left" else slice(n)
        ids[b, columns], mask[b, columns] = IDS[b, :n], 1
    return ids, mask


def test_logits_are_those_of_the_model_inside(model):
    with torch.no_grad():
        wanted, _ = model.language_model()(IDS)
        whole = model(IDS)
        assert torch.equal(model(IDS, use_cache=False).logits, wanted)
        assert torch.equal(model(IDS, use_cache=False, logits_to_keep=2).logits, wanted[:, -2:])
        kept = model(IDS, use_cache=False, logits_to_keep=torch.tensor([0, 7])).logits
        torch.testing.assert_close(kept, wanted[:, [0, 7]])  # to the last bits
        assert model(IDS, use_cache=False, return_dict=False)[0].shape == wanted.shape
    # Without a gradient a cache is made and returned, as in other models.
    torch.testing.assert_close(whole.logits, wanted)
    assert whole.past_key_values.get_seq_length() == 30
    assert model(IDS).past_key_values is None and model(IDS).logits.requires_grad


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cached", [False, True])
def test_padding_is_as_if_it_were_not_there(model, side, cached):
    ids, mask = padded(side)
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=cached).logits
        for b, n in enumerate(LENGTHS):
            alone, _ = model.language_model()(IDS[b : b + 1, :n])
            torch.testing.assert_close(found[b][mask[b].bool()], alone[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_loss_counts_each_token_that_another_stands_before(model, side):
    ids, mask = padded(side)
    losses, count = [], 0
    for b, n in enumerate(LENGTHS):
        _, loss = model.language_model()(IDS[b : b + 1, : n - 1], IDS[b : b + 1, 1:n])
        losses.append(loss * (n - 1))
        count += n - 1
    found = model(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(found.loss, sum(losses) / count, check_dtype=False)
    assert found.past_key_values is None
    by_count = model(ids, attention_mask=mask, labels=ids, num_items_in_batch=torch.tensor(7)).loss
    torch.testing.assert_close(by_count, sum(losses) / 7, check_dtype=False)


@pytest.mark.full
@pytest.mark.processes
def test_compiled_for_growing_lengths_with_padding_it_is_two_graphs():
    found = told_by("traced_padding.py", interpreted=True)
    assert found["graphs"] == 2 and found["error"] < 1e-5


def test_packed_sequences_do_not_see_each_other(model):
    row, cu = torch.cat([IDS[0], IDS[1, :11]])[None], torch.tensor([0, 30, 41], dtype=torch.int32)
    found = model(row, cu_seq_lens_q=cu, position_ids=torch.arange(41)[None]).logits
    torch.testing.assert_close(found[:, 30:], model.language_model()(IDS[1:2, :11])[0])


def test_recomputed_blocks_have_the_same_gradients(model):
    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    again, enabled = gradients(), model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert enabled and not model.is_gradient_checkpointing
    torch.testing.assert_close(again, plain)


def test_a_file_brings_the_same_model_back(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, backend="masked")
    assert type(again) is NSAForCausalLM and again.dtype == torch.float64
    assert again.model.sizes == model.model.sizes.with_(backend="masked")
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_config() == model.model.sizes and config.pad_token_id == 256
    assert_same_weights(again, model)


def test_what_a_file_lacks_is_drawn_and_the_rest_stays(model, tmp_path):
    lacking = ("gate2.weight", "phi_key.weight1", "blocks.1.norm1.weight", "lm_head.weight")
    kept = {k: v * 0 + 3 for k, v in model.state_dict().items() if not k.endswith(lacking)}
    model.save_pretrained(tmp_path, state_dict=dict(kept))
    found, told = NSAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    torch.manual_seed(0)
    drawn = LanguageModel(model.model.sizes)  # their spread is to be like this
    assert set(told["missing_keys"]) == set(model.state_dict()) - set(kept)
    for name, weight in found.state_dict().items():
        if name in kept:
            assert bool((weight == 3).all())
        else:
            like = drawn.get_parameter(
                name.removeprefix("model.").replace("lm_head", "head")
            ).double()
            assert (weight.mean() - like.mean()).abs() < 0.02
            assert like.std() * 0.7 <= weight.std() <= like.std() * 1.4


def test_a_tied_head_is_the_embedding_also_in_a_file(tmp_path):
    tied = NSAForCausalLM(NSAConfig.of(tiny(), tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    again = NSAForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.model.embed_tokens.weight, tied.lm_head.weight)


def test_a_larger_vocabulary_is_known_inside():
    model = NSAForCausalLM(NSAConfig.of(tiny()))
    model.resize_token_embeddings(260, mean_resizing=False)
    assert model.config.vocab_size == model.model.sizes.vocab == 260
    assert model(torch.full((1, 3), 259)).logits.shape == (1, 3, 260)


def test_a_config_takes_names_of_both_kinds_and_says_what_is_wrong():
    config = NSAConfig(hidden_size=64, num_hidden_layers=3, nsa={"window": 100}, backend="gather")
    model = config.model_config()
    assert (model.dim, model.layers, model.nsa) == (64, 3, Sizes(window=100))
    assert config.hidden_size == config.dim == 64 and config.use_cache
    assert NSAConfig(nsa=Sizes(window=7)).model_config().nsa.window == 7
    assert NSAConfig().model_config().layers == 12
    stored = json.loads(NSAConfig().to_json_string())  # the defaults too
    assert set(NSAConfig().model_config().to_dict()) < set(stored)
    with pytest.raises(ValueError, match="kv_heads=5"):
        NSAConfig(num_key_value_heads=5)
    with pytest.raises(ValueError, match=r"no field nsa.windw"):
        NSAConfig(nsa={"windw": 3})


def test_what_does_not_fit_is_refused(model):
    cache = GenerationCache(model.config)
    model(IDS[:2, :4], cache=cache, use_cache=True)
    mask = torch.ones_like(IDS)
    cases = [
        ({"input_embeds": 1}, TypeError, "takes no input_embeds"),
        ({"inputs_embeds": torch.ones(1)}, ValueError, "one of input_ids and inputs_embeds"),
        ({"output_attentions": True}, ValueError, "there is no T x T matrix"),
        ({"is_causal": False}, ValueError, "NSA is causal"),
        ({"cache": DynamicCache()}, ValueError, "DynamicCache cannot hold what NSA keeps"),
        ({"cache": cache}, ValueError, "of 3 sequences, the cache of 2"),
        ({"cache": GenerationCache(model.config), "labels": IDS}, ValueError, "no labels"),
        ({"attention_mask": mask[:, 1:]}, ValueError, r"shape \(3, 29\) and must be"),
        ({"attention_mask": mask[:, None]}, ValueError, "0 where there is no token"),
        ({"attention_mask": torch.ones(3, 1, 30, 30)}, ValueError, "a mask of queries by keys"),
        ({"position_ids": torch.arange(30)[None] + 1}, ValueError, "position_ids differ"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            model(IDS, **options)
    assert cache.columns == 4 and cache.nsa.lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="attention='dense' has no cache"):
        GenerationCache(tiny(attention="dense", backend="auto"))
    model(IDS, position_ids=torch.arange(30)[None])  # as they are


OLD = "import sys, types; sys.modules['transformers'] = made = types.ModuleType('transformers'); "
OLD += "made.__version__ = '4.57.6'; made.AutoConfig = made.AutoModelForCausalLM = None; "


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("import sys; sys.modules['transformers'] = None; ", "is not to be had here"),
        (OLD, "found 4.57.6; pip install 'nsa[hf]'"),
    ],
)
def test_without_a_transformers_that_fits_the_import_says_what_would_do(before, message):
    done = subprocess.run(
        [sys.executable, "-c", f"{before}import nsa.hf"], capture_output=True, text=True
    )
    assert done.returncode and message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError: nsa.hf needs transformers")
