"""Text shards as the data of nsa train: their training split, in bytes or in tokens."""

import pytest
import torch
from text_packages import small_shards

from nsa.model.presets import preset
from nsa.model.tokens import tokenize, tokens
from nsa.model.train_config import TrainConfig
from workbook.rooms.training.job import Job, source_of


def job(folder, vocab):
    config = preset("cpu_test", vocab=vocab)
    return Job(config, TrainConfig(batch=1, tokens=32, steps=2), data=str(folder), device="cpu")


def test_shards_are_trained_on_without_what_is_held_out(tmp_path):
    made = small_shards(tmp_path)
    source = source_of(job(made.folder, 256))
    assert source.record()["sha256"] == made.manifest["sha256"]["train"]


def test_their_tokens_are_trained_on_if_they_fit_the_model(tmp_path):
    pytest.importorskip("tokenizers")
    made = tokenize(small_shards(tmp_path), 300)
    source, same = source_of(job(made.folder, 300)), tokens(made, "train", 1337)
    assert source.record() == same.record()
    assert torch.equal(source.batch(0, 1, 32)[0], same.batch(0, 1, 32)[0])
    with pytest.raises(ValueError, match="has 300 ids and the model vocab=256"):
        job(made.folder, 256)
    assert source_of(job(made.folder / "train.bin", 256)).record()["bytes"] == same.bytes
