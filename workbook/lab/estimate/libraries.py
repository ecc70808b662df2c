"""Non-torch programs on the pretended GPU: Triton kernels, flash-attn and compiled flex_attention.
No kernel runs, but their allocations are made.

Our Triton launchers run in Python as they are; only `kernel[grid](...)` does nothing. flash-attn
need not be installed, and nothing is compiled.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor

from nsa.attention import dense, measured
from nsa.attention.backends import flex, triton

OURS = "nsa::"  # the operators of nsa.kernels


def notes() -> tuple[str, ...]:
    """Notes on libraries missing here, and the effect on the estimate."""
    if triton.INSTALLED:
        return ()
    return ("Triton is not installed here, so the GPU is taken to lack it too: auto takes others",)


def check(backend: str) -> None:
    """Raise ValueError if estimating the backend needs a library that is missing here."""
    if backend == "triton" and not triton.INSTALLED:
        raise ValueError(
            "backend=triton is estimated by its kernels' launchers, which need Triton, but "
            "no GPU: pip install 'nsa[triton]'; any other backend needs nothing"
        )


def launcher(func: Any) -> Callable | None:
    """Return the Python function of one of our operators; None for any other."""
    found = OPDEFS.get(func._schema.name) if func._schema.name.startswith(OURS) else None
    return found._init_fn if found else None


def _address(x: Tensor) -> int:
    """Return a fake address, unique per storage and aligned like an allocator's."""
    return x.untyped_storage()._cdata * 512 + x.storage_offset() * x.element_size()


@contextlib.contextmanager
def stubbed(flash: bool) -> Iterator[None]:
    """Replace these programs inside by stubs that only allocate. flash: treat flash-attn as
    installed (used if it is requested by name); False: only if it is installed."""
    known = dense.library_for

    def library_for(capability):
        if not flash and isinstance(known(capability), str):
            return known(capability)
        return Flash(capability).library()

    with contextlib.ExitStack() as held:

        def put(owner: Any, name: str, value: Any) -> None:
            held.enter_context(mock.patch.object(owner, name, value))

        put(dense, "library_for", library_for)
        put(flex, "_flex_attention", lambda compiled: _flex_attention)
        # GPU properties are cached by device, and the next estimate may be for another GPU.
        put(measured, "_gpu", measured._gpu.__wrapped__)
        put(FakeTensor, "data_ptr", _address)
        if triton.INSTALLED:
            from triton.runtime.jit import KernelInterface

            from nsa.kernels import ops

            put(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
            put(ops, "SideStream", lambda q: mock.MagicMock())  # count both as one stream
        yield


def round_up(n: int, size: int) -> int:
    """Round n up to a multiple of `size`."""
    return -(-n // size) * size


class Flash:
    """Allocations of flash-attn, by GPU generation."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.newest = capability[0] >= 9
        self.capability = capability

    def library(self) -> dense.Library:
        if not self.newest:
            return dense.Library("fa2", self.attend, open_left=-1)
        dims = {"smallest": 64, "largest": 256 if self.capability[0] == 9 else 128}
        return dense.Library("fa4", self.attend, open_left=None, **dims)

    def attend(self, q, k, v, *, softmax_scale, causal, window_size, deterministic) -> Tensor:
        workspace = self._newest if self.newest else self._second
        return _Attention.apply(q, k, v, lambda *x: workspace(*x, deterministic), None)

    def _newest(self, q: Tensor, k: Tensor, deterministic: bool) -> list[Tensor]:
        """flash_attn/cute/interface.py, _flash_attn_bwd: dq in fp32, the row sums of p dp and the
        log-sum-exp padded to tiles; with groups also dk and dv in fp32."""
        (batch, tokens, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
        rows, width = round_up(tokens, 64 if self.capability[0] == 9 else 128), round_up(dim, 32)
        made = [q.new_empty(batch, heads, rows * width, dtype=torch.float32)]
        made += [q.new_empty(batch, heads, rows, dtype=torch.float32) for _ in range(2)]
        if heads != kv_heads:
            shape = batch, kv_heads, round_up(keys, 128) * width
            made += [q.new_zeros(shape, dtype=torch.float32) for _ in range(2)]
        return made

    def _second(self, q: Tensor, k: Tensor, deterministic: bool) -> list[Tensor]:
        """csrc/flash_attn/flash_api.cpp, mha_bwd: row sums, dq in fp32, with groups dk and dv of
        each query head. If deterministic, one dq for each part of the keys."""
        (batch, tokens, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
        rows, width, parts = round_up(tokens, 128), round_up(dim, 32 if dim <= 128 else 64), 1
        if deterministic:
            processors = torch.cuda.get_device_properties(q.device).multi_processor_count
            parts = -(-processors // (batch * heads))
        made = [q.new_empty(batch, heads, rows, dtype=torch.float32)]
        made += [q.new_empty(parts, batch, rows, heads, width, dtype=torch.float32)]
        if heads != kv_heads:
            made += [q.new_empty(batch, keys, heads, dim) for _ in range(2)]
        return made


class _Attention(torch.autograd.Function):
    """q [B, T, HQ, D], k and v [B, T, HKV, *] -> o [B, T, HQ, DV]: saves these and a log-sum-exp,
    and in the backward allocates temporaries with `workspace(q, k)`."""

    @staticmethod
    def forward(ctx, q, k, v, workspace, kept):
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.workspace, ctx.kept = workspace, kept
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, _, _ = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        held = ctx.workspace(q, k)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        del held
        return *grads, None, None


def _flex_attention(q, k, v, *, block_mask, scale, enable_gqa, kernel_options) -> Tensor:
    """torch/_inductor/kernel/flex: o and a log-sum-exp, in the backward the row sums of do o. The
    mask's inputs and tiles, which are made by torch's own operators, live until then."""

    def workspace(q: Tensor, k: Tensor) -> list[Tensor]:
        return [q.new_empty(q.shape[:3], dtype=torch.float32)]

    o = _Attention.apply(*(x.transpose(1, 2) for x in (q, k, v)), workspace, block_mask)
    return o.transpose(1, 2)
