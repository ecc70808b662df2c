"""Operators past torch's dispatcher: the same bits, and in sight of whoever looks on."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from backend_calls import DEVICE, attend
from cases import Case, draw
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels import compress, ops, registration, rotary, span_common, tiles
from nsa.kernels.sequences import Axis

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

CASES = [
    Case(40, kv_heads=1, group=2, dim=16, value_dim=16),
    Case(40, kv_heads=1, group=2, dim=16, value_dim=16, packed=(17, 1, 22)),
]
OPERATORS = ops.attend, ops.attend_backward, compress.compress_mean, compress.compress_mean_backward
NAMES = {f"nsa::{operator.name}" for operator in OPERATORS}


def step(case=CASES[0], learned=True, make=lambda x: x):
    """o of a call and, if learned, the gradient of each leaf, always of the same draw."""
    torch.manual_seed(0)
    drawn = draw(case, torch.float32, DEVICE)
    with nullcontext() if learned else torch.no_grad():
        o = make(attend(drawn, "triton"))
    if not learned:
        return [o]
    leaves = [x for x in drawn.leaves.values() if x.requires_grad]
    return [o, *torch.autograd.grad(o.square().sum(), leaves, allow_unused=True)]


def through(monkeypatch):
    monkeypatch.setattr(registration, "seen", lambda args: True)


def never(monkeypatch):
    def refuse(*args):
        raise AssertionError("it went through the dispatcher")

    for operator in (*OPERATORS, ops.select, rotary.rotate):
        monkeypatch.setattr(operator, "overload", refuse)


def same(got, want):
    return all(
        (x is None and y is None) or torch.equal(x, y) for x, y in zip(got, want, strict=True)
    )


@pytest.mark.parametrize(
    ("case", "learned"), [(CASES[0], False), (CASES[1], True)], ids=["no-grad", "packed-learned"]
)
def test_bits_are_the_same_past_the_dispatcher_as_through_it(monkeypatch, case, learned):
    with monkeypatch.context() as patched:
        never(patched)
        past = step(case, learned)
    through(monkeypatch)
    assert same(past, step(case, learned))


def test_lists_of_tensors_go_both_ways_and_what_no_loss_reaches_has_no_gradient(monkeypatch):
    def turned():
        torch.manual_seed(1)
        cos, sin = (torch.randn(5, 8, device=DEVICE) for _ in range(2))
        xs = [torch.randn(2, 5, h, 16, device=DEVICE, requires_grad=h < 3) for h in (2, 1, 4)]
        found = rotary.rotate(cos, sin, None, False, xs)
        assert isinstance(found, list) and [x.requires_grad for x in found] == [True] * 3
        grads = torch.autograd.grad(found[0].square().sum(), xs[:2], allow_unused=True)
        return [x.detach() for x in found], list(grads)

    with monkeypatch.context() as patched:
        never(patched)
        past, of_past = turned()
    assert of_past[1] is None
    through(monkeypatch)
    found, grads = turned()
    assert same(past, found) and same(of_past[:1], grads[:1])


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found.add(getattr(func, "_qualified_op_name", ""))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def test_a_dispatch_mode_sees_the_operators():
    with Names() as mode:
        step()
    assert mode.found >= NAMES


def test_a_profiler_sees_the_operators():
    with profile(acc_events=True) as profiled:
        step()
    assert {event.key for event in profiled.key_averages()} >= NAMES


@pytest.mark.parametrize("look", ["function mode", "subclass", "vmap", "trace", "none"])
def test_what_is_not_a_plain_call_is_told_from_one(look):
    x, found = torch.ones(3, device=DEVICE), []

    def asked(x):
        found.append(registration.seen((x, None, 3)))
        return x * 1

    if look == "function mode":
        with Calls():
            asked(x)
    elif look == "subclass":
        asked(x.as_subclass(Own))
    elif look == "vmap":
        torch.vmap(asked)(x)
    elif look == "trace":
        torch.jit.trace(asked, x, check_trace=False)
    else:
        asked(x)
        asked(torch.nn.Parameter(x))
    assert found and all(one == (look != "none") for one in found)


def test_a_selection_by_what_learns_has_no_gradient():
    q, k = (torch.randn(40, heads, 16, device=DEVICE, requires_grad=True) for heads in (2, 1))
    chosen = ops.select(q, k[:2], None, 1, registration.sizes_of(CASES[0].config), 0.25)
    assert chosen.dtype == torch.int32 and not chosen.requires_grad


@pytest.mark.parametrize("length", [64, 48])
def test_a_descriptor_is_what_triton_makes_with_all_its_checks(length):
    axis = Axis(2, length)
    x = torch.zeros(2 * length, 3, 24, dtype=torch.float16, device=DEVICE)[:, :, :16]
    made = span_common.operand(x, axis, 16, True)
    shape, strides = [2, 3, length, 16], [length * 72, 24, 72, 1]
    wanted = TensorDescriptor(x, shape=shape, strides=strides, block_shape=[1, 1, 16, 16])
    assert made.base is x and {**vars(wanted), **vars(made)} == vars(wanted)
    left = vars(wanted).keys() - vars(made).keys()
    assert all(getattr(made, name) == getattr(wanted, name) for name in left)
    line = torch.zeros(3, 2 * length, device=DEVICE)
    made = span_common.line_operand(line, axis, 16, True)
    wanted = TensorDescriptor(line, [3, 2, length], [2 * length, length, 1], [1, 1, 16])
    assert made.base is line and made.shape == wanted.shape and made.strides == wanted.strides


def test_a_gpu_is_asked_once_and_another_pretence_anew(monkeypatch):
    asked, device = [], torch.device("cuda:7")
    for capability in ((9, 0), (8, 0)):
        tell = lambda where, told=capability: asked.append(where) or told  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_capability", tell)
        assert [tiles.architecture(device) for _ in range(3)] == [10 * capability[0]] * 3
        properties = lambda where, n=capability[0]: SimpleNamespace(multi_processor_count=n)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        assert tiles.processors(device) == capability[0]
    assert asked == [device, device]
