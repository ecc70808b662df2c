"""The base model, packing by positions, loading in other processes, and generate's arguments."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tokens

pytest.importorskip("transformers")

from hf_clients import client, client_config, saved, tokenizer
from hf_models import made
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
)

from nsa.hf import NSAConfig, NSAForCausalLM, NSAModel
from nsa.hf.base import check_one_device

IDS = tokens(2, 30)


@pytest.fixture(scope="module")
def model():
    return made(phi="linear")


def test_the_base_model_has_hidden_states_from_ids_and_from_embeddings(model):
    embedded = model.get_input_embeddings()(IDS)
    for cached in (False, True):
        found = model(IDS, output_hidden_states=True, use_cache=cached)
        again = model(inputs_embeds=embedded, output_hidden_states=True, use_cache=cached)
        torch.testing.assert_close(again.logits, found.logits)
        assert len(found.hidden_states) == 1 + model.config.num_hidden_layers
        torch.testing.assert_close(found.hidden_states[0], embedded)
        last = model.base_model(IDS, use_cache=cached).last_hidden_state
        torch.testing.assert_close(last, found.hidden_states[-1])
        torch.testing.assert_close(model.lm_head(last), found.logits)
    assert model(IDS).hidden_states is None
    assert len(model.base_model.layers) == len(model.model.blocks) == 2


def test_padding_is_left_out_of_embeddings_and_hidden_states_too(model):
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    embedded = model.get_input_embeddings()(IDS)
    found = model(inputs_embeds=embedded, attention_mask=mask, output_hidden_states=True)
    alone = model(IDS[1:, 6:], output_hidden_states=True)
    for here, there in zip(found.hidden_states, alone.hidden_states, strict=True):
        torch.testing.assert_close(here[1, 6:], there[0])


def test_a_loss_is_the_same_from_embeddings(model):
    wanted = model(IDS, labels=IDS).loss
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(IDS), labels=IDS).loss, wanted)


@pytest.mark.parametrize("flash", [False, True])
def test_what_the_flattening_collator_packs_does_not_see_the_rest(model, flash):
    rows = [{"input_ids": IDS[0].tolist()}, {"input_ids": IDS[1, :11].tolist()}]
    batch = DataCollatorWithFlattening(
        return_flash_attn_kwargs=flash, return_seq_idx=flash, return_position_ids=not flash
    )(rows)
    found = model(**batch)
    torch.testing.assert_close(found.logits[:, :30], model(IDS[:1]).logits)
    torch.testing.assert_close(found.logits[:, 30:], model(IDS[1:, :11]).logits)
    losses = [model(row, labels=row).loss for row in (IDS[:1], IDS[1:, :11])]
    wanted = (losses[0] * 29 + losses[1] * 10) / 39
    torch.testing.assert_close(found.loss, wanted, check_dtype=False)


def test_rows_may_each_be_packed_and_padded(model):
    row = torch.cat([IDS[0, :18], IDS[1, :12]])
    ids = torch.stack([row, row])
    positions = torch.cat([torch.arange(18), torch.arange(12)]).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    found = model(ids, position_ids=positions, attention_mask=mask).logits
    for part, alone in ((found[:, :18], IDS[:1, :18]), (found[:1, 18:], IDS[1:, :12])):
        wanted = model(alone).logits
        torch.testing.assert_close(part, wanted.expand_as(part))
    torch.testing.assert_close(found[1, 18:25], model(IDS[1:, :7]).logits[0])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([*range(10), *range(3, 23)], "begin again at 0"),
        ([*range(1, 31)], "position_ids differ"),
        ([0] * 29 + [4], "begin again at 0"),
    ],
)
def test_positions_that_do_not_count_up_are_refused(model, positions, message):
    with pytest.raises(ValueError, match=message):
        model(IDS[:1], position_ids=torch.tensor([positions]))


def test_heads_for_a_sequence_and_for_each_token_train(tmp_path):
    folder = saved(tmp_path)
    for auto, shape in (
        (AutoModelForSequenceClassification, (2, 3)),
        (AutoModelForTokenClassification, (2, 30, 3)),
    ):
        head = auto.from_pretrained(folder, num_labels=3)
        ids = IDS.clamp(3, 90)
        labels = torch.zeros(shape[:-1], dtype=torch.int64)
        found = head(ids, labels=labels)
        assert found.logits.shape == shape
        found.loss.backward()
        assert head.model.embed_tokens.weight.grad.any() and head.score.weight.grad.any()


def test_names_that_tools_look_up_are_llamas():
    config = client_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [getattr(config, name) for name in names] == [64, 2, 4, 2]
    assert config.intermediate_size == client().model.blocks[0].mlp.up_proj.out_features
    assert NSAConfig(intermediate_size=96).intermediate_size == 96
    assert config.head_dim == 16 and config.vocab_size == 98


def test_every_hook_fires(model):
    called = set()
    leaves = {name: part for name, part in model.named_modules() if not list(part.children())}
    handles = [
        part.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, part in leaves.items()
    ]
    model(IDS)
    for handle in handles:
        handle.remove()
    assert called == set(leaves)


def test_files_with_the_names_of_before_open_and_are_saved_with_todays(model, tmp_path):
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {}
    for name, weight in load_file(file).items():
        name = name.replace("lm_head.", "model.head.").replace("embed_tokens", "embed")
        name = re.sub(
            r"\.(cmp|slc|win)\.([kv]_proj)", r".\2.\1", name.replace("o_proj", "out_proj")
        )
        old[re.sub(r"mlp\.(\w+)_proj", r"mlp.\1", name)] = weight
    assert not set(old) & {"lm_head.weight", "model.embed_tokens.weight"}
    save_file(old, file, metadata={"format": "pt"})
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(model.state_dict())
    base, told = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(base) is NSAModel and not told["missing_keys"]


@pytest.mark.full
@pytest.mark.registered
@pytest.mark.processes
@pytest.mark.parametrize("first", ["", "transformers.AutoConfig.from_pretrained(folder); "])
def test_a_fresh_process_opens_a_saved_model_without_importing_nsa(tmp_path, first):
    code = f"import transformers; folder = {saved(tmp_path)!r}; {first}"
    code += "print(type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__)"
    assert answer(code).strip() == "NSAForCausalLM"


@pytest.mark.full
@pytest.mark.registered
@pytest.mark.processes
def test_who_loads_another_model_does_not_import_ours_and_can_open_it_afterwards(tmp_path):
    code = "import sys, torch, transformers; A = transformers.AutoModel; "
    sizes = "hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64"
    code += f"A.from_config(transformers.LlamaConfig({sizes}, intermediate_size=32)); "
    code += "print('nsa.hf' in sys.modules); "
    code += f"print(type(A.from_pretrained({saved(tmp_path)!r})).__name__)"
    assert answer(code).split() == ["False", "NSAModel"]


@pytest.mark.full
@pytest.mark.processes
def test_without_the_registration_the_error_says_what_would_do_and_the_folders_code_opens_it(
    tmp_path,
):
    code = f"""
from transformers import AutoModelForCausalLM as A
try:
    A.from_pretrained({saved(tmp_path)!r})
except ValueError as error:
    print("trust_remote_code=True" in str(error))
m = A.from_pretrained({saved(tmp_path)!r}, trust_remote_code=True)
import torch
print(m.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape)
"""
    *_, refused, shape = answer(code, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).splitlines()
    assert refused.endswith("True") and "[1, 6]" in shape  # after a question of transformers
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["auto_map"]["AutoModelForCausalLM"] == "modeling_nsa.NSAForCausalLM"


def answer(code: str, environment: dict[str, str] | None = None) -> str:
    """Standard output of a new process; AssertionError with its end if that fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_trusted_folder_is_saved_as_it_was(tmp_path):
    folder = saved(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(again) is NSAForCausalLM
    again.save_pretrained(tmp_path / "b")
    here, there = ({f.name for f in (tmp_path / x).iterdir()} for x in "ab")
    assert there < here and "modeling_nsa.py" in there


def test_generate_takes_stop_strings_and_early_exits(tmp_path):
    model, letters = client().eval(), tokenizer()
    given = letters("hello", return_tensors="pt")
    plain = model.generate(**given, max_new_tokens=12, do_sample=False)
    text = letters.decode(plain[0, 5:])
    stopped = model.generate(
        **given, max_new_tokens=12, do_sample=False, tokenizer=letters, stop_strings=[text[3]]
    )
    first = text.index(text[3])
    assert torch.equal(stopped, plain[:, : 5 + first + 1])
    early = model.generate(**given, max_new_tokens=12, do_sample=False, assistant_early_exit=1)
    assert torch.equal(early[:, : plain.shape[1]], plain)
    assert model.config.num_hidden_layers == 2
    ids = given["input_ids"]
    found = model(ids, seq_idx=None, logits_indices=None, cache_position=torch.arange(5)).logits
    assert torch.equal(found, model(ids).logits)


def test_continuous_batching_is_declined_by_name():
    with pytest.raises(NotImplementedError, match="GenerationCache"):
        client().generate_batch([[5, 6]])


def test_a_tokenizer_without_padding_is_told_what_it_lacks():
    head = AutoModelForSequenceClassification.from_config(client_config(pad_token_id=None))
    with pytest.raises(ValueError, match="no padding token"):
        head(IDS.clamp(3, 90))


def test_weights_on_disk_serve_as_those_in_memory(tmp_path):
    pytest.importorskip("accelerate")
    folder = saved(tmp_path, phi="mlp")
    place = {"model.embed_tokens": "cpu", "model.blocks.0": "cpu", "model.blocks.1": "disk"}
    place |= {"model.norm": "cpu", "lm_head": "disk"}
    ids = IDS.clamp(3, 90)
    with torch.no_grad():
        off = AutoModelForCausalLM.from_pretrained(
            folder, device_map=place, offload_folder=str(tmp_path / "off")
        )
        assert off.model.blocks[1].attention.phi_key.weight1.device.type == "meta"
        whole = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(off(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
        found = off.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(found, whole.generate(ids, max_new_tokens=3, do_sample=False))


def test_a_cache_is_refused_where_a_model_is_on_two_devices():
    with pytest.raises(ValueError, match="model on cpu, cuda:1; use_cache=False"):
        check_one_device(SimpleNamespace(device=torch.device(d)) for d in ("cuda:1", "cpu", "meta"))


@pytest.mark.gpus2
def test_a_model_over_two_gpus_says_what_it_says_on_one(tmp_path):
    folder, ids = saved(tmp_path), IDS.clamp(3, 90)
    place = {"model.embed_tokens": 0, "model.blocks.0": 0, "model.blocks.1": 1}
    place |= {"model.norm": 1, "lm_head": 1}
    two = AutoModelForCausalLM.from_pretrained(folder, device_map=place)
    one = AutoModelForCausalLM.from_pretrained(folder).to("cuda:0")
    assert torch.equal(two(ids, use_cache=False).logits.cpu(), one(ids.cuda()).logits.cpu())
    plain = {"max_new_tokens": 3, "do_sample": False}
    found = two.generate(ids.cuda(), use_cache=False, **plain)
    assert torch.equal(found, one.generate(ids.cuda(), **plain))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
def test_linears_replaced_by_dynamic_int8_say_nearly_the_same():
    from torch.ao.quantization import quantize_dynamic

    model = client().eval()
    ids = IDS.clamp(3, 90)
    plain = model(ids).logits
    int8 = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    kinds = {type(part).__module__.split(".")[-1] for part in int8.modules()}
    assert not any(type(part) is torch.nn.Linear for part in int8.modules()) and len(kinds) > 1
    assert 0 < (int8(ids).logits - plain).abs().max() < 0.1 * plain.abs().max()
