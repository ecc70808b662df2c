"""A tiny model, its cache, and logits by both; fp64, to rounding."""

import torch

from nsa.model.cache import NSACache
from nsa.model.llama import LanguageModel

EXACT = {"rtol": 0.0, "atol": 1e-11}

DTYPE = torch.float64


def model_of(config):
    return LanguageModel(config).double().eval()


def cache_of(model, batch=1, capacity=64, **how):
    return NSACache(model.config, batch, capacity, dtype=DTYPE, **how)


@torch.no_grad()
def whole(model, ids):
    return model(ids)[0]


def assert_as_alone(model, found, sequences):
    """Each row of logits is of the newest tokens of its sequence by itself."""
    for logits, ids in zip(found, sequences, strict=True):
        alone = whole(model, ids[None])[0, -len(logits) :]
        torch.testing.assert_close(logits, alone, **EXACT)


def joined(ids, lengths, new):
    """The first lengths[b] ids of each row, and its new ones behind them."""
    rows = zip(ids, lengths, new, strict=True)
    return [torch.cat([row[:length], later]) for row, length, later in rows]


def continued(model, cache, ids, sizes):
    """Logits of ids that come into the cache in pieces of these sizes, the last one again."""
    found, start = [], 0
    while start < ids.shape[1]:
        size = sizes[min(len(found), len(sizes) - 1)]
        found.append(model(ids[:, start : start + size], cache=cache)[0])
        start += size
    return torch.cat(found, 1)


def ragged(model, ids, lengths, **how):
    """A cache that holds the first lengths[b] ids of each row, and the logits that made it."""
    cache = cache_of(model, len(lengths), **how)
    return cache, model(ids, cache=cache, counts=lengths)[0]
