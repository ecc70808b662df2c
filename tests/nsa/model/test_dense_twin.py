import pytest
import torch
from tiny_models import gradients, hidden, tiny, tokens

from nsa.attention import dense, witness
from nsa.attention.registry import Declined
from nsa.model.dense_attention import DenseAttention
from nsa.model.llama import LanguageModel, parameter_count
from nsa.model.presets import PRESETS, dense_twin, preset, production
from nsa.reference.rotary import rotary_tables, rotate


def twin(**changes):
    return dense_twin(tiny()).with_(**changes)


def written_out(layer, x):
    """The layer in fp64, head by head, with an explicit mask."""
    c, x = layer.config, x.double()
    heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
    q, k, v = (
        (x @ getattr(layer, f"{n}_proj").weight.double().T).unflatten(-1, (h, -1))
        for n, h in heads.items()
    )
    base, scale = c.rope_base, c.rope_scale
    cos, sin = rotary_tables(x.shape[1], c.head_dim, base, dtype=torch.float64, scale=scale)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    outputs = []
    for h in range(c.heads):
        s = h // (c.heads // c.kv_heads)
        scores = q[:, :, h] @ k[:, :, s].transpose(1, 2) * c.head_dim**-0.5
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, s])
    return torch.cat(outputs, -1) @ layer.o_proj.weight.double().T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"value_dim": 4},
        {"value_dim": 12},
        {"rope_scale": 4.0},
    ],
    ids=str,
)
def test_it_is_causal_attention_with_rotary(changes):
    layer = DenseAttention(twin(**changes))
    x = hidden(layer.config, batch=2)
    assert torch.allclose(layer(x).double(), written_out(layer, x), atol=1e-6)


def test_packed_sequences_do_not_see_each_other():
    layer = DenseAttention(twin())
    x = hidden(layer.config)
    packed = layer(x, cu_seqlens=torch.tensor([0, 17, 17, 48], dtype=torch.int32))
    alone = torch.cat([layer(x[:, :17]), layer(x[:, 17:])], dim=1)
    assert torch.allclose(packed, alone, atol=1e-6)
    with pytest.raises(ValueError, match=r"cu_seqlens=\[0, 17\] must rise from 0 to T=48"):
        layer(x, cu_seqlens=torch.tensor([0, 17], dtype=torch.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "sparse"}, "attention='sparse' is unknown; known are nsa, dense"),
        ({"attention": "dense", "force_branch": "win"}, "dense attention has no branches"),
        ({"attention": "dense"}, r"backend='gather' .* known are auto, sdpa, sdpa:flash, "),
    ],
)
def test_what_means_nothing_to_it_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel(tiny(**changes))


def test_flash_runs_or_says_why_not():
    layer = DenseAttention(twin(backend="flash"))
    with pytest.raises(Declined, match="needs a GPU, got cpu"):
        layer(hidden(layer.config))


def test_every_parameter_has_a_gradient_and_the_witness_names_what_served():
    with witness.recording() as seen:
        found = gradients(LanguageModel(twin()))
    assert all(g is not None and g.abs().max() > 0 for g in found.values())
    assert seen.record()["paths"] == {"dense": {"sdpa:flash": 2}}
    assert seen.record()["declined"] == {
        "flash": {"needs bf16 or fp16, got torch.float32; needs a GPU, got cpu": 2}
    }


def test_auto_takes_flash_attn_where_it_serves(monkeypatch):
    def served(q, k, v, *, scale):
        assert scale == 8**-0.5
        return q.clone(), "fa4"

    monkeypatch.setattr(dense, "why_not", lambda q, value_dim, scale: [])
    monkeypatch.setattr(dense, "dense_attention", served)
    with witness.recording() as seen:
        LanguageModel(twin())(tokens())
        LanguageModel(twin(backend="sdpa"))(tokens())
    assert seen.record()["paths"] == {"dense": {"fa4": 2, "sdpa:flash": 2}}
    assert seen.record()["declined"] == {}


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_the_twin_has_the_kernel_that_it_asks_for_or_declines(kernel):
    layer = DenseAttention(twin(backend=f"sdpa:{kernel}"))
    x = hidden(layer.config, batch=2)
    with witness.recording() as seen:
        assert torch.allclose(layer(x).double(), written_out(layer, x), atol=1e-6)
    assert seen.record()["paths"] == {"dense": {f"sdpa:{kernel}": 1}}
    with pytest.raises(Declined, match=r"torch has no cudnn kernel .* on cpu: \w"):
        DenseAttention(twin(backend="sdpa:cudnn"))(x)


def test_strict_stops_at_what_is_not_finite():
    model = LanguageModel(twin(strict=True))
    with torch.no_grad():
        model.blocks[1].attention.v_proj.weight[0, 0] = torch.nan
    with (
        witness.recording(),  # whoever warned before does not warn again
        pytest.warns(RuntimeWarning, match="not finite"),
        pytest.raises(FloatingPointError, match=r"dense attention at layer 1: .* are not finite"),
    ):
        model(tokens())


@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_a_twin_may_weigh_what_its_model_weighs(name):
    config = preset(name)
    with torch.device("meta"):
        nsa, less, same = (
            parameter_count(LanguageModel(c))
            for c in (config, dense_twin(config), dense_twin(config, same_parameters=True))
        )
    assert less < nsa
    assert abs(same - nsa) <= 24 * config.dim * config.layers


def test_the_twin_of_the_production_model_has_the_parameters_that_its_docstring_says():
    with torch.device("meta"):
        count = parameter_count(LanguageModel(dense_twin(production())))
    assert f"{count:,} beside `production`'s 78,578,736" in " ".join(dense_twin.__doc__.split())
    forced = dense_twin(tiny(force_branch="slc"))
    assert (forced.attention, forced.force_branch) == ("dense", None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
@pytest.mark.parametrize("value_dim", [64, 32])
def test_on_a_gpu_in_bf16_it_is_causal_attention(backend, value_dim):
    config = dense_twin(tiny(dim=128, head_dim=64, value_dim=value_dim), backend=backend)
    layer = DenseAttention(config).cuda()
    x = hidden(config, batch=2).cuda()
    reference = DenseAttention(config)
    reference.load_state_dict({n: p.cpu() for n, p in layer.state_dict().items()})
    expected = written_out(reference, x.cpu())
    with torch.autocast("cuda", torch.bfloat16):
        try:
            o = layer(x)
        except Declined as refusal:
            pytest.skip(str(refusal))
    assert (o.double().cpu() - expected).abs().max() < 0.02 * expected.abs().max()
    o.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in layer.parameters())
