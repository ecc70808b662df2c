import io
import json
import re
import sys

import pytest
from tiny_models import tiny

from nsa.model.data import synthetic
from nsa.model.generate import generate
from nsa.model.llama import LanguageModel
from nsa.model.saving import load_model
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from workbook.cli import main as cli
from workbook.runs.files import write_json


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run `tiny-1` of a model that reads bytes, and `small-1` of 16 ids."""
    place = tmp_path_factory.mktemp("runs") / "2026-11-01"
    for name, changes in (("tiny-1", {}), ("small-1", {"vocab": 16})):
        config = tiny(layers=1, backend="masked", **changes)
        model, training = LanguageModel(config), TrainConfig(batch=1, tokens=8, seed=3)
        Trainer(model, synthetic(vocab=config.vocab), training).save(place / name / "checkpoints")
        write_json(place / name / "record.json", {"status": "ok"})
    return place


def printed(capsys, *words, code=0):
    assert cli.main(["generate", *map(str, words)]) == code
    return capsys.readouterr()


@pytest.mark.processes
def test_a_text_goes_on_as_the_model_does_and_tells_how_fast(runs, capsys, tmp_path):
    record = tmp_path / "record.json"
    model = ["--checkpoint", runs / "tiny-1", "--device", "cpu"]
    how = ["--tokens", 9, "--temperature", 1, "--seed", 4, "--top-k", 50, "--page", 16]
    shown = printed(capsys, *model, "--prompt", "def f", *how, "--record", record)
    given = {"temperature": 1.0, "seed": 4, "top_k": 50}
    (wanted,) = generate(load_model(runs / "tiny-1"), [b"def f"], 9, **given).all()
    assert shown.out == bytes(wanted).decode("utf-8", "replace") + "\n"
    told = r"nsa: 9 tokens, the first after \d+\.\d ms, then \d+\.\d tokens/s on cpu\n"
    assert re.match(told, shown.err)
    # position 12: 5 compressed keys, two blocks of 8 of which the own has 5 tokens, a window of 8
    assert "keys read in the last step a layer: 5 cmp, 13 slc, 8 win" in shown.err
    kept = json.loads(record.read_text())
    assert kept["new_tokens"] == [9] and kept["sampling"]["top_k"] == 50
    assert kept["cache"]["last_step"] == {"cmp": 5, "slc": 13, "win": 8}
    assert kept["cache"]["page"] == 16 and kept["model"]["name"] == "tiny" and kept["torch"]


def test_several_prompts_are_a_batch_and_one_comes_from_standard_input(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"zwei\n")))
    words = ["--checkpoint", runs / "tiny-1", "--tokens", 4, "--device", "cpu"]
    shown = printed(capsys, *words, "--prompt", "one", "--prompt", "-")
    found = generate(load_model(runs / "tiny-1"), [b"one", b"zwei\n"], 4).all()
    one, two = (bytes(tokens).decode("utf-8", "replace") for tokens in found)
    assert shown.out == f"--- 0\n{one}\n--- 1\n{two}\n"
    assert "nsa: 8 tokens" in shown.err


def test_ids_go_in_and_come_out_where_the_vocabulary_is_not_bytes(runs, capsys):
    words = ["--checkpoint", "small-1", "--runs", runs.parent, "--ids", "--device", "cpu"]
    shown = printed(capsys, *words, "--prompt", "1, 2,15", "--tokens", 3)
    (wanted,) = generate(load_model(runs / "small-1"), [[1, 2, 15]], 3).all()
    assert shown.out.split() == list(map(str, wanted))


def test_bad_requests_are_one_clear_line(runs, capsys, tmp_path):
    tiny_run, small = ["--checkpoint", runs / "tiny-1"], ["--checkpoint", runs / "small-1"]
    prompt, empty = ["--prompt", "a"], tmp_path / "empty"
    empty.mkdir()
    cases = [
        (tiny_run, "--prompt is missing"),
        ([*tiny_run, "--prompt", "-", "--prompt", "-"], "standard input can be read once"),
        ([*tiny_run, "--prompt", ""], "--prompt is empty"),
        ([*tiny_run, *prompt, "--tokens", 0], "tokens=0 must be at least 1"),
        ([*tiny_run, *prompt, "--top-p", 0.5], "top_p=0.5 would change nothing"),
        ([*tiny_run, *prompt, "--backend", "flex"], "backend='flex' is unknown"),
        ([*tiny_run, *prompt, "--page", 12], "page=12 is not a multiple of select_block=8"),
        ([*tiny_run, *prompt, "--record", tmp_path], "is a folder; name a file"),
        ([*small, *prompt], "has 16 ids and not the 256 bytes of a text; --ids"),
        ([*small, "--ids", "--prompt", "1,x"], "with --ids: wanted is as 0,17,3"),
        ([*small, "--ids", "--prompt", "1,16"], "vocab=16 has 0 to 15"),
        (
            ["--checkpoint", "none", "--runs", runs.parent, *prompt],
            "there is no such file or folder",
        ),
        (["--checkpoint", empty, *prompt], "there is no checkpoint"),
    ]
    for words, message in cases:
        shown = printed(capsys, *words, "--device", "cpu", code=2)
        assert message in shown.err and shown.err.count("\n") == 1, shown.err
        assert shown.out == ""
