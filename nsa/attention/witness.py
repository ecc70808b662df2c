"""The path witness: which implementation served each branch, how often, and was it finite.

An A/B test whose arms have equal witnesses compared a program with itself. Counting is
process-wide, because autograd recomputes checkpointed blocks in threads of its own; so is the
place (layer, step) of a call: one training loop a process.
"""

import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

TOGETHER = 8  # outputs of a place that are looked at in one go

Key = tuple[str, torch.dtype, torch.device]  # a place, and what can be looked at in one go

_lock = threading.RLock()
_place: dict[str, int] = {}


class Witness:
    """What every call of `nsa_attention` inside one recording did.

    `paths` counts (branch, implementation), with "score" for the selection's scores; `backends`
    counts calls by backend; `declined` counts (backend, reason) of those that "auto" prefers to the
    one it took, for all branches of a call. A block that gradient checkpointing runs twice counts
    twice.
    """

    def __init__(self) -> None:
        self.paths: Counter[tuple[str, str]] = Counter()
        self.backends: Counter[str] = Counter()
        self.declined: Counter[tuple[str, str]] = Counter()
        # Of each place: the largest magnitudes not looked at yet, and how many before were bad.
        self._norms: dict[Key, list[Tensor]] = {}
        self._non_finite: dict[Key, Tensor] = {}
        self.warned = False

    def saw_output(self, norm: Tensor) -> None:
        """Counts an output by its largest magnitude `norm` [], without a sync on a GPU."""
        # Without the step, or a long run would hold a tensor a step.
        key = place(without="step"), norm.dtype, norm.device
        waiting = self._norms.setdefault(key, [])
        waiting.append(norm)
        if len(waiting) >= TOGETHER:
            self._look(key)

    def _look(self, key: Key) -> None:
        bad = (~(torch.stack(self._norms.pop(key)) < math.inf)).sum()  # NaN is not less either
        self._non_finite[key] = bad + self._non_finite.get(key, 0)

    def non_finite(self) -> dict[str, int]:
        """Calls whose output held a non-finite value, by place. Waits for the GPU."""
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
        """All of it, JSON-able: {"backends": {backend: n}, "paths": {branch: {implementation: n}},
        "declined": {backend: {reason: n}}, "non_finite": {place: n}}."""
        paths, declined = {}, {}
        for counts, named in ((self.paths, paths), (self.declined, declined)):
            for (first, second), count in sorted(counts.items()):
                named.setdefault(first, {})[second] = count
        found = {"backends": dict(self.backends), "paths": paths, "declined": declined}
        return found | {"non_finite": self.non_finite()}

    def warn(self, here: str) -> None:
        """Warns of a non-finite output, the first time only."""
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
    """Counts every call made while it is open. Recordings nest; each counts on its own."""
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
    """Tells every open witness that `backend` served a call through `notes`, and the reasons for
    which others had `declined` it."""
    reasons = [(name, "; ".join(why)) for name, why in declined.items()]
    with _lock:
        for witness in _witnesses:
            witness.backends[backend] += 1
            witness.paths.update(notes)
            witness.declined.update(reasons)


def saw_output(o: Tensor) -> None:
    """Tells every open witness whether an output holds a non-finite value, without a sync on a GPU.

    There the warning waits until a witness is read; on a CPU it comes at once. A subclass of Tensor
    (FakeTensor, say), one on "meta" or one under torch.func may have no values to look at.
    """
    if type(o) is not Tensor or o.is_meta or torch._C._are_functorch_transforms_active():
        return
    # A CUDA graph's replays go unseen, and its capture must not leave tensors of its memory here.
    if o.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    # An infinity norm lets NaN and inf through and needs no temporary of o's size. It is the only
    # operation here, for each is a launch that a small call feels.
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
    """Names the place of the calls inside, e.g. where(layer=3) or where(step=5); they nest.

    Compiled code names none: it would be compiled again for each step.
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
    """The place in words, e.g. "layer 3, step 5"; `without` leaves one of its names out."""
    named = [f"{name} {_place[name]}" for name in sorted(_place) if name != without]
    return ", ".join(named) or "no place named"
