"""Each planted fault does what it says, seen without a supervisor and without a judge."""

import gc
import importlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from planted import Told, made

from whyhung.process import ranks, trial
from whyhung.process.trial import check_entry
from whyhung.verdict import KINDS
from workbook.rooms.selfcheck import registry
from workbook.rooms.selfcheck.registry import chosen, every, listed, why_not

PLANTED, CONTROLS, ENDS = listed().values()


def named(name):
    (fault,) = chosen([name])
    return fault


def started(name, steps=0, told=None, **settings):
    """The subject of that name after so many steps, with some of its settings changed."""
    subject = made(named(name), told, settings=named(name).settings | settings)
    for step in range(steps):
        subject.step(step)
    return subject


def trained(name, steps=None):
    """(losses, {parameter: missing, zero or not finite}) after the fault's steps."""
    subject = started(name)
    losses = [float(subject.step(step)) for step in range(steps or named(name).steps)]
    return losses, wrong(subject)


def wrong(subject):
    """{parameter that wants a gradient: what is wrong with its gradient}"""

    def state(gradient):
        if gradient is None:
            return "missing"
        if not gradient.isfinite().all():
            return "not finite"
        return "" if gradient.any() else "zero"

    asked = [(n, p) for n, p in subject.model.named_parameters() if p.requires_grad]
    return {name: found for name, p in asked if (found := state(p.grad))}


def test_there_are_enough_faults_and_controls_for_a_machine_without_a_gpu():
    assert sum(not why_not(fault, gpus=0) for fault in PLANTED) >= 20
    assert sum(not why_not(control, gpus=0) for control in CONTROLS) >= 8


def test_names_are_unique_kinds_exist_and_subjects_can_be_found():
    assert len({fault.name for fault in every()}) == len(every())
    for fault in every():
        assert set(fault.kinds) <= set(KINDS) and fault.kinds
        json.dumps(fault.settings)
        if fault.script:
            assert Path(fault.script).is_file() and fault.script in fault.command and fault.text
            continue
        check_entry(fault.subject)
        module, _, name = fault.subject.partition(":")
        made = importlib.import_module(module)
        assert hasattr(made, name)
        assert all(line in Path(made.__file__).read_text() for line in fault.line.split(" or "))


def test_no_control_may_be_called_a_hang():
    healthy = [fault for fault in every() if fault.control]
    assert not any({"HANG", "STALLED"} & set(fault.kinds) for fault in healthy)
    assert len(healthy) > len(CONTROLS)


def test_each_run_of_a_program_is_a_fault_of_which_only_kinds_are_due():
    first, second = chosen(["gloo_broadcast_alone"])
    assert (first.name, second.command[-1]) == ("gloo_broadcast_alone --loader no", "yes")
    assert (first.due, first.ranks, first.rank) == ("HANG or STALLED", 2, 1)
    assert first.certifiable and first.line == "reload_weights or train_step"
    assert (first.batch, first.needs, first.control) == ("frozen", "", False)
    healthy, _ = chosen(["thread_pool"])
    assert healthy.control and healthy.due == "PASS or SLOW" and healthy.batch == "first"
    assert {fault.needs for fault in chosen(["endless_kernel"])} == {"gpus2"}


def test_where_the_programs_are_missing_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "PACKAGE", tmp_path / "nsa")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not installed with nsa; run it in a clone"):
        registry.folder()


def test_a_choice_is_of_names_groups_and_batches():
    assert {fault.group for fault in chosen(groups=["slow", "fails"])} == {"slow", "fails"}
    assert chosen(["no_number 1", "no_number 0"], ["fails"]) == chosen(["no_number"])
    assert all(fault.batch == "first" for fault in chosen(batches=["first"]))
    with pytest.raises(ValueError, match="nothing is of group"):
        chosen(["no_number"], ["healthy"])


def test_what_needs_two_gpus_says_so_where_there_is_one():
    assert why_not(named("two ranks (NCCL)"), gpus=1) == "needs 2 GPU(s), here are 1"
    assert why_not(named("device OOM"), gpus=1) == ""


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="the nearest is 'gate x 0'"):
        chosen(["gate x 1"])


@pytest.mark.parametrize(
    ("name", "found", "parts"),
    [
        ("detached branch", "missing", {"win.k_proj.weight", "win.v_proj.weight"}),
        ("gate x 0", "zero", {"win.k_proj.weight", "win.v_proj.weight"}),
        ("argmax", "missing", {"scores.weight", "scores.bias"}),
        ("detached late", "missing", {"0.weight", "0.bias"}),
    ],
)
def test_losses_stay_finite_while_gradients_do_not_come(name, found, parts):
    losses, spoilt = trained(name)
    assert all(map(math.isfinite, losses))
    assert set(spoilt.values()) == {found} and len(spoilt) == 2
    assert all(any(n.endswith(part) for part in parts) for n in spoilt)


def test_a_layer_that_is_detached_late_has_its_gradients_until_then():
    assert trained("detached late", steps=3)[1] == {}


def test_an_empty_row_has_a_finite_loss_and_gradients_that_are_not():
    losses, spoilt = trained("empty softmax row", steps=1)
    assert math.isfinite(losses[0])
    assert spoilt == {"qkv.weight": "not finite", "qkv.bias": "not finite"}


def test_fp16_adamw_is_not_finite_after_its_first_step():
    parameters = started("fp16 AdamW", 1).model.parameters()
    assert not all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("name", ["changed recomputation", "recomputation"])
def test_a_changed_recomputation_raises_nothing_and_changes_gradients_one_like_it_none(name):
    once, anew = (
        [p.grad for p in started(name, 1, **how).model.parameters()]
        for how in ({"checkpoint": ""}, {})
    )
    pairs = list(zip(once, anew, strict=True))
    if name == "recomputation":
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("in-place", RuntimeError, "modified by an inplace operation"),
        ("missing shard", KeyError, "part-00003"),
        ("one huge tensor", RuntimeError, "can't allocate memory"),
    ],
)
def test_an_exception_comes_at_step_three(name, kind, words):
    subject = started(name, 3)
    with pytest.raises(kind, match=words):
        subject.step(3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "least_mib"), [("kept tensors", 2), ("reference cycle", 2), ("kept masks", 0.25)]
)
def test_what_is_kept_grows_each_step(name, least_mib):
    def tensor_mib():
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        return sum(x.numel() * x.element_size() for x in tensors) / 2**20

    enabled = gc.isenabled()
    try:
        subject, seen = started(name), []
        for step in range(4):
            subject.step(step)
            seen.append(tensor_mib())
        assert all(b - a >= least_mib for a, b in pairwise(seen))
    finally:
        gc.enable() if enabled else gc.disable()
        gc.collect()


def nodes(tensor):
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


def graph_sizes(name):
    """Nodes of the own graph of each of four steps, as its backward finds them."""
    told, sizes = Told(), []
    told.backward = lambda loss: (sizes.append(nodes(loss)), loss.backward())
    started(name, 4, told)
    return sizes


def test_a_graph_that_is_kept_grows_by_as_much_each_step():
    sizes = graph_sizes("kept graph")
    assert len({b - a for a, b in pairwise(sizes[1:])}) == 1
    assert sizes[3] > sizes[2]


def test_kept_losses_leave_each_steps_own_graph_as_it_was():
    assert len(set(graph_sizes("kept losses"))) == 1
    assert nodes(started("kept losses", 2).total) > nodes(started("kept losses", 1).total)


def test_a_dense_attention_keeps_four_times_as_much_for_twice_as_many_tokens():
    def saved(tokens):
        kept = []
        subject = started("quadratic buffer", tokens=tokens)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ):
            subject.forward(0, *subject.fetch(0))
        return max(kept)

    assert saved(256) == 4 * saved(128) == 256**2


def test_each_number_is_compiled_anew():
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    started("recompilations", 4)
    assert counters["stats"]["unique_graphs"] - before >= 3


HEALTHY = ["healthy", "healthy NSA", "masked row", "other strides", "recomputation", "frozen part"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_control_trains_with_every_gradient_that_it_asks_for(name):
    losses, spoilt = trained(name)
    assert all(map(math.isfinite, losses)) and spoilt == {}


def test_a_frozen_layer_asks_for_no_gradient():
    assert started("frozen part", 1).model[0].weight.grad is None


def test_other_strides_reach_the_hook_as_they_were_made():
    subject, seen = started("other strides"), []
    subject.model[0].weight.register_hook(lambda gradient: seen.append(gradient.stride()))
    subject.step(0)
    assert seen and seen[0] != subject.model[0].weight.stride()


def test_every_subject_tells_its_phases_in_order():
    told = Told()
    started("healthy", 1, told)
    assert told.phases == ["data", "forward", "backward", "optimizer"]


def test_two_subjects_of_one_seed_train_alike():
    assert trained("healthy NSA", 3)[0] == trained("healthy NSA", 3)[0]


def test_a_spin_on_a_device_is_bounded():
    from faults.devices import spin

    with pytest.raises(ValueError, match="at most 60"):
        spin(61.0)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("killed", "crash", "ended by SIGKILL"),
        ("segfault", "crash", "ended by SIGSEGV"),
        ("aborted", "crash", "ended by SIGABRT"),
        ("exit 3", "error", "SystemExit: 3"),
        ("early exit 0", "error", "exited with 0 before it had a result"),
        ("one huge tensor", "oom", "can't allocate memory"),
    ],
)
def test_a_process_ends_as_the_fault_says(name, status, message):
    outcome = trial.run_child("planted:steps", {"name": name}, deadline_s=60)
    assert outcome.status == status and message in outcome.message


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("form", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", sorted({fault.name[:-2] for fault in ENDS}))
def test_slow_ones_end_and_failing_ones_fail(name, form):
    outcome = trial.run_child("planted:steps", {"name": f"{name} {form}"}, deadline_s=300)
    (fault,) = chosen([f"{name} {form}"])
    losses = (outcome.result or {"losses": [math.nan]})["losses"]
    assert (not all(map(math.isfinite, losses))) == (fault.group == "fails"), outcome.message


def ended(name, folder, deadline_s=60.0):
    how = {"ranks": 2, "deadline_s": deadline_s, "folder": folder}
    return ranks.run_ranks("planted:steps", {"name": name}, **how)


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_rank_is_the_first_to_fail(tmp_path):
    rows = ended("one rank killed", tmp_path)
    assert [row["first"] for row in rows] == [False, True]
    assert rows[1]["message"] == "ended by SIGKILL"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("rank's own branch", {"ok"}),
        pytest.param("two ranks", {"ok"}, marks=pytest.mark.long),
        ("other shape", {"crash", "error", "ended"}),
    ],
)
def test_ranks_end_well_if_one_leaves_out_a_branch_and_not_at_another_shape(name, ends, tmp_path):
    assert {row["status"] for row in ended(name, tmp_path)} <= ends
