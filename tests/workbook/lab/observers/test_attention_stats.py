import math
from functools import partial
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from observed import trainer
from tiny_models import TOKENS, hidden, tiny
from torch import nn

from nsa.attention import witness
from nsa.attention.branches import select_blocks
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel
from nsa.reference.compress import compress_keys
from nsa.reference.nsa import BRANCHES, nsa
from workbook.lab.measure.counting import Count
from workbook.lab.observers.attention_stats import (
    NAMES,
    AttentionStats,
    distances,
    gate_statistics,
    keys_attended,
    layer_inputs,
    look,
)
from workbook.lab.observers.deferred import Deferred


def layer(**changes):
    return NSAAttention(tiny(**changes))


def seen(attention, x):
    return dict(zip(NAMES, look(attention, x).tolist(), strict=True))


def trained(steps=1, every=1, model=(), **training):
    """Rows of a training, and what each forward of the first layer's attention shows."""
    model, inputs = LanguageModel(tiny(**dict(model))), []
    stats = AttentionStats(model, every=every)
    made = trainer(stats, model=model, tokens=TOKENS, **training)
    hook = model.blocks[0].attention.register_forward_pre_hook(
        lambda module, args: inputs.append(look(module, args[0]).tolist())
    )
    made.run(steps)
    hook.remove()
    return stats.rows(), inputs


def values(row):
    return [row[name] for name in NAMES]


@pytest.mark.parametrize(
    "changes",
    [{}, {"phi": "mlp"}, {"shared_kv": True}, {"compress_rope": "after"}, {"gate": "softmax"}],
)
def test_the_numbers_are_those_of_the_reference(changes):
    attention, x = layer(**changes), hidden(tiny(), batch=2)
    found = seen(attention, x)
    inputs = layer_inputs(attention, x)
    config = attention.config.nsa
    expected = nsa(inputs.q, inputs.k, inputs.v, inputs.gates, config, phi=inputs.phi)
    for branch in BRANCHES:
        norms = expected.branches[branch].norm(dim=-1)
        assert found[f"norm_{branch}"] == pytest.approx(norms.mean().item(), rel=1e-4)
    rows = enumerate(expected.blocks.transpose(0, 1).flatten(1).tolist())
    chosen = [(t // config.select_block, j) for t, row in rows for j in row if j >= 0]
    back = [own - j for own, j in chosen]
    free = [own - j for own, j in chosen if config.select_initial <= j <= own - config.select_local]
    assert found["distance_blocks"] == pytest.approx(mean(back))
    assert found["distance_free_blocks"] == pytest.approx(mean(free))
    assert found["forced_share"] == pytest.approx(1 - len(free) / len(back))
    gates = inputs.gates.detach().double()
    for index, branch in enumerate(BRANCHES):
        assert found[f"gate_{branch}"] == pytest.approx(gates[..., index].mean().item(), rel=1e-5)


def test_gates_that_are_alike_have_the_largest_entropy_and_one_that_is_alone_none():
    alike, alone = torch.full((2, 5, 4, 3), 0.5), torch.zeros(2, 5, 4, 3)
    alone[..., 1] = 0.9
    found = (alike, (0.5, 0.5, 0.5, math.log(3), 0.5, 0)), (alone, (0, 0.9, 0, 0, 0.9, 1))
    for gates, expected in found:
        assert torch.stack(gate_statistics(gates)).tolist() == pytest.approx(expected)


def test_a_triple_has_collapsed_when_one_gate_has_more_than_19_in_20_of_the_sum():
    gates = torch.tensor([[0.94, 0.03, 0.03], [0.96, 0.02, 0.02], [1, 1, 1], [0.1, 0.001, 0.001]])
    *_, largest, collapsed = torch.stack(gate_statistics(gates)).tolist()
    assert (largest, collapsed) == (1.0, 0.5)


def test_the_selected_keys_that_a_query_attends_to_are_those_that_numpy_counts():
    config, blocks = tiny().nsa, layer_inputs_with_blocks(count=TOKENS - 3)
    k = np.zeros((*blocks.shape[:3],))
    for at in np.ndindex(*k.shape):
        tokens = {j * config.select_block + i for j in blocks[at].tolist() if j >= 0
                  for i in range(config.select_block)}  # fmt: skip
        k[at] = len({s for s in tokens if s <= at[1]})
    found = torch.stack(keys_attended(blocks, config)).tolist()
    assert found == pytest.approx([k.mean(), k.max(), (k == k.max()).mean()])
    assert 0 < found[2] < 1


def test_a_full_selection_attends_to_all_keys_and_then_to_n_blocks_less_what_is_not_yet():
    # The case study's sizes at T 2048: its own telemetry shows 752.5 where it is right. With a full
    # own block it would be min(t + 1, n l'), whose mean is 768.25.
    config, tokens = NSAConfig(), 2048
    own = torch.arange(tokens) // config.select_block
    blocks = own[:, None] - torch.arange(config.select_count).flip(0)
    blocks = torch.where(blocks < 0, -1, blocks).int()[None, :, None]
    mean, most, share = torch.stack(keys_attended(blocks, config)).tolist()
    assert (mean, most) == (752.5, 1024)
    assert share == 17 / tokens  # the last token of a block, once there are n of them
    bound = torch.arange(1, tokens + 1).clamp(max=config.select_count * config.select_block)
    assert bound.float().mean() == 768.25 > mean


def layer_inputs_with_blocks(count):
    attention, x = layer(), hidden(tiny(), batch=2, count=count)
    inputs = layer_inputs(attention, x)
    k_cmp = compress_keys(inputs.k["cmp"], inputs.phi, inputs.config)
    return select_blocks(inputs.q, k_cmp, inputs.config, inputs.scale)


def test_an_observed_step_dispatches_few_operations_more():
    model = LanguageModel(tiny(layers=2))
    counts = []
    for observers in ([], [AttentionStats(model, every=1)]):
        made = trainer(*observers, model=model)
        made.run(1)
        with Count() as counted:
            made.run(1)
        counts.append(counted.total)
    plain, observed = counts
    assert plain < observed < 1.5 * plain  # at every=50 less than 1 % of all steps


def test_distances_count_back_from_the_querys_own_block():
    config = NSAConfig(4, 2, 4, 4, select_initial=1, select_local=1, window=4)
    blocks = torch.full((1, 24, 1, 4), -1, dtype=torch.int32)
    blocks[0, 20, 0] = torch.tensor([0, 2, 3, 5])  # own block 5; 0 and 5 are forced
    blocks[0, 0, 0, 0] = 0
    found = torch.stack(distances(blocks, config)).tolist()
    assert found == pytest.approx([(5 + 3 + 2 + 0 + 0) / 5, 2.5, 0.6])


def test_where_nothing_is_free_there_is_no_distance():
    found = seen(layer(), hidden(tiny(), count=16))
    assert math.isnan(found["distance_free_blocks"])
    assert found["forced_share"] == 1.0


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_forced_branch_is_looked_at_alone(branch):
    found = seen(layer(force_branch=branch), hidden(tiny()))
    assert {name: found[f"gate_{name}"] for name in BRANCHES} == {
        name: float(name == branch) for name in BRANCHES
    }
    assert {name for name in BRANCHES if not math.isnan(found[f"norm_{name}"])} == {branch}
    for name in ("distance_blocks", "k_mean", "k_max", "share_at_max"):
        assert math.isnan(found[name]) == (branch != "slc")
    assert (found["gate_max"], found["collapse_share"]) == (1.0, 1.0)


def test_every_layer_of_an_observed_step_is_a_row():
    rows, _ = trained(steps=4, every=2)
    assert [(row["step"], row["layer"]) for row in rows] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert all(math.isfinite(x) for row in rows for x in values(row))
    assert rows[0] != rows[1]


@pytest.mark.parametrize("changes", [{"checkpoint": "all"}, {"checkpoint": "0:1"}])
def test_a_recomputed_layer_is_looked_at_once(changes):
    assert trained(steps=2)[0] == trained(steps=2, model=changes)[0]


def test_the_first_of_several_micro_batches_is_looked_at():
    rows, (first, second) = trained(batch=4, accumulate=2)
    assert values(rows[0]) == first != second
    assert len(rows) == 2


def test_bf16_is_looked_at_as_it_is_computed():
    rows, _ = trained(precision="bf16")
    assert all(math.isfinite(x) for row in rows for x in values(row))


def test_losses_and_the_witness_are_those_of_an_unobserved_run():
    found = []
    for observers in ([], [partial(AttentionStats, every=1)]):
        model = LanguageModel(tiny())
        made = trainer(*(make(model) for make in observers), model=model)
        with witness.recording() as record:
            found.append((made.run(3), record.record()))
    assert found[0] == found[1]


def test_steps_that_are_not_observed_have_no_hook():
    model = LanguageModel(tiny())
    stats = AttentionStats(model, every=3)
    hooked = {}

    class Look:
        def on_phase(self, name, step):
            hooked[step, name] = any(b.attention._forward_hooks for b in model.blocks)

    trainer(stats, Look(), model=model).run(5)
    assert {place for place, there in hooked.items() if there} == {(0, "forward"), (3, "forward")}


def test_writers_get_the_numbers_when_they_have_arrived(monkeypatch):
    seen = []
    writer = SimpleNamespace(write=lambda step, values: seen.append((step, values)))
    model = LanguageModel(tiny())
    stats = AttentionStats(model, every=1, writers=[writer])
    made = trainer(stats, model=model)
    with monkeypatch.context() as patch:
        patch.setattr(Deferred, "ready", lambda self: iter(()))
        made.run(2)
        assert seen == []
    made.run(1)
    assert [step for step, _ in seen] == [0, 1, 2]
    assert len(seen[0][1]) == 2 * len(NAMES)
    assert seen[1][1]["layer1/gate_win"] == stats.rows()[3]["gate_win"]


@pytest.mark.full
def test_our_kernels_show_the_same_as_torch_does():
    pytest.importorskip("triton")
    sizes = {"head_dim": 16, "dim": 64}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for backend in ("gather", "triton"):
        torch.manual_seed(0)
        attention = layer(backend=backend, **sizes).to(device)
        found.append(seen(attention, hidden(tiny(**sizes)).to(device)))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(ValueError, match="no NSAAttention to look into"):
        AttentionStats(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every=0 must be at least 1; 50 is usual"):
        AttentionStats(LanguageModel(tiny()), every=0)
    with pytest.raises(ValueError, match="packed sequences cannot be looked into"):
        look(layer(), hidden(tiny()), None, torch.tensor([0, TOKENS]))
    stats = AttentionStats(LanguageModel(tiny()))
    with pytest.raises(ValueError, match="compile=True runs no hooks of modules"):
        stats.on_start(SimpleNamespace(config=SimpleNamespace(compile=True)))
