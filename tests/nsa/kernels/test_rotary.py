"""Rotary embedding as a kernel, against its definition in plain torch."""

import pytest
import torch
from backend_calls import DEVICE
from kernel_inputs import DTYPES, normal

from nsa.kernels.rotary import rotate
from nsa.model.rotary import Rotary, has_kernel
from nsa.reference import rotary

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def turned(x, cos, sin, positions=None):
    """One x by the kernel."""
    return rotate(cos, sin, positions, False, [x])[0]


def drawn(batch=2, tokens=37, heads=3, dim=24, dtype=torch.float32, restart=None):
    x = normal(batch, tokens, heads, dim, dtype=dtype)
    cos, sin = rotary.rotary_tables(tokens, dim, device=DEVICE)
    positions = None
    if restart is not None:
        index = torch.arange(tokens, device=DEVICE)
        positions = torch.where(index < restart, index, index - restart)
    return x.requires_grad_(), cos, sin, positions


def both(x, cos, sin, positions):
    """(o, gradient of x) of the kernel and of the definition."""
    found = []
    for o in (turned(x, cos, sin, positions), rotary.rotate(x, cos, sin, positions=positions)):
        do = torch.linspace(-1, 1, o.numel(), device=DEVICE).to(o.dtype).view_as(o)
        found.append((o, *torch.autograd.grad(o, x, do)))
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("restart", [None, 20], ids=["dense", "packed"])
@pytest.mark.parametrize("dim", [2, 24, 128])
def test_the_kernel_turns_as_the_definition_does(dim, restart, dtype):
    mine, wanted = both(*drawn(dim=dim, dtype=dtype, restart=restart))
    for got, want in zip(mine, wanted, strict=True):
        assert got.dtype == dtype
        # Products of fp32 that are added as one round otherwise; then both round to the dtype.
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_views_of_a_wider_row_are_read_where_they_lie():
    _, cos, sin, _ = drawn()
    row = torch.randn(2, 37, 5 * 24, device=DEVICE)
    x = row[..., 24:96].unflatten(-1, (3, 24))
    want = rotary.rotate(x, cos, sin)
    torch.testing.assert_close(turned(x, cos, sin), want)
    last = x.transpose(2, 3).contiguous().transpose(2, 3)  # not contiguous in D
    torch.testing.assert_close(turned(last, cos, sin), want)


def test_queries_and_keys_are_turned_by_one_launch_each_with_its_own_heads_and_strides():
    x, cos, sin, positions = drawn(heads=6, restart=20)
    row = torch.randn(2, 37, 5 * 24, device=DEVICE, requires_grad=True)
    others = row[..., :24].unflatten(-1, (1, 24)), row[..., 24:96].unflatten(-1, (3, 24))
    found = rotate(cos, sin, positions, False, [x, *others])
    wanted = [rotary.rotate(each, cos, sin, positions=positions) for each in (x, *others)]
    torch.testing.assert_close(found, wanted)
    dos = [torch.randn_like(each) for each in wanted]
    mine, want = (torch.autograd.grad(outs, [x, row], dos) for outs in (found, wanted))
    torch.testing.assert_close(mine, want)


def test_what_no_loss_reaches_has_no_gradient():
    x, cos, sin, _ = drawn()
    y = x.detach().clone().requires_grad_()
    found = rotate(cos, sin, None, False, [y, x])
    dy, dx = torch.autograd.grad(found[1].sum(), [y, x], allow_unused=True)
    want = torch.autograd.grad(rotary.rotate(x, cos, sin).sum(), x)[0]
    torch.testing.assert_close(dx, want)
    assert dy is None


@pytest.mark.parametrize("restart", [None, 20], ids=["dense", "packed"])
def test_it_is_a_sound_operator(restart):
    x, *tables = drawn(tokens=9, restart=restart and 4)
    torch.library.opcheck(rotate.op, (*tables, False, [x, x.detach()[:, :, :1]]))
    x = torch.empty(0, 5, 2, 8, device=DEVICE)
    assert turned(x, *rotary.rotary_tables(5, 8, device=DEVICE)).shape == x.shape


def test_a_model_uses_it_on_a_gpu_and_the_definition_elsewhere(monkeypatch):
    x, cos, sin, positions = drawn(restart=20)
    assert has_kernel(x) == (DEVICE == "cuda")
    assert not has_kernel(x.double())
    called = []
    monkeypatch.setattr("nsa.model.rotary.has_kernel", lambda x: called.append(1) or True)
    want = rotary.rotate(x, cos, sin, positions=positions)
    torch.testing.assert_close(Rotary(cos, sin, positions)(x)[0], want)
    assert called
