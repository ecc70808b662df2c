"""Weights go from a run to transformers and back, and from a dense Llama to NSA."""

import pytest
import torch
from tiny_models import tiny, tokens

pytest.importorskip("transformers")

import transformers
from hf_models import assert_same_weights, made
from transformers import LlamaConfig, LlamaForCausalLM

import nsa
from nsa.config import NSAConfig as Sizes
from nsa.hf import from_checkpoint, from_llama, to_checkpoint
from nsa.model.data import synthetic
from nsa.model.generate import generate
from nsa.model.llama import LanguageModel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig

IDS = tokens(2, 48)
WIDE = Sizes(4, 2, 8, 64, 1, 2, window=512)  # a query sees all of 48 tokens


def llama(**changes):
    torch.manual_seed(3)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 80}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes | {"initializer_range": 0.2} | changes)
    return LlamaForCausalLM(config).double().eval()


def test_a_run_of_train_goes_to_transformers_and_back(tmp_path):
    config = TrainConfig(batch=2, tokens=32, seed=5)
    trainer = Trainer(LanguageModel(tiny(phi="mlp")), synthetic(0), config)
    trainer.step(0)
    trainer.save(tmp_path / "run")
    model = from_checkpoint(tmp_path / "run", backend="masked")
    model.init_weights()  # it has its weights, and nothing is drawn
    model.save_pretrained(tmp_path / "hf")
    again = type(model).from_pretrained(tmp_path / "hf")
    file = to_checkpoint(again, tmp_path / "back", config)
    back = nsa.load_model(file, backend="gather")
    assert back.config == trainer.model.config
    assert_same_weights(back, trainer.model)
    prompt = IDS[:1, :9]
    found = again.generate(prompt, max_new_tokens=7)[0, 9:].tolist()
    assert found == generate(back, list(prompt), 7).all()[0]
    # A trainer goes on from it, though not bit for bit: the optimizer begins anew.
    other = Trainer(LanguageModel(tiny(phi="mlp")), synthetic(0), config)
    other.load(file)
    assert other.steps_done == 0 and other.step(0).isfinite()


def test_a_tied_head_is_one_of_its_own_in_a_checkpoint(tmp_path):
    model, _ = from_llama(llama(tie_word_embeddings=True), WIDE, backend="gather")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    back = nsa.load_model(to_checkpoint(model, tmp_path))
    assert torch.equal(back.head.weight, back.embed_tokens.weight)
    assert back.head.weight.data_ptr() != back.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight is model.model.embed_tokens.weight


ROPE = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
]


@pytest.mark.parametrize("rope", ROPE, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize(
    "options", [{}, {"phi": "linear"}, {"shared_kv": True, "share_selection": 2}], ids=str
)
def test_where_all_is_seen_each_branch_and_their_mean_are_the_llama(rope, options):
    """Two of the three gates at 1/2 are left: 1/2 of each of two dense branches."""
    dense = llama(rope_parameters=rope)
    with torch.no_grad():
        wanted = dense(IDS).logits
        model, new = from_llama(dense, WIDE, backend="gather", **options)
        gates = [block.attention.gate2 for block in model.model.blocks]
        assert all(not gate.weight.any() and not gate.bias.any() for gate in gates)
        half = model(IDS).logits
        for gate in gates:
            gate.bias.view(-1, 3)[:, 0] = -1e4
        # transformers turns by angles in fp32
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=1e-5)
        assert (half - wanted).abs().max() > 0.1  # the compressed branch is no dense attention
        options.pop("share_selection", None)
        for branch in ("slc", "win"):
            alone, _ = from_llama(dense, WIDE, backend="gather", force_branch=branch, **options)
            torch.testing.assert_close(alone(IDS).logits, wanted, rtol=0, atol=1e-5)
    phi = 2 * 2 if "phi" in options else 0  # keys and values: positions, weights
    assert len(new) == 2 * (4 + phi)
    assert all(".gate" in name or ".phi_" in name for name in new)
    assert set(new) < set(model.state_dict())


def test_the_branches_copies_are_trained_apart(tmp_path):
    dense = llama(bos_token_id=4)
    dense.save_pretrained(tmp_path)
    model, _ = from_llama(tmp_path, Sizes(4, 2, 8, 4, window=8), gate="softmax", backend="gather")
    assert model.config.bos_token_id == 4 and model.dtype == torch.float64
    model.train()(IDS, labels=IDS).loss.backward()
    layer = model.model.blocks[0].attention
    for side in ("k_proj", "v_proj"):
        weights = [layer.get_submodule(f"{b}.{side}").weight for b in ("cmp", "slc", "win")]
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
        assert len({w.data_ptr() for w in weights}) == 3
        assert not torch.equal(weights[1].grad, weights[2].grad)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"attention_bias": True}, {}, "the model has no attention_bias=True"),
        ({"mlp_bias": True, "hidden_act": "gelu"}, {}, "no hidden_act='gelu', mlp_bias=True"),
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
        ({}, {"dim": 64}, "dim is not NSA's own; options are name, phi"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope_type='dynamic'"),
        ({"rope_parameters": LLAMA3}, {}, "no rope_type='llama3'; .* 'default' or 'linear'"),
    ],
)
def test_what_the_model_has_not_is_named(changes, options, message):
    with pytest.raises(ValueError, match=message):
        from_llama(llama(**changes), **options)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3"])
def test_other_models_are_declined_before_their_weights_are_read(kind, tmp_path):
    other = getattr(transformers, f"{kind}Config")(num_hidden_layers=1, hidden_size=64)
    message = f"a model of type '{kind.lower()}' is no Llama; model_type 'llama' can be taken"
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_llama(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(other)
    with pytest.raises(ValueError, match=message):
        from_llama(model)


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_it(tmp_path):
    from transformers import Trainer as Training
    from transformers import TrainingArguments

    model = made(head_dim=8).float().train()
    with torch.no_grad():
        model.lm_head.weight /= 20
    data = [{"input_ids": row, "labels": row} for row in tokens(1, 33).repeat(8, 1)]
    options = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "report_to": []}
    options |= {"use_cpu": True, "logging_steps": 10, "save_steps": 50, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=50, **options)
    trainer = Training(model, arguments, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[-1]
    assert_same_weights(type(model).from_pretrained(tmp_path / "checkpoint-50"), model)
