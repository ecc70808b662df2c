"""Accuracy before speed: an implementation against fp64 at chosen rows, forward and gradients."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.experiments.comparison.exact import Rows, at_rows
from nsa.experiments.comparison.implementations import NSA, Implementation
from nsa.experiments.comparison.selection_check import handed_in, hold_selection, revealed
from nsa.lab.measure.accuracy import Error, Red, hold
from nsa.lab.measure.attention_inputs import Drawn
from nsa.lab.measure.shapes import Shape

SAMPLE = 64  # query rows that are looked at where T is too long for all of them
ALL_ROWS = 4096  # T up to which all of them are
MOST_PASSES = 16  # forwards that finding out a selection may take


class NoGradient(Exception):
    """The output depends on no input as autograd sees it: there is a forward alone."""


@dataclass(frozen=True)
class Checked:
    """What was compared, in words, the errors of o and of each gradient, and what o should be.

    rows [R] with plain torch's o and the exact one there, [B, R, HQ, DV] each, are of the
    implementation's own selection; rows is None where a selection was handed in.
    """

    what: str
    errors: tuple[Error, ...]
    rows: Tensor | None = None
    plain: Tensor | None = None
    exact: Tensor | None = None

    def hold_again(self, o: Tensor, when: str) -> None:
        """Red where an output made later from the same inputs is not accurate any more."""
        if not bool(o.isfinite().all()):
            raise Red(f"o {when} is not finite")
        if self.rows is not None:
            got = o.detach()[:, self.rows]
            hold(f"o {when}", got, self.plain, self.exact, dtype=o.dtype)

    @property
    def forward(self) -> Error:
        return self.errors[0]

    @property
    def backward(self) -> Error | None:
        """The gradient that comes closest to its limit."""
        return max(self.errors[1:], key=lambda e: e.worst / (e.limit or 1), default=None)


def small(shape: Shape) -> Shape:
    """The same dims, group and config with few KV heads and just enough tokens to have a choice."""
    config = shape.config
    tokens = config.select_block * (config.select_count + 4) + config.select_block // 2 + 5
    kv_heads = min(shape.kv_heads, 2)
    return replace(
        shape,
        tokens=min(shape.tokens, tokens),
        heads=kv_heads * shape.group,
        kv_heads=kv_heads,
        batch=min(shape.batch, 2),
    )


def sample_rows(tokens: int, device: torch.device, seed: int = 0) -> Tensor:
    """All rows of a short sequence, SAMPLE ascending ones of a long one with its first and last."""
    if tokens <= ALL_ROWS:
        return torch.arange(tokens, device=device)
    generator = torch.Generator().manual_seed(seed)
    chosen = {0, 1, tokens // 2, *range(tokens - 8, tokens)}
    while len(chosen) < SAMPLE:
        chosen.add(int(torch.randint(tokens, (), generator=generator)))
    return torch.tensor(sorted(chosen), device=device)


def check(
    implementation: Implementation,
    drawn: Drawn,
    *,
    backward: bool = True,
    reveal: bool = True,
) -> Checked:
    """Holds it to the accuracy rule at `sample_rows`; Red says where it fails.

    Its own selection is found out first and held against the exact importance (`reveal`); without
    that, a selection made by plain torch is handed in. Gradients are those of dO that is 0 outside
    the rows; with dO everywhere they have to be finite. NoGradient where `backward` is asked of an
    output without one. Whatever the implementation raises comes through.
    """
    rows = sample_rows(drawn.shape.tokens, drawn.q.device)
    every = len(rows) == drawn.shape.tokens
    what = "all rows" if every else f"{len(rows)} rows"
    blocks, handed = None, None
    if implementation.operation == NSA:
        if reveal:
            blocks = revealed(implementation, drawn, rows)
            hold_selection(drawn, rows, blocks)
            what += ", own selection"
        else:
            blocks, handed = handed_in(drawn, rows)
            what += ", selection handed in"
    leaves = drawn.leaves()
    names = implementation.reaches(drawn) if backward else []
    with torch.set_grad_enabled(backward):
        o = implementation.call(drawn, handed)
    if not bool(o.isfinite().all()):
        raise Red(f"o: {int((~o.isfinite()).sum())} values are not finite, of {o.numel()}")
    if backward and not o.requires_grad:
        raise NoGradient("its output has no gradient")
    grads: dict[str, Tensor] = {}
    if backward:
        inputs = {n: leaves[n] for n in names}
        if not every:
            whole = _gradients(o, inputs, drawn.do)
            bad = [f"d{name}" for name, grad in whole.items() if not bool(grad.isfinite().all())]
            if bad:
                raise Red(f"{', '.join(bad)} with dO at all queries: not finite")
            del whole
        do = torch.zeros_like(drawn.do)
        do[:, rows] = drawn.do[:, rows]
        grads = _gradients(o, inputs, do)
        del do
    got = Rows(o.detach()[:, rows], {})
    del o
    what += ", forward and gradients" if backward else ", forward"
    operation = implementation.operation
    truth = at_rows(drawn, rows, blocks, operation, torch.float64)
    stick = at_rows(drawn, rows, blocks, operation, drawn.q.dtype)
    dtype = drawn.q.dtype
    errors = [hold("o", got.o, stick.o, truth.o, dtype=dtype)]
    largest = max(float(x.abs().max()) for x in truth.grads.values())
    for name in names:
        grad = grads.pop(name)
        if name in ("q", "gates"):
            grad = _only_at(rows, grad, name)
        same, exact = stick.grads.pop(name), truth.grads.pop(name)
        errors.append(hold(f"d{name}", grad, same, exact, dtype=dtype, magnitude=largest))
    own = None if handed is not None else rows
    return Checked(what, tuple(errors), own, stick.o, truth.o)


def _gradients(o: Tensor, inputs: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """By name; Red where one does not reach its input.

    The graph is kept: a compiled backward whose first run frees it refuses ever to keep it, which
    timing the backward alone needs (torch's donated buffers).
    """
    found = torch.autograd.grad(o, [*inputs.values()], do, retain_graph=True, allow_unused=True)
    missing = [f"d{name}" for name, grad in zip(inputs, found, strict=True) if grad is None]
    if missing:
        raise Red(f"no gradient reaches {', '.join(missing)}")
    return dict(zip(inputs, found, strict=True))


def _only_at(rows: Tensor, grad: Tensor, name: str) -> Tensor:
    """The gradient at the rows; Red where one elsewhere, whose dO is 0, is not 0."""
    at = grad[:, rows]
    if grad.shape[1] > len(rows):
        grad[:, rows] = 0
        stray = int((grad != 0).sum())  # NaN counts, too
        if stray:
            raise Red(f"d{name}: {stray} values are not 0 at queries whose dO is 0")
    return at
