"""A program that makes calls which are refused, apart from the tests' type checks, which would
speak first. One line of JSON: {call: [the error's type, its words]}."""

import json

import numpy as np
import torch
from tiny_models import tiny

import nsa
from nsa.attention.places import CacheShape
from nsa.model.sampling import Sampling
from nsa.model.train_config import TrainConfig

SIZES = nsa.NSAConfig()
X = torch.randn(1, 9, 32)


class OfTransformers:
    """Stands for nsa.hf.NSAConfig: transformers need not be there."""

    def model_config(self):
        return tiny()


def layer(dtype=torch.float32):
    return nsa.NSAAttention(32, 4, 2, backend="gather").to(dtype)


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return layer()(X.bfloat16())


CALLS = {
    "num_heads": lambda: nsa.NSAAttention(64, num_heads=8),
    "num_kv_heads": lambda: nsa.NSAAttention(64, 8, num_kv_heads=8),
    "layer(x, x, x)": lambda: layer()(X, X, X),
    "layer(x, None, x)": lambda: layer()(X, None, X),
    "bf16 into fp32": lambda: layer()(X.bfloat16()),
    "fp32 into bf16": lambda: layer(torch.bfloat16)(X),
    "bf16 under autocast": autocast,
    "a model of sizes": lambda: nsa.LanguageModel(SIZES),
    "a model of transformers": lambda: nsa.LanguageModel(OfTransformers()),
    "a cache of sizes": lambda: nsa.NSACache(SIZES, 1, 8),
    "a cache of transformers": lambda: nsa.NSACache(OfTransformers(), 1, 8),
    "a layer of transformers": lambda: nsa.NSAAttention(64, 8, config=OfTransformers()),
    "sizes of transformers": lambda: CacheShape(OfTransformers(), 1, 8, 2, 8, 8),
    "NumPy": lambda: (
        nsa.NSAAttention(np.int64(32), np.int32(4), config=nsa.NSAConfig(window=np.int64(8))),
        json.dumps(tiny(layers=np.int64(3), max_tokens=np.int16(9)).to_dict()),
        json.dumps(TrainConfig(np.int64(2), 8, steps=np.int64(3)).to_dict()),
        json.dumps([CacheShape(SIZES, *map(np.int64, (1, 8, 2, 8, 8))).to_dict()]),
        json.dumps([Sampling(seed=np.int64(3)).seed]),
    ),
}


def outcome(call) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


if __name__ == "__main__":
    print(json.dumps({name: outcome(call) for name, call in CALLS.items()}))
