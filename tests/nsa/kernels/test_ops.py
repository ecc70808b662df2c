"""The operators as torch sees them: schemas, fake kernels, compilation, checkpoints, export."""

from dataclasses import replace
from unittest.mock import MagicMock as Mock

import pytest
import torch
from backend_calls import DEVICE, attend, outcome
from cases import SMALL, Case, draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from nsa.attention.api import nsa_attention
from nsa.kernels import ops, side_stream
from nsa.kernels.compress import compress_mean
from nsa.kernels.registration import sizes_of
from nsa.reference.nsa import BRANCHES
from workbook.lab.measure import timing

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

CASE = Case(40, kv_heads=1, group=2, dim=16, value_dim=16)
PACKED = replace(CASE, packed=(17, 1, 22))
dense_and_packed = pytest.mark.parametrize("case", [CASE, PACKED], ids=["dense", "packed"])
CHECKS = "test_schema", "test_faketensor"


def detached(case=CASE, blocks=False, sinks=False):
    """Flat arguments of `ops.attend` for a case without a learned phi, none of them a leaf."""
    drawn = draw(case, torch.float32, DEVICE)
    (q, k, v, g, config), kwargs = drawn.arguments()
    cu, sizes = kwargs["cu_seqlens"], sizes_of(config)
    flat = {b: (k[b].flatten(0, 1), v[b].flatten(0, 1)) for b in BRANCHES}
    k_cmp, v_cmp = compress_mean(*flat["cmp"], cu, q.shape[0], sizes)
    chosen = torch.zeros(q.shape[1], k_cmp.shape[1], 2, dtype=torch.int32, device=DEVICE)
    chosen[..., 1] = -1
    given = q.flatten(0, 1), k_cmp, v_cmp, *flat["slc"], *flat["win"]
    tensors = [x.detach() for x in (*given, g.flatten(0, 1))]
    tensors.append(torch.randn(q.shape[2], 3, device=DEVICE) if sinks else None)
    return *tensors, chosen if blocks else None, cu, q.shape[0], sizes, 0.25, True


@pytest.mark.full
@dense_and_packed
@pytest.mark.parametrize("blocks", [False, True], ids=["scored", "handed-in"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_attend_is_a_sound_operator(case, blocks, sinks):
    given = detached(case, blocks=blocks, sinks=sinks)
    torch.library.opcheck(ops.attend.op, given, test_utils=CHECKS)


def test_one_branch_without_gates_shares_no_memory_with_what_its_backward_keeps():
    q, k_cmp, v_cmp, *_, batch, sizes, scale, keep = detached()
    o, o_cmp, *_ = ops.attend(q, k_cmp, v_cmp, *[None] * 8, batch, sizes, scale, keep)
    assert torch.equal(o, o_cmp) and o.data_ptr() != o_cmp.data_ptr()


@dense_and_packed
def test_compress_and_select_are_sound_operators(case):
    q, k_cmp, _, k, v, *_, cu, batch, sizes, scale, _ = detached(case)
    for values in (v, None):
        torch.library.opcheck(compress_mean.op, (k, values, cu, batch, sizes), test_utils=CHECKS)
    torch.library.opcheck(ops.select.op, (q, k_cmp, cu, batch, sizes, scale), test_utils=CHECKS)


@pytest.mark.full
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_the_backward_has_the_shapes_that_its_fake_promises(sinks):
    args = detached(sinks=sinks)
    o, *kept, blocks = ops.attend(*args)
    tensors, (_, cu, batch, sizes, scale, _) = args[:9], args[9:]
    for keys in (True, False):
        given = torch.randn_like(o), *tensors, blocks, cu, o, *kept, batch, sizes, scale, keys
        torch.library.opcheck(ops.attend_backward.op, given, test_utils=CHECKS)


def results(case, call, branches=BRANCHES):
    """{"o": o, leaf: its gradient} for the leaves of those branches, always of the same draw."""
    torch.manual_seed(0)
    drawn = draw(case, torch.float32, DEVICE)
    o = call(drawn)
    leaves = {n: x for n, x in drawn.leaves.items() if "_" not in n or n[-3:] in branches}
    grads = torch.autograd.grad(o.square().sum(), list(leaves.values()))
    return {"o": o, **dict(zip(leaves, grads, strict=True))}


def same_bits(got, want):
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


@pytest.mark.full
@dense_and_packed
def test_a_whole_graph_compiles_and_gives_the_same_bits(case):
    compiled = torch.compile(nsa_attention, fullgraph=True, backend="aot_eager")

    def call(drawn):
        args, kwargs = drawn.arguments()
        return compiled(*args, **kwargs, backend="triton")

    same_bits(results(case, call), results(case, lambda x: attend(x, "triton")))


@pytest.mark.full
def test_a_checkpointed_call_gives_the_same_bits():
    again = results(CASE, lambda x: checkpoint(attend, x, "triton", use_reentrant=False))
    same_bits(again, results(CASE, lambda x: attend(x, "triton")))


def test_fake_tensors_pass_through_without_a_launch():
    with FakeTensorMode():
        drawn = draw(replace(CASE, tokens=5000, config=SMALL), torch.float32, DEVICE)
        o = attend(drawn, "triton")
    assert o.shape == (1, 5000, 2, 16)


def test_export_keeps_the_operators():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, gates):
            return nsa_attention(q, k, v, gates, CASE.config, backend="triton")

    (q, k, v, gates, _), _ = draw(CASE, torch.float32, DEVICE).arguments()
    tensors = tuple(x.detach() for x in (q, k["win"], v["win"], gates))
    program = torch.export.export(Attention(), tensors)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"nsa.attend.default", "nsa.compress_mean.default"} <= called
    want = Attention()(*tensors)
    assert torch.equal(program.module()(*tensors), want)


def test_a_second_derivative_is_refused():
    drawn = draw(CASE, torch.float32, DEVICE)
    q, loss = drawn.leaves["q"], attend(drawn, "triton").square().sum()
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grad.sum(), q)


def only_learning(drawn, *names):
    for name, leaf in drawn.leaves.items():
        leaf.requires_grad_(name in names)
    return names


def test_frozen_keys_cost_no_key_gradients(monkeypatch):
    from nsa.kernels import selected_dkdv, span_bwd

    def never(*args, **kwargs):
        raise AssertionError("gradients of frozen keys were computed")

    monkeypatch.setattr(span_bwd, "span_dkdv", never)
    monkeypatch.setattr(selected_dkdv, "selected_dkdv", never)
    drawn = draw(CASE, torch.float32, DEVICE)
    only_learning(drawn, "q", "gates")
    grads = torch.autograd.grad(attend(drawn, "triton").sum(), [drawn.leaves["q"]])
    assert grads[0].isfinite().all()


SUBSETS = [["cmp"], ["slc"], ["win"], ["slc", "win"], ["cmp", "win"], ["cmp", "slc"]]


@pytest.mark.full
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_an_operator_without_some_branches_is_the_sum_of_the_others(branches):
    got, want = (
        results(CASE, lambda x, name=name: attend(x, name, branches=branches), branches)
        for name in ("triton", "gather")
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # which names what differs


def test_each_tensor_trained_alone_gets_the_gradient_that_it_gets_among_all():
    drawn = draw(replace(CASE, tokens=17), torch.float32, DEVICE)
    leaves = drawn.leaves
    together = torch.autograd.grad(attend(drawn, "triton").square().sum(), list(leaves.values()))
    for name, want in zip(leaves, together, strict=True):
        if name in ("v_win", "gates"):
            only_learning(drawn, name)
            (got,) = torch.autograd.grad(attend(drawn, "triton").square().sum(), leaves[name])
            assert torch.equal(got, want), name


def test_head_dims_that_are_padded():
    drawn = draw(replace(CASE, tokens=17, dim=20, value_dim=18), torch.float32, DEVICE)
    drawn.blocks = torch.zeros(1, 17, 1, 2, dtype=torch.int32, device=DEVICE)
    drawn.blocks[..., 1] = -1
    do = torch.randn(1, 17, 2, 18, device=DEVICE)
    got, want = (
        outcome(lambda x, name=name: attend(x, name), drawn, do) for name in ("triton", "masked")
    )
    assert got[0].shape == (1, 17, 2, 18)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, PACKED, replace(CASE, tokens=700, batch=2)], ids=str)
def test_a_second_stream_changes_no_bit(case, monkeypatch):
    def with_two_from(enough):
        monkeypatch.setattr(side_stream, "ENOUGH", enough)
        return results(case, lambda x: attend(x, "triton"))

    want = with_two_from(2**62)
    for _ in range(20):  # its kernels race with those of the call before for the same memory
        same_bits(with_two_from(0), want)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [*SUBSETS, list(BRANCHES)], ids="+".join)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen keys"])
def test_a_capture_holds_whatever_streams_are_needed(branches, frozen):
    """One that nobody used must not be waited for: it is no part of the capture."""
    drawn = draw(replace(CASE, tokens=700), torch.float32, DEVICE)
    names = [n for n in drawn.leaves if "_" not in n or n[-3:] in branches]
    if frozen:
        names = only_learning(drawn, "q", "gates")
    leaves, do = [drawn.leaves[name] for name in names], torch.randn_like(drawn.leaves["q"])
    timing.graph_latency(lambda: attend(drawn, "triton", branches=branches), leaves, do)


def test_the_side_stream_begins_after_what_the_current_one_was_given():
    side, order = object.__new__(ops.SideStream), Mock()
    side._stream, side._current, side._inside = order.side, order.now, order.block
    side._used = False
    with side:
        order.work()
    side.join()
    assert [name for name, *_ in order.mock_calls] == [
        "side.wait_stream", "block.__enter__", "work", "block.__exit__", "now.wait_stream"
    ]  # fmt: skip
    assert order.side.wait_stream.call_args.args == (order.now,)
    assert order.now.wait_stream.call_args.args == (order.side,)


def test_the_selected_branch_waits_for_the_window_which_it_adds_to(monkeypatch):
    order = []

    class Side(ops.SideStream):
        def __exit__(self, *raised):
            order.append("window")

        def join(self):
            order.append("join")

    plain = ops.selected_fwd.selected_forward
    monkeypatch.setattr(ops, "SideStream", Side)
    noted = lambda *a, **k: order.append("selected") or plain(*a, **k)  # noqa: E731
    monkeypatch.setattr(ops.selected_fwd, "selected_forward", noted)
    with torch.no_grad():
        attend(draw(replace(CASE, tokens=17), torch.float32, DEVICE), "triton")
    assert order[:3] == ["window", "join", "selected"]


def test_there_is_one_stream_for_little_work_and_on_a_cpu():
    q = torch.empty(8, 2, 16, device=DEVICE)
    side = ops.SideStream(q)
    before = torch.cuda.current_stream() if DEVICE == "cuda" else None
    with side:
        assert before is None or torch.cuda.current_stream() == before
    side.join()
