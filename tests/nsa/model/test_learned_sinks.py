"""A layer whose heads may attend to nothing: `sinks="learned"`."""

import pytest
import torch
from tiny_models import gradients, hidden, tiny, tokens

from nsa.model.config import ModelConfig
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.model.train_config import TrainConfig, adamw
from nsa.reference.nsa import BRANCHES, nsa
from workbook.lab.observers.attention_stats import look
from workbook.lab.oracles.reference import check_model


def learned(**changes):
    """A model whose sinks are not 0."""
    model = LanguageModel(tiny(sinks="learned", **changes))
    for name, x in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(x, std=2.0)
    return model


def test_by_default_there_are_none_and_old_configs_and_weights_load():
    model, values = LanguageModel(tiny()), tiny().to_dict()
    assert not [name for name in model.state_dict() if "sinks" in name]
    assert values.pop("sinks") == "none" and ModelConfig.from_dict(values) == tiny()
    more = LanguageModel(tiny(sinks="learned"))
    found = more.load_state_dict(model.state_dict(), strict=False)
    assert found.missing_keys == [f"blocks.{n}.attention.sinks" for n in (0, 1)]
    with pytest.raises(ValueError, match="sinks='fixed' is unknown; known are none, learned"):
        tiny(sinks="fixed")


def test_they_start_at_zero_and_change_no_other_weight_of_a_seed():
    plain, sunk = LanguageModel(tiny()), learned()
    for model in (plain, sunk):
        model.reset_parameters(seed=3)
    other = sunk.state_dict()
    for n in (0, 1):
        assert torch.equal(other.pop(f"blocks.{n}.attention.sinks"), torch.zeros(12))
    assert all(torch.equal(x, other[name]) for name, x in plain.state_dict().items())


def test_the_layer_is_the_definition_with_its_sinks():
    layer = learned().blocks[0].attention
    x = hidden(layer.config)
    given = layer.arguments(x)
    assert torch.equal(given["sinks"], layer.sinks.view(4, 3))
    torch.testing.assert_close(layer(x), layer.o_proj(nsa(**given).o.flatten(2)))
    assert not torch.allclose(layer(x), layer.o_proj(nsa(**given | {"sinks": None}).o.flatten(2)))


@pytest.mark.parametrize("changes", [{}, {"force_branch": "slc"}, {"strict": True}], ids=str)
def test_every_sink_of_a_branch_that_is_computed_learns(changes):
    for name, gradient in gradients(learned(**changes)).items():
        if name.endswith("sinks"):
            moved = gradient.view(4, 3).abs().amin(0) > 0
            only = changes.get("force_branch")
            assert moved.tolist() == [only in (None, b) for b in BRANCHES], name


def test_they_do_not_decay():
    model = learned()
    optimizer = adamw(model, TrainConfig(batch=1, tokens=8), torch.device("cpu"))
    decayed, plain = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    sinks = {id(block.attention.sinks) for block in model.blocks}
    assert sinks <= plain and not sinks & decayed


def test_who_looks_at_attention_sees_it_with_its_sinks():
    model = learned()
    assert set(check_model(model, tokens()).values()) == {"gather"}
    layer = NSAAttention(tiny(sinks="learned"))
    x = hidden(layer.config)
    before = look(layer, x)[-3:]
    torch.nn.init.constant_(layer.sinks, 50.0)
    assert (look(layer, x)[-3:] < 1e-9 * before).all()
