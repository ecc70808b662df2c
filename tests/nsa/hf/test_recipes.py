"""Recipes as tutorials have them, with this model's folder in place of theirs.

Written by hand after public tutorials; docs/log.md names them. A folder is all that they are given.
"""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from hf_clients import saved
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TEXTS = [f"line {i}: the cat sat on mat {i % 7}" for i in range(48)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


def arguments(folder, **more):
    common = {"per_device_train_batch_size": 8, "learning_rate": 2e-3, "report_to": []}
    common |= {"use_cpu": True, "disable_tqdm": True, "logging_steps": 2, "save_strategy": "no"}
    return TrainingArguments(str(folder), **common | more)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_causal_fine_tuning_with_a_language_modeling_collator(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    data = Dataset.from_dict({"text": TEXTS}).map(
        lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"]
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(
        model, arguments(tmp_path, max_steps=12), data_collator=collator,
        train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer,
    )  # fmt: skip
    found = losses(trainer)
    assert found[-1] < 0.9 * found[0]
    assert math.exp(trainer.evaluate()["eval_loss"]) < math.exp(found[0])


def test_causal_fine_tuning_on_chunks_of_concatenated_text(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    joined = [token for text in TEXTS for token in tokenizer(text)["input_ids"]]
    chunks = [joined[i : i + 64] for i in range(0, len(joined) - 63, 64)]
    data = Dataset.from_dict({"input_ids": chunks, "labels": chunks})
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    more = {"max_steps": 12, "activation_checkpointing": True, "bf16": True}
    found = losses(Trainer(model, arguments(tmp_path, **more), train_dataset=data))
    assert found[-1] < 0.9 * found[0]


def test_sequence_classification_with_padding_by_batch(checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    rows = {"text": ["good " * (1 + i % 4) if i % 2 else "bad " * (1 + i % 5) for i in range(48)]}
    data = Dataset.from_dict(rows | {"label": [i % 2 for i in range(48)]})
    data = data.map(lambda row: tokenizer(row["text"], truncation=True))
    trainer = Trainer(
        model, arguments(tmp_path, max_steps=20), train_dataset=data, eval_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer), processing_class=tokenizer,
        compute_metrics=lambda p: {"accuracy": float((p[0].argmax(-1) == p[1]).mean())},
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1


def test_a_loop_of_ones_own_with_accelerate(checkpoint):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(rows, batch_size=8, shuffle=False, collate_fn=collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=24)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(loss.item())
    assert found[-1] < 0.9 * found[0]


def test_the_text_generation_pipeline_with_a_batch_and_a_chat(checkpoint):
    pipe = pipeline("text-generation", model=checkpoint, device="cpu")
    one, two = pipe(["the cat", "a"], max_new_tokens=6, batch_size=2, do_sample=False)
    alone = pipe("the cat", max_new_tokens=6, do_sample=False)
    assert one[0]["generated_text"] == alone[0]["generated_text"]
    assert two[0]["generated_text"].startswith("a")
    chat = [{"role": "user", "content": "hi"}]
    said = pipe(chat, max_new_tokens=4)[0]["generated_text"]
    assert said[0] == chat[0] and said[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.2},
        {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
        {"prompt_lookup_num_tokens": 4},
        {"do_sample": False, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]]},
    ],
    ids=["min-p", "beams", "lookup", "constraints"],
)
def test_generation_strategies(checkpoint, how):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    single = "prompt_lookup_num_tokens" in how
    texts = ["the cat sat on the cat"] if single else ["the cat", "hello there"]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    found = model.generate(**given, max_new_tokens=8, **how)
    torch.manual_seed(0)
    how = {} if single else how  # drafts need a cache, and change no token
    plain = model.generate(**given, max_new_tokens=8, use_cache=False, **how)
    assert torch.equal(found[:, : plain.shape[1]], plain)
    count = len(texts) * how.get("num_return_sequences", 1)
    assert len(tokenizer.batch_decode(found)) == count


def test_words_are_streamed_from_another_thread(checkpoint):
    from threading import Thread

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    given = tokenizer("the cat", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = dict(given, streamer=streamer, max_new_tokens=6, do_sample=False)
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    said = "".join(streamer)
    thread.join()
    whole = model.generate(**given, max_new_tokens=6, do_sample=False)
    assert said == tokenizer.decode(whole[0, given["input_ids"].shape[1] :])


def test_perplexity_of_a_long_text_by_a_sliding_window(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = tokenizer(" ".join(TEXTS[:8]), return_tensors="pt").input_ids
    total, count, end = 0.0, 0, 0
    for start in range(0, ids.shape[1], 50):
        stop = min(start + 100, ids.shape[1])
        window, labels = ids[:, start:stop], ids[:, start:stop].clone()
        labels[:, : -(stop - end)] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        new = int((labels[:, 1:] != -100).sum())
        total, count, end = total + float(loss) * new, count + new, stop
        if stop == ids.shape[1]:
            break
    assert count == ids.shape[1] - 1
    assert math.exp(total / count) == pytest.approx(len(tokenizer), rel=0.2)  # untrained


def test_embeddings_of_sentences_are_means_over_their_tokens(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint).eval()

    def embedded(texts):
        given = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**given).last_hidden_state
        mask = given["attention_mask"][..., None].float()
        return (hidden * mask).sum(1) / mask.sum(1)

    both = embedded(["the cat sat", "a much longer sentence than that"])
    torch.testing.assert_close(both[:1], embedded(["the cat sat"]))


def test_frozen_layers_and_new_tokens(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.resize_token_embeddings(len(tokenizer))
    for parameter in model.model.layers[:1].parameters():
        parameter.requires_grad = False
    given = tokenizer("<tool> the cat", return_tensors="pt")
    model(**given, labels=given["input_ids"]).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    assert model.model.layers[1].mlp.up_proj.weight.grad.any()
    assert model.get_input_embeddings().weight.grad[len(tokenizer) - 1].any()


def test_adapters_of_a_model_in_four_bits_are_prepared_and_trained(checkpoint):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        device_map="cpu",
    )
    assert "Linear4bit" in {type(part).__name__ for part in model.modules()}
    model = peft.prepare_model_for_kbit_training(model)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    given = tokenizer(TEXTS[:4], return_tensors="pt", padding=True)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for _ in range(8):
        loss = model(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.95 * found[0]
