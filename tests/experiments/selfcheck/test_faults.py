"""Each planted fault does what it says, seen without a supervisor and without a judge."""

import json
import math
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from places import SUPPORT
from planted import Told, made

from nsa.experiments.selfcheck.faults.registry import CONTROLS, FAULTS, PLANTED, chosen, why_not
from nsa.lab.process import ranks, trial
from nsa.lab.process.trial import check_entry
from nsa.lab.verdict import KINDS

WAITS = [f for f in PLANTED if "HANG" in f.kinds and f.ranks == 1 and not f.needs]


def named(name):
    (fault,) = chosen([name])
    return fault


def trained(fault, steps=None):
    """(losses, {parameter: missing, zero, not finite or arrived}) after the fault's steps."""
    subject = made(fault)
    losses = [float(subject.step(step)) for step in range(steps or fault.steps)]
    return losses, {n: state(p.grad) for n, p in subject.model.named_parameters()}


def state(gradient):
    if gradient is None:
        return "missing"
    if not gradient.isfinite().all():
        return "not finite"
    return "arrived" if gradient.any() else "zero"


def wrong(states):
    return {name: found for name, found in states.items() if found != "arrived"}


def test_there_are_enough_faults_and_controls_for_a_machine_without_a_gpu():
    assert sum(not why_not(fault, gpus=0) for fault in PLANTED) >= 24
    assert sum(not why_not(control, gpus=0) for control in CONTROLS) >= 8


def test_names_are_unique_kinds_exist_and_subjects_can_be_found():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert set(fault.kinds) <= set(KINDS) and fault.kinds
        check_entry(fault.subject)
        module, _, name = fault.subject.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)
        json.dumps(fault.settings)


def test_no_control_may_be_called_a_hang():
    assert not any("HANG" in control.kinds for control in CONTROLS)


def test_what_needs_two_gpus_says_so_where_there_is_one():
    assert why_not(named("two ranks (NCCL)"), gpus=1) == "needs 2 GPU(s), here are 1"
    assert why_not(named("device OOM"), gpus=1) == ""


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="the nearest is 'gate x 0'"):
        chosen(["gate x 1"])


@pytest.mark.parametrize(
    ("name", "found", "parts"),
    [
        ("detached branch", "missing", {"k_proj.win.weight", "v_proj.win.weight"}),
        ("gate x 0", "zero", {"k_proj.win.weight", "v_proj.win.weight"}),
        ("argmax", "missing", {"scores.weight", "scores.bias"}),
        ("detached late", "missing", {"0.weight", "0.bias"}),
    ],
)
def test_losses_stay_finite_while_gradients_do_not_come(name, found, parts):
    losses, states = trained(named(name))
    assert all(map(math.isfinite, losses))
    spoilt = wrong(states)
    assert set(spoilt.values()) == {found} and len(spoilt) == 2
    assert all(any(n.endswith(part) for part in parts) for n in spoilt)


def test_a_layer_that_is_detached_late_has_its_gradients_until_then():
    assert wrong(trained(named("detached late"), steps=3)[1]) == {}


def test_an_empty_row_has_a_finite_loss_and_gradients_that_are_not():
    losses, states = trained(named("empty softmax row"), steps=1)
    assert math.isfinite(losses[0])
    assert wrong(states) == {"qkv.weight": "not finite", "qkv.bias": "not finite"}


def test_fp16_adamw_is_not_finite_after_its_first_step():
    subject = made(named("fp16 AdamW"))
    subject.step(0)
    assert not all(p.isfinite().all() for p in subject.model.parameters())


def test_a_diverging_loss_ends_as_no_number():
    assert not math.isfinite(trained(named("diverging"))[0][-1])


def first_gradients(name, **changes):
    fault = named(name)
    subject = made(fault, settings=fault.settings | changes)
    subject.step(0)
    return [p.grad for p in subject.model.parameters()]


def test_a_changed_recomputation_raises_nothing_and_changes_gradients():
    pairs = zip(
        first_gradients("changed recomputation"),
        first_gradients("changed recomputation", checkpoint=""),
        strict=True,
    )
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs)


def test_a_recomputation_that_does_as_it_did_changes_nothing():
    pairs = zip(
        first_gradients("recomputation"), first_gradients("recomputation", checkpoint=""),
        strict=True,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("in-place", RuntimeError, "modified by an inplace operation"),
        ("missing shard", KeyError, "part-00003"),
        ("one huge tensor", RuntimeError, "can't allocate memory"),
    ],
)
def test_an_exception_comes_at_step_three(name, kind, words):
    subject = made(named(name))
    for step in range(3):
        subject.step(step)
    with pytest.raises(kind, match=words):
        subject.step(3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "least_mib"), [("kept tensors", 2), ("reference cycle", 2), ("kept masks", 0.25)]
)
def test_what_is_kept_grows_each_step(name, least_mib):
    import gc

    enabled = gc.isenabled()
    try:
        subject, seen = made(named(name)), []
        for step in range(4):
            subject.step(step)
            seen.append(tensor_mib())
        assert all(b - a >= least_mib for a, b in pairwise(seen))
    finally:
        gc.enable() if enabled else gc.disable()
        gc.collect()


def tensor_mib():
    import gc

    return sum(
        x.numel() * x.element_size() for x in gc.get_objects() if type(x) is torch.Tensor
    ) / 2**20  # fmt: skip


def nodes(tensor):
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


def graph_sizes(name, steps=4):
    """Nodes of each step's own graph, as its backward finds them."""
    told = Told()
    sizes = []
    told.backward = lambda loss: (sizes.append(nodes(loss)), loss.backward())
    subject = made(named(name), told)
    for step in range(steps):
        subject.step(step)
    return sizes


def test_a_graph_that_is_kept_grows_by_as_much_each_step():
    sizes = graph_sizes("kept graph")
    assert len({b - a for a, b in pairwise(sizes[1:])}) == 1
    assert sizes[3] > sizes[2]


def test_kept_losses_leave_each_steps_own_graph_as_it_was():
    assert len(set(graph_sizes("kept losses"))) == 1
    subject = made(named("kept losses"))
    subject.step(0)
    before = nodes(subject.total)
    subject.step(1)
    assert nodes(subject.total) > before


def test_a_dense_attention_keeps_four_times_as_much_for_twice_as_many_tokens():
    def saved(tokens):
        kept = []
        subject = made(named("quadratic buffer"), settings={"tokens": tokens})
        inputs, targets = subject.fetch(0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ):
            subject.forward(0, inputs, targets)
        return max(kept)

    assert saved(256) == 4 * saved(128) == 256**2


def test_each_number_is_compiled_anew():
    from torch._dynamo.utils import counters

    subject = made(named("recompilations"))
    before = counters["stats"]["unique_graphs"]
    for step in range(4):
        subject.step(step)
    assert counters["stats"]["unique_graphs"] - before >= 3


HEALTHY = ["healthy", "healthy NSA", "masked row", "other strides", "recomputation", "stranger"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_control_trains_with_every_gradient(name):
    fault = named(name)
    subject = made(fault)
    losses = [float(subject.step(step)) for step in range(fault.steps)]
    assert all(map(math.isfinite, losses))
    if hasattr(subject, "model"):
        assert wrong({n: state(p.grad) for n, p in subject.model.named_parameters()}) == {}


def test_a_frozen_layer_has_no_gradient_and_asks_for_none():
    subject = made(named("frozen part"))
    subject.step(0)
    asked = {n for n, p in subject.model.named_parameters() if p.requires_grad}
    assert (
        wrong({n: state(p.grad) for n, p in subject.model.named_parameters() if n in asked}) == {}
    )
    assert "0.weight" not in asked


def test_other_strides_reach_the_hook_as_they_were_made():
    subject = made(named("other strides"))
    seen = []
    subject.model[0].weight.register_hook(lambda gradient: seen.append(gradient.stride()))
    subject.step(0)
    assert seen and seen[0] != subject.model[0].weight.stride()


def test_every_subject_tells_its_phases_in_order():
    told = Told()
    made(named("healthy"), told).step(0)
    assert told.phases == ["data", "forward", "backward", "optimizer"]


def test_two_subjects_of_one_seed_train_alike():
    assert trained(named("healthy NSA"), 3)[0] == trained(named("healthy NSA"), 3)[0]


def test_a_spin_on_a_device_is_bounded():
    from nsa.experiments.selfcheck.faults.devices import spin

    with pytest.raises(ValueError, match="at most 60"):
        spin(61.0)


@pytest.mark.processes
@pytest.mark.full
def test_each_wait_rests_at_step_three_in_the_state_that_it_says():
    """One process forks into all of them, so that torch is imported once."""
    command = [sys.executable, str(SUPPORT / "fault_waits.py"), *(fault.name for fault in WAITS)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    seen = json.loads(output)
    assert {name for name, row in seen.items() if row["step"] != 3} == set()
    busy = {name for name, row in seen.items() if row["state"] == "R" or row["cpu_s"] > 0.04}
    assert busy == {f.name for f in WAITS if f.busy}
    assert {name for name, row in seen.items() if row["state"] == "T"} == {"stop signal"}
    beatless = {name for name, row in seen.items() if row["beats"] < 3}
    assert beatless == {"GIL held", "GIL held asleep", "stop signal"}


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
        ("host OOM", "oom", "can't allocate memory"),
    ],
)
def test_a_process_ends_as_the_fault_says(name, status, message):
    outcome = trial.run_child("planted:steps", {"name": name}, deadline_s=60)
    assert outcome.status == status and message in outcome.message


def ended(name, tmp_path, deadline_s=60.0):
    rows = ranks.run_ranks(
        "planted:steps", {"name": name}, ranks=2, deadline_s=deadline_s, folder=tmp_path
    )
    return [row["status"] for row in rows], rows


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_rank_is_the_first_to_fail(tmp_path):
    _, rows = ended("one rank killed", tmp_path)
    assert [row["first"] for row in rows] == [False, True]
    assert rows[1]["message"] == f"ended by {signal.Signals(9).name}"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["skipped collective", "one rank without data"])
def test_ranks_that_wait_for_each_other_do_so_in_step_three(name, tmp_path):
    statuses, rows = ended(name, tmp_path, deadline_s=15)
    assert statuses == ["timeout", "timeout"]
    assert {row["place"] for row in rows} == {"step 3"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank's own branch", "two ranks"])
def test_ranks_end_well_whether_or_not_one_leaves_out_a_branch(name, tmp_path):
    assert ended(name, tmp_path)[0] == ["ok", "ok"]


@pytest.mark.processes
@pytest.mark.slow
def test_another_shape_is_no_silence(tmp_path):
    assert set(ended("other shape", tmp_path)[0]) <= {"crash", "error", "ended"}
