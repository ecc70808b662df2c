"""Spare Triton's interpreter work that it does over and over and whose results it drops.

Interpreted kernels spend two thirds of their time on three things: every call of a function in a
kernel looks through all of `triton.language` for what to replace, though the launch has replaced
it; every sum of integers is done again in 64 bits for an assertion that is off; every dtype of
numpy is found in a table made for that one call. What a kernel computes stays the same to the bit:
`tests/nsa/kernels/test_quick_interpreter.py` compares.
"""

import dataclasses
import inspect

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_REPLACED: set[int] = set()  # of triton's modules, by id, in the launch that is under way
_SEEN: dict[object, frozenset[int]] = {}  # function: those of triton's modules that it knows


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _np_dtype
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
