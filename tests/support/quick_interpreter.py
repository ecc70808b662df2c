"""Spare Triton's interpreter work that it does over and over and whose results it drops.

Interpreted kernels spend most of their time on four things: every call of a function in a
kernel looks through all of `triton.language` for what to replace, though the launch has replaced
it; every sum of integers is done again in 64 bits for an assertion that is off; every dtype of
numpy is found in a table made for that one call; the shape of every value is checked, named and
wrapped anew. What a kernel computes stays the same to the bit:
`tests/nsa/kernels/test_quick_interpreter.py` compares.
"""

import dataclasses
import inspect

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_REPLACED: set[int] = set()  # of triton's modules, by id, in the launch that is under way
_SEEN: dict[object, frozenset[int]] = {}  # function: those of triton's modules that it knows


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = _block_type, _tensor
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    builder = interpreter.interpreter_builder
    # Its assertions are off as long as `debug` is, so nothing reads what it sanitizes.
    checks = builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=checks)


_plain_patch_lang = interpreter._patch_lang
_plain_np_dtype = interpreter._get_np_dtype


def _patch_lang(fn) -> interpreter._LangPatchScope:
    """Replace what a kernel, or a function called in one, knows of Triton, once a launch."""
    if fn not in _SEEN:
        modules = (x for x in fn.__globals__.values() if inspect.ismodule(x))
        _SEEN[fn] = frozenset(id(x) for x in modules if x in (tl, tl.core))
    if _SEEN[fn] and _SEEN[fn] <= _REPLACED:
        return interpreter._LangPatchScope()
    scope = _plain_patch_lang(fn)
    if not _REPLACED:  # a launch; those of calls within it are never restored
        restore = scope.restore

        def restored() -> None:
            _REPLACED.clear()
            restore()

        scope.restore = restored
    _REPLACED.update(_SEEN[fn])
    return scope


_NUMPYS: dict[str, np.dtype] = {}


def _np_dtype(dtype) -> np.dtype:
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.uint64)
    if scalar.name not in _NUMPYS:
        _NUMPYS[scalar.name] = _plain_np_dtype(scalar)
    return _NUMPYS[scalar.name]


_plain_block_type, _plain_tensor = tl.block_type.__init__, tl.tensor.__init__
_SHAPES: dict[tuple, tuple] = {}  # sizes: the shape of a type, its elements; shape of a value
_SCALAR = tl.tuple([]), tl.constexpr(1)


def _block_type(self, element_ty, shape) -> None:
    sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if sizes not in _SHAPES:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        elements = validate_block_shape(sizes)
        wrapped = tl.tuple([tl.constexpr(x) for x in sizes])
        _SHAPES[sizes] = tl.tuple(sizes), elements, wrapped, tl.constexpr(elements)
    self.element_ty = element_ty
    self.shape, self.numel = _SHAPES[sizes][:2]


def _tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    of_type = _SHAPES[tuple(type.shape.values)][2:] if type.is_block() else _SCALAR
    self.shape, self.numel = of_type


_plain_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast(self, one, other) -> tuple:
    shape = getattr(one.type, "shape", None)
    if shape is not None and shape is getattr(other.type, "shape", None):
        return one, other
    return _plain_broadcast(self, one, other)
