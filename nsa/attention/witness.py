"""The path witness: which implementation ran each branch, how often, and non-finite outputs.

An A/B test whose variants have equal witnesses compared a program with itself. Counting is
process-wide, because autograd recomputes checkpointed blocks in its own threads; so is the
place (layer, step) of a call: one training loop per process.
"""

import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

TOGETHER = 8  # outputs of a place that are checked together

Key = tuple[str, torch.dtype, torch.device]  # outputs with one key are checked together

_lock = threading.RLock()
_place: dict[str, int] = {}


class Witness:
    """Record of every call of `nsa_attention` inside one recording.

    `paths` counts (branch, implementation), with "score" for the selection's scores; `backends`
    counts calls by backend; `declined` counts (backend, reason) of those that "auto" prefers to the
    one it chose, once per call. A block that gradient checkpointing runs twice counts twice.
    """

    def __init__(self) -> None:
        self.paths: Counter[tuple[str, str]] = Counter()
        self.backends: Counter[str] = Counter()
        self.declined: Counter[tuple[str, str]] = Counter()
        # For each place: the magnitudes not checked yet, and the number of bad ones before.
        self._norms: dict[Key, list[Tensor]] = {}
        self._non_finite: dict[Key, Tensor] = {}
        self.warned = False

    def saw_output(self, norm: Tensor) -> None:
        """Count an output by its largest magnitude `norm` [], without a sync on a GPU."""
        # Without the step, since a long run would hold one tensor per step.
        key = place(without="step"), norm.dtype, norm.device
        waiting = self._norms.setdefault(key, [])
        waiting.append(norm)
        if len(waiting) >= TOGETHER:
            self._look(key)

    def _look(self, key: Key) -> None:
        bad = (~(torch.stack(self._norms.pop(key)) < math.inf)).sum()  # NaN is not less either
        self._non_finite[key] = bad + self._non_finite.get(key, 0)

    def non_finite(self) -> dict[str, int]:
        """Calls with a non-finite output value, by place. Waits for the GPU."""
        found: Counter[str] = Counter()
        with _lock:
            for key in list(self._norms):
                self._look(key)
            for (here, *_), count in self._non_finite.items():
                found[here] += int(count)
        for here in +found:
            self.warn(here)
        return dict(+found)

    def record(self) -> dict:
        """All counts for JSON: {"backends": {backend: n}, "paths": {branch: {implementation: n}},
        "declined": {backend: {reason: n}}, "non_finite": {place: n}}."""
        paths, declined = {}, {}
        for counts, named in ((self.paths, paths), (self.declined, declined)):
            for (first, second), count in sorted(counts.items()):
                named.setdefault(first, {})[second] = count
        found = {"backends": dict(self.backends), "paths": paths, "declined": declined}
        return found | {"non_finite": self.non_finite()}

    def warn(self, here: str) -> None:
        """Warn of a non-finite output, the first time only."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"attention output is not finite ({here}); further ones are only counted. "
                "strict=True stops at the first and names the branch.",
                RuntimeWarning,
                stacklevel=5,
            )


_witnesses: list[Witness] = [Witness()]


def process() -> Witness:
    """The witness of the whole process: every call counts here, recorded or not."""
    return _witnesses[0]


@contextmanager
def recording() -> Iterator[Witness]:
    """Count every call made while it is open. Recordings nest and count independently."""
    witness = Witness()
    with _lock:
        _witnesses.append(witness)
    try:
        yield witness
    finally:
        with _lock:
            _witnesses.remove(witness)


def saw_call(
    backend: str, notes: list[tuple[str, str]], declined: Mapping[str, Sequence[str]]
) -> None:
    """Record in every open witness that `backend` ran a call by `notes`, and the reasons why
    others had `declined` it."""
    reasons = [(name, "; ".join(why)) for name, why in declined.items()]
    with _lock:
        for witness in _witnesses:
            witness.backends[backend] += 1
            witness.paths.update(notes)
            witness.declined.update(reasons)


def saw_output(o: Tensor) -> None:
    """Record in every open witness if an output is non-finite, without a sync on a GPU.

    On a GPU the warning waits until a witness is read; on a CPU it is immediate. A Tensor subclass
    (FakeTensor, say), one on "meta" or one under torch.func may have no values to check.
    """
    if type(o) is not Tensor or o.is_meta or torch._C._are_functorch_transforms_active():
        return
    # A CUDA graph's replays are not recorded, and its capture must not leave its tensors here.
    if o.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    # An infinity norm lets NaN and inf through and needs no temporary of o's size. It is the only
    # operation here, since each is a launch that slows down a small call.
    norm = torch.linalg.vector_norm(o.detach(), ord=math.inf)
    with _lock:
        for witness in _witnesses:
            witness.saw_output(norm)
        if o.device.type == "cpu" and not norm.isfinite():
            _witnesses[-1].warn(place())
            for witness in _witnesses:
                witness.warned = True


@contextmanager
def where(**place: int) -> Iterator[None]:
    """Set the place of the calls inside, e.g. where(layer=3) or where(step=5); they nest.

    It has no effect in compiled code, which would otherwise be recompiled for each step.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = dict(_place)
    _place.update(place)
    try:
        yield
    finally:
        _place.clear()
        _place.update(before)


def place(without: str = "") -> str:
    """Place as text, e.g. "layer 3, step 5"; `without` omits one of its names."""
    named = [f"{name} {_place[name]}" for name in sorted(_place) if name != without]
    return ", ".join(named) or "no place named"
