"""Twenty steps of TRL's trainers, each of which learns."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")

from datasets import Dataset
from hf_clients import client, client_config, saved, tokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from nsa.hf import NSAForSequenceClassification

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # theirs; they are many
]
STEPS = 20
TEXTS = Dataset.from_list([{"text": f"the quick brown fox {i} jumps"} for i in range(32)])
PAIRS = Dataset.from_list(
    [{"prompt": f"say {i}", "chosen": " yes please", "rejected": " no"} for i in range(32)]
)


def options(folder, **more):
    common = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 2e-3}
    common |= {"report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    return {"output_dir": str(folder), "disable_tqdm": True} | common | more


def fell(trainer, by=0.8):
    """The loss of the last five steps is below `by` times that of the first five."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    first, last = (sum(x) / 5 for x in (losses[:5], losses[-5:]))
    assert last < by * first, losses
    return losses


def learned(trainer):
    """The next token is right more often in the last steps than in the first: a loss that is
    weighted by the probability itself, as dft's, need not fall."""
    trainer.train()
    log = trainer.state.log_history
    right = [entry["mean_token_accuracy"] for entry in log if "loss" in entry]
    assert len(right) == STEPS and sum(right[-5:]) > sum(right[:5]) + 1, right


def next_token_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ({}, {}),
        ({"packing": True}, {}),
        ({"padding_free": True, "max_length": None}, {}),
        ({"loss_type": "dft"}, {}),
        ({}, {"compute_loss_func": next_token_loss}),
    ],
    ids=["plain", "packing", "padding-free", "dft", "own-loss"],
)
def test_supervised(tmp_path, form, more):
    arguments = SFTConfig(**options(tmp_path, **{"max_length": 64} | form))
    learned(
        SFTTrainer(client(), arguments, train_dataset=TEXTS, processing_class=tokenizer(), **more)
    )


def test_packed_and_padded_batches_of_the_same_texts_have_the_same_loss(tmp_path):
    """Texts of one length fill a row each, or rows of the packing together."""
    found = []
    for form in ({}, {"padding_free": True}):
        arguments = SFTConfig(**options(tmp_path, max_length=None, max_steps=1, **form))
        trainer = SFTTrainer(client(), arguments, train_dataset=TEXTS, processing_class=tokenizer())
        trainer.train()
        found.append(trainer.state.log_history[0]["loss"])
    assert found[0] == pytest.approx(found[1], abs=2e-4)  # logged with four digits


def test_supervised_by_the_name_of_a_folder(tmp_path):
    arguments = SFTConfig(**options(tmp_path, max_length=64))
    learned(SFTTrainer(saved(tmp_path / "model"), arguments, train_dataset=TEXTS))


def test_preferences(tmp_path):
    arguments = DPOConfig(**options(tmp_path, max_length=64))
    fell(DPOTrainer(saved(tmp_path / "model"), args=arguments, train_dataset=PAIRS))


def test_rewards_of_pairs(tmp_path):
    model = NSAForSequenceClassification(client_config(num_labels=1))
    arguments = RewardConfig(**options(tmp_path, max_length=64))
    data = PAIRS.map(lambda row: {k: row["prompt"] + row[k] for k in ("chosen", "rejected")})
    data = data.remove_columns("prompt")
    fell(RewardTrainer(model, arguments, train_dataset=data, processing_class=tokenizer()))


def test_policy_by_rewards_of_what_it_generates(tmp_path):
    arguments = GRPOConfig(
        **options(
            tmp_path, num_generations=4, max_completion_length=12, learning_rate=5e-3,
            per_device_train_batch_size=8, beta=0.0,
        )
    )  # fmt: skip
    trainer = GRPOTrainer(
        client(),
        reward_funcs=lambda completions, **_: [sum(map(str.islower, c)) / 12 for c in completions],
        args=arguments,
        train_dataset=PAIRS.select_columns(["prompt"]),
        processing_class=tokenizer(),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) > sum(rewards[:5]), rewards
