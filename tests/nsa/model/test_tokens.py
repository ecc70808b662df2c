"""Tokenized shards: the same bytes in fewer tokens, and what does not fit is refused."""

import json
import math
import sys

import pytest
import torch
from text_packages import small_shards

from nsa.model.shards import opened
from nsa.model.tokens import FILE, tokenize, tokenizer, tokens

pytest.importorskip("tokenizers")
VOCAB = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tokenize(small_shards(tmp_path_factory.mktemp("shards")), VOCAB)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_ids_are_the_whole_text_and_fewer(made, split):
    data, text = tokens(made, split), (made.folder / f"{split}.bin").read_bytes()
    assert tokenizer(made).decode(data.ids.tolist()).encode() == text
    assert data.bytes_per_token == len(text) / len(data.ids) > 2
    assert int(data.ids.int().max()) < VOCAB
    assert data.bits_a_byte(math.log(2) * data.bytes_per_token) == pytest.approx(1.0)


def test_every_byte_has_an_id_that_spells_it(made):
    found, spelled = tokens(made).spelling, tokenizer(made)
    assert len({*found}) == 256
    for text in ("\n#= KEYS word;\n", "é°\x00~"):
        assert spelled.decode([found[byte] for byte in text.encode()]) == text


def test_batches_are_passages_with_each_ids_successor(made):
    data = tokens(made, seed=3)
    read, targets = data.batch(5, 2, 30)
    assert read.dtype == torch.int64 and torch.equal(read[:, 1:], targets[:, :-1])
    whole, row = data.ids.tolist(), [*read[0].tolist(), int(targets[0, -1])]
    assert any(whole[i : i + 31] == row for i in range(len(whole)))
    assert torch.equal(data.batch(5, 2, 30)[0], read)
    assert not torch.equal(data.batch(6, 2, 30)[0], read)
    with pytest.raises(ValueError, match=r"got \d+ tokens, but T = 100000"):
        data.batch(0, 1, 100000)


def test_the_same_shards_give_the_same_files(made, tmp_path):
    again = tokenize(small_shards(tmp_path), VOCAB)
    assert again.manifest == made.manifest == opened(made.folder).manifest
    for name in (FILE, "train.ids", "held-out.ids"):
        assert (again.folder / name).read_bytes() == (made.folder / name).read_bytes()
    assert tokens(again).record()["tokenizer_sha256"] == made.manifest["tokenizer"]["sha256"]


def test_a_tokenizer_or_ids_of_others_are_refused(tmp_path):
    shards = small_shards(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokens; nsa\.model\.tokens\.tokenize"):
        tokens(shards)
    shards = tokenize(shards, VOCAB)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads((shards.folder / FILE).read_text()) | {"version": "2"}))
    with pytest.raises(ValueError, match="does not fit these shards: its sha256 is"):
        tokenizer(shards, other)
    (shards.folder / "train.ids").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="does not fit these shards"):
        tokens(shards)
    assert len(tokens(shards, "held-out").ids) > 0


@pytest.mark.parametrize(
    ("vocab", "message"),
    [(256, "vocab=256 must be in 257..65536"), (60000, r"yield \d+ ids; vocab=\d+ would do")],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path, vocab, message):
    with pytest.raises(ValueError, match=message):
        tokenize(small_shards(tmp_path), vocab)


def test_without_the_library_the_error_names_what_to_install(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert len(tokens(made).ids) > 0  # ids need none
    with pytest.raises(ImportError, match="pip install 'nsa"):
        tokenizer(made)


def test_a_model_of_another_vocabulary_is_refused(made):
    tokens(made).check(VOCAB)
    with pytest.raises(ValueError, match="has 300 ids and the model vocab=256; --set vocab=300"):
        tokens(made).check(256)
