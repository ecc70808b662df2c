"""LanguageModel as a transformers model: masks, labels, caches and what `generate` asks for."""

from dataclasses import fields
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa.hf.cache import ASSISTED, GenerationCache
from nsa.hf.config import NSAConfig
from nsa.model.llama import LanguageModel

# transformers renamed it in the course of version 5.
KEY = next(x.name for x in fields(CausalLMOutputWithPast) if x.name in ("cache", "past_key_values"))
# What callers of `forward` may say beside its arguments, and what NSA does without.
IGNORED = {"cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "return_dict"}


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """A small Llama whose attention is NSA; `model` is the LanguageModel inside."""

    config_class = NSAConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.model_config())
        self._drawn = self.model.embed.weight.device.type != "meta"
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, **other: Any) -> "NSAForCausalLM":
        """That model, not a copy; `other` is of the config, as eos_token_id."""
        with torch.device("meta"):
            made = cls(NSAConfig.of(model.config, **other))
        made.model, made._drawn = model, True
        return made.train(model.training)

    def forward(
        self,
        input_ids: Int64[Tensor, "B T"],
        attention_mask: Int[Tensor, "B TOTAL"] | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        labels: Int64[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T, V] of the tokens, or of those that `logits_to_keep` names.

        Where `attention_mask` is 0 there is no token: a sequence is what is left, wherever the
        padding stands, and positions count its tokens alone. Logits there mean nothing. With a
        cache the mask is of all its columns and the new ones, or of the new ones alone.

        `labels` are the input_ids themselves, -100 where none is scored: the loss is the mean cross
        entropy of each token given those before it. None is computed for padding and for the token
        just behind it. With labels no cache is made; without, one is made and returned if
        `use_cache` says so, by default the config's word for it where no gradient is recorded.
        What goes through a cache has no gradient. `cu_seq_lens_q` [N + 1] (B = 1) keeps packed
        sequences apart, as DataCollatorWithFlattening gives it.

        Raises:
            TypeError: an argument that is unknown.
            ValueError: what does not fit, and what NSA has not: attention matrices, 4-D masks,
                positions of the caller's own, embeddings in place of ids.
        """
        cache = past_key_values if cache is None else cache
        cu_seqlens, position_ids, return_dict = self._check(input_ids, cache, labels, options)
        real = self._real(input_ids, attention_mask, cache)
        if position_ids is not None and cu_seqlens is None:
            self._check_positions(position_ids, attention_mask, cache)
        if cache is None and labels is None:
            wanted = self.config.use_cache and not torch.is_grad_enabled()
            if wanted if use_cache is None else use_cache:
                cache = GenerationCache(self.config)
        tokens, counts, back = _packed_left(input_ids, real)
        if cache is None:
            logits, _ = self.model(tokens, cu_seqlens=cu_seqlens)
            logits = _kept(_unpacked(logits, back), logits_to_keep)
        else:
            weight = self.model.embed.weight
            dtype, kind = weight.dtype, weight.device.type
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
            inside = cache.room(*tokens.shape, dtype, weight.device)
            x = self.model.read(tokens, inside, counts)
            cache.saw(tokens.shape[1], real)
            with torch.no_grad():
                logits = self.model.logits(_kept(_unpacked(x, back), logits_to_keep))
        loss = None
        if labels is not None:
            if real is not None:
                scored = real & torch.cat([real[:, :1], real[:, :-1]], dim=1)
                labels = labels.masked_fill(~scored, -100)
            items = options.get("num_items_in_batch")
            sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": items}
            loss = self.loss_function(logits=logits, labels=labels, **sizes)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{KEY: cache})
        return output if return_dict else output.to_tuple()

    def _check(
        self, tokens: Tensor, cache: Any, labels: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """(cu_seqlens, position_ids, whether an output is wanted rather than a tuple)."""
        has_not = {
            "inputs_embeds": "the model reads input_ids",
            "output_attentions": "there is no T x T matrix; nsa.lab.observers tells of selections",
            "output_hidden_states": "a forward hook on model.blocks[i] gives them",
        }
        known = {*IGNORED, *has_not, "cu_seq_lens_q", "position_ids", "num_items_in_batch"}
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"NSAForCausalLM takes no {name}")
            if name in has_not and value is not None and value is not False:
                raise ValueError(f"NSAForCausalLM takes no {name}: {has_not[name]}")
        cu_seqlens = options.get("cu_seq_lens_q")
        if cache is not None:
            if not isinstance(cache, GenerationCache):
                raise ValueError(
                    f"a {type(cache).__name__} cannot hold what NSA keeps; "
                    "nsa.hf.GenerationCache(model.config) can"
                )
            if labels is not None or cu_seqlens is not None:
                raise ValueError("with a cache there are no labels and no cu_seq_lens_q")
            if cache.nsa is not None and cache.batch_size != len(tokens):
                raise ValueError(
                    f"input_ids are of {len(tokens)} sequences, the cache of {cache.batch_size}; "
                    "cache.batch_select_indices(rows) has others"
                )
        return_dict = options.get("return_dict")
        if return_dict is None:
            return_dict = self.config.return_dict
        return cu_seqlens, options.get("position_ids"), return_dict

    def _real(
        self, tokens: Tensor, mask: Tensor | None, cache: GenerationCache | None
    ) -> Bool[Tensor, "B T"] | None:
        """Which of the new columns are tokens; None: all of them."""
        if mask is None:
            return None
        new, before = tokens.shape[1], cache.columns if cache is not None else 0
        wanted = [(tokens.shape[0], n) for n in dict.fromkeys((before + new, new))]
        if tuple(mask.shape) not in wanted:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} and must be [B, T] = "
                f"{' or '.join(map(str, wanted))}: 0 where there is no token"
            )
        real = mask[:, -new:].to(tokens.device).bool()
        # One column may be looked at without waiting for the device.
        return None if new > 1 and bool(real.all()) else real

    def _check_positions(
        self, given: Tensor, mask: Tensor | None, cache: GenerationCache | None
    ) -> None:
        """ValueError unless those are the positions that the model counts itself."""
        first = cache.columns if cache is not None else 0
        new = given.shape[-1]
        if mask is None:
            wrong = given != first + torch.arange(new, device=given.device)
        else:
            here = mask[:, -new:].to(given.device).bool()
            wrong = (given != (mask.to(given.device).long().cumsum(-1) - 1)[:, -new:]) & here
        if bool(wrong.any()):
            raise ValueError(
                "position_ids differ from 0, 1, ... of each sequence's tokens, which are the "
                "positions here; leave them out, or for packed sequences give cu_seq_lens_q"
            )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Puts a GenerationCache of the size that is needed among `generate`'s arguments."""
        if self.config.attention != "nsa":  # without a cache the whole sequence is read each time
            generation_config.use_cache = False
        if model_kwargs.get(KEY) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={kind!r}: NSA has a cache of its own; leave it out, or give "
                f"{KEY}=nsa.hf.GenerationCache(model.config, page=64)"
            )
        taken_back = generation_mode == GenerationMode.ASSISTED_GENERATION
        taken_back = taken_back or getattr(generation_config, "is_assistant", False)
        sizes = {"slack": ASSISTED} if taken_back else {}
        model_kwargs[KEY] = GenerationCache(self.config, max_cache_length + 1, **sizes)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draws what a loaded checkpoint lacks, as LanguageModel does; what was loaded stays."""
        named = [] if self._drawn else self.model.named_parameters()
        lacking = [(name, p) for name, p in named if not hasattr(p, "_is_hf_initialized")]
        if lacking:
            drawn = LanguageModel(self.config.model_config())
            for name, parameter in lacking:
                parameter.copy_(drawn.get_parameter(name))
        self._drawn = True

    def gradient_checkpointing_enable(self, *options: Any, **more: Any) -> None:
        """Recomputes every block in the backward, as `LanguageModel.recompute` does."""
        self.model.recompute("all")

    def gradient_checkpointing_disable(self) -> None:
        self.model.recompute("")

    activation_checkpointing_enable = gradient_checkpointing_enable
    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return len(self.model.recomputed) > 0

    is_activation_checkpointing = is_gradient_checkpointing

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.model.embed

    def set_input_embeddings(self, value: torch.nn.Embedding) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: torch.nn.Linear) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> torch.nn.Embedding:
        """As in transformers; the model inside learns of its new vocabulary."""
        made = super().resize_token_embeddings(*sizes, **options)
        self.model.config = self.config.model_config()
        return made


def _packed_left(
    tokens: Int64[Tensor, "B T"], real: Bool[Tensor, "B T"] | None
) -> tuple[Tensor, Tensor | list[int] | None, Tensor | None]:
    """(tokens with each sequence's own ones first and zeros behind, how many those are, where each
    column of the input went): the latter two None where all are real."""
    if real is None:
        return tokens, None, None
    tokens = tokens.masked_fill(~real, 0)
    if tokens.shape[1] == 1:
        return tokens, real[:, 0].int(), None
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    return tokens.gather(1, order), real.sum(1).tolist(), order.argsort(dim=1)


def _unpacked(x: Float[Tensor, "B T F"], back: Tensor | None) -> Float[Tensor, "B T F"]:
    """x in the columns of the input."""
    return x if back is None else x.gather(1, back[..., None].expand(-1, -1, x.shape[2]))


def _kept(x: Float[Tensor, "B T F"], keep: int | Tensor) -> Float[Tensor, "B K F"]:
    """The last `keep` columns, all for 0, or those whose indices `keep` holds."""
    return x[:, keep] if isinstance(keep, Tensor) else x[:, -keep:] if keep else x
