import json
import math
import re
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from text_packages import small_shards

from nsa.attention.branches import select_blocks
from nsa.model import saving, tokens
from nsa.model.shards import opened
from nsa.reference.compress import Phi, compress_keys
from workbook.rooms.quality import __main__ as driver
from workbook.rooms.quality import child
from workbook.rooms.quality.cells import Cell
from workbook.rooms.quality.child import Amounts, OutOfTime, run_cell

FEW = Amounts(look=1024, held_out=1024, rows=1, longest=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_shards(tmp_path_factory.mktemp("text"))


def cell(variant="nsa", **changes):
    values = {"seed": 3, "tokens": 512, "bytes": 12 * 512, "model": "tiny", "batch_tokens": 512}
    return Cell(variant, **values | {"precision": "fp32"} | changes)


def weights(folder, one):
    return saving.newest(folder / one.name)["model"]


class Ticks:
    """Clock that counts its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return float(self.count)


@pytest.mark.full
def test_a_cell_cut_off_in_the_middle_goes_on_bit_for_bit(tmp_path, text, monkeypatch):
    monkeypatch.setattr(child, "CHUNK", 1)
    one = cell()
    row = run_cell(one, text, tmp_path / "whole", device="cpu", amounts=FEW)
    with pytest.raises(OutOfTime, match=r"saved after step 5 of") as stopped:
        run_cell(one, text, tmp_path / "cut", device="cpu", amounts=FEW, until=9, clock=Ticks())
    cut = stopped.value.row
    assert (cut["cell"], cut["outcome"], cut["steps"]) == (one.to_dict(), "unfinished", 5)
    assert cut["losses"] == row["losses"][:5] and "bits" not in cut
    said = []
    again = run_cell(one, text, tmp_path / "cut", device="cpu", amounts=FEW, say=said.append)
    assert said[0] == "resumed after step 5"
    for name in (
        "losses",
        "bits",
        "by_position",
        "tasks",
        "selections",
        "selected",
        "steps",
        "outcome",
    ):
        assert again[name] == row[name]
    assert [bits for *_, bits in again["curve"]] == [bits for *_, bits in row["curve"]]
    for name, weight in weights(tmp_path / "whole", one).items():
        assert torch.equal(weight, weights(tmp_path / "cut", one)[name])


@pytest.mark.full
def test_a_row_has_what_the_question_asks_for_and_is_not_made_twice(tmp_path, text, monkeypatch):
    one = cell()
    row = run_cell(one, text, tmp_path, device="cpu", amounts=FEW)
    assert row["outcome"] == "ok" and row["steps"] == 12
    assert len(row["curve"]) == child.LOOKS and row["curve"][-1][0] == one.bytes
    assert list(row["by_position"]) == ["512"] and row["by_position"]["512"][512] > 0
    assert set(row["tasks"]) == {"needle", "recall", "tracking"}
    assert [len(layers) for layers in row["selections"].values()] == [2]
    assert [look["bytes"] for look in row["selected"]] == [seen for seen, *_ in row["curve"]]
    assert row["data"]["sha256"] == text.manifest["sha256"]
    assert row["losses"][0] > row["losses"][-1]
    monkeypatch.setattr(child, "trainer_at", None)  # which would be called to train
    assert run_cell(one, text, tmp_path, device="cpu") == json.loads(json.dumps(row))
    kept = tmp_path / one.name / "row.json"
    kept.write_text(kept.read_text().replace('"variant"', '"arm"'))  # as earlier calls named it
    assert run_cell(one, text, tmp_path, device="cpu") == json.loads(json.dumps(row))


@pytest.mark.full
def test_tensors_are_saved_on_request_also_of_a_cell_that_is_done(tmp_path, text, monkeypatch):
    one, asked = cell(), replace(FEW, tensors=(256,))
    row = run_cell(one, text, tmp_path, device="cpu", amounts=FEW)
    with monkeypatch.context() as broken, pytest.raises(OSError):  # in the middle of the layers
        broken.setattr(child.torch, "save", Mock(side_effect=[None, OSError("no space")]))
        run_cell(one, text, tmp_path, device="cpu", amounts=asked)
    again = run_cell(one, text, tmp_path, device="cpu", amounts=asked)
    assert again["losses"] == row["losses"] and again["bits"] == row["bits"]
    files = sorted((tmp_path / one.name / "tensors-256").iterdir())
    assert [file.name for file in files] == ["layer-0.pt", "layer-1.pt"]
    held, config = torch.load(files[1]), one.config()
    assert held["q"].shape == (1, 256, config.heads, config.head_dim)
    k_cmp = compress_keys(held["k"]["cmp"], Phi(), config.nsa)
    chosen = select_blocks(held["q"], k_cmp, config.nsa, config.head_dim**-0.5)
    assert torch.equal(held["blocks"].long(), chosen.long())
    assert set(held["k"]) == set(held["v"]) == {"cmp", "slc", "win"}


@pytest.mark.full
@pytest.mark.parametrize("variant", ["dense", "window", "compressed"])
def test_variants_that_select_nothing_have_no_selections(tmp_path, text, variant):
    row = run_cell(cell(variant), text, tmp_path, device="cpu", amounts=FEW)
    assert row["outcome"] == "ok" and row["selections"] == {}
    asked = replace(FEW, tensors=(256,))  # there are none, so nothing is made again
    assert run_cell(cell(variant), text, tmp_path, device="cpu", amounts=asked) == json.loads(
        json.dumps(row)
    )


@pytest.mark.full
def test_variants_of_a_seed_see_the_same_bytes_and_seeds_others(tmp_path, text, monkeypatch):
    seen = {}
    for one in (cell(), cell("dense"), cell(seed=4)):
        batches = seen[one.name] = []
        taken = child.Planted.batch

        def batch(self, step, *sizes, batches=batches, taken=taken):
            found = taken(self, step, *sizes)
            if self.kind is None:
                batches.append(found[0])
            return found

        with monkeypatch.context() as patched:
            patched.setattr(child.Planted, "batch", batch)
            run_cell(one, text, tmp_path, device="cpu", amounts=FEW)
    first, second, other = (torch.stack(batches[:12]) for batches in seen.values())
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.full
@pytest.mark.parametrize("spoilt", [math.nan, 99.0])
def test_a_seed_that_diverges_is_a_row(tmp_path, text, monkeypatch, spoilt):
    run = child.Trainer.run

    def spoil(self, steps):
        return [spoilt for _ in run(self, steps)]

    monkeypatch.setattr(child.Trainer, "run", spoil)
    row = run_cell(cell(), text, tmp_path, device="cpu", amounts=FEW)
    assert row["outcome"] == "diverged" and "bits" not in row
    assert (tmp_path / cell().name / "row.json").is_file()


@pytest.fixture(autouse=True)
def little_is_evaluated(monkeypatch):
    monkeypatch.setitem(child.AMOUNTS, "tiny", FEW)


def command(folder, text, *more):
    (folder / "work").mkdir(exist_ok=True)
    if not (folder / "work" / "text").exists():
        (folder / "work" / "text").symlink_to(text.folder)
    sizes = ["--model", "tiny", "--tokens", "512", "--batch-tokens", "512", "--bytes", "2K"]
    places = ["--out", str(folder / "out"), "--work", str(folder / "work"), "--device", "cpu"]
    return driver.main([*places, *sizes, "--longest", "1", *more])


def rows(folder):
    lines = (folder / "out" / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.full
def test_the_command_writes_a_line_a_cell_and_takes_what_is_done(tmp_path, text, capsys):
    assert command(tmp_path, text, "--variants", "nsa,dense", "--seeds", "0") == 0
    first = rows(tmp_path)
    assert [row["cell"]["variant"] for row in first] == ["nsa", "dense"]
    manifest = (text.folder / "manifest.json").read_bytes()
    assert (tmp_path / "out" / "manifest.json").read_bytes() == manifest
    kept = tmp_path / "earlier.jsonl"
    stored = (tmp_path / "out" / "rows.jsonl").read_text()
    kept.write_text(stored.replace('"variant"', '"arm"'))  # as earlier calls named it
    other = tmp_path / "other"
    other.mkdir()
    done = ("--variants", "nsa,dense", "--seeds", "0", "--done", str(kept), "--seconds", "0")
    assert command(other, text, *done) == 0
    assert rows(other) == first
    assert command(other, text, "--seeds", "1", "--seconds", "0") == 0
    assert rows(other) == [] and "not begun" in capsys.readouterr().out


@pytest.mark.full
def test_tokens_are_trained_on_and_told_in_bytes(tmp_path, text, capsys):
    pytest.importorskip("tokenizers")
    folder = tmp_path / "work" / "text-300-ids"
    shutil.copytree(text.folder, folder)
    options = ("--variants", "dense", "--seeds", "0", "--vocab", "300")
    assert command(tmp_path, text, *options) == 0
    (row,) = rows(tmp_path)
    assert row["outcome"] == "ok" and row["cell"]["vocab"] == 300
    made = tokens.tokens(opened(folder), "held-out")
    assert row["bytes_per_token"] == made.bytes_per_token > 2
    seen = row["cell"]["bytes"] * made.bytes_per_token
    assert row["curve"][-1][0] == pytest.approx(seen, abs=1)
    # The model has hardly learnt: a loss of at most log2(300) bits a token, told a byte.
    assert 0 < row["bits"] < 1.1 * math.log2(300) / made.bytes_per_token
    assert row["bits"] == pytest.approx(row["by_position"]["512"]["512"], rel=0.5)
    assert row["data"]["tokenizer"]["vocab"] == 300
    one = Cell.from_dict(row["cell"] | {"vocab": 301, "seed": 1})
    with pytest.raises(ValueError, match=r"has 300 ids and the model vocab=301"):
        run_cell(one, opened(folder), tmp_path, device="cpu", amounts=FEW)


def test_a_cell_that_fails_is_a_row_and_the_others_run(tmp_path, text, monkeypatch):
    fails = child.run_cell

    def run(one, *given, **more):
        if one.variant == "nsa":
            raise RuntimeError("no memory")
        return fails(one, *given, **more)

    monkeypatch.setattr(child, "run_cell", run)
    assert command(tmp_path, text, "--seeds", "0") == 0
    assert [(row["outcome"], row.get("message")) for row in rows(tmp_path)] == [
        ("error", "RuntimeError: no memory"), ("ok", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--variants", "dens"], "no variant 'dens'; the nearest is 'dense'"),
        (["--bytes", "600"], "fewer than two steps"),
        (["--done", "missing.jsonl"], "--done: .*missing.jsonl"),
    ],
)
def test_bad_options_end_with_their_reason(tmp_path, text, more, told, capsys):
    assert command(tmp_path, text, *more) == 2
    assert re.search(told, capsys.readouterr().err)
