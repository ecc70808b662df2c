"""torchtitan's own Trainer trains NSA by the recipe, on one rank and on two, on the CPU."""

import importlib.util
import json

import pytest
import torch
from processes import run_ranks
from tiny_models import tiny, tokens

WANTED = ("torchtitan", "transformers")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, WANTED)), reason=f"needs {' and '.join(WANTED)}"
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Records of a run of one rank, and of one of two."""
    found = [tmp_path_factory.mktemp(f"titan{count}") for count in (1, 2)]
    for count, folder in enumerate(found, 1):
        run_ranks(count, "titan_entries.py", folder)
    return found


def seen(folder, rank=0):
    return json.loads((folder / f"seen{rank}.json").read_text())


def test_two_ranks_have_the_losses_of_one(folders):
    one, two = (seen(folder)["losses"] for folder in folders)
    assert list(one) == list("12345") and one["5"] < one["1"] - 1
    assert seen(folders[1], 1)["losses"] == two
    assert one["1"] == pytest.approx(two["1"], rel=1e-6)
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-4)


def test_a_checkpoint_of_torchtitan_is_gone_on_from(folders):
    for folder in folders:
        found = seen(folder)
        assert list(found["resumed"]) == ["5"]
        assert found["resumed"]["5"] == pytest.approx(found["losses"]["5"], rel=1e-6)


def test_what_it_leaves_in_hugging_faces_layout_is_the_model_there(folders):
    from safetensors.torch import load_file

    from nsa.hf import NSAConfig, NSAForCausalLM

    for folder in folders:
        model, weights = NSAForCausalLM(NSAConfig.of(tiny())), {}
        for file in (folder / "checkpoint/step-5").glob("*.safetensors"):
            weights |= load_file(file)
        model.load_state_dict(weights)
        batch = tokens(4, 49, seed=0) % 7
        with torch.no_grad():
            borders = torch.tensor([*range(0, 192, 48), *range(20, 192, 48), 192]).sort().values
            logits = model(
                batch[:, :-1].reshape(1, -1), cu_seq_lens_q=borders.int(), use_cache=False
            ).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        assert seen(folder)["first loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_recomputed_replicated_compiled_and_bf16_layers_say_the_same(folders):
    for folder in folders:
        found = seen(folder)
        same = [found[name] for name in ("no recomputation", "replicated")]
        assert same == pytest.approx([found["first loss"]] * 2, rel=1e-6)
        assert found["compiled"] == pytest.approx(found["one document"], rel=1e-6)
        assert found["one document"] != found["first loss"] != found["bf16"]
        assert found["bf16"] == pytest.approx(found["first loss"], rel=0.01)


def test_the_command_line_finds_the_recipe_and_what_it_cannot_do_is_named(folders):
    found = seen(folders[0])
    assert found["parsed"] == [3, "production"] and found["mine"] == 24
    assert "is sharded by FSDP2 alone, and tp = 2; 1 would do" in found["declined"]
