"""NSAAttention in a model that knows nothing of this package: a GPT's block."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from places import SUPPORT
from processes import environment_with_package
from torch import nn
from torch.nn import functional as F

from nsa import NSAAttention, NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.rotary import Rotary

SMALL = NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=4, window=8)


class Block(nn.Module):
    """LayerNorm, attention, GELU: a GPT's, whose attention is NSA's layer."""

    def __init__(self, dim: int, **options) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = NSAAttention(dim, 4, 2, SMALL, **options)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks over 16 symbols; no positions of its own, because NSA's layer has rotary."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.blocks = nn.Sequential(*(Block(32, **options) for _ in range(2)))

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def trained(model, loss):
    """The first and the last of 60 losses that a model is trained on."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        found = loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses[0], losses[-1]


@pytest.mark.full
@pytest.mark.parametrize("amp", [False, True])
def test_a_gpt_with_the_layer_learns_to_look_back(amp):
    torch.manual_seed(1)
    model = GPT()
    torch.manual_seed(0)
    tokens = torch.randint(16, (4, 40))

    def loss():
        """Nats of what was seen 5 tokens before."""
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(tokens)[:, 5:]
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, :-5].flatten())

    first, last = trained(model, loss)
    assert first > 2.5 and last < 0.5  # ln 16 = 2.77


def test_the_layer_is_saved_copied_and_cast_as_any_other():
    model, x = GPT(phi="mlp").eval(), torch.randint(16, (1, 33))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    fresh = GPT(phi="mlp").eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))
    assert model.bfloat16()(x).dtype == torch.bfloat16


def test_sizes_stand_by_themselves_and_kv_heads_are_heads_by_default():
    layer = NSAAttention(256, 8)
    sizes = ("dim", "heads", "kv_heads", "head_dim", "nsa")
    assert [getattr(layer.config, name) for name in sizes] == [256, 8, 8, 32, NSAConfig()]
    odd = NSAAttention(dim=30, heads=4, kv_heads=2, config=SMALL, head_dim=8, value_dim=6)
    assert odd(torch.randn(2, 9, 30)).shape == (2, 9, 30)  # 9 tokens: fewer than any block


def test_a_whole_models_config_gives_the_same_layer():
    torch.manual_seed(2)
    one = NSAAttention(32, 4, 2, SMALL, gate="softmax", layers=3)
    torch.manual_seed(2)
    config = ModelConfig("m", 3, 32, 4, 2, 8, nsa=SMALL, gate="softmax")
    other = NSAAttention(config).state_dict()
    assert all(torch.equal(x, other[name]) for name, x in one.state_dict().items())
    assert len(other) == len(one.state_dict())


WHOLE = NSAAttention(32, 4, 2, SMALL).config


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((256,), {}, r"NSAAttention\(dim=256\) needs heads as well"),
        ((250, 8), {}, "dim=250 is not a multiple of heads=8; heads may be 1, 2, 5, 10"),
        ((256, 8, 3), {}, "kv_heads=3; kv_heads may be 1, 2, 4, 8"),
        ((256, "8"), {}, "heads"),
        ((256, 8, 2, {"window": 8}), {}, "NSAConfig"),
        ((256, 8), {"window": 8}, r"no option 'window'; config=NSAConfig\(window=...\) has it"),
        ((256, 8), {"backnd": "sdpa"}, "no option 'backnd'; the nearest is 'backend'"),
        ((256, 8), {"vocab": 8}, "no option 'vocab'"),
        ((WHOLE, 8), {}, r"a ModelConfig has all sizes; change it by its with_\(heads=8\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(given, options, message):
    # of a wrong type jaxtyping's hook says so first, in its own words
    with pytest.raises((ValueError, TypeError), match=message):
        NSAAttention(*given, **options)


POOR = {
    "num_heads": ("ValueError", "no option 'num_heads'; the nearest is 'heads'"),
    "num_kv_heads": ("ValueError", "no option 'num_kv_heads'; the nearest is 'kv_heads'"),
    "layer(x, x, x)": ("TypeError", "rotary is a Tensor and must be a nsa.model.rotary.Rotary or"),
    "layer(x, None, x)": ("ValueError", "cu_seqlens has shape [1, 9, 32]; needed is [N + 1] int32"),
    "bf16 into fp32": ("ValueError", "x is torch.bfloat16 and the layer's weights are torch.floa"),
    "fp32 into bf16": ("ValueError", "x is torch.float32 and the layer's weights are torch.bfloa"),
    "bf16 under autocast": ("", ""),
    "a model of sizes": ("TypeError", "must be a ModelConfig, got a nsa.config.NSAConfig; model.c"),
    "a model of transformers": ("TypeError", "OfTransformers; config.model_config() is one"),
    "a cache of sizes": ("TypeError", "got a nsa.config.NSAConfig; model.config is one"),
    "a cache of transformers": ("TypeError", "OfTransformers; config.model_config() is one"),
    "a layer of transformers": ("TypeError", "OfTransformers; config.model_config().nsa is one"),
    "sizes of transformers": ("ValueError", "OfTransformers; config.model_config().nsa is one"),
    "NumPy": ("", ""),
}


@pytest.mark.processes
def test_what_a_stranger_tries_is_answered_with_what_would_do():
    run = [sys.executable, SUPPORT / "poor_calls.py"]
    done = subprocess.run(run, env=environment_with_package(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == POOR.keys()
    for name, (kind, words) in POOR.items():
        assert found[name][0] == kind and words in found[name][1], (name, found[name])


@pytest.mark.parametrize("shape", [(2, 9, 31), (9, 32), (1, 2, 9, 32)])
def test_an_input_of_another_shape_is_refused(shape):
    # under jaxtyping's hook its own TypeError comes first for two and four dimensions
    with pytest.raises((ValueError, TypeError), match=r"x must be \[B, T, 32\]|x"):
        NSAAttention(32, 4, 2, SMALL)(torch.randn(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpt_with_the_layer_learns_with_the_kernels_compiled_and_not(compiled):
    torch.manual_seed(1)
    wide = NSAConfig(compress_block=16, compress_stride=16, select_block=16, select_count=4)
    model = NSAAttention(64, 4, 2, wide, backend="triton").cuda()
    called = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(2, 200, 64, device="cuda")

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return (called(x)[:, 5:].float() - x[:, :-5]).square().mean()

    first, last = trained(model, loss)
    assert last < 0.9 * first


def test_angles_that_are_not_made_yet_have_a_hash():
    """torch 2.11 asks for it while it compiles the layer, and took the error for its own."""
    assert isinstance(hash(object.__new__(Rotary)), int)
