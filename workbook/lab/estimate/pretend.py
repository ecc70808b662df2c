"""A pretended GPU: fake tensors on "cuda:0", for a torch built with or without CUDA.

Such a tensor is a fake tensor on the CUDA device for Python, FakeTensorMode and autocast, and
a meta tensor for C++. Autograd gets the device from C++, finds none to guard and runs; C++ code
that branches on the device and differs on a GPU is replaced by `composites`.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # its registrations must precede the patches below
import torch.cuda.amp.common
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from workbook.lab.estimate.composites import Composites
from workbook.lab.estimate.gpus import Gpu
from workbook.lab.estimate.libraries import stubbed

DEVICE = torch.device("cuda:0")


# Operators whose results are fully determined by the meta kernel, besides those that torch tags as
# pointwise: shapes and strides follow from the arguments, and all tensors are on one device.
VIEWS = frozenset(
    """
    view _unsafe_view _reshape_alias slice select transpose permute expand unsqueeze squeeze detach
    alias t unbind split split_with_sizes as_strided unfold copy_ fill_ zero_
    """.split()  # noqa: SIM905
)
NEW = frozenset(
    """
    mm bmm cat stack _softmax _softmax_backward_data sum clone slice_backward select_backward
    """.split()  # noqa: SIM905
)


class Quick(FakeTensorMode):
    """FakeTensorMode, several times as fast for most operators of a step.

    An operator listed above, on plain fake tensors of one device, calls its meta kernel without
    FakeTensorMode's search for special cases. If it returns a single new tensor, the result is
    cached by shapes, strides and dtypes, since many of these kernels are slow Python.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._kinds: dict[Any, str] = {}
        self._made: dict[Any, tuple[Any, Any, torch.dtype]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and two wrappers around each operator take time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func, types, args=(), kwargs=None):
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        key: list[Any] | None = None
        if kind and not self.in_kernel_invocation:
            key = [func]
            device = _read(args, None, key)
            if device is not None and kwargs:
                key += kwargs
                device = _read(kwargs.values(), device, key)
        if key is None or device is None:
            return super().dispatch(func, types, args, kwargs)
        known = tuple(key) if kind == "new" else None
        with in_kernel_invocation_manager(self):
            if (like := self._made.get(known)) is not None:
                out = _empty(like)
            else:
                out = func(*args, **(kwargs or {}))
                if kind == "new":
                    self._remember(known, out)
        if isinstance(out, torch.Tensor):
            return self._faked(out, device)
        return type(out)(self._faked(x, device) for x in out)

    def _remember(self, key: Any, out: torch.Tensor) -> None:
        like = out.shape, out.stride(), out.dtype
        if _empty(like).untyped_storage().nbytes() == out.untyped_storage().nbytes():
            self._made[key] = like

    def _faked(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return x if type(x) is FakeTensor else FakeTensor(self, x, device)


def _empty(like: tuple[Any, Any, torch.dtype]) -> torch.Tensor:
    return torch.empty_strided(*like[:2], dtype=like[2], device="meta")


def _kind(func: Any) -> str:
    """Return "new" for one new tensor, "old" for views and arguments as results; else ""."""
    if getattr(func, "namespace", "") != "aten":
        return ""
    schema, name = func._schema, func._schema.name.partition("::")[2]
    pointwise = torch.Tag.pointwise in func.tags and len(schema.returns) == 1
    aliases = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
    if (name in NEW or pointwise) and not aliases:
        return "new"
    return "old" if name in VIEWS or pointwise else ""


def _read(values: Any, device: torch.device | None, key: list[Any]) -> torch.device | None:
    """Return the common device of all tensors in `values` (and `device` if given), and append their
    properties to `key`. None if any is not a plain fake tensor of that device, or is a
    torch.device."""
    for x in values:
        kind = type(x)
        if kind is FakeTensor:
            if x.constant is not None or (device is not None and x.fake_device != device):
                return None
            device = x.fake_device
            key.append((x.shape, x.stride(), x.dtype))
        elif kind is list or kind is tuple:
            key.append(len(x))
            found = _read(x, device, key)
            if found is None and any(isinstance(y, (torch.Tensor, torch.device)) for y in x):
                return None
            device = found or device
        elif isinstance(x, (torch.Tensor, torch.device)):
            return None
        else:
            key.append((kind, x))
    return device


class Fakes(Quick):
    """Quick for tensors that are meta tensors for C++: new tensors made by C++ alongside them are
    on the pretended GPU too."""

    def dispatch(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.in_kernel_invocation and kwargs.get("device") == torch.device("meta"):
            kwargs = kwargs | {"device": DEVICE}
        return super().dispatch(func, types, args, kwargs)


@contextlib.contextmanager
def pretended(gpu: Gpu, *, flash: bool = False) -> Iterator[Fakes]:
    """Pretend that GPU inside: tensors made on DEVICE are fake, and torch.cuda reports the GPU.

    flash: flash-attn is available, even if it is not installed.
    """
    make = torch.Tensor._make_subclass

    def subclass(cls, data, require_grad=False, *, dispatch_device=False, **options):
        return make(cls, data, require_grad, dispatch_device=False, **options)

    properties = SimpleNamespace(
        name=gpu.name, total_memory=gpu.total, multi_processor_count=gpu.processors
    )
    properties.major, properties.minor = gpu.capability
    answers: dict[str, Any] = {
        "is_bf16_supported": True,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_device_properties": properties,
        "current_device": 0,
        "is_current_stream_capturing": False,
    }
    with contextlib.ExitStack() as held:

        def put(owner: Any, name: str, value: Any, **options: Any) -> None:
            held.enter_context(mock.patch.object(owner, name, value, **options))

        put(torch.Tensor, "_make_subclass", staticmethod(subclass))
        on_gpu = property(lambda fake: fake.device.type == "cuda")
        put(FakeTensor, "is_cuda", on_gpu, create=True)
        put(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        for name, answer in answers.items():
            put(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        held.enter_context(stubbed(flash))
        fakes = held.enter_context(Fakes())
        composites = held.enter_context(Composites())
        put(torch, "clear_autocast_cache", composites.forget)
        put(torch.autograd, "_engine_run_backward", composites.backward)
        yield fakes
