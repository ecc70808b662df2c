import pytest

from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.presets import PRESETS, preset, production, repro

PARAMETERS = {
    "repro": 1_005_024,
    "step5": 894_120,
    "smoke": 4_708_080,
    "cpu_test": 441_408,
    "production": 78_578_736,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_its_docstring_says(name):
    count = parameter_count(LanguageModel(preset(name)))
    assert count == PARAMETERS[name]
    assert f"{count:,} parameters" in PRESETS[name].__doc__


def test_with_its_gate_the_production_model_weighs_exactly_what_the_case_studys_did():
    assert parameter_count(LanguageModel(production().with_(gate="softmax"))) == 78_295_332


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
    }


def test_a_preset_takes_changes_of_fields_and_of_nested_fields():
    changed = preset("repro", layers=1, nsa={"window": 32})
    assert (changed.layers, changed.nsa.window, changed.nsa.select_count) == (1, 32, 8)
    assert preset("repro", layers=12) == repro(layers=12)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="no preset 'prodution'; the nearest is 'production'"):
        preset("prodution")
    with pytest.raises(ValueError, match="known are repro, step5, smoke, cpu_test, production"):
        preset("gpt")
