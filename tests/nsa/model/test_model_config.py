import json

import pytest
import torch
from tiny_models import refuses_type, tiny

from nsa.model.config import ModelConfig, layer_range
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.presets import PRESETS, preset, production, repro


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3; kv_heads may be 1, 2, 4"),
        ({"head_dim": 9}, "head_dim=9 is odd .*8 and 10"),
        ({"head_dim": 1}, "head_dim=1 is odd .*2 and 2"),
        ({"phi": "max"}, "phi='max' is unknown; known are mean, linear, mlp"),
        ({"gate": "tanh"}, "gate='tanh' is unknown; known are sigmoid, linear, softmax, uniform"),
        ({"compress_rope": "never"}, "compress_rope='never' .* before, after"),
        ({"force_branch": "sel"}, "force_branch='sel' .* cmp, slc, win, None"),
        ({"backend": ""}, "'auto'"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"value_dim": 0}, "value_dim=0 must be at least 1"),
        ({"rope_base": 0.0}, "rope_base=0.0 must be finite and greater than 0"),
        ({"rope_base": float("inf")}, "rope_base=inf must be finite and greater than 0"),
        ({"rope_scale": -2.0}, "rope_scale=-2.0 must be finite and greater than 0"),
        ({"gate_temperature": 0.0}, "gate_temperature=0.0 must be finite and greater than 0"),
        ({"gate_init": "ones"}, "gate_init='ones' is unknown; known are xavier, zero"),
        (
            {"gate": "uniform", "gate_temperature": 2.0, "stopgrad_gates": True},
            "no parameters, so that gate_temperature=2.0, stopgrad_gates=True would change nothing",
        ),
        ({"norm_eps": float("nan")}, "norm_eps=nan must be finite and greater than 0"),
        ({"checkpoint": "0:3"}, "checkpoint='0:3' does not fit 2 layers; .*end <= 2"),
        ({"headdim": 8}, "ModelConfig has no field headdim; the nearest is 'head_dim'"),
        ({"nsa": {"windows": 8}}, "NSAConfig has no field nsa.windows; .* is 'nsa.window'"),
        ({"nsa": {"compress_stride": 3}}, "is not a multiple of compress_stride=3"),
    ],
)
def test_an_illegal_field_is_refused_with_what_would_do(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


WRONG = {"name": None, "dim": 32.0, "layers": True, "strict": 1, "nsa": 512}
WRONG |= {"max_tokens": "512", "rope_base": "1e4", "norm_eps": True, "gate_temperature": "1"}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_field_of_the_wrong_type_is_refused(name, value):
    refuses_type(tiny(), name, value, f"{name}={value!r} is not a")


@pytest.mark.parametrize(
    "config",
    [
        tiny(phi="mlp", checkpoint="1:", force_branch="win", value_dim=6, nsa={"window": 4}),
        tiny(gate_temperature=0.5, gate_init="zero", rope_scale=4.0),
        tiny(attention="dense", backend="auto", gate="uniform"),
    ],
    ids=["nsa", "switches", "dense"],
)
def test_a_config_survives_json(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_stored_config_with_unknown_names_or_too_few_is_refused():
    values = tiny().to_dict()
    later = {"attention", "gate_temperature", "gate_init", "rope_scale"}
    older = {name: value for name, value in values.items() if name not in later}
    assert ModelConfig.from_dict(older) == tiny(), "runs before these fields stored it so"
    with pytest.raises(ValueError, match="no field dims; the nearest is 'dim'"):
        ModelConfig.from_dict({**values, "dims": 4})
    with pytest.raises(ValueError, match=r"no field nsa\.stride"):
        ModelConfig.from_dict({**values, "nsa": {"stride": 4}})
    del values["dim"], values["heads"], values["vocab"]  # vocab has a default
    with pytest.raises(ValueError, match=r"ModelConfig needs dim, heads as well; it got name, "):
        ModelConfig.from_dict(values)
    with pytest.raises(ValueError, match=r"needs name, layers, .*, head_dim as well; .* nothing"):
        ModelConfig.from_dict({})


RANGES = {"": "", "all": "0123", "1:3": "12", ":2": "01", "2:": "23", "0:4": "0123", ":": "0123"}


@pytest.mark.parametrize(("text", "chosen"), RANGES.items())
def test_a_layer_range_names_its_layers(text, chosen):
    assert "".join(map(str, layer_range(text, 4))) == chosen


@pytest.mark.parametrize("text", ["0:5", "4:", "3:3", "3:1", "-1:2", "1", "a:b", "0:2:1", "none"])
def test_a_range_that_is_not_one_of_the_model_is_refused_with_the_legal_ones(text):
    with pytest.raises(ValueError, match=r"legal are '', 'all' or 'start:end' .* end <= 4"):
        layer_range(text, 4)


def test_swiglu_weighs_what_two_matrices_of_four_times_the_width_did():
    for dim in (128, 256, 768):
        config = tiny(dim=dim)
        assert config.mlp_size % 16 == 0
        assert 3 * dim * config.mlp_size == pytest.approx(2 * dim * 4 * dim, rel=0.02)
    assert tiny(dim=768).mlp_size == 2048
    assert tiny(mlp_hidden=40).mlp_size == 40


def parameters(config):
    with torch.device("meta"):
        return parameter_count(LanguageModel(config))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_its_docstring_says(name):
    assert f" {parameters(preset(name)):,} parameters" in " ".join(PRESETS[name].__doc__.split())


def test_with_its_gate_the_production_model_weighs_exactly_what_the_case_studys_did():
    assert parameters(production().with_(gate="softmax")) == 78_295_332


def test_a_preset_has_the_sizes_of_the_case_study():
    sizes = {
        name: (c.layers, c.dim, c.heads, c.kv_heads, c.head_dim, *vars(c.nsa).values())
        for name, c in ((name, preset(name)) for name in PRESETS)
    }
    # layers dim HQ HKV D | l d l' n initial local w
    assert sizes == {
        "repro": (5, 128, 8, 2, 16, 16, 8, 32, 8, 1, 2, 64),
        "step5": (1, 256, 8, 2, 32, 16, 8, 32, 8, 1, 2, 256),
        "smoke": (6, 256, 8, 2, 32, 16, 8, 32, 8, 1, 2, 256),
        "cpu_test": (2, 128, 8, 2, 16, 16, 8, 32, 8, 1, 2, 64),
        "production": (12, 768, 12, 2, 64, 32, 16, 64, 16, 1, 2, 512),
        "memory_table": (5, 768, 12, 2, 64, 32, 16, 64, 16, 1, 2, 512),
        "cpu_config": (12, 768, 12, 2, 64, 32, 16, 64, 16, 1, 2, 512),
    }
    assert preset("cpu_config").checkpoint == "all"


def test_a_preset_takes_changes_of_fields_and_of_nested_fields():
    changed = preset("repro", layers=1, nsa={"window": 32})
    assert (changed.layers, changed.nsa.window, changed.nsa.select_count) == (1, 32, 8)
    assert preset("repro", layers=12) == repro(layers=12)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="no preset 'prodution'; the nearest is 'production'"):
        preset("prodution")
    with pytest.raises(ValueError, match="known are repro, step5, smoke, cpu_test, production, "):
        preset("gpt")
