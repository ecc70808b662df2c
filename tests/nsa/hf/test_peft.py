"""Adapters of PEFT act on every weight, and merged into it they say the same."""

import pytest
import torch
from tiny_models import tokens

pytest.importorskip("transformers")
pytest.importorskip("peft")

from hf_models import made
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::DeprecationWarning"),
]
IDS = tokens(2, 30)
TARGETS = {
    "all-linear": "all-linear",
    "q v": ["q_proj", "v_proj"],
    "q k v o": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "gates": ["gate1", "gate2"],
    "ends": ["embed_tokens", "lm_head"],
    "one branch": r".*\.attention\.slc\..*",
}


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_train_and_merge_to_the_same_logits(targets, shared, gate, tmp_path):
    if shared and targets == "one branch":
        pytest.skip("shared projections are of no branch")
    model = made(phi="linear", gate=gate, shared_kv=shared)
    plain = model(IDS, use_cache=False).logits.detach()
    config = LoraConfig(r=4, target_modules=TARGETS[targets], init_lora_weights=False)
    adapted = get_peft_model(model, config).double().train()
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    kinds = {"all-linear": 2 if shared else 6, "q v": 1 if shared else 3, "one branch": 2}
    if targets in kinds:  # keys and values of each branch, or values alone
        sides = sum(".k_proj.lora_A" in n or ".v_proj.lora_A" in n for n in trained)
        assert sides == 2 * kinds[targets]
    assert trained and all(g is not None and bool(g.any()) for g in trained.values())
    adapted.eval()
    with torch.no_grad():
        found = adapted(input_ids=IDS, use_cache=False).logits
        assert (found - plain).abs().max() > 1e-3 * plain.abs().max()
        torch.testing.assert_close(adapted(input_ids=IDS, use_cache=True).logits, found)
        adapted.save_pretrained(tmp_path)
        other = made(phi="linear", gate=gate, shared_kv=shared)
        again = PeftModel.from_pretrained(other, tmp_path).double()
        torch.testing.assert_close(again(input_ids=IDS, use_cache=False).logits, found)
        merged = adapted.merge_and_unload()(IDS, use_cache=False).logits
    torch.testing.assert_close(merged, found, rtol=1e-9, atol=1e-9)


def test_a_prompt_of_embeddings_is_tuned():
    model = made()
    adapted = get_peft_model(
        model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).double()
    adapted(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss.backward()
    (prompt,) = [p for p in adapted.parameters() if p.requires_grad]
    assert prompt.grad.any()
