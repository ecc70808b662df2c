"""generate gives the same tokens with a cache and without, in each mode."""

import copy

import pytest
import torch
from tiny_models import tokens

pytest.importorskip("transformers")

from hf_models import made

from nsa.hf import GenerationCache
from nsa.hf.model import KEY

IDS = tokens(3, 20, seed=4)
MASK = torch.ones_like(IDS)
MASK[1, :7] = MASK[2, :15] = 0  # l - 1 tokens and fewer are among the first steps


@pytest.fixture(scope="module")
def model():
    return made(seed=1, layers=1, phi="mlp", compress_rope="after")


def without_a_cache(model, ids, new, **how):
    return model.generate(ids, max_new_tokens=new, use_cache=False, **how)


HOW = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 30, "top_p": 0.95, "temperature": 0.8},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_batch_with_left_padding_goes_on_as_without_a_cache(model, how):
    how = {"attention_mask": MASK, **how}
    torch.manual_seed(0)
    found = model.generate(IDS, max_new_tokens=10, **how)
    torch.manual_seed(0)
    assert torch.equal(found, without_a_cache(model, IDS, 10, **how))


def test_padding_changes_no_token(model):
    found = model.generate(IDS, attention_mask=MASK, max_new_tokens=10)
    for b, first in enumerate((0, 7, 15)):
        alone = model.generate(IDS[b : b + 1, first:], max_new_tokens=10)
        assert torch.equal(alone[0, 20 - first :], found[b, 20:])


def test_beams_share_the_pages_of_a_paged_cache(model):
    cache = GenerationCache(model.config, 64, page=8)
    how = {"attention_mask": MASK, "num_beams": 3, "max_new_tokens": 10}
    plain = model.generate(IDS, **how)
    assert torch.equal(model.generate(IDS, **{KEY: cache}, **how), plain)
    assert cache.nsa.pages.shared and cache.nsa.shape.page == 8


@pytest.mark.full
@pytest.mark.parametrize("way", ["itself", "another", "lookup"])
def test_assisted_decoding_takes_columns_back(model, way):
    ids, new = IDS[:1].repeat(1, 3), 25  # something to be looked up
    how = {"prompt_lookup_num_tokens": 40, "eos_token_id": 299}
    if way == "lookup":
        new = 45  # the first draft has 40 tokens, none of which stays
    if way != "lookup":
        other = model if way == "itself" else made(seed=9, layers=1)
        how = {"assistant_model": copy.deepcopy(other)}
    found = model.generate(ids, max_new_tokens=new, do_sample=False, **how)
    wanted = without_a_cache(model, ids, new, do_sample=False)
    # transformers 5.0 lets a draft that is right go beyond max_new_tokens
    assert found.shape[1] >= wanted.shape[1]
    assert torch.equal(found[:, : wanted.shape[1]], wanted)


def test_a_prompt_in_pieces_is_the_prompt(model):
    how = {"attention_mask": MASK, "max_new_tokens": 6}
    found = model.generate(IDS, prefill_chunk_size=7, **how)
    assert torch.equal(found, model.generate(IDS, **how))


def test_a_copied_cache_serves_several_ends_of_one_beginning(model):
    cache = GenerationCache(model.config)
    with torch.no_grad():
        model(IDS[:1, :12], cache=cache)
    for end in IDS[:, 12:]:
        ids = torch.cat([IDS[0, :12], end])[None]
        found = model.generate(ids, **{KEY: copy.deepcopy(cache)}, max_new_tokens=5)
        assert torch.equal(found, without_a_cache(model, ids, 5))
    assert cache.columns == 12 and cache.nsa.lengths.tolist() == [12]


@pytest.mark.parametrize("page", [None, 8])
def test_a_loop_of_ones_own_with_a_mask_and_a_cache_that_grows(page):
    model = made(phi="linear")
    ids, mask = tokens(3, 90), torch.ones(3, 90, dtype=torch.int64)
    mask[0, :9], mask[1, 40:47], mask[2, 60] = 0, 0, 0  # holes too
    cache = GenerationCache(model.config, capacity=8, page=page)
    with torch.no_grad():
        found, start = [], 0
        for new in (9, 1, 5, 32, 1, 1, 12, 1, 28):
            part = slice(start, start + new)
            seen = mask[:, part] if start % 2 else mask[:, : part.stop]  # either will do
            found.append(model(ids[:, part], attention_mask=seen, cache=cache).logits)
            start += new
        plain = model(ids, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], plain[real])
    assert cache.get_seq_length() == 90 and cache.nsa.lengths.tolist() == [81, 83, 89]
    assert torch.equal(cache.real, real) and cache.nsa.shape.capacity >= 89


def test_the_cache_is_cut_chosen_from_and_emptied(model):
    cache = GenerationCache(model.config)
    with torch.no_grad():
        model(IDS, attention_mask=MASK, cache=cache)
        ids = torch.tensor([[5, 6, 7]]).expand(3, 3)
        model(ids, cache=cache)
        cache.crop(-2)
        assert cache.columns == 21 and cache.nsa.lengths.tolist() == [21, 14, 6]
        cache.crop(0)
        cache.crop(20)  # as older versions call it: so many stay
        assert cache.nsa.lengths.tolist() == [20, 13, 5]
        cache.batch_select_indices([2, 0])
        cache.batch_repeat_interleave(2)
        found = model(ids[[0, 0, 0, 0]], cache=cache).logits
        for b, (row, first) in enumerate([(2, 15), (2, 15), (0, 0), (0, 0)]):
            whole = torch.cat([IDS[row, first:], ids[0]])[None]
            torch.testing.assert_close(found[b], model.language_model()(whole)[0][0, -3:])
    with pytest.raises(ValueError, match="has 23 columns and 24 cannot be removed"):
        cache.crop(-24)
    cache.reset()
    assert cache.columns == 0 and cache.nsa.lengths.tolist() == [0] * 4 and cache.batch_size == 4


def test_columns_taken_back_may_be_padding_also_of_sequences_in_another_order(model):
    cache, ids = GenerationCache(model.config), tokens(2, 12, seed=6)
    mask = torch.ones_like(ids)
    mask[0, 8:11] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-3)
        assert cache.nsa.lengths.tolist() == [9, 8]
        found = model(ids[:, :2], cache=cache).logits
    for b, (row, kept) in enumerate([(1, 9), (0, 8)]):
        whole = torch.cat([ids[row, :kept], ids[b, :2]])[None]
        torch.testing.assert_close(found[b], model.language_model()(whole)[0][0, -2:])


def test_other_caches_are_refused_and_dense_attention_goes_without(model):
    with pytest.raises(ValueError, match="cache_implementation='static': NSA has a cache of"):
        model.generate(IDS, max_new_tokens=2, cache_implementation="static")
    dense = made(attention="dense", backend="auto")
    found = dense.generate(IDS, max_new_tokens=4)
    ids = IDS
    for _ in range(4):
        new = dense(ids).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, new[:, None]], 1)
    assert torch.equal(found, ids)


def test_what_generate_returns_tells_what_was_read(model):
    how = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(IDS, attention_mask=MASK, max_new_tokens=4, **how)
    assert len(out.logits) == 4 and getattr(out, KEY).nsa.record()["lengths"] == [23, 16, 8]


@pytest.mark.gpu
def test_on_a_gpu_generate_decodes_by_the_kernels():
    model = made(seed=2, backend="auto", head_dim=16).to("cuda", torch.bfloat16)
    ids, mask = IDS.cuda(), MASK.cuda()
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
    )
    plain = model(out.sequences, attention_mask=torch.nn.functional.pad(mask, (0, 12), value=1))
    found = torch.stack(out.logits, 1).float()
    wanted = plain.logits[:, 19:-1].float()
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
