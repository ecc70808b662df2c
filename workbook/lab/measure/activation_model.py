"""Memory of a training step computed from shapes alone, one term per tensor, nothing fitted."""

from dataclasses import dataclass

import torch

from nsa.attention.backends.triton import SOUND
from nsa.attention.registry import check_name, get
from nsa.blocks import count_compressed, count_selectable
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel

FP32 = 4
# Backends whose tensors are modelled; any other name is treated as one that keeps the least.
MODELLED = ("triton", "flash", "flex", "packed", "gather", "sdpa", "masked", "sequential")


@dataclass(frozen=True)
class Prediction:
    """Bytes held by a step at every T, independent of its backend."""

    weights: int
    gradients: int
    optimizer_state: int

    @property
    def fixed(self) -> int:
        """Bytes held at least during the optimizer phase."""
        return self.weights + self.gradients + self.optimizer_state


def predict(config: ModelConfig) -> Prediction:
    """Return the exact sizes for fp32 weights: per parameter 4 bytes for the weight, 4 for its
    gradient, 8 for AdamW's moments; and 4 for each parameter tensor's step count."""
    with torch.device("meta"):
        parameters = list(LanguageModel(config).parameters())
    weights = FP32 * sum(p.numel() for p in parameters)
    return Prediction(weights, weights, 2 * weights + FP32 * len(parameters))


@dataclass(frozen=True)
class Activations:
    """Bytes kept for the backward by all layers and the head."""

    casts: int  # bf16 weights, made by autocast once per forward and reused by the backward
    residual: int  # the residual stream, and inputs and outputs of norms
    mlp: int  # gate, silu, up and their product
    attention: int
    head: int  # logits and their log-softmax, fp32
    quadratic: int  # grows with T x T; attention's as well
    freed: int  # of these, when the backward reaches the last layer's attention

    @property
    def linear(self) -> int:
        """Bytes that grow with T."""
        return self.residual + self.mlp + self.attention + self.head

    @property
    def total(self) -> int:
        return self.casts + self.linear + self.quadratic

    def nearest(self, measured: float) -> float:
        """Bytes predicted at the peak that held the measured ones: all of these, at the end of the
        forward, down to those that are left in the backward of the last layer's attention, where
        the peak is if its temporaries are more than what was freed."""
        return min(max(measured, self.total - self.freed), self.total)


def predicted_peak(
    config: ModelConfig, tokens: int, batch: int = 1, dtype: str = "fp32", backend: str = ""
) -> int:
    """Bytes at the peak of a step, excluding temporaries: the larger of two points in time.

    At the end of the forward: weights, AdamW's moments and activations. In the optimizer:
    weights, gradients and moments.
    """
    state = predict(config)
    kept = activations(config, tokens, batch, dtype, backend).total
    return max(state.weights + state.optimizer_state + kept, state.fixed)


def activations(
    config: ModelConfig, tokens: int, batch: int = 1, dtype: str = "fp32", backend: str = ""
) -> Activations:
    """Bytes that a forward without checkpointing keeps for the backward.

    dtype "bf16" is autocast: the residual stream and inputs of norms stay fp32. `backend` overrides
    the config's. Excluded: masks of one byte shared by all heads, tensors kept by phi, and a second
    copy of a norm's input where torch has no fused norm. The tests require agreement within 15 % of
    measurements. ValueError for an unknown backend and for "auto", which is not a single program.
    """
    name = get(check_name(backend or config.backend)).name
    size = FP32 if dtype == "fp32" else 2
    weights = predict(config).weights
    each, rows = config.layers * batch, batch * tokens
    one_by_one = one_token_at_a_time(config, tokens) if name == "sequential" else 0
    mlp, head = each * tokens * 4 * config.mlp_size * size, rows * FP32 * 2 * config.vocab
    return Activations(
        casts=0 if dtype == "fp32" else weights * size // FP32,
        # each layer's two norms and the last one: inputs and outputs
        residual=rows * (2 * config.layers + 1) * config.dim * (FP32 + size),
        mlp=mlp,
        attention=each * (tokens * _attention(config, name, size) + one_by_one)
        + rows * _selections(config, name),
        head=head,
        quadratic=each * _squares(config, name, tokens, size),
        freed=head + mlp // config.layers,
    )


def _attention(config: ModelConfig, backend: str, size: int) -> int:
    """Bytes per token: q, three k and v, each branch's o and their sum, gates and statistics."""
    queries = config.heads * config.head_dim
    outputs = config.heads * config.value_size
    gates = (size + FP32) * 3 * config.heads
    if backend == "triton":
        return size * queries + gates + _of_kernels(config, size)
    projections = 1 if config.shared_kv else 3
    keys = projections * config.kv_heads * (config.head_dim + config.value_size)
    kept = size * (queries + keys + 4 * outputs) + gates
    if backend == "packed":
        kept += FP32 * outputs  # the selected branch's o before it is rounded
    return kept


def _of_kernels(config: ModelConfig, size: int) -> int:
    """Bytes per token that our kernels keep beside q and gates: two k and v and the compressed
    ones, o and the compressed branch's, what rounding took from o, and the last projection's input
    where it is not o itself. Their 16-bit values have SOUND columns at least."""
    value = max(config.value_size, SOUND) if size == 2 else config.value_size
    # What is compressed is not kept, only the result, unless the other branches read it.
    projections = (1 if config.shared_kv else 2) + 1 / config.nsa.compress_stride
    keys = size * config.kv_heads * (config.head_dim + value) * projections
    outputs = config.heads * value * (2 * size + (size == 2))
    copied = size * config.heads * config.value_size * (value != config.value_size)
    return int(keys) + outputs + copied


def _selections(config: ModelConfig, backend: str) -> int:
    """Bytes per token of the selections of all layers; those that share one keep it once."""
    if backend not in ("gather", "packed", "triton"):
        return 0
    layers = -(-config.layers // config.share_selection)
    return layers * 4 * config.nsa.select_count * config.kv_heads


def _squares(config: ModelConfig, backend: str, tokens: int, size: int) -> int:
    """Bytes per layer and sequence that grow with T x T."""
    compressed = count_compressed(tokens, config.nsa)
    if backend == "masked":
        # fp32 probabilities for every head, a copy to multiply the values with, and masks
        pairs = tokens * (2 * tokens + compressed)
        return config.heads * pairs * (FP32 + size) + tokens**2 * config.kv_heads + pairs
    if backend == "sdpa:math":  # fp32 probabilities for every head, also of bf16
        return config.heads * tokens * (2 * tokens + compressed) * FP32
    if backend.startswith("sdpa"):
        # A mask as an additive bias for every head of a group: one of each KV head for selected.
        rows = tokens * ((config.kv_heads + 1) * tokens + compressed)
        return config.heads // config.kv_heads * rows * size
    return 0


def one_token_at_a_time(config: ModelConfig, tokens: int) -> int:
    """Bytes kept by `sequential` per sequence and layer: fp32 copies of the keys and values in
    each token's blocks, and all its probabilities."""
    nsa, width = config.nsa, config.kv_heads * (config.head_dim + config.value_size)
    window = sum(min(nsa.window, t + 1) for t in range(tokens))
    compressed = sum(count_compressed(t + 1, nsa) for t in range(tokens))
    blocks = min(nsa.select_count, count_selectable(tokens, nsa))
    selected = sum(min(blocks * nsa.select_block, t + 1) for t in range(tokens))
    return FP32 * (selected * width + (window + compressed + selected) * config.heads)
