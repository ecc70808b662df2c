"""NSA models of transformers with a head: causal LM, sequence and token classification."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa.hf.base import KEY, NSAModel, NSAPreTrainedModel, kept, scored
from nsa.hf.cache import ASSISTED, GenerationCache
from nsa.hf.config import NSAConfig
from nsa.model.llama import LanguageModel, draw_head, in_autocast_dtype


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """A small Llama with NSA attention: `model` computes hidden states, `lm_head` logits."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = NSAModel(config)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        draw_head(self.lm_head)
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, **other: Any) -> "NSAForCausalLM":
        """Wrap a model's modules without copies; `other` are config fields such as eos_token_id."""
        with torch.device("meta"):
            made = cls(NSAConfig.of(model.config, **other))
        inside = made.model
        inside.embed_tokens, inside.blocks, inside.norm = (
            model.embed_tokens,
            model.blocks,
            model.norm,
        )
        made.lm_head, inside.recomputed, inside._drawn = model.head, model.recomputed, True
        return made.train(model.training)

    def language_model(self) -> LanguageModel:
        """Return a LanguageModel of the same modules, without copies."""
        inside = self.model
        with torch.device("meta"):
            made = LanguageModel(inside.sizes)
        made.embed_tokens, made.blocks, made.norm = inside.embed_tokens, inside.blocks, inside.norm
        made.head, made.recomputed = self.lm_head, inside.recomputed
        return made.train(self.training)

    def forward(
        self,
        input_ids: Int64[Tensor, "B T"] | None = None,
        attention_mask: Int[Tensor, "B TOTAL"] | None = None,
        position_ids: Int64[Tensor, "_ T"] | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        labels: Int64[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T, V] of the tokens, or of those in `logits_to_keep`.

        Arguments are those of `NSAModel.forward`. `labels` are the input_ids themselves, -100 where
        none is scored: the loss is the mean cross entropy of each token given those before it,
        divided by `num_items_in_batch` instead of their number if that is given. Padding and the
        token right after it are not scored. With labels no cache is created.

        Raises TypeError and ValueError as NSAModel does.
        """
        cache = past_key_values if cache is None else cache
        if labels is not None:
            if cache is not None:
                raise ValueError("with a cache there are no labels")
            use_cache = False
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds=inputs_embeds,
            use_cache=use_cache, return_dict=True, **options,
        )  # fmt: skip
        logits = self.lm_head(in_autocast_dtype(kept(outputs.last_hidden_state, logits_to_keep)))
        loss = None
        if labels is not None:
            labels = scored(labels, attention_mask)
            items = options.get("num_items_in_batch")
            sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": items}
            loss = self.loss_function(logits=logits, labels=labels, **sizes)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states,
            **{KEY: getattr(outputs, KEY)},
        )  # fmt: skip
        plain = self.config.return_dict if return_dict is None else return_dict
        return output if plain else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Add a GenerationCache of the required size to `generate`'s arguments."""
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

    def init_continuous_batching(self, *args: Any, **options: Any) -> None:
        """Raise NotImplementedError: transformers' scheduler keeps keys in its own pages."""
        raise NotImplementedError(
            "continuous batching of transformers has a paged cache of its own, and NSA's branches "
            f"know nothing of it; generate(ids, {KEY}=nsa.hf.GenerationCache(model.config, "
            "page=64)) serves a batch"
        )

    generate_batch = init_continuous_batching
    continuous_batching_context_manager = init_continuous_batching


class NSAForSequenceClassification(GenericForSequenceClassification, NSAPreTrainedModel):
    """Logits of `num_labels` classes from each sequence's last token."""


class NSAForTokenClassification(GenericForTokenClassification, NSAPreTrainedModel):
    """Logits of `num_labels` classes for each token."""
