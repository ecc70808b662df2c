"""The compressed and window kernels against attention over the mask written out."""

from dataclasses import dataclass

import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from kernel_inputs import attended, sequences_of
from torch import Tensor

from nsa.blocks import Span, compressed_span, window_span
from nsa.config import NSAConfig
from nsa.kernels.common import LOG2E
from nsa.kernels.sinks import sink_gradients, sunk_rows
from nsa.kernels.span_bwd import span_dkdv, span_dq
from nsa.kernels.span_fwd import span_forward
from nsa.kernels.tiles import Tile
from nsa.reference.attend import without_sink

CONFIG = NSAConfig(8, 4, 8, 4, window=20)
COMPRESSED, WINDOW = compressed_span(CONFIG), window_span(CONFIG)
TILE = Tile(16, 16, 4, 2)
BRANCH, BASE_BRANCH = 2, 0


@dataclass
class Case:
    """Sequences of the given lengths, see `sequences_of`."""

    lengths: tuple[int, ...]
    span: Span
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    tile: Tile | None = TILE
    specialized: bool | None = None
    sink: bool = False

    def keys_of(self, tokens: int) -> int:
        return self.span.seen(tokens - 1)[1] if tokens else 0


class Problem:
    """A case's tensors, what the kernels make of them, and what plain torch does."""

    def __init__(self, case: Case):
        self.case, self.span = case, case.span
        self.chosen = {"tile": case.tile, "specialized": case.specialized}
        sequences = sequences_of(case.lengths, CONFIG)
        self.tokens = tokens = sequences.tokens
        of_tokens = case.span.length == case.span.stride == 1
        self.keys = tokens if of_tokens else sequences.compressed
        self.scale = case.dim**-0.5

        def draw(*shape):
            return torch.randn(*shape).to(DEVICE, case.dtype)

        self.q = draw(tokens.rows, case.heads, case.dim)
        self.k = draw(self.keys.rows, case.kv_heads, case.dim)
        self.v = draw(self.keys.rows, case.kv_heads, case.value_dim)
        self.do = draw(tokens.rows, case.heads, case.value_dim)
        self.base = draw(tokens.rows, case.heads, case.value_dim)
        self.gates = torch.rand(tokens.rows, case.heads, 3).to(DEVICE, case.dtype)
        self.sinks = torch.randn(case.heads, 3).to(DEVICE) if case.sink else None

    @property
    def along(self):
        return self.span, self.tokens, self.keys, self.scale

    def forward(self, **options):
        mixed = {"gates": self.gates, "base": self.base, "base_branch": BASE_BRANCH} | options
        if self.sinks is not None:
            mixed["sink2"] = self.sinks[:, BRANCH].contiguous() * LOG2E
        values = self.q, self.k, self.v
        return span_forward(*values, *self.along, branch=BRANCH, **self.chosen, **mixed)

    def dq(self, lse2, gated=True, **options):
        saved = self.q, self.k, self.v, self.do, lse2, self.gates if gated else None
        return span_dq(*saved, BRANCH, *self.along, **self.chosen, **options)

    def dkdv(self, lse2, delta, gated=True, **options):
        saved = self.q, self.k, self.v, self.do, lse2, delta, self.gates if gated else None
        return span_dkdv(*saved, BRANCH, *self.along, **self.chosen, **options)

    def reference(self, dtype, gated=True) -> dict[str, Tensor]:
        """Plain torch's output and gradients, each sequence on its own."""
        names = ("q", "k", "v", "gates")
        wide = torch.promote_types(dtype, torch.float32)
        sink = None if self.sinks is None else self.sinks[:, BRANCH].to(wide).requires_grad_()
        leaves = {x: getattr(self, x).to(dtype).detach().requires_grad_() for x in names}
        key_lengths = [self.case.keys_of(length) for length in self.case.lengths]

        def visible(number, rows):
            s = torch.arange(key_lengths[number], device=DEVICE)
            seen = [self.span.seen(t) for t in range(rows.stop - rows.start)]
            return torch.stack([(s >= low) & (s < high) for low, high in seen])[None, None]

        qkv = (leaves[x] for x in "qkv")
        o, lse = attended(*qkv, self.case.lengths, key_lengths, visible, self.scale)
        if sink is not None:
            o = (o * without_sink(lse, sink)[..., None]).to(dtype)
        if gated:
            gates = leaves["gates"]
            base = gates[..., BASE_BRANCH, None] * self.base.to(dtype)
            o = gates[..., BRANCH, None] * o + base
        used = names if gated else names[:3]
        if sink is not None:
            used, leaves = (*used, "sink"), leaves | {"sink": sink}
        grads = torch.autograd.grad(o, [leaves[x] for x in used], self.do.to(dtype))
        found = {"o": o.detach(), **{f"d{x}": g for x, g in zip(used, grads, strict=True)}}
        if gated:
            found["dgates"] = found["dgates"][..., BRANCH]
        return found

    def kernels(self, gated=True) -> dict[str, Tensor]:
        o, lse2 = self.forward() if gated else self.forward(gates=None)
        dgates = torch.zeros_like(self.gates, dtype=torch.float32) if gated else None
        *_, rows = sunk_rows(self.sinks, lse2[:, :0], lse2[:, :0], lse2)
        dq, delta = self.dq(rows.lse2, gated, kept=rows.kept, dgates=dgates)
        dk, dv = self.dkdv(rows.lse2, delta, gated)
        found = {"o": o, "dq": dq, "dk": dk, "dv": dv}
        if self.sinks is not None:
            gates, of = self.gates if gated else None, [(delta, BRANCH)]
            found["dsink"] = sink_gradients(self.sinks, gates, [rows] * 3, of)[:, BRANCH]
        return {**found, "dgates": dgates[..., BRANCH]} if gated else found


def check(case: Case, gated=True) -> None:
    problem = Problem(case)
    same, exact = problem.reference(case.dtype, gated), problem.reference(torch.float64, gated)
    for name, value in problem.kernels(gated).items():
        if value.numel():
            results = value, same[name], exact[name]
            assert_as_accurate(f"{name} of {case}", *results, magnitude=float(case.dim))
