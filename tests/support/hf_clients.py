"""A tiny model and a tokenizer of characters, as a user of TRL, PEFT or lm_eval has them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nsa.hf import NSAConfig, NSAForCausalLM

VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(c): c - 32 + 3 for c in range(32, 127)}
SIZES = {
    "compress_block": 8, "compress_stride": 4, "select_block": 8, "select_count": 4, "window": 16,
}  # fmt: skip
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, and pad, bos and eos."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    made.chat_template = CHAT
    return made


def client_config(**changes) -> NSAConfig:
    """Two layers, 64 wide."""
    sizes = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return NSAConfig(**sizes | special | {"vocab": len(VOCABULARY), "nsa": SIZES} | changes)


def client(**changes) -> NSAForCausalLM:
    """The model, drawn from seed 0."""
    torch.manual_seed(0)
    return NSAForCausalLM(client_config(**changes))


def saved(folder: Path, **changes) -> str:
    """A folder with the model and its tokenizer, as a user loads them by path."""
    client(**changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
