"""Tokens instead of bytes: a byte-level BPE trained on text shards, and the shards as its ids.

`tokenize` writes tokenizer.json, train.ids and held-out.ids (uint16) beside the bytes of
`nsa.model.shards`, and their sha256 into the manifest. Losses of bytes and of tokens compare in
bits a byte: nats a token / ln 2 / bytes a token. Needs the package tokenizers.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt16
from torch import Tensor

from nsa.model.config import check_int
from nsa.model.data import Batch, Device, check_sizes, passages, with_successors
from nsa.model.shards import END, SPLITS, Shards, write
from nsa.spelling import choice

VOCAB = 4096
LARGEST = 1 << 16  # ids are stored as uint16
FILE = "tokenizer.json"
AT_ONCE = 64  # files encoded together


@dataclass(frozen=True)
class Tokens:
    """One split of tokenized shards as training data; `bytes` is the size of its text."""

    name: str
    file: Path
    seed: int
    vocab: int
    bytes: int
    tokenizer: str  # sha256 of its file
    spelling: tuple[int, ...]  # ids of the 256 bytes, each by itself

    @cached_property
    def ids(self) -> UInt16[Tensor, " N"]:
        """All ids in order, mapped into memory."""
        return torch.from_numpy(np.memmap(self.file, np.uint16, "c"))

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self.ids)

    def bits_a_byte(self, nats: float) -> float:
        """Convert a mean loss in nats a token to bits a byte of the text."""
        return nats / math.log(2) / self.bytes_per_token

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`batch` passages of `tokens` ids, and each id's successor as its target. ValueError if
        there are fewer than tokens + 1 ids."""
        check_sizes(step, batch, tokens)
        if len(self.ids) <= tokens:
            raise ValueError(
                f"{self.name}: got {len(self.ids)} tokens, but T = {tokens} and the last one's "
                f"target need {tokens + 1}; build larger shards, or take a shorter T"
            )
        drawn = passages(self.ids.view(torch.int16), self.seed, step, batch, tokens)
        return with_successors(drawn.long() & 0xFFFF, device)

    def record(self) -> dict[str, Any]:
        """Facts for a run's record, with bytes a token, by which bits a byte are computed."""
        facts = {"name": self.name, "seed": self.seed, "vocab": self.vocab, "bytes": self.bytes}
        sizes = {"tokens": len(self.ids), "bytes_per_token": self.bytes_per_token}
        return facts | sizes | {"tokenizer_sha256": self.tokenizer}

    def check(self, vocab: int) -> None:
        """Raise ValueError unless a model's vocabulary is that of the tokenizer."""
        if vocab != self.vocab:
            raise ValueError(
                f"the tokenizer of {self.name} has {self.vocab} ids and the model vocab={vocab}; "
                f"--set vocab={self.vocab} would do, or the data {self.file.with_suffix('.bin')}, "
                "whose tokens are bytes"
            )


def tokenize(shards: Shards, vocab: int = VOCAB) -> Shards:
    """Train a tokenizer of `vocab` ids on the training split, and write the ids of both splits.

    Text is split at word borders as in GPT-2 and never across files; every byte has an id, so that
    any text is encoded without loss. The same shards give the same files.

    Raises:
        ImportError: tokenizers is missing.
        ValueError: vocab is not in 257..65536, or more than the text yields.
    """
    if not 256 < check_int("vocab", vocab) <= LARGEST:
        raise ValueError(f"vocab={vocab} must be in 257..{LARGEST}: 256 bytes, and ids of 16 bits")
    library = _library()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocab, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(_files(shards, "train"), library.trainers.BpeTrainer(**options))
    if (found := made.get_vocab_size()) != vocab:
        raise ValueError(
            f"vocab={vocab}: {shards.manifest['bytes']['train']} bytes of text yield {found} ids; "
            f"vocab={found} would do, or larger shards"
        )
    text = made.to_str().encode()
    facts = {"library": f"tokenizers {library.__version__}", "vocab": vocab, "tokens": {}}
    facts |= {"sha256": hashlib.sha256(text).hexdigest(), "ids_sha256": {}}
    write(shards.folder / FILE, text)
    for split in SPLITS:
        files, ids = _files(shards, split), []
        while few := list(islice(files, AT_ONCE)):
            ids += [np.array(one.ids, np.uint16) for one in made.encode_batch_fast(few)]
        ids = np.concatenate(ids).tobytes()
        write(shards.folder / f"{split}.ids", ids)
        facts["tokens"][split] = len(ids) // 2
        facts["ids_sha256"][split] = hashlib.sha256(ids).hexdigest()
    manifest = shards.manifest | {"tokenizer": facts}
    write(shards.folder / "manifest.json", json.dumps(manifest).encode())
    return replace(shards, manifest=manifest)


def tokens(shards: Shards, split: str = "train", seed: int = 1337) -> Tokens:
    """The ids of "train" or "held-out" as data; needs no library. ValueError for shards without
    ids, and for ids or a tokenizer that are not those of the manifest."""
    choice("split", split, SPLITS)
    facts = _facts(shards)
    ids = shards.folder / f"{split}.ids"
    _check(ids, facts["ids_sha256"][split])
    _check(shards.folder / FILE, facts["sha256"])
    size = shards.manifest["bytes"][split]
    name = f"{split} of {shards.folder}, {facts['vocab']} tokens"
    spelling = _spelling(json.loads((shards.folder / FILE).read_text(encoding="utf-8")))
    return Tokens(name, ids, seed, facts["vocab"], size, facts["sha256"], spelling)


def tokenizer(shards: Shards, file: str | os.PathLike | None = None) -> Any:
    """The tokenizer of the shards' ids, a `tokenizers.Tokenizer` with encode and decode, from
    `file` if given. ValueError if that is not the one that made the ids."""
    file = Path(file or shards.folder / FILE)
    _check(file, _facts(shards)["sha256"])
    return _library().Tokenizer.from_file(str(file))


def _spelling(made: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the 256 bytes, which a byte-level vocabulary writes as GPT-2 does: a printable byte as
    the character of its number, the others in order as characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    written = [byte if byte in printable else next(others) for byte in range(256)]
    return tuple(made["model"]["vocab"][chr(character)] for character in written)


def _facts(shards: Shards) -> dict[str, Any]:
    if "tokenizer" not in shards.manifest:
        raise ValueError(
            f"{shards.folder} has no tokens; nsa.model.tokens.tokenize(shards) makes them"
        )
    return shards.manifest["tokenizer"]


def _check(file: Path, wanted: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
    if found != wanted:
        raise ValueError(
            f"{file} does not fit these shards: its sha256 is {found[:12]} and the manifest has "
            f"{wanted[:12]}; nsa.model.tokens.tokenize(shards) makes tokenizer and ids anew"
        )


def _files(shards: Shards, split: str) -> Iterator[str]:
    """Each file's text, with the byte that ends it."""
    whole = (shards.folder / f"{split}.bin").read_bytes()
    return (part.decode() + END.decode() for part in whole.split(END) if part)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "a tokenizer needs the package tokenizers: pip install 'nsa[tokens]', or pip install "
            "tokenizers; bytes (vocab=256) need none"
        ) from error
    return tokenizers
