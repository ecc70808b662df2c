"""A small Llama that reads bytes: RMSNorm, attention, SwiGLU, residuals, untied head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa.attention.transforms import autocast_dtype
from nsa.attention.witness import where
from nsa.model.config import ModelConfig, check_config, layer_range
from nsa.model.dense_attention import DenseAttention
from nsa.model.layer import NSAAttention
from nsa.model.names import rename_on_load
from nsa.model.projections import draw
from nsa.model.rotary import Rotary, rotary_for
from nsa.parallel.layout import IGNORED
from nsa.parallel.mesh import ContextParallel

if TYPE_CHECKING:
    from nsa.model.cache import NSACache

ATTENTION = {"nsa": NSAAttention, "dense": DenseAttention}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = config.layers
        self.gate_proj = nn.Linear(config.dim, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.dim, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        draw((self.gate_proj, self.up_proj), self.down_proj, self.layers, generator)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer; `index` is its position in the model, used in errors and records."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index, self.shares = index, config.share_selection > 1
        self.norm1 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = ATTENTION[config.attention](config)
        self.norm2 = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary,
        cu_seqlens: Integer[Tensor, " N1"] | None = None,
        blocks: Int[Tensor, "B T HKV N"] | None = None,
        **cached: Any,
    ) -> Float[Tensor, "B T E"] | tuple[Tensor, Tensor]:
        """`cached` are arguments of the attention layer: cache, counts, decode and advance.

        With `share_selection` above 1 the result is (x, blocks): the argument `blocks`, or, if
        that is None, the selection of this layer. It is handed on as a value, so that a layer that
        is recomputed in the backward has the same.
        """
        if self.shares:
            cached |= {"blocks": blocks, "return_blocks": True}
        if torch.compiler.is_compiling():  # one that reads its index is compiled layer by layer
            return self._forward(x, rotary, cu_seqlens, **cached)
        # Set here rather than in the model's loop, so that it also holds in a recomputation.
        with where(layer=self.index):
            return self._forward(x, rotary, cu_seqlens, **cached)

    def _forward(
        self, x: Tensor, rotary: Rotary, cu_seqlens: Tensor | None, **cached: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        found = self.attention(in_autocast_dtype(self.norm1(x)), rotary, cu_seqlens, **cached)
        attended, *blocks = parts(found)
        x = x + attended
        x = x + self.mlp(in_autocast_dtype(self.norm2(x)))
        return (x, *blocks) if blocks else x


class Decoder(nn.Module):
    """Tokens to hidden states: an embedding, blocks and a last norm, created by `build`.

    A base class without its own constructor, so that a class of another library can inherit from
    it: LanguageModel adds the head, `nsa.hf` the interface of transformers.
    """

    sizes: ModelConfig
    context: ContextParallel | None = None

    def build(self, config: ModelConfig) -> None:
        """Create the modules; weights come from torch's global generator."""
        self.sizes = config
        self.embed_tokens = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.recompute(config.checkpoint)

    def embedded(self, tokens: Tensor) -> Float[Tensor, "B T E"]:
        """Embeddings of ids [B, T] int64; embeddings [B, T, E] are returned unchanged.

        Raises ValueError for other ids, and on a CPU for ids outside the vocabulary. On a GPU such
        ids cause a device-side assertion, since checking them first would make the host wait.
        """
        if tokens.is_floating_point():
            return tokens
        with naming_strangers(self.sizes.vocab, "tokens", tokens):
            return self.embed_tokens(tokens)

    def hidden(
        self,
        tokens: Tensor,
        cu_seqlens: Integer[Tensor, " N1"] | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Output of the last block for ids [B, T] or embeddings [B, T, E], before the last norm.

        With `cu_seqlens` (B = 1) the sequences are independent. `seen` is filled with the
        embeddings and every block's output. Raises ValueError as LanguageModel does.
        """
        self._check_on_all_ranks(tokens, cu_seqlens)
        rotary = rotary_for(
            self.sizes, tokens.shape[1], tokens.device, cu_seqlens, context=self.context
        )
        return self.run_blocks(self.embedded(tokens), rotary, cu_seqlens, seen=seen)

    @torch.no_grad()
    def read(
        self,
        tokens: Tensor,
        cache: "NSACache",
        counts: Tensor | Sequence[int] | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Append the next tokens to the cache; return the last block's output, as `hidden` does.

        For counts on a GPU, which the host does not read, room for all T tokens is reserved.
        Raises ValueError as LanguageModel does.
        """
        self.check(tokens)
        counts, known = cache.check(self.sizes, tokens, counts)
        limit, new = self.sizes.max_tokens, tokens.shape[1]
        if limit is not None and cache.longest + new > limit:
            raise ValueError(
                f"the cache has {cache.longest} tokens and {new} more are more than "
                f"max_tokens={limit}; crop it or raise max_tokens"
            )
        cache.reserve(known)
        x = self.step(tokens, cache, counts, seen)
        cache.count(known)
        return x

    def step(
        self,
        tokens: Tensor,
        cache: "NSACache",
        counts: Tensor | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Device part of `read`, which a CUDA graph can replay."""
        rotary = cache.rotary(tokens.shape[1])
        x = self.embedded(tokens)
        cached = {"counts": counts, "decode": cache.backend, "advance": False}
        running, blocks = islice(self.blocks, self.sizes.layers), ()
        for index, (block, layer) in enumerate(zip(running, cache.layers, strict=True)):
            if seen is not None:
                seen.append(x)
            blocks = self._handed_on(index, blocks)
            x, *blocks = parts(block(x, rotary, None, *blocks, cache=layer, **cached))
        cache.advance(tokens.shape[1], counts)
        return x

    def share_sequences(self, context: ContextParallel | None) -> None:
        """Have each sequence on the ranks of `context`; None: whole sequences again.

        Inputs are then this rank's rows, as `shard_sequence` cuts them, and `cu_seqlens` those of
        whole sequences. Call it before the model is wrapped for DDP or FSDP2. Raises ValueError
        for dense attention, and KV heads that "ulysses" cannot split.
        """
        if context is not None:
            check_shareable(self.sizes, context)
        self.context = context
        # Layers need not compare what the model has compared.
        within = None if context is None else replace(context, check=False)
        for block in self.blocks if self.sizes.attention == "nsa" else ():
            block.attention.share_sequences(within)

    def _check_on_all_ranks(self, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        """`check`, which on the ranks of `context` fails on all if on one."""
        error, sizes = None, {"tokens": f"{list(tokens.shape)} {tokens.dtype}"}
        try:
            self.check(tokens, packed=cu_seqlens is not None)
            if self.context is not None:
                self.context.layout(tokens.shape[1])
                sizes["cu_seqlens"] = None if cu_seqlens is None else cu_seqlens.tolist()
        except ValueError as refused:
            if self.context is None:
                raise
            error = refused
        if self.context is not None:
            self.context.agree(sizes, error)

    def recompute(self, layers: str) -> range:
        """Recompute these blocks in the backward: less memory for one more forward of each.

        `layers` is "" (none), "all" or "start:end", as in `layer_range`; returns these layers. The
        path witness counts calls, so a recomputed block's attention counts twice per step.
        """
        self.recomputed = layer_range(layers, len(self.blocks))
        return self.recomputed

    def run_blocks(
        self, x: Tensor, *context: Any, seen: list[Tensor] | None = None
    ) -> Float[Tensor, "B T E"]:
        """Apply the blocks in order, each called as block(x, *context), `context` being the rotary
        tables and cu_seqlens, and with the selection of the last one that shares it.

        Each checkpoint gets the block itself. A lambda over the loop variable would give the same
        loss but recompute every layer with the last block: the backward runs after the loop.

        The whole block is recomputed (early_stop=False), which costs only its last operation more:
        so torch detects a recomputation that saves other tensors than the forward did.
        No layer draws random numbers, so their state is not stored.
        """
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        blocks = ()  # the last selection, if it is shared
        for index, block in enumerate(islice(self.blocks, self.sizes.layers)):
            if seen is not None:
                seen.append(x)
            call = partial(again, block) if index in self.recomputed else block
            x, *blocks = parts(call(x, *context, *self._handed_on(index, blocks)))
        return x

    def _handed_on(self, layer: int, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
        """The selection that this layer is given, none if it selects."""
        return blocks if layer % self.sizes.share_selection else ()

    def check(self, tokens: Tensor, packed: bool = False) -> None:
        """Raise ValueError unless tokens are ids or embeddings, at least one and at most max_tokens
        per sequence; the lengths of packed sequences are not checked."""
        embedded = tokens.is_floating_point()
        wide = 3 if embedded else 2
        right = tokens.dim() == wide and (embedded or tokens.dtype == torch.int64)
        if not right or tokens.numel() == 0 or (embedded and tokens.shape[2] != self.sizes.dim):
            raise ValueError(
                f"tokens are {list(tokens.shape)} {tokens.dtype}; needed is [B, T] torch.int64 "
                f"with at least one token, or their embeddings [B, T, {self.sizes.dim}]"
            )
        limit = self.sizes.max_tokens
        count = tokens.shape[1] * (1 if self.context is None else self.context.ranks)
        if limit is not None and not packed and count > limit:
            raise ValueError(
                f"{count} tokens are more than max_tokens={limit}; cut the input or "
                "raise max_tokens"
            )


class LanguageModel(Decoder):
    """Next-byte prediction. Weights come from torch's global generator; see `reset_parameters`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.build(config)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        draw_head(self.head)
        self.register_load_state_dict_pre_hook(rename_on_load)

    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew from a generator of this seed on the weights' own device."""
        generator = torch.Generator(self.embed_tokens.weight.device).manual_seed(seed)
        nn.init.normal_(self.embed_tokens.weight, std=0.02, generator=generator)
        draw_head(self.head, generator)
        for block in self.blocks:
            for drawn in (block.attention, block.mlp):
                drawn.reset_parameters(generator)
            for norm in (block.norm1, block.norm2):
                norm.reset_parameters()
        self.norm.reset_parameters()

    def forward(
        self,
        tokens: Int64[Tensor, "B T"],
        targets: Int64[Tensor, "B T"] | None = None,
        cu_seqlens: Integer[Tensor, " N1"] | None = None,
        cache: "NSACache | None" = None,
        counts: Tensor | Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, ""] | None]:
        """(logits, mean cross entropy in nats, fp32); the loss is None without targets.

        `targets` are the next tokens. With `cu_seqlens` (B = 1) the sequences are independent.
        After `share_sequences` all are this rank's rows, and the loss is their mean, 0 if none is
        scored; weighed by each rank's share of the scored targets the losses add up to the whole.
        With a `cache`, tokens are the next ones of the sequences in it, of which counts[b] are
        real (all by default), and are appended; no gradient flows.

        Raises ValueError for tokens that are not [B, T] int64 with 1 <= T <= max_tokens, and for
        ids outside the vocabulary as in `embedded`. A cache that does not fit or is full raises
        ValueError too, and is unchanged.
        """
        if cache is not None:
            if targets is not None or cu_seqlens is not None:
                raise ValueError("with a cache there are no targets and no cu_seqlens")
            with torch.no_grad():
                return self.logits(self.read(tokens, cache, counts)), None
        if counts is not None:
            raise ValueError("counts are for a cache; without one all T tokens are real")
        self._check_targets(tokens, targets)
        logits = self.logits(self.hidden(tokens, cu_seqlens))
        if targets is None:
            return logits, None
        with naming_strangers(self.config.vocab, "targets", targets):
            loss = self._loss(logits.float().flatten(0, 1), targets.flatten())
        return logits, loss

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.context is None:
            return F.cross_entropy(logits, targets)
        # The scored targets of a sequence may all lie on other ranks, and a mean of none is NaN.
        total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return total / (targets != IGNORED).sum().clamp(min=1)

    def logits(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T V"]:
        """Logits of the next tokens for the last block's output."""
        return self.head(in_autocast_dtype(self.norm(x)))

    @staticmethod
    def _check_targets(tokens: Tensor, targets: Tensor | None) -> None:
        if targets is not None and (targets.shape != tokens.shape or targets.dtype != tokens.dtype):
            raise ValueError(
                f"targets are {list(targets.shape)} {targets.dtype}, tokens {list(tokens.shape)} "
                f"{tokens.dtype}; both must be alike"
            )


def check_shareable(config: ModelConfig, context: ContextParallel) -> None:
    """Raise ValueError for dense attention, and for KV heads that the method cannot split."""
    if config.attention != "nsa":
        raise ValueError(
            f"attention={config.attention!r} does not share sequences among ranks; "
            "attention='nsa' does"
        )
    context.check_heads(config.kv_heads)


def draw_head(head: nn.Linear, generator: torch.Generator | None = None) -> None:
    """Draw a head whose logits have standard deviation 1/4 at any width: the initial loss is
    ln(vocab) + 1/32."""
    nn.init.normal_(head.weight, std=0.25 / sqrt(head.in_features), generator=generator)


@contextmanager
def naming_strangers(vocab: int, name: str, ids: Tensor) -> Iterator[None]:
    """Convert torch's IndexError for an id to a ValueError with the ids and the range."""
    try:
        yield
    except IndexError as error:
        held = f"{int(ids.min())} to {int(ids.max())}"
        message = f"{name} hold ids from {held}; vocab={vocab} has 0 to {vocab - 1}"
        raise ValueError(message) from error


def parts(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a layer as a tuple: x alone, or x and the selection that it hands on."""
    return found if isinstance(found, tuple) else (found,)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x to the autocast dtype once. Autocast alone would cast it for each projection that
    reads it, and keep each copy for the backward."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters of the model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
