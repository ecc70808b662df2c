"""How many nodes of autograd the main thread has made: the forward's progress, whatever makes it.

torch counts them for each thread by itself, so the main thread must be asked. It looks at pending
calls between two bytecodes, and answers then; nothing is interrupted, no signal is sent.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_asking: set[MainThread] = set()  # the interpreter keeps no reference to what it will call


class MainThread:
    """`ask()` as often as you like; `told(count)` is called in the main thread when it answers."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told = told
        self._callback = _CALLBACK(self._answer)

    def ask(self) -> None:
        """Nothing while the last question is open, or before torch is loaded."""
        if self not in _asking and _counter() is not None:
            _asking.add(self)
            if ctypes.pythonapi.Py_AddPendingCall(self._callback, None):  # too many are waiting
                _asking.discard(self)

    def _answer(self, _: int | None) -> int:
        _asking.discard(self)
        counter = _counter()
        if counter is not None:
            self._told(counter())
        return 0


def _counter() -> Callable[[], int] | None:
    return getattr(sys.modules.get("torch.autograd"), "_get_sequence_nr", None)
