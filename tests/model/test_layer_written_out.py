"""The layer against its formula, written out from its own weights and the reference."""

import pytest
import torch
from tiny_models import TOKENS, hidden, tiny

from nsa.model.layer import NSAAttention
from nsa.reference.compress import Phi, PhiWeights
from nsa.reference.nsa import BRANCHES, nsa
from nsa.reference.rotary import rotary_tables


def written_out(layer, x, cu_seqlens=None):
    """What the layer is documented to compute, from its own weights and the reference."""
    config, weight = layer.config, dict(layer.named_parameters())
    cos, sin = rotary_tables(x.shape[1], config.head_dim, config.rope_base)
    positions = torch.arange(x.shape[1])
    if cu_seqlens is not None:
        positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])

    def turned(y):
        first, second = y[..., : config.head_dim // 2], y[..., config.head_dim // 2 :]
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    def projected(name, heads):
        return (x @ weight[f"{name}.weight"].T).unflatten(-1, (heads, -1))

    def learned(side):
        prefix = f"phi_{side}."
        found = {n.removeprefix(prefix): w for n, w in weight.items() if n.startswith(prefix)}
        return PhiWeights(**found) if found else None

    after = config.compress_rope == "after"
    q = turned(projected("q_proj", config.heads))
    source = {name: "shared" if config.shared_kv else name for name in BRANCHES}
    k = {name: projected(f"k_proj.{source[name]}", config.kv_heads) for name in BRANCHES}
    k = {name: y if after and name == "cmp" else turned(y) for name, y in k.items()}
    v = {name: projected(f"v_proj.{source[name]}", config.kv_heads) for name in BRANCHES}
    phi = Phi(config.phi, learned("key"), learned("value"), (cos, sin) if after else None)

    per_group = config.gate == "softmax"
    read = q.unflatten(2, (config.kv_heads, -1)).mean(3) if per_group else x
    read = read @ weight["gate1.weight"].T + weight["gate1.bias"]
    read = read * torch.sigmoid(read)
    logits = read @ weight["gate2.weight"].T + weight["gate2.bias"]
    if config.force_branch:
        gates = torch.tensor([float(name == config.force_branch) for name in BRANCHES])
        gates = gates.to(x).expand(*q.shape[:3], 3)
    elif per_group:
        gates = logits.softmax(-1).repeat_interleave(config.heads // config.kv_heads, 2)
    else:
        gates = logits.unflatten(-1, (config.heads, 3)).sigmoid()

    branches = (config.force_branch,) if config.force_branch else BRANCHES
    o = nsa(q, k, v, gates, config.nsa, phi=phi, cu_seqlens=cu_seqlens, branches=branches).o
    return o.flatten(2) @ weight["out_proj.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": "sigmoid"},
        {"gate": "softmax"},
        {"shared_kv": True},
        {"force_branch": "cmp"},
        {"force_branch": "win"},
        {"force_branch": "slc"},
        {"force_branch": "slc", "shared_kv": True},
    ],
    ids=["sigmoid", "softmax", "shared", "cmp", "win", "slc", "slc-shared"],
)
@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("borders", [None, [0, 1, TOKENS]], ids=["whole", "packed"])
def test_the_layer_is_the_reference_with_its_weights_written_out(borders, phi, rope, changes):
    config = tiny(phi=phi, compress_rope=rope, value_dim=6, rope_base=100.0, **changes)
    layer = NSAAttention(config).double()
    with torch.no_grad():  # large enough that scores, gates and biases matter
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    x = hidden(config).double().requires_grad_()
    if borders is not None:
        borders = torch.tensor(borders, dtype=torch.int32)
    got, want = layer(x, cu_seqlens=borders), written_out(layer, x, borders)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    names, leaves = zip(("x", x), *layer.named_parameters(), strict=True)
    of = torch.randn_like(want)
    grads = (torch.autograd.grad(o, leaves, of, materialize_grads=True) for o in (got, want))
    for name, g, w in zip(names, *grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
