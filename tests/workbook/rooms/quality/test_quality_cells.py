import pytest
import torch

from nsa.model.llama import LanguageModel, parameter_count
from workbook.rooms.quality.cells import MODELS, VARIANTS, Cell, cells_of


def cell(**changes):
    return Cell(**{"variant": "nsa", "seed": 0, "tokens": 512, "bytes": 4096, "model": "tiny",
                   "batch_tokens": 1024} | changes)  # fmt: skip


def parameters(one):
    with torch.device("meta"):
        return parameter_count(LanguageModel(one.config()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_model_of_the_same_width_and_depth(variant):
    config, base = cell(variant=variant).config(), cell().config()
    assert (config.dim, config.layers, config.heads) == (base.dim, base.layers, base.heads)
    assert config.attention == ("dense" if variant.startswith("dense") else "nsa")
    assert variant in ("nsa", "dense") or config != base


def test_the_models_have_the_parameters_that_they_say():
    assert parameters(cell(model="small")) == pytest.approx(21e6, rel=0.05)
    assert parameters(cell()) == pytest.approx(130_000, rel=0.1)
    wide, nsa, dense = (
        parameters(cell(model="small", variant=a)) for a in ("dense-wide", "nsa", "dense")
    )
    assert dense < nsa and abs(wide - nsa) < 0.01 * nsa
    assert set(MODELS) == {"small", "tiny", "production"}


def test_steps_and_rows_follow_from_the_bytes():
    one = cell(bytes=10_000)
    assert (one.batch, one.steps) == (2, 9)
    train = one.training()
    assert (train.batch, train.tokens, train.steps) == (2, 512, 9)
    assert train.rate(train.steps - 1) == pytest.approx(train.lr / 10, rel=0.5)


def test_cells_come_by_length_then_seed_then_variant_and_have_names_of_their_own():
    found = cells_of(("nsa", "dense"), (0, 1), (512, 1024), bytes=8192, model="tiny",
                     batch_tokens=1024)  # fmt: skip
    assert [(c.tokens, c.seed, c.variant) for c in found[:3]] == [
        (512, 0, "nsa"), (512, 0, "dense"), (512, 1, "nsa")
    ]  # fmt: skip
    assert len({c.name for c in found}) == 8
    assert all(Cell.from_dict(c.to_dict()) == c for c in found)


def test_a_vocabulary_of_tokens_is_the_models_and_one_of_bytes_is_as_rows_always_were():
    one = cell(vocab=4096)
    assert one.config().vocab == 4096 and one.name == f"{cell().name}-4096"
    assert Cell.from_dict(one.to_dict()) == one != cell() == Cell.from_dict(cell().to_dict())
    assert "vocab" not in cell().to_dict()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab": 255}, "vocab=255 must be at least 256"),
        ({"variant": "densee"}, "variant='densee' is unknown; the nearest is 'dense'"),
        ({"model": "big"}, "model='big' is unknown"),
        ({"tokens": 100}, "tokens=100 must be at least 512"),
        ({"batch_tokens": 1000}, "batch_tokens=1000 are no multiple of tokens=512; 512 are"),
        ({"bytes": 1500}, "bytes=1500 are fewer than two steps of 1024; at least 2048"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_a_cell_that_cannot_be_trained_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        cell(**changes)
