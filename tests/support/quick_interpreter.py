"""Spare Triton's interpreter work that it does over and over and whose results it drops.

Interpreted kernels spend most of their time on what is the same in each operation: every call of a
function in a kernel looks through all of `triton.language` for what to replace, though the launch
has replaced it; every sum of integers is done again in 64 bits for an assertion that is off; dtypes
are told apart by their names, and operands that have one dtype are promoted and cast to it; a
number beside a tensor is made a tensor twice; the shape of every value is checked, named and
wrapped anew; each operator is called through five functions. What a kernel computes stays the same
to the bit: `tests/nsa/kernels/test_quick_interpreter.py` compares.
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


_SHAPES: dict[tuple, tuple] = {}  # sizes: the shape of a type, its elements; shape of a value
_SCALAR = tl.tuple([]), tl.constexpr(1)


def _block_type(self, element_ty, shape) -> None:
    sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if sizes not in _SHAPES:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        elements = validate_block_shape(sizes)
        wrapped = tl.tuple([tl.constexpr(x) for x in sizes])
        _SHAPES[sizes] = tl.tuple(sizes), elements, (wrapped, tl.constexpr(elements))
    self.element_ty = element_ty
    self.shape, self.numel, self.of_values = _SHAPES[sizes]


def _with_element_ty(self, scalar_ty) -> tl.block_type:
    return self if scalar_ty is self.element_ty else tl.block_type(scalar_ty, self.shape)


def _tensor(self, handle, type) -> None:
    self.handle, self.type = handle, type
    self.dtype = type.scalar
    self.shape, self.numel = type.of_values if type.is_block() else _SCALAR


# Bytes of a value by the id of its dtype, of which there is one object each; and its kind's number.
_BYTES = {id(x): max(1, x.primitive_bitwidth // 8) for x in (
    tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64,
    tl.float16, tl.bfloat16, tl.float32, tl.float64)}  # fmt: skip
_NUMBERS = {id(x): x.kind().value for x in (tl.int1, tl.int32, tl.int64, tl.float32, tl.float64)}
_HALVES = {id(tl.float16): 2, id(tl.bfloat16): 2}  # a quotient of two is promoted
_OFFSETS = {id(tl.int32), id(tl.int64)}
_KINDS = {bool: 0, int: 1, float: 2}


def _handle(self, data, dtype, attr=None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > _BYTES.get(id(dtype), 0):
        self.__post_init__()


_plain_fits = interpreter._validate_np_data_size


def _fits(data, dtype) -> bool:
    return data.itemsize <= _BYTES.get(id(dtype), 0) or _plain_fits(data, dtype)


_plain_unwrap = tl.core._unwrap_if_constexpr


def _unwrap(x):
    kind = type(x)
    return x if kind is tl.tensor or kind in _KINDS else _plain_unwrap(x)


_plain_constant = TritonSemantic.scalar_constant


def _constant(self, value, dtype) -> tl.tensor:
    if id(dtype) not in _NUMBERS:
        return _plain_constant(self, value, dtype)
    data = np.array([0 if value == 0 else value], dtype=_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


_plain_cast = TritonSemantic.cast


def _cast(self, x, dtype, *rounding) -> tl.tensor:
    return x if x.dtype is dtype else _plain_cast(self, x, dtype, *rounding)


_plain_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast(self, one, other) -> tuple:
    shape = getattr(one.type, "shape", None)
    if shape is getattr(other.type, "shape", None):
        return one, other
    return _plain_broadcast(self, one, other)


_plain_operands = TritonSemantic.binary_op_type_checking_impl


def _operands(
    self, one, other, one_ptr=False, other_ptr=False, arithmetic=True, quotient=False
) -> tuple:
    """Two operands as tensors of one dtype and shape."""
    if type(one) is tl.tensor and arithmetic:
        dtype, number = one.dtype, _KINDS.get(type(other))
        kind = _NUMBERS.get(id(dtype))
        if kind is None and not quotient:
            kind = _HALVES.get(id(dtype))
        if number is not None:
            fits = number != 1 or -(2**31) <= other < 2**31
            if kind is not None and number <= kind and fits:
                return self.broadcast_impl_value(one, self.scalar_constant(other, dtype))
        elif type(other) is tl.tensor:
            moved = one_ptr and type(dtype) is tl.pointer_type and id(other.dtype) in _OFFSETS
            if moved or (kind is not None and other.dtype is dtype):
                return self.broadcast_impl_value(one, other)
    return _plain_operands(self, one, other, one_ptr, other_ptr, arithmetic, quotient)


_CHECKS = tl.core.add.__code__  # of all that are called through a check of `_semantic`


def _patch_attr(obj, name, member, builder, scope) -> None:
    """Replace a function of Triton's by itself with the interpreter's semantic."""
    called = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKS else member
    semantic = interpreter.interpreter_semantic

    def replaced(*args, **options):
        options["_semantic"] = semantic
        return called(*args, **options)

    scope.set_attr(obj, name, replaced)


_options = interpreter.interpreter_builder.options
# (owner, name, ours); a block's name is made when it is read.
REPLACED = (
    (interpreter, "_patch_lang", _patch_lang),
    (interpreter, "_patch_attr", _patch_attr),
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_validate_np_data_size", _fits),
    (interpreter.TensorHandle, "__init__", _handle),
    (tl.core, "_unwrap_if_constexpr", _unwrap),
    (tl.block_type, "__init__", _block_type),
    (tl.block_type, "with_element_ty", _with_element_ty),
    (tl.block_type, "name", property(lambda self: f"<{self.shape}, {self.element_ty}>")),
    (tl.tensor, "__init__", _tensor),
    (TritonSemantic, "scalar_constant", _constant),
    (TritonSemantic, "cast", _cast),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (TritonSemantic, "binary_op_type_checking_impl", _operands),
    # Its assertions are off as long as `debug` is, so nothing reads what it sanitizes.
    (interpreter.interpreter_builder, "options",
     dataclasses.replace(_options, sanitize_overflow=_options.debug)),
)  # fmt: skip
PLAIN = tuple((owner, name, vars(owner).get(name)) for owner, name, _ in REPLACED)


def install() -> None:
    """From now on, in this process."""
    for owner, name, ours in REPLACED:
        setattr(owner, name, ours)
