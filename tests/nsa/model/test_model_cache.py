"""A model that reads from a cache says what it says of the whole sequence; fp64, to rounding."""

from itertools import product

import pytest
import torch
from model_caches import DTYPE, EXACT, cache_of, continued, model_of, ragged, whole
from tiny_models import TOKENS, hidden, tiny, tokens

from nsa.attention.cache import LayerCache
from nsa.model.cache import NSACache, shape_of
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.model.presets import PRESETS, dense_twin, preset
from nsa.model.reads import keys_read


def check_equal(model, sizes, count=TOKENS, **how):
    ids = tokens(2, count)
    cache = cache_of(model, 2, count, **how)
    torch.testing.assert_close(continued(model, cache, ids, sizes), whole(model, ids), **EXACT)
    return cache


PHI, ROPE = ("mean", "linear", "mlp"), ("before", "after")
GATE = ("sigmoid", "linear", "softmax", "uniform")
BRANCH = None, "cmp", "slc", "win"
GRID = [
    {"phi": phi, "gate": gate, "compress_rope": rope, "shared_kv": shared, "force_branch": branch}
    for phi, gate, rope, shared, branch in product(PHI, GATE, ROPE, (False, True), BRANCH)
]


def few(grid):
    """Every twentieth, and so every value of each field."""
    chosen = grid[::19]
    for name in grid[0]:
        assert {case[name] for case in chosen} == {case[name] for case in grid}
    return chosen


@pytest.mark.parametrize("case", few(GRID), ids=lambda c: "-".join(map(str, c.values())))
def test_logits_from_a_cache_are_those_of_the_whole_sequence(case):
    check_equal(model_of(tiny(**case, value_dim=6)), [19, 1, 1, 1, 7, 18, 1])


@pytest.mark.long
def test_they_are_for_every_phi_gate_rotary_and_branch():
    for case in GRID:
        check_equal(model_of(tiny(**case, layers=1)), [34, 1, 6], 41)


@pytest.mark.parametrize("name", PRESETS)
def test_they_are_for_every_preset_made_narrow(name):
    config = preset(name)
    layers, sizes = min(config.layers, 2), config.nsa
    small = {"dim": 16, "head_dim": 4, "heads": 2 * config.kv_heads, "backend": "gather"}
    eighth = ("compress_block", "compress_stride", "select_block", "window")
    nsa = {field: getattr(sizes, field) // 8 for field in eighth}
    model = model_of(config.with_(layers=layers, checkpoint="", **small, nsa=nsa))
    # more blocks than are selected and more tokens than the window
    count = max(sizes.select_count * nsa["select_block"], nsa["window"]) + 20
    check_equal(model, [count - 12, 1, 1, 1, 4, 1], count)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu_config"])
@torch.no_grad()
def test_two_thousand_tokens_one_by_one_are_as_exact_as_the_whole(name):
    """cpu_config is `production`, whose layers are recomputed in a backward that is not here."""
    config, ids = preset(name, backend="gather"), tokens(1, 2000)
    model = LanguageModel(config).eval()
    exact = model_of(config)
    exact.load_state_dict(model.state_dict())
    wanted, plain = whole(exact, ids), whole(model, ids)
    found = continued(exact, NSACache(config, 1, 2000, dtype=DTYPE), ids, [1])
    torch.testing.assert_close(found, wanted, **EXACT)
    # In fp32 a near tie among blocks may fall the other way, in either, and all later tokens of an
    # untrained model notice. Before that, and where all blocks are selected, only rounding differs.
    found = continued(model, NSACache(config, 1, 2000), ids, [1])
    error, allowed = ((x - wanted).abs().amax(2)[0] for x in (found, plain))
    tied = torch.maximum(error, allowed) > 1e-4
    before = int(tied.int().argmax()) if tied.any() else len(tied)
    assert before >= config.nsa.select_count * config.nsa.select_block
    assert error[:before].max() <= 2 * allowed[:before].max()


def edges(nsa):
    """Lengths at which something begins or ends, and their neighbours."""
    l, d, size = nsa.compress_block, nsa.compress_stride, nsa.select_block  # noqa: E741
    middle = (l, l + d, size, nsa.window, 2 * size, nsa.select_count * size)
    return sorted({length + off for length in middle for off in (-1, 0, 1)} | {1, l + d - 1})


@pytest.mark.parametrize("length", edges(tiny().nsa))
@pytest.mark.parametrize("slack", [2, 16])
def test_no_cached_length_is_special(length, slack):
    """With slack 2 the training forward reads what comes first, with 16 the decoding one."""
    model = model_of(tiny(phi="linear", compress_rope="after", layers=1))
    check_equal(model, [length, 1, 1, 2], length + 4, slack=slack)


@pytest.mark.parametrize("sizes", [[1], [7], [16], [17], [30, 3], [40, 8], [3, 45]])
def test_a_prompt_may_come_in_pieces(sizes):
    check_equal(model_of(tiny(phi="mlp")), sizes)


@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
@pytest.mark.parametrize("page", [None, 8])
def test_each_backend_decodes_the_same(backend, page):
    check_equal(model_of(tiny(phi="linear")), [20, 1, 5, 1], 32, backend=backend, page=page)


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("branch", BRANCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_known_before_there_is_a_cache(page, shared, branch, dtype):
    config = tiny(shared_kv=shared, force_branch=branch, value_dim=12)
    how = {"dtype": dtype, "page": page, "pages": page and 9}
    cache = NSACache(config, 3, 48, **how)
    storages = {}
    for x in (*_tensors(cache), *(x for layer in cache.layers for x in _tensors(layer))):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    assert NSACache.bytes_for(config, 3, 48, **how) == cache.bytes == sum(storages.values())


def _tensors(owner):
    """Tensors that an object holds, in dicts, tuples and its Places too."""
    waiting, found = [owner], []
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, tuple):
            waiting += one
        elif one is owner or type(one).__name__ == "Places":
            waiting += vars(one).values()
    return found


def test_counters_tell_what_was_read_thrown_away_included():
    model = model_of(tiny())
    nsa = model.config.nsa

    def read(*lengths):
        total = keys_read(torch.tensor(lengths), nsa).sum(0)
        return dict(zip(("cmp", "slc", "win"), total.tolist(), strict=True))

    cache, _ = ragged(model, tokens(2, 33), [33, 18])
    assert cache.record()["last_step"] == cache.record()["in_all"] == read(33, 18)
    model(tokens(2, 5), cache=cache)
    record = cache.record()
    assert record["in_all"] == read(38, 23)
    step = {name: record["in_all"][name] - n for name, n in read(33, 18).items()}
    assert record["last_step"] == step
    cache.crop([35, 19])
    model(tokens(2, 1), cache=cache)
    thrown = {name: n - read(35, 19)[name] for name, n in read(38, 23).items()}
    assert cache.record()["in_all"] == {n: read(36, 20)[n] + thrown[n] for n in thrown}
    # one more token at position 35 and one at 19: C, (n - 1) l' + t % l' + 1, w
    assert cache.record()["last_step"] == {"cmp": 17 + 9, "slc": 28 + 20, "win": 8 + 8}
    before = cache.record()["in_all"]
    cache.reorder([1, 1])
    cache.reset([0])
    assert cache.record()["in_all"] == before


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    model = model_of(tiny())
    cache = cache_of(model, 2, 24)
    model(tokens(2, 20), cache=cache)
    before = [x.clone() for layer in cache.layers for x in layer.tensors.values()]
    wide = LanguageModel(tiny(nsa={"window": 9}, phi="linear")).double()
    cases = [
        (wide, tokens(2, 1), {}, "another config .* nsa: .*window=9.* phi: 'linear', 'mean'"),
        (model, tokens(3, 1), {}, r"3 sequences and the cache of 2; .* 3, \.\.\.\) fits"),
        (model, tokens(2, 5), {}, "full: sequence 0 has 20 of 24 tokens and 5 more do not fit; "),
        (model, tokens(2, 1).to("meta"), {}, "tokens are on meta and the cache on cpu"),
        (model, tokens(2, 1), {"counts": torch.tensor([1])}, r"counts must be int32 \[B\] = \(2,"),
        (model, tokens(2, 1), {"targets": tokens(2, 1)}, "no targets and no cu_seqlens"),
        (LanguageModel(tiny()), tokens(2, 1), {}, "float32 and the cache torch.float64"),
        (LanguageModel(tiny(max_tokens=20)).double(), tokens(2, 1), {}, "more than max_tokens=20"),
        (model, tokens(2, 1) + 256, {}, "vocab=256 has 0 to 255"),
        (model, tokens(2, 1), {"counts": [1, 2]}, r"counts=\[1, 2\] must be within 0..1"),
    ]
    for other, ids, how, message in cases:
        with pytest.raises(ValueError, match=message):
            other(ids, cache=cache, **how)
    for lengths in (21, -1, [20, 21]):
        with pytest.raises(ValueError, match="holds 20 tokens and cannot be cropped to"):
            cache.crop(lengths)
    for index in ([0], [0, 2], [0, -1]):
        with pytest.raises(ValueError, match="index"):
            cache.reorder(index)
    with pytest.raises(ValueError, match="counts are for a cache"):
        model(tokens(2, 1), counts=torch.tensor([1, 1]))
    after = [x for layer in cache.layers for x in layer.tensors.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert cache.lengths.tolist() == cache.places.held == [20, 20]
    model(tokens(2, 4), cache=cache)  # and what fits goes on


@pytest.mark.slow
def test_a_model_goes_on_by_the_kernels_as_on_torch():
    pytest.importorskip("triton")
    config = tiny(layers=1, head_dim=16, phi="linear", compress_rope="after")
    model, ids, found = LanguageModel(config), tokens(2, 30), []
    for backend in ("gather", "triton"):
        cache = NSACache(config, 2, 32, page=16, backend=backend)
        model(ids[:, :22], cache=cache, counts=[22, 9])
        first = model(ids[:, 22:26], cache=cache)[0]
        cache.reorder([1, 1])
        cache.crop([12, 11])
        found.append(torch.cat([first, model(ids[:, 26:28], cache=cache)[0]], 1))
    torch.testing.assert_close(*found, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("rope", ROPE)
def test_a_layer_alone_goes_on_from_a_cache_of_its_own(rope):
    config = tiny(phi="linear", compress_rope=rope)
    layer = NSAAttention(config).double()
    x = hidden(config, batch=2).double()
    cache = LayerCache(shape_of(config, 2, TOKENS, dtype=DTYPE))
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split([20, 1, 1, 9, 17], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), **EXACT)
    assert cache.lengths.tolist() == [TOKENS, TOKENS]
    alone = NSAAttention(config.with_(force_branch="win")).double()
    for who, given, message in [
        (layer, {"cu_seqlens": torch.tensor([0, 1])}, "sequences side by side"),
        (alone, {}, r"keeps \('cmp', 'slc', 'win'\) and the layer computes \('win',\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            who(x[:, :1], cache=cache, **given)


@torch.no_grad()
def test_under_autocast_a_cache_of_that_dtype_is_as_exact_as_the_whole():
    torch.manual_seed(0)
    model = LanguageModel(tiny(nsa={"select_count": 6}))  # all blocks, so that none is a near tie
    ids = tokens(4)
    exact = model_of(model.config)
    exact.load_state_dict(model.state_dict())
    wanted = whole(exact, ids)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(ids)[0]
        cache = NSACache(model.config, 4, TOKENS, dtype=torch.bfloat16)
        found = continued(model, cache, ids, [20, 1, 1, 1, 9, 1])
        with pytest.raises(ValueError, match=r"bfloat16 .* and the cache torch\.float32"):
            model(ids, cache=NSACache(model.config, 4, TOKENS))
    error, allowed = ((x.double() - wanted).abs() for x in (found, plain))
    assert error.mean() <= 2 * allowed.mean() and error.max() <= 2 * allowed.max()


def test_what_no_cache_can_be_made_for_says_so():
    for make, message in [
        (lambda: NSACache(dense_twin(tiny()), 1, 8), "attention='dense' has no cache"),
        (lambda: NSACache(tiny(), 1, 8, backend="flex"), "backend='flex' is unknown"),
        (lambda: NSACache(tiny(), 1, 8, page=12), "page=12 is not a multiple of select_block=8"),
        (lambda: NSACache(tiny(), 0, 8), "batch=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
