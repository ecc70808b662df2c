"""A small Llama that reads bytes: RMSNorm, attention, SwiGLU, residuals, untied head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa.attention.transforms import autocast_dtype
from nsa.attention.witness import where
from nsa.model.config import ModelConfig, check_config, layer_range
from nsa.model.dense_attention import DenseAttention
from nsa.model.layer import NSAAttention, draw
from nsa.model.rotary import Rotary, rotary_for

if TYPE_CHECKING:
    from nsa.model.cache import NSACache

ATTENTION = {"nsa": NSAAttention, "dense": DenseAttention}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = config.layers
        self.gate = nn.Linear(config.dim, config.mlp_size, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        draw((self.gate, self.up), self.down, self.layers, generator)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer; `index` is its place in the model, which errors and records name."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = ATTENTION[config.attention](config)
        self.norm2 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary,
        cu_seqlens: Integer[Tensor, " N1"] | None = None,
        **cached: Any,
    ) -> Float[Tensor, "B T E"]:
        """`cached` is of the attention layer: cache, counts, decode and advance."""
        if torch.compiler.is_compiling():  # one that reads its index is compiled layer by layer
            return self._forward(x, rotary, cu_seqlens, **cached)
        # Named here rather than by the model's loop, so that a recomputation is named too.
        with where(layer=self.index):
            return self._forward(x, rotary, cu_seqlens, **cached)

    def _forward(
        self, x: Tensor, rotary: Rotary, cu_seqlens: Tensor | None, **cached: Any
    ) -> Tensor:
        x = x + self.attention(in_autocast_dtype(self.norm1(x)), rotary, cu_seqlens, **cached)
        return x + self.mlp(in_autocast_dtype(self.norm2(x)))


class LanguageModel(nn.Module):
    """Next-byte prediction. Weights come from torch's global generator; see `reset_parameters`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._reset_ends()
        self.recompute(config.checkpoint)

    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew from a generator of this seed on the weights' own device."""
        generator = torch.Generator(self.embed.weight.device).manual_seed(seed)
        self._reset_ends(generator)
        for block in self.blocks:
            for drawn in (block.attention, block.mlp):
                drawn.reset_parameters(generator)
            for norm in (block.norm1, block.norm2):
                norm.reset_parameters()
        self.norm.reset_parameters()

    def _reset_ends(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.embed.weight, std=0.02, generator=generator)
        # Logits of standard deviation 1/4 at any width: the first loss is ln(vocab) + 1/32.
        std = 0.25 / sqrt(self.config.dim)
        nn.init.normal_(self.head.weight, std=std, generator=generator)

    def forward(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"] | None = None,
        cu_seqlens: Integer[Tensor, " N1"] | None = None,
        cache: "NSACache | None" = None,
        counts: Tensor | Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""] | None]:
        """(logits, mean cross entropy in nats, fp32); the loss is None without targets.

        `targets` are the tokens one later. With `cu_seqlens` (B = 1) the sequences do not see each
        other. With a `cache` tokens are the next ones of the sequences in it, of which counts[b]
        are real (all by default), and are put into it; no gradient flows.

        Raises ValueError for tokens that are not [B, T] int64 with 1 <= T <= max_tokens, and on a
        CPU for ids outside the vocabulary. On a GPU such ids end in a device-side assertion, for
        looking at them first would make the host wait. A cache that does not fit or is full raises
        ValueError too, and stays as it was.
        """
        if cache is not None:
            if targets is not None or cu_seqlens is not None:
                raise ValueError("with a cache there are no targets and no cu_seqlens")
            with torch.no_grad():
                return self.logits(self.read(tokens, cache, counts)), None
        if counts is not None:
            raise ValueError("counts are for a cache; without one all T tokens are real")
        self._check(tokens, targets)
        rotary = rotary_for(self.config, tokens.shape[1], tokens.device, cu_seqlens)
        with self._naming_strangers("tokens", tokens):
            x = self.embed(tokens)
        x = self.run_blocks(x, rotary, cu_seqlens)
        logits = self.logits(x)
        if targets is None:
            return logits, None
        with self._naming_strangers("targets", targets):
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return logits, loss

    def logits(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """What the last block's output says of the next tokens."""
        return self.head(in_autocast_dtype(self.norm(x)))

    @torch.no_grad()
    def read(
        self,
        tokens: Int64[Tensor, "B T"],
        cache: "NSACache",
        counts: Tensor | Sequence[int] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Puts the next tokens into the cache; the last block's output, for `logits`.

        Of counts that stand on a GPU the host knows nothing, and reserves room for all T tokens.
        Raises ValueError as `forward` does.
        """
        self._check(tokens, None)
        counts, known = cache.check(self.config, tokens, counts)
        limit, new = self.config.max_tokens, tokens.shape[1]
        if limit is not None and cache.longest + new > limit:
            raise ValueError(
                f"the cache has {cache.longest} tokens and {new} more are more than "
                f"max_tokens={limit}; crop it or raise max_tokens"
            )
        cache.reserve(known)
        x = self.step(tokens, cache, counts)
        cache.count(known)
        return x

    def step(
        self, tokens: Tensor, cache: "NSACache", counts: Tensor | None = None
    ) -> Float[Tensor, "B T E"]:
        """The part of `read` that the device does alone, so that a CUDA graph can replay it."""
        rotary = cache.rotary(tokens.shape[1])
        with self._naming_strangers("tokens", tokens):
            x = self.embed(tokens)
        cached = {"counts": counts, "decode": cache.backend, "advance": False}
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, rotary, cache=layer, **cached)
        cache.advance(tokens.shape[1], counts)
        return x

    def recompute(self, layers: str) -> range:
        """Recompute these blocks in the backward: less memory for one more forward of each.

        `layers` is "" (none), "all" or "start:end", as `layer_range` reads it; returns which. The
        path witness counts calls, so a recomputed block's attention counts twice a step.
        """
        self.recomputed = layer_range(layers, len(self.blocks))
        return self.recomputed

    def run_blocks(self, x: Tensor, *context: Any) -> Tensor:
        """x through the blocks in turn, each called as block(x, *context).

        Each checkpoint is given the block itself. A lambda over the loop's variable would give the
        same loss and recompute every layer with the last block: the backward runs after the loop.

        The whole block is recomputed (early_stop=False), which costs no more than its last
        operation: so torch notices a recomputation that saves other tensors than the forward did.
        No layer draws random numbers, so their state is not stored.
        """
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        for index, block in enumerate(self.blocks):
            recomputed = index in self.recomputed
            x = again(block, x, *context) if recomputed else block(x, *context)
        return x

    @contextmanager
    def _naming_strangers(self, name: str, ids: Tensor) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            vocab, held = self.config.vocab, f"{int(ids.min())} to {int(ids.max())}"
            message = f"{name} hold ids from {held}; vocab={vocab} has 0 to {vocab - 1}"
            raise ValueError(message) from error

    def _check(self, tokens: Tensor, targets: Tensor | None) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.numel() == 0:
            raise ValueError(
                f"tokens are {list(tokens.shape)} {tokens.dtype}; needed is [B, T] torch.int64 "
                "with at least one token"
            )
        if targets is not None and (targets.shape != tokens.shape or targets.dtype != tokens.dtype):
            raise ValueError(
                f"targets are {list(targets.shape)} {targets.dtype}, tokens {list(tokens.shape)} "
                f"{tokens.dtype}; both must be alike"
            )
        limit = self.config.max_tokens
        if limit is not None and tokens.shape[1] > limit:
            raise ValueError(
                f"{tokens.shape[1]} tokens are more than max_tokens={limit}; cut the input or "
                "raise max_tokens"
            )


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x in the dtype in which autocast will compute. Autocast alone would cast it once for each
    projection that reads it, and keep each copy for the backward."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers in the model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
