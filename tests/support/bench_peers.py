"""Implementations for the benchmark's tests, right and wrong ones, called by their import path."""

import torch

from nsa.attention.api import nsa_attention
from nsa.attention.backends import masked


def right(q, k, v, gates, config):
    return nsa_attention(q, k, v, gates, config, backend="gather")


@torch.compile(backend="aot_eager")
def _bent(o):
    return 8 * (o / 8).tanh().atanh()  # o, by way of what its backward needs


def compiled(q, k, v, gates, config):
    return _bent(right(q, k, v, gates, config))


def zeros(q, k, v, gates, config):
    return right(q, k, v, gates, config) * 0


def scaled(q, k, v, gates, config):
    return right(q, k, v, gates, config) * 1.01


def no_window(q, k, v, gates, config):
    gates = gates * torch.tensor([1.0, 1.0, 0.0], dtype=gates.dtype)
    return right(q, k, v, gates, config)


def newest_blocks(q, k, v, gates, config):
    """Selects the newest blocks and the first, whatever the scores say."""
    batch, tokens, kv_heads, _ = k.shape
    own = torch.arange(tokens)[:, None] // config.select_block
    slots = torch.arange(config.select_count)
    blocks = (own - config.select_count + 1).clamp(min=0) + slots
    blocks[:, 0] = 0
    blocks = torch.where(blocks <= own, blocks, -1)[None, :, None]
    blocks = blocks.expand(batch, -1, kv_heads, -1).int()
    return nsa_attention(q, k, v, gates, config, backend="gather", blocks=blocks)


def too_many_blocks(q, k, v, gates, config):
    more = {**vars(config), "select_count": config.select_count + 1}
    return right(q, k, v, gates, type(config)(**more))


class _Leaky(torch.autograd.Function):
    """The identity, whose gradient is wrong by `wrong`."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.wrong(grad), None


def wrong_dk(q, k, v, gates, config):
    return right(q, _Leaky.apply(k, lambda g: g * 1.02), v, gates, config)


def stray_dq(q, k, v, gates, config):
    return right(_Leaky.apply(q, lambda g: g + 1e-30), k, v, gates, config)


def not_a_number(q, k, v, gates, config):
    o = right(q, k, v, gates, config)
    return o.masked_fill(torch.arange(o.shape[1])[:, None, None] == 3, float("nan"))


def window_one_short(q, k, v, gates, config):
    return right(q, k, v, gates, type(config)(**vars(config) | {"window": config.window - 1}))


def wrong_dgates(q, k, v, gates, config):
    return right(q, k, v, _Leaky.apply(gates, lambda g: g.flip(-1)), config)


def no_dgates(q, k, v, gates, config):
    return right(q, k, v, gates.detach(), config)


def forward_only(q, k, v, gates, config):
    with torch.no_grad():
        return right(q, k, v, gates, config)


def nan_where_nobody_looks(q, k, v, gates, config):
    """At query 20, which is in no sample of rows."""
    o = right(q, k, v, gates, config)
    return o.masked_fill(torch.arange(o.shape[1])[:, None, None] == 20, float("nan"))


def nan_gradient_where_nobody_looks(q, k, v, gates, config):
    """Only where dO at query 20 is not 0."""
    o = right(q, k, v, gates, config)
    return _Leaky.apply(o, lambda g: g + torch.where(g[:, 20].any(), float("nan"), 0.0))


def rounds_its_inputs(q, k, v, gates, config):
    """Right for the inputs that it leaves behind."""
    q.data.copy_(q.data.bfloat16())
    return right(q, k, v, gates, config)


def spoils_v(q, k, v, gates, config):
    """Right, but for whoever comes later."""
    o = right(q, k, v, gates, config)
    v.data[:, -1] = v.data[:, -1].flip(-1)
    return o


TIRES = {"after": 0}


def tires(q, k, v, gates, config):
    """Right until it was called TIRES["after"] times."""
    TIRES["after"] -= 1
    return right(q, k, v, gates, config) * (1.0 if TIRES["after"] >= 0 else 0.5)


def a_tuple(q, k, v, gates, config):
    return right(q, k, v, gates, config), None


def leaves_the_program(q, k, v, gates, config):
    raise SystemExit(3)


def interrupts(q, k, v, gates, config):
    raise KeyboardInterrupt


def wrong_shape(q, k, v, gates, config):
    return right(q, k, v, gates, config).transpose(1, 2)


def wrong_dtype(q, k, v, gates, config):
    return right(q, k, v, gates, config).double()


def out_of_memory(q, k, v, gates, config):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB")


def hoard(q, k, v, gates, config):
    """Takes GPU memory until there is none."""
    held = []
    while True:
        held.append(torch.empty(1 << 32, dtype=torch.uint8, device=q.device))


def four_arguments(q, k, v, gates):
    return q


NOT_CALLABLE = masked.BACKEND


def measure_or_crash(spec):
    """A trial's entry: a shape of 64 tokens ends its process, any other is measured."""
    import os

    from nsa.experiments.comparison.bench import measure_spec

    if spec["shapes"][0]["tokens"] == 64:
        os.abort()
    return measure_spec(spec)
