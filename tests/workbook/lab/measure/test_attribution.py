"""Memory of a step by module and line, which looking on does not change."""

import gc
import types
import weakref

import pytest
import torch
from observed import trainer
from quadratic import Stranger, T
from tiny_models import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from nsa.attention import witness
from workbook.lab.measure.allocations import replay
from workbook.lab.measure.attribution import Attributing
from workbook.lab.measure.owners import Owner, Parts
from workbook.lab.measure.recorders import CpuRecorder, training_tensors
from workbook.lab.observers.trace import Ranges

pytestmark = pytest.mark.usefixtures("nothing_before")
CPU = torch.device("cpu")


@pytest.fixture
def poisoned_memory():
    """Not here: filling memory with NaN allocates."""


def of_second_step(config, make):
    """Record of a tiny training's second step."""
    made = trainer(config=config, tokens=64)
    made.step(0)
    recorder = make(made)
    ranges = Ranges(made.model, lines=True)
    ranges.attach()
    made.observers = (recorder,)
    with recorder:
        made.step(1)
    ranges.close()
    return recorder


def attributing(made):
    parts = Parts(made.model)
    parts.optimizers.append(made.optimizer)
    return Attributing(CPU, parts)


def plain(made):
    return CpuRecorder(training_tensors(made.model, made.optimizer))


# gather's backward scatters: under a dispatch mode it would allocate a result more
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": "all"},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"backend": "masked"}, marks=pytest.mark.full),
        pytest.param({"backend": "sdpa"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_step_that_is_attributed_allocates_what_one_that_is_not_does(changes, monkeypatch):
    monkeypatch.setattr(witness, "TOGETHER", 10**6)  # looks at so many outputs of all steps at once
    config = tiny(**changes)
    streams = [of_second_step(config, make).stream for make in (plain, attributing)]
    sizes = [[n for n in s.sizes[s.marks[0][0] :] if n > 0] for s in streams]
    assert len(sizes[0]) > 500 and sizes[0] == sizes[1]
    theirs, ours = (replay(stream)["by_phase_category"] for stream in streams)
    for held in (*theirs.values(), *ours.values()):
        held.pop("resident")  # whatever other tests left alive
    assert ours == theirs


def test_a_line_is_told_of_both_passes_and_what_is_recomputed_is_told_apart():
    found = of_second_step(tiny(checkpoint="all"), attributing)
    owners = set(found.owners.values())
    mlp = {o.phase: o for o in owners if o.module == "blocks.*.mlp" and "SwiGLU" in o.line}
    assert mlp["forward"].line == mlp["backward"].line, "of the node's own forward"
    again = {o for o in owners if o.module == "blocks.*.mlp (recomputed)"}
    assert {o.line for o in again} == {mlp["forward"].line} and {o.phase for o in again} == {
        "backward"
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_has_lines_in_either_kind_of_checkpoint(reentrant):
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.ones(256, 64, requires_grad=True)
    ranges = Ranges(block, lines=True)
    ranges.attach()
    recorder = by_hand(lambda: checkpoint(block, x, use_reentrant=reentrant).sum(), Parts(block))
    ranges.close()
    rows = recorder.attribution().rows()
    told = sum(row["mib"] for row in rows if row["line"] or row["phase"] == "before the step")
    assert told > 0.95 * sum(row["mib"] for row in rows)
    assert any("(recomputed)" in owner.module for owner in recorder.owners.values())


def test_a_function_of_the_users_own_has_the_lines_of_its_own_backward():
    found = of_second_step(tiny(), attributing)
    lines = {o.line.partition(" ")[2] for o in found.owners.values() if o.phase == "backward"}
    assert "_GatherAttention.backward" in lines


def by_hand(forward, parts, optimizer=None):
    with Attributing(CPU, parts) as recorder:
        recorder.on_phase("forward", 0)
        loss = forward()
        recorder.on_phase("backward", 0)
        loss.backward()
        recorder.on_phase("end", 0)
    return recorder


def test_the_end_of_a_gradient_of_the_step_before_is_seen():
    model = nn.Linear(200, 200)
    model(torch.ones(1, 200)).sum().backward()

    def forward():
        model.zero_grad()
        return model(torch.ones(1, 200)).sum()

    recorder = by_hand(forward, Parts(model))
    found = recorder.attribution()
    assert found.lives.lost_bytes == 0
    before, after = (found.lives.held(at) for at in found.around("backward"))
    assert before["gradients"] == 0 and after["gradients"] == 4 * (200 * 200 + 200)


class Keeper:
    def __init__(self):
        self.kept = [torch.zeros(500_000)]


def test_what_was_there_before_has_the_name_of_who_holds_it_and_is_not_kept_alive():
    gc.collect()  # what earlier tests held may be larger
    model, batch, keeper = nn.Linear(8, 8), torch.zeros(700_000), Keeper()
    theirs = types.ModuleType("theirs")
    theirs.__spec__, theirs.TABLE = None, torch.zeros(600_000)
    kept = (lambda x: lambda: x)(torch.zeros(400_000))
    seen = weakref.ref(batch)
    rows = by_hand(lambda: model(torch.ones(2, 8)).sum(), Parts(model)).attribution().rows()
    held = {row["module"]: row["mib"] * 2**20 for row in rows if row["category"] == "resident"}
    assert held["theirs.TABLE"] == 2_400_000
    assert held[f"{__name__}.Keeper.kept[...]"] == 2_000_000 == keeper.kept[0].nbytes
    assert held[f"{__name__}.{kept.__qualname__}'s closure"] == kept().nbytes
    (here,) = (name for name in held if name.startswith("batch in test_what_was_there"))
    assert held[here] == 2_800_000
    del batch
    gc.collect()
    assert seen() is None


def test_a_parameter_is_the_line_of_the_class_that_has_it():
    owners = Parts(Stranger()).owners().values()
    assert {(o.module, o.line.partition(" ")[2]) for o in owners} == {("layers.*.mix", "Scores")}
    assert all(o.line.startswith("tests/support/quadratic.py:") for o in owners)


def test_a_cuda_history_fills_in_the_lines_that_are_missing():
    recorder = Attributing(CPU, Parts())
    frames = [
        {"filename": "/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
        {"filename": "/theirs/train.py", "line": 31, "name": "forward"},
    ]
    trace = []
    for line in ("", "kept.py:1 f"):
        recorder.owners[len(recorder.stream)] = Owner("mlp", line)
        recorder.stream.alloc(512, 100)
        recorder.stream.free(512)
        trace += [{"action": "alloc", "addr": 512, "frames": frames}]
        trace += [{"action": "free_requested", "addr": 512, "frames": []}]
    recorder.fill(trace)
    assert [o.line for o in recorder.owners.values()] == [
        "/theirs/train.py:31 forward",
        "kept.py:1 f",
    ]


def test_the_planted_line_holds_what_it_should():
    model = Stranger()
    ranges = Ranges(None, lines=True)
    ranges.attach()
    found = by_hand(lambda: model(torch.ones(T, 8)), Parts(model)).attribution()
    ranges.close()
    # two layers keep the sigmoid's output, and the backward of the second has a gradient beside it
    planted = [row for row in found.rows() if row["line"].endswith("Scores.forward")]
    by_category = {row["category"]: row["mib"] for row in planted if row["mib"] > 0.5}
    one = 4 * T * T / 2**20
    assert by_category["activations"] == 2 * one
    assert by_category["temporaries"] in (one, 2 * one)
    others = sum(row["share"] for row in found.rows() if row["category"] == "resident")
    assert sum(row["share"] for row in planted) / (1 - others) > 0.95
    assert all("quadratic.py:16" in row["line"] for row in planted if row["mib"] > 0.5)
