import inspect

import pytest
import torch
from tiny_models import TOKENS, gradients, hidden, tiny, tokens
from torch.overrides import TorchFunctionMode

from nsa.attention.witness import recording
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset
from nsa.model.rotary import rotary_for
from nsa.reference.compress import Phi, PhiWeights, compress
from nsa.reference.nsa import BRANCHES, nsa
from workbook.lab.observers.graph import count_nodes

# Keys of one head that all move by one vector leave a softmax over them as it was.
ROUNDING_ONLY = {("linear", "before"): "phi_key.position", ("mlp", "before"): "phi_key.bias2"}


@pytest.mark.parametrize("gate", ["sigmoid", "linear", "softmax"])
@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_every_parameter_gets_a_finite_nonzero_gradient_at_the_first_step(phi, rope, gate):
    model = LanguageModel(tiny(phi=phi, compress_rope=rope, gate=gate))
    found = gradients(model)
    rounding = ROUNDING_ONLY.get((phi, rope), "none is")
    # Float32 leaves about 1e-7 of the terms whose sum is zero; a real gradient is far above that.
    scale = max(g.abs().max() for name, g in found.items() if "attention" in name)
    for name, gradient in found.items():
        assert gradient is not None and gradient.isfinite().all(), name
        largest = gradient.abs().max()
        if name.endswith(rounding):
            assert largest < 1e-6 * scale, (name, largest)
        else:
            assert largest > 1e-6 * scale, (name, largest)


GATE = {f"gate{n}.{p}" for n in (1, 2) for p in ("weight", "bias")}


def without_gradient(model):
    return {name for name, gradient in gradients(model).items() if gradient is None}


@pytest.mark.parametrize("force_branch", BRANCHES)
@pytest.mark.parametrize("phi", ["mean", "linear"])
def test_a_forced_branch_leaves_the_others_and_the_gate_without_gradient(force_branch, phi):
    model = LanguageModel(tiny(force_branch=force_branch, phi=phi))
    without = {name.partition("attention.")[2] for name in without_gradient(model)}
    names = [name for name in BRANCHES if name != force_branch]
    others = {f"{name}.{side}_proj.weight" for side in "kv" for name in names}
    learned = {f"phi_{side}.{p}" for side in ("key", "value") for p in ("position", "weight1")}
    unused = learned if phi == "linear" and force_branch != "cmp" else set()
    assert without == GATE | others | unused


def test_projections_that_are_more_than_a_weight_are_traced_as_they_are(monkeypatch):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def hook(module, args, output):
        return 3 * output

    config = tiny()
    layer, x = NSAAttention(config), hidden(config)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = layer.projections(x, BRANCHES)["v win"]
    handle = layer.win.v_proj.register_forward_hook(hook)
    torch.testing.assert_close(layer.projections(x, BRANCHES)["v win"], 3 * plain)
    handle.remove()
    layer.win.v_proj.forward = lambda x: 4 * plain
    torch.testing.assert_close(layer.projections(x, BRANCHES)["v win"], 4 * plain)
    del layer.win.v_proj.forward
    doubled = Doubled(config.dim, plain.shape[-1], bias=False)
    doubled.load_state_dict(layer.win.v_proj.state_dict())
    layer.win.v_proj = doubled
    torch.testing.assert_close(layer.projections(x, BRANCHES)["v win"], 2 * plain)


def applied_projections(layer):
    """A list to which each application of a key or value projection adds its name."""
    applied = []
    for name, projection in layer.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            projection.register_forward_hook(lambda *_, at=name: applied.append(at))
    return applied


class Products(TorchFunctionMode):
    """Counts the linear products without bias."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        plain = args[2:] in ((), (None,)) and not kwargs
        self.count += function is torch.nn.functional.linear and plain
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phi": "mlp", "compress_rope": "after"},
        {"shared_kv": True},
        {"force_branch": "cmp"},
        {"force_branch": "win"},
        {"force_branch": "slc"},
        {"attention": "dense", "backend": "sdpa"},
    ],
    ids=str,
)
def test_projections_traced_as_one_product_make_the_same(monkeypatch, changes):
    model = LanguageModel(tiny(layers=1, **changes))
    apart = gradients(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with Products() as counted:
        together = gradients(model)
    # q, k and v; o_proj; gate; up; down; the head. Keys that only score blocks stay apart, so
    # that their weight has no gradient.
    assert counted.count == 6 + (changes.get("force_branch") == "slc")
    for name, gradient in apart.items():
        if gradient is None:
            assert together[name] is None, name
        else:
            torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize("force_branch", [None, *BRANCHES])
def test_a_shared_projection_is_applied_once(force_branch, rope):
    config = tiny(force_branch=force_branch, shared_kv=True, compress_rope=rope)
    layer = NSAAttention(config)
    applied = applied_projections(layer)
    layer(hidden(config))
    assert sorted(applied) == ["k_proj", "v_proj"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rope", ["before", "after"])
def test_keys_that_only_score_blocks_keep_nothing_for_a_backward(rope, shared):
    config = tiny(force_branch="slc", shared_kv=shared, compress_rope=rope)
    layer = NSAAttention(config)
    rotary = rotary_for(config, TOKENS, torch.device("cpu"))
    projections = layer.projections(hidden(config), ("slc",))
    _, keys = layer.queries_and_keys(projections, rotary, ("slc",))
    assert {name: k.requires_grad for name, k in keys.items()} == {"slc": True, "cmp": False}


@pytest.mark.parametrize("force_branch", [None, *BRANCHES])
def test_a_learned_phi_takes_gradients_where_they_are_wanted_and_used(force_branch):
    layer = NSAAttention(tiny(phi="mlp", force_branch=force_branch)).double()
    x = hidden(layer.config).double()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            layer.phi_key.float()  # its weights are made fp64 for the call
            phi = layer.arguments(x)["phi"]
        if force_branch == "win":
            assert phi is None
        else:
            assert phi.key.weight1.requires_grad == (enabled and force_branch != "slc")


@pytest.mark.parametrize("force_branch", BRANCHES)
def test_a_forced_branch_skips_the_others_work(force_branch):
    config = tiny(force_branch=force_branch)
    layer, full = NSAAttention(config), NSAAttention(tiny())
    applied = applied_projections(layer)
    x = hidden(config)
    with recording() as forced_paths:
        forced_nodes = count_nodes([layer(x)])
    with recording() as full_paths:
        full_nodes = count_nodes([full(x)])

    scoring = ["cmp.k_proj"] if force_branch == "slc" else []
    assert sorted(applied) == sorted([f"{force_branch}.k_proj", f"{force_branch}.v_proj", *scoring])
    served = {branch for branch, _ in forced_paths.paths} & set(BRANCHES)
    assert served == {force_branch}
    assert {branch for branch, _ in full_paths.paths} >= set(BRANCHES)
    assert forced_nodes < 0.6 * full_nodes


@pytest.mark.parametrize("gate", ["sigmoid", "linear", "softmax"])
def test_stopped_gates_cost_exactly_the_gate_parameters_their_gradient(gate):
    plain, stopped = (
        LanguageModel(tiny(gate=gate, stopgrad_gates=stopped)) for stopped in (False, True)
    )
    stopped.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(stopped(tokens())[0], plain(tokens())[0])
    assert not without_gradient(plain)
    gates = {f"blocks.{layer}.attention.{name}" for layer in (0, 1) for name in GATE}
    assert without_gradient(stopped) == gates & set(plain.state_dict())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_linear_gate_is_the_sigmoid_of_one_matrix(temperature):
    layer = NSAAttention(tiny(gate="linear", gate_temperature=temperature))
    assert [n for n, _ in layer.named_parameters() if "gate" in n] == ["gate2.weight"]
    x = hidden(layer.config)
    wanted = torch.sigmoid(x @ layer.gate2.weight.T / temperature)
    found = layer.gates(x, torch.randn(1, TOKENS, 4, 8))
    torch.testing.assert_close(found, wanted.view(1, TOKENS, 4, 3))


def test_a_uniform_gate_is_a_third_each_and_costs_exactly_the_gates_gradients():
    plain, uniform = LanguageModel(tiny()), LanguageModel(tiny(gate="uniform"))
    gates = {f"blocks.{layer}.attention.{name}" for layer in (0, 1) for name in GATE}
    learning = [{n for n, g in gradients(m).items() if g is not None} for m in (plain, uniform)]
    assert learning[0] - learning[1] == gates and learning[1] < learning[0]
    layer = NSAAttention(tiny(gate="uniform"))
    x = hidden(layer.config)
    assert torch.equal(
        layer.gates(x, torch.randn(1, TOKENS, 4, 8)), torch.full((1, TOKENS, 4, 3), 1 / 3)
    )


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_zero_last_matrix_leaves_the_gates_first_one_without_gradient_at_step_one(gate):
    moved = {}
    for init in ("zero", "xavier"):
        model = LanguageModel(tiny(gate=gate, gate_init=init))
        model.reset_parameters(seed=3)
        layer, x = model.blocks[0].attention, hidden(model.config)
        gates = layer.gates(x, torch.randn(1, TOKENS, 4, 8))
        assert (gates.std() == 0) == (init == "zero")
        found = gradients(model)
        for n in (1, 2):
            named = [g for name, g in found.items() if f"gate{n}.weight" in name]
            moved[init, n] = torch.stack([g.abs().max() for g in named])
    assert not moved["zero", 1].any() and (moved["xavier", 1] > 0).all()
    assert (moved["zero", 2] > 0).all() and (moved["xavier", 2] > 0).all()


def test_zero_and_xavier_gates_of_one_seed_differ_in_the_gates_last_matrices_alone():
    states = []
    for init in ("zero", "xavier"):
        model = LanguageModel(tiny(gate_init=init, phi="mlp"))
        model.reset_parameters(seed=3)
        states.append(model.state_dict())
    differ = {name for name, x in states[0].items() if not torch.equal(x, states[1][name])}
    assert differ == {f"blocks.{layer}.attention.gate2.weight" for layer in (0, 1)}


def test_the_case_studys_gates_have_the_spread_that_it_reports():
    model = LanguageModel(preset("production", gate="softmax", vocab=8, mlp_hidden=16))
    last = torch.cat([block.attention.gate2.weight for block in model.blocks])
    assert last.shape == (12 * 3, 32)
    assert last.std().item() == pytest.approx(0.0239, rel=0.1)  # sqrt(2 / 35) / 10


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gates_start_near_their_middle_with_a_tenth_of_xaviers_spread(gate):
    config = tiny(dim=256, heads=16, kv_heads=2, head_dim=64, gate=gate)
    layer = NSAAttention(config)
    biased = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert biased == {"gate1.bias", "gate2.bias"}
    out, hidden_size = layer.gate2.weight.shape
    xavier = (2 / (out + hidden_size)) ** 0.5
    assert layer.gate2.weight.std().item() == pytest.approx(0.1 * xavier, rel=0.15)
    assert layer.gate2.weight.abs().max() <= 0.1 * 3**0.5 * xavier
    assert not layer.gate1.bias.any() and not layer.gate2.bias.any()
    x = hidden(config)
    gates = layer.gates(x, torch.randn(1, TOKENS, 16, 64))
    middle = 1 / 2 if gate == "sigmoid" else 1 / 3
    assert gates.std() > 0
    assert (gates - middle).abs().max() < 0.15


def test_a_learned_linear_phi_starts_as_the_mean():
    layer = NSAAttention(tiny(phi="linear"))
    x = torch.randn(2, TOKENS, 2, 8)
    started = compress(x, "linear", layer.phi_key(x.dtype), layer.config.nsa)
    torch.testing.assert_close(started, compress(x, "mean", None, layer.config.nsa))


def test_illegal_borders_are_refused_with_what_would_do():
    layer = NSAAttention(tiny())
    x = hidden(layer.config)
    for borders in ([0, 30, 20, TOKENS], [0, 20], [5, TOKENS], [0, 99]):
        with pytest.raises(ValueError, match=r"cu_seqlens=.* must rise from 0 to T=48"):
            layer(x, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    shaped = r"needed is \[N \+ 1\] int32, rising from 0 to T=48"
    for borders in ([], [[0, TOKENS]]):
        borders = torch.tensor(borders, dtype=torch.int32)
        # Under jaxtyping's hook its own TypeError comes first for two dimensions.
        with pytest.raises((ValueError, TypeError), match=f"{shaped}|cu_seqlens"):
            layer(x, cu_seqlens=borders)
        with pytest.raises(ValueError, match=shaped):
            inspect.unwrap(rotary_for)(layer.config, TOKENS, "cpu", borders)


def test_the_backend_named_is_the_backend_that_runs_and_an_unknown_one_is_refused():
    for backend in ("gather", "sdpa", "masked"):
        layer = NSAAttention(tiny(backend=backend))
        with recording() as witness:
            layer(hidden(layer.config))
        assert dict(witness.backends) == {backend: 1}
    with pytest.raises(ValueError, match=r"backend 'gathr' is unknown.*the nearest is 'gather'"):
        NSAAttention(tiny(backend="gathr"))


def written_out(layer, x, cu_seqlens=None):
    """Compute what the layer is documented to, from its own weights and the reference."""
    config, weight = layer.config, dict(layer.named_parameters())
    exponents = torch.arange(config.head_dim // 2) / (config.head_dim / 2)
    times = torch.arange(x.shape[1])[:, None] / config.rope_scale
    cos, sin = (turn(times * config.rope_base**-exponents) for turn in (torch.cos, torch.sin))
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
    source = {name: "" if config.shared_kv else f"{name}." for name in BRANCHES}
    k = {name: projected(f"{source[name]}k_proj", config.kv_heads) for name in BRANCHES}
    k = {name: y if after and name == "cmp" else turned(y) for name, y in k.items()}
    v = {name: projected(f"{source[name]}v_proj", config.kv_heads) for name in BRANCHES}
    phi = Phi(config.phi, learned("key"), learned("value"), (cos, sin) if after else None)

    per_group = config.gate == "softmax"
    read = q.unflatten(2, (config.kv_heads, -1)).mean(3) if per_group else x
    read = read @ weight["gate1.weight"].T + weight["gate1.bias"]
    read = read * torch.sigmoid(read)
    logits = read @ weight["gate2.weight"].T + weight["gate2.bias"]
    logits = logits / config.gate_temperature
    if config.force_branch:
        gates = torch.tensor([float(name == config.force_branch) for name in BRANCHES])
        gates = gates.to(x).expand(*q.shape[:3], 3)
    elif per_group:
        gates = logits.softmax(-1).repeat_interleave(config.heads // config.kv_heads, 2)
    else:
        gates = logits.unflatten(-1, (config.heads, 3)).sigmoid()

    branches = (config.force_branch,) if config.force_branch else BRANCHES
    o = nsa(q, k, v, gates, config.nsa, phi=phi, cu_seqlens=cu_seqlens, branches=branches).o
    return o.flatten(2) @ weight["o_proj.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": "sigmoid"},
        {"gate": "softmax"},
        {"gate_temperature": 3.0, "rope_scale": 4.0},
        {"gate": "softmax", "gate_temperature": 0.5},
        {"shared_kv": True},
        {"force_branch": "cmp"},
        {"force_branch": "win"},
        {"force_branch": "slc"},
        {"force_branch": "slc", "shared_kv": True},
    ],
    ids=["sigmoid", "softmax", "warm", "cool", "shared", "cmp", "win", "slc", "slc-shared"],
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


def test_a_layer_takes_angles_from_another_device():
    """Models spread over several devices hand them on so; meta stands for another device."""
    config = tiny(backend="masked")
    with torch.device("meta"):
        layer = NSAAttention(config)
        x = torch.empty(1, 40, config.dim)
    angles = rotary_for(config, 40, torch.device("cpu"), torch.tensor([0, 10, 40]))
    assert angles.to(torch.device("cpu")) is angles
    assert layer(x, angles).device.type == "meta"
