"""Implementations for the benchmark's tests, right and wrong ones, called by their import path."""

import math
import os

import torch

from nsa.attention.api import nsa_attention
from nsa.attention.backends import masked


def right(q, k, v, gates, config):
    return nsa_attention(q, k, v, gates, config, backend="gather")


def bent(change):
    """`right`, whose output is changed."""

    def peer(q, k, v, gates, config):
        return change(right(q, k, v, gates, config))

    return peer


def resized(**fields):
    """`right` of a config in which these fields are so much larger."""

    def peer(q, k, v, gates, config):
        values = vars(config) | {n: getattr(config, n) + more for n, more in fields.items()}
        return right(q, k, v, gates, type(config)(**values))

    return peer


def raising(error):
    def peer(q, k, v, gates, config):
        raise error

    return peer


def nan_at(token):
    return bent(lambda o: o.masked_fill(torch.arange(o.shape[1])[:, None, None] == token, math.nan))


class _Leaky(torch.autograd.Function):
    """The identity, whose gradient is wrong by `wrong`."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.wrong(grad), None


@torch.compile(backend="aot_eager")
def _compiled(o):
    return 8 * (o / 8).tanh().atanh()  # o, by way of what its backward needs


compiled = bent(_compiled)
zeros = bent(lambda o: o * 0)
scaled = bent(lambda o: o * 1.01)
a_tuple = bent(lambda o: (o, None))
wrong_shape = bent(lambda o: o.transpose(1, 2))
wrong_dtype = bent(torch.Tensor.double)
too_many_blocks = resized(select_count=1)
window_one_short = resized(window=-1)
not_a_number = nan_at(3)
nan_where_nobody_looks = nan_at(20)  # a query that is in no sample of rows
# Only where dO at query 20 is not 0.
nan_gradient_where_nobody_looks = bent(
    lambda o: _Leaky.apply(o, lambda g: g + torch.where(g[:, 20].any(), math.nan, 0.0))
)
leaves_the_program = raising(SystemExit(3))
interrupts = raising(KeyboardInterrupt())
out_of_memory = raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB"))


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


def wrong_dk(q, k, v, gates, config):
    return right(q, _Leaky.apply(k, lambda g: g * 1.02), v, gates, config)


def stray_dq(q, k, v, gates, config):
    return right(_Leaky.apply(q, lambda g: g + 1e-30), k, v, gates, config)


def wrong_dgates(q, k, v, gates, config):
    return right(q, k, v, _Leaky.apply(gates, lambda g: g.flip(-1)), config)


def no_dgates(q, k, v, gates, config):
    return right(q, k, v, gates.detach(), config)


forward_only = torch.no_grad()(right)


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


def hoard(q, k, v, gates, config):
    """Takes GPU memory until there is none."""
    held = []
    while True:
        held.append(torch.empty(1 << 32, dtype=torch.uint8, device=q.device))


def ends_its_process(q, k, v, gates, config):
    os.abort()


def four_arguments(q, k, v, gates):
    return q


NOT_CALLABLE = masked.BACKEND


def measure_or_crash(spec):
    """A trial's entry: a shape of 64 tokens ends its process, any other is measured."""
    from workbook.rooms.comparison.trials import measure_spec

    if spec["shapes"][0]["tokens"] == 64:
        os.abort()
    return measure_spec(spec)
