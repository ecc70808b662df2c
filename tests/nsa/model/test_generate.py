"""Text generated from a cache is what the model would say without one, and what was asked for."""

import functools
import math

import pytest
import torch
from tiny_models import tiny, tokens

from nsa.config import NSAConfig
from nsa.model.cache import NSACache
from nsa.model.config import ModelConfig
from nsa.model.generate import generate
from nsa.model.llama import LanguageModel
from nsa.model.sampling import Sampling
from nsa.model.tasks import IGNORED, Needle

LENGTHS = 30, 4, 17
PROMPTS = [row[:length].tolist() for row, length in zip(tokens(3, 30), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1337)
    made = LanguageModel(tiny(phi="linear", layers=1)).double()
    with torch.no_grad():
        made.head.weight *= 20  # logits that differ
    return made


@torch.no_grad()
def without_a_cache(model, prompt, count, sampling, column=0):
    """The same tokens, for each of which the whole sequence is read anew."""
    ids, numbers = list(prompt), sampling.numbers(column + 1, count)[:, column]
    for number in numbers:
        logits, _ = model(torch.tensor([ids]))
        ids.append(int(sampling.choose(logits[:, -1], number[None])))
    return ids[len(prompt) :]


HOW = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5},
]


# Of chunks of 8 the third begins with the last token of 17.
@pytest.mark.parametrize(("how", "chunk"), [*zip(HOW, (8, None, 20), strict=True)], ids=str)
def test_a_batch_of_prompts_goes_on_as_each_alone_without_a_cache(model, how, chunk):
    found = generate(model, PROMPTS, 10, chunk=chunk, **how).all()
    for column, (prompt, new) in enumerate(zip(PROMPTS, found, strict=True)):
        assert new == without_a_cache(model, prompt, 10, Sampling(**how), column)


def test_tokens_come_one_step_after_the_other(model):
    made = generate(model, PROMPTS, 5, page=8)
    assert made.tokens == [[], [], []]
    first = next(made)
    assert made.tokens == [[token] for token in first]
    # What is computed is not more than what was asked for.
    assert made.cache.lengths.tolist() == [30, 4, 17]
    rest = list(made)
    assert [list(column) for column in zip(first, *rest, strict=True)] == made.tokens
    assert made.cache.lengths.tolist() == [34, 8, 21] and made.cache.pages.page == 8
    assert list(made) == []


def test_a_sequence_ends_with_its_end_and_the_others_go_on(model):
    plain = generate(model, PROMPTS, 30, temperature=1.0).all()
    end = plain[1][6]
    places = [row.index(end) + 1 if end in row else 30 for row in plain]
    assert places[1] <= 7 and max(places) > places[1]
    made = generate(model, PROMPTS, 30, temperature=1.0, end=end)
    steps = list(made)
    assert made.tokens == [row[:place] for row, place in zip(plain, places, strict=True)]
    assert len(steps) == max(places)
    assert all(step[1] is None for step in steps[places[1] :])
    # The last token of a sequence is told and not read.
    held = [len(p) + n - 1 for p, n in zip(PROMPTS, places, strict=True)]
    assert made.cache.lengths.tolist() == held


def test_it_goes_on_from_a_cache_that_holds_something(model):
    whole = generate(model, [PROMPTS[0]], 12).all()[0]
    cache = NSACache(model.config, 1, 64, dtype=torch.float64)
    model(torch.tensor([PROMPTS[0][:20]]), cache=cache)
    made = generate(model, [PROMPTS[0][20:]], 12, cache=cache)
    assert made.all()[0] == whole and cache.lengths.tolist() == [41]


def test_what_the_cache_holds_counts_towards_the_models_limit():
    limited = LanguageModel(tiny(max_tokens=32)).double()
    cache = NSACache(limited.config, 1, 64, dtype=torch.float64)
    limited(torch.tensor([PROMPTS[0][:20]]), cache=cache)
    with pytest.raises(ValueError, match="are 33, more than max_tokens=32"):
        generate(limited, [PROMPTS[0][20:]], 3, cache=cache)
    assert len(generate(limited, [PROMPTS[0][20:]], 2, cache=cache).all()[0]) == 2


def test_the_record_says_how_many_how_fast_and_what_was_read(model):
    made = generate(model, PROMPTS, 6, temperature=0.5)
    assert math.isnan(made.tokens_per_s)
    made.all()
    record = made.record()
    assert made.tokens_per_s == 15 / (made.total_s - made.first_token_s)
    assert record["new_tokens"] == [6, 6, 6] and record["prompt_tokens"] == [30, 4, 17]
    assert 0 < record["first_token_ms"] < float("inf") and 0 < record["tokens_per_s"] < float("inf")
    assert record["sampling"]["temperature"] == 0.5 and not record["cuda_graph"]
    assert record["cache"] == made.cache.record()
    assert record["cache"]["bytes"] == made.cache.bytes
    assert record["cache"]["lengths"] == [35, 9, 22]


def test_bad_requests_are_refused_before_anything_is_computed(model):
    limited = LanguageModel(tiny(max_tokens=32)).double()
    small = functools.partial(NSACache, model.config, dtype=torch.float64)
    cases = [
        (model, [], {}, r"prompts=\[\]: wanted is a list"),
        (model, [[1], []], {}, "prompt 1 has shape .0.; wanted are at least one id"),
        (model, [torch.tensor([1.5])], {}, "prompt 0 is torch.float32; ids are int64"),
        (model, [[3, 256]], {}, "prompt 0 holds ids from 3 to 256; vocab=256 has 0 to 255"),
        (model, [[1]], {"tokens": 0}, "tokens=0 must be at least 1"),
        (model, [[1]], {"top_k": 3}, "top_k=3 would change nothing"),
        (model, [[1]], {"chunk": 0}, "chunk=0 must be at least 1"),
        (model, [[1]], {"backend": "flex"}, "backend='flex' is unknown"),
        (model, [[1]], {"page": 9}, "page=9 is not a multiple"),
        (model, [[1]], {"cuda_graph": True}, "needs a CUDA device .* a model on 'cpu'"),
        (limited, [[1] * 30], {}, "are 33, more than max_tokens=32"),
        (model, [[1] * 30], {"cache": small(1, 24)}, "sequence 0 has 0 of 24 tokens and 33 more"),
        (model, [[1]], {"cache": small(1, 24), "page": 8}, "page and backend are the cache's own"),
        (model, [[1]], {"cache": small(2, 24)}, "tokens are of 1 sequences and the cache of 2"),
    ]
    for who, prompts, how, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(who, prompts, **{"tokens": 3} | how)


@pytest.mark.long
def test_a_needle_is_found_with_the_cache_as_without_it():
    """Trained on 64 tokens, asked at up to 256: the same answers, most of them right."""
    torch.manual_seed(0)
    nsa = NSAConfig(8, 4, 8, 3, select_initial=1, select_local=1, window=8)
    sizes = {"layers": 1, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 16}
    # Angles that hold at distances which training has not met.
    model = LanguageModel(ModelConfig("needle", **sizes, nsa=nsa, backend="masked", rope_base=1e14))
    needle = Needle(vocab=16, values=8, filler=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(100):
        _, loss = model(*needle.batch(step, 16, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.double()
    for count, least in ((64, 0.95), (256, 0.7)):
        ids, targets = needle.batch(10**6, 64, count)
        wanted = targets[targets != IGNORED]
        with torch.no_grad():
            plain = model(ids)[0][:, -1].argmax(-1)
        made = generate(model, list(ids), 1, chunk=50)
        answers = torch.tensor(next(made))
        assert torch.equal(answers, plain)
        assert (answers == wanted).float().mean() >= least
        # The last ones one after the other.
        cache = NSACache(model.config, 64, count, dtype=torch.float64)
        model(ids[:, :-20], cache=cache)
        for t in range(count - 20, count):
            logits, _ = model(ids[:, t : t + 1], cache=cache)
        assert torch.equal(logits[:, -1].argmax(-1), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("end", [None, 7])
def test_a_cuda_graph_generates_what_launches_do(end):
    model = LanguageModel(tiny(phi="mlp")).cuda()
    how = {"temperature": 1.0, "end": end}
    plain = generate(model, PROMPTS, 40, cuda_graph=False, **how)
    graph = generate(model, PROMPTS, 40, cuda_graph=True, **how)
    assert graph.all() == plain.all()
    assert graph.cache.record() == plain.cache.record()
    assert graph.cache.places.held == plain.cache.places.held
