"""Models small enough for a test, whose branches all leave something out: T > w, T > n l'."""

from dataclasses import replace

import torch

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig

TOKENS = 48


def tiny(**changes) -> ModelConfig:
    """Two layers of 4 query heads and 2 KV heads; a query sees 4 of up to 6 blocks and 8 tokens."""
    config = ModelConfig(
        name="tiny",
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        nsa=NSAConfig(
            compress_block=4, compress_stride=2, select_block=8, select_count=4, window=8
        ),
        backend="gather",
    )
    return config.with_(**changes)


def tokens(batch=1, count=TOKENS, seed=0):
    """Random bytes [batch, count] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch, count), generator=generator)


def hidden(config, batch=1, count=TOKENS, seed=0):
    """Random hidden states [batch, count, dim] fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, config.dim, generator=generator)


def refuses_type(config, name, value, message):
    """A TypeError for a field of that value, also past jaxtyping's hook, whose own comes first."""
    import pytest  # not above: programs of ranks import this module

    with pytest.raises(TypeError, match=name):
        replace(config, **{name: value})
    object.__setattr__(config, name, value)
    with pytest.raises(TypeError, match=message):
        config.__post_init__()


def gradients(model, batch=2):
    """{name: gradient or None} of one training step's loss."""
    model.zero_grad(set_to_none=True)
    _, loss = model(tokens(batch), tokens(batch, seed=1))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}
