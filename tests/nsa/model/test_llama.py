import copy
import math

import pytest
import torch
from tiny_models import TOKENS, gradients, tiny, tokens

from nsa.attention import witness
from nsa.model.llama import LanguageModel
from nsa.model.presets import PRESETS, dense_twin, preset


@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_the_first_loss_is_that_of_a_guess_among_256_bytes(name):
    model = LanguageModel(preset(name, backend="sdpa"))
    with torch.no_grad():
        _, loss = model(tokens(1, 128), tokens(1, 128, seed=1))
    assert loss.item() == pytest.approx(math.log(256) + 1 / 32, abs=0.05)


def test_no_logit_reads_a_later_token():
    model = LanguageModel(tiny())
    read = tokens()
    with torch.no_grad():
        logits, _ = model(read)
        for last in (0, 7, 8, 23, TOKENS - 2):
            changed = read.clone()
            changed[:, last + 1 :] = (changed[:, last + 1 :] + 1) % 256
            after, _ = model(changed)
            assert torch.equal(after[:, : last + 1], logits[:, : last + 1]), last
            assert not torch.equal(after[:, last + 1 :], logits[:, last + 1 :])


@pytest.mark.parametrize("changes", [{}, {"phi": "mlp", "compress_rope": "after", "value_dim": 6}])
def test_packed_sequences_are_read_as_if_alone(changes):
    model = LanguageModel(tiny(**changes))
    lengths = [5, 1, 42]
    read = tokens()
    borders = torch.tensor([0, 5, 6, 48], dtype=torch.int32)
    with torch.no_grad():
        packed, _ = model(read, cu_seqlens=borders)
        alone = torch.cat([model(part)[0] for part in read.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config", [tiny(phi="linear"), tiny(phi="mlp"), dense_twin(tiny())], ids=lambda c: c.name
)
def test_one_seed_gives_one_model_whatever_its_weights_were_before(config):
    model, other = LanguageModel(config), LanguageModel(config)
    assert not torch.equal(model.head.weight, other.head.weight)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(5.0)
    model.reset_parameters(3)
    other.reset_parameters(3)
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    assert [name for (name, one), two in pairs if not torch.equal(one, two)] == []
    other.reset_parameters(4)
    same = {n for n, p in model.named_parameters() if torch.equal(p, other.get_parameter(n))}
    drawn_alike = ("bias", "bias1", "bias2", *("position", "weight1") * (config.phi == "linear"))
    assert same == {n for n in same if "norm" in n or n.endswith(drawn_alike)}


@pytest.mark.parametrize("make", [tiny, dense_twin(tiny()).with_], ids=["nsa", "dense"])
def test_output_projections_start_smaller_by_the_root_of_twice_the_depth(make):
    config = make(layers=8, dim=64, head_dim=16)
    block = LanguageModel(config).blocks[0]
    for matrix in (block.attention.o_proj.weight, block.mlp.down_proj.weight):
        assert matrix.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_each_layer_is_named_to_the_attention(monkeypatch):
    places = []
    forward = torch.nn.Linear.forward

    def noting(linear, x):
        places.append(witness.place())
        return forward(linear, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", noting)
    with torch.no_grad():
        LanguageModel(tiny(layers=3))(tokens())
    assert list(dict.fromkeys(places)) == ["layer 0", "layer 1", "layer 2", "no place named"]


def test_a_copied_model_computes_with_its_own_weights():
    model = LanguageModel(tiny(checkpoint="all"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert model(tokens())[0].any()
        assert not twin(tokens())[0].any()


def test_autocast_feeds_all_projections_of_a_layer_from_one_copy():
    model = LanguageModel(tiny())
    seen = []
    attention = model.blocks[0].attention
    for projection in attention.linears().values():
        projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens(), tokens(seed=1))
    assert {x.data_ptr() for x in seen} == {seen[0].data_ptr()}
    assert {x.dtype for x in seen} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_may_be_of_one_other_dtype_throughout(dtype):
    model = LanguageModel(tiny(phi="mlp", compress_rope="after")).to(dtype)
    found = gradients(model)
    assert {g.dtype for g in found.values()} == {dtype}
    assert all(g.isfinite().all() for g in found.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), r"tokens are \[1, 0\] torch.int64.*at least one"),
        (torch.zeros(0, 4, dtype=torch.int64), r"tokens are \[0, 4\]"),
        (torch.zeros(1, 25, dtype=torch.int64), r"25 tokens are more than max_tokens=24"),
        (torch.tensor([[3, 100]]), "hold ids from 3 to 100; vocab=100 has 0 to 99"),
        (torch.tensor([[-1, 99]]), "hold ids from -1 to 99; vocab=100 has 0 to 99"),
    ],
)
def test_tokens_that_do_not_fit_and_ids_outside_the_vocabulary_are_refused(wrong, message):
    model = LanguageModel(tiny(max_tokens=24, vocab=100))
    with pytest.raises(ValueError, match=message):
        model(wrong)
    legal = torch.tensor([[3, 99]])
    if wrong.shape == legal.shape:
        with pytest.raises(ValueError, match=f"targets {message}"):
            model(legal, wrong)
    assert model(legal, legal)[1].isfinite()
    assert model(legal[:, :1], legal[:, 1:])[1].isfinite(), "one token is enough"


def test_the_model_around_its_attention_is_llama_written_out():
    eps = 0.5
    model = LanguageModel(tiny(layers=1, norm_eps=eps)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    weight = dict(model.named_parameters())
    attention = model.blocks[0].attention

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight[f"{name}.weight"]

    def mlp(x):
        gate, up, down = (weight[f"blocks.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        opened = x @ gate.T
        return (opened / (1 + torch.exp(-opened)) * (x @ up.T)) @ down.T

    with torch.no_grad():
        x = weight["embed_tokens.weight"][tokens()]
        x = x + attention(normed(x, "blocks.0.norm1"))
        x = x + mlp(normed(x, "blocks.0.norm2"))
        want = normed(x, "norm") @ weight["head.weight"].T
        logits, loss = model(tokens())
        assert loss is None
        torch.testing.assert_close(logits, want)
        targets = tokens(seed=1)
        chosen = want.log_softmax(-1).gather(-1, targets[..., None])
        loss = model(tokens(), targets)[1]
        torch.testing.assert_close(loss, -chosen.mean(), check_dtype=False)
