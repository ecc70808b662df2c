"""What the forward keeps for the backward, from shapes alone: no fitted number.

One term for each tensor that autograd saves, so that a wrong term names itself.
"""

from dataclasses import dataclass

from nsa.attention.registry import check_name, get
from nsa.blocks import count_compressed, count_selectable
from nsa.experiments.memory.step_model import predict
from nsa.model.config import ModelConfig

FP32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes kept by all layers and the head: `linear` grows with T, `quadratic` with T x T.

    `casts` are the weights in bf16, which autocast makes once a forward and the backward uses.
    """

    casts: int
    linear: int
    quadratic: int

    @property
    def total(self) -> int:
        return self.casts + self.linear + self.quadratic


def predicted_peak(
    config: ModelConfig, tokens: int, batch: int = 1, dtype: str = "fp32", backend: str = ""
) -> int:
    """Bytes of a step at its peak, but for temporaries: the larger of two moments.

    When the forward ends: weights, AdamW's moments and activations. When the optimizer runs:
    weights, gradients and moments.
    """
    state = predict(config, tokens, batch, backend)
    kept = activations(config, tokens, batch, dtype, backend).total
    return max(state.weights + state.optimizer_state + kept, state.fixed)


def activations(
    config: ModelConfig, tokens: int, batch: int = 1, dtype: str = "fp32", backend: str = ""
) -> Activations:
    """Bytes that a forward without checkpointing keeps.

    dtype "bf16" is autocast: the residual stream and what norms read stay fp32. `backend` replaces
    the config's. Left out: masks of one byte shared by all heads, what phi keeps, and a second copy
    of the input that a norm keeps where torch has no fused one. The tests hold it to 15 % of what
    is measured. ValueError for an unknown backend and for "auto", which is no one program.
    """
    name = get(check_name(backend or config.backend)).name
    size = FP32 if dtype == "fp32" else 2
    rows = batch * tokens
    layer = rows * (_block(config, size) + _attention(config, name, size))
    copies = _one_token_at_a_time(config, tokens) if name == "sequential" else 0
    head = rows * (FP32 * config.dim + size * config.dim + FP32 * 2 * config.vocab)
    quadratic = {"masked": _masked, "sdpa": _sdpa}.get(name)
    squares = 0 if quadratic is None else batch * quadratic(config, tokens, size)
    weights = predict(config, tokens, batch, backend).weights
    return Activations(
        casts=0 if dtype == "fp32" else weights * size // FP32,
        linear=config.layers * (layer + batch * copies) + head,
        quadratic=config.layers * squares,
    )


def _block(config: ModelConfig, size: int) -> int:
    """Bytes a token: both norms' inputs and outputs, the MLP's gate, silu, up and product."""
    return 2 * config.dim * (FP32 + size) + 4 * config.mlp_size * size


def _attention(config: ModelConfig, backend: str, size: int) -> int:
    """Bytes a token: q, three k and v, each branch's o and their sum, gates and statistics."""
    queries = config.heads * config.head_dim
    outputs = config.heads * config.value_size
    projections = 1 if config.shared_kv else 3
    keys = projections * config.kv_heads * (config.head_dim + config.value_size)
    # The kernels form the gated sum and keep only the compressed branch's o beside it.
    branches = 1 if backend == "triton" else 3
    kept = size * (queries + keys + (branches + 1) * outputs + 3 * config.heads)
    statistics = FP32 * 3 * config.heads
    if backend == "packed":
        kept += FP32 * outputs  # the selected branch's o before it is rounded
    if backend in ("gather", "packed", "triton"):
        kept += 4 * config.nsa.select_count * config.kv_heads  # the selection
    return kept + statistics


def _masked(config: ModelConfig, tokens: int, size: int) -> int:
    """fp32 probabilities for every head, a copy to multiply the values with, and masks."""
    pairs = tokens * (2 * tokens + count_compressed(tokens, config.nsa))
    masks = tokens * tokens * config.kv_heads + pairs
    return config.heads * pairs * (FP32 + size) + masks


def _sdpa(config: ModelConfig, tokens: int, size: int) -> int:
    """A mask as an additive bias for every head of a group: one of each KV head for selected."""
    group = config.heads // config.kv_heads
    rows = tokens * ((config.kv_heads + 1) * tokens + count_compressed(tokens, config.nsa))
    return group * rows * size


def _one_token_at_a_time(config: ModelConfig, tokens: int) -> int:
    """fp32 copies of the keys and values in each token's blocks, and of all its probabilities."""
    nsa, width = config.nsa, config.kv_heads * (config.head_dim + config.value_size)
    window = sum(min(nsa.window, t + 1) for t in range(tokens))
    compressed = sum(count_compressed(t + 1, nsa) for t in range(tokens))
    blocks = min(nsa.select_count, count_selectable(tokens, nsa))
    selected = sum(min(blocks * nsa.select_block, t + 1) for t in range(tokens))
    return FP32 * (selected * width + (window + compressed + selected) * config.heads)
