"""Selections as users may make them, and attention over the mask written out."""

import math
from dataclasses import dataclass

import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from kernel_inputs import attended, sequences_of
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kernels.common import LOG2E
from nsa.kernels.selected_plan import Plan, plan
from nsa.kernels.sequences import Sequences
from nsa.kernels.sinks import Sunk, sunk_rows
from nsa.reference.attend import without_sink
from nsa.reference.select import selected_tokens

BRANCH = 1
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
if DEVICE == "cuda":
    DTYPES["bf16"] = torch.bfloat16


@dataclass
class Case:
    """Sequences of the given lengths, see `sequences_of`; N slots a query."""

    lengths: tuple[int, ...]
    group: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    select_block: int = 8
    slots: int = 3
    dtype: str = "fp32"
    gated: bool = True
    sink: bool = False

    def sequences(self) -> Sequences:
        return sequences_of(self.lengths, NSAConfig(4, 4, self.select_block, select_count=3))

    def draw(self) -> dict[str, Tensor]:
        tokens, heads = sum(self.lengths), self.kv_heads * self.group
        shapes = {
            "q": (heads, self.dim),
            "k": (self.kv_heads, self.dim),
            "v": (self.kv_heads, self.value_dim),
            "do": (heads, self.value_dim),
        }
        drawn = {n: torch.randn(tokens, *s).to(DTYPES[self.dtype]) for n, s in shapes.items()}
        most = -(-max(self.lengths) // self.select_block)
        # Out of range in both directions, in the future, and named twice.
        drawn["blocks"] = torch.randint(-2, most + 2, (tokens, self.kv_heads, self.slots)).int()
        if self.gated:
            drawn["gates"] = torch.rand(tokens, heads, 3).to(DTYPES[self.dtype])
        if self.sink:
            drawn["sinks"] = torch.randn(heads, 3)
        return drawn


Given = dict[str, Tensor]


def written_out(case: Case, given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by autograd through the reference, sequence by sequence, in `dtype`."""
    q, k, v, do = (given[n].detach().to(dtype).requires_grad_() for n in ("q", "k", "v", "do"))
    gates = given["gates"].to(dtype) if case.gated else torch.ones(*q.shape[:2], 3, dtype=dtype)
    weights = gates[..., BRANCH].clone().requires_grad_()
    config = case.sequences().config

    def visible(number: int, rows: slice) -> Tensor:
        position = torch.arange(case.lengths[number])
        chosen = selected_tokens(given["blocks"][None, rows], len(position), config)
        return chosen & (position <= position[:, None])

    o, lse = attended(q, k, v, case.lengths, case.lengths, visible, case.dim**-0.5)
    if case.sink:
        o = o * without_sink(lse, given["sinks"][:, BRANCH])[..., None]
    o = o * weights[..., None]
    o.backward(do.detach().to(o.dtype))
    lse2 = lse.detach() / math.log(2)
    grads = {"dq": q.grad, "dk": k.grad, "dv": v.grad, "delta": weights.grad}
    return {"o": o.detach(), "lse2": lse2, **grads}


def with_sinks(given: Given, lse2: Tensor) -> tuple[Tensor | None, Sunk]:
    """(what a forward takes, what a backward takes) of the branch's sinks, or of none."""
    sinks, none = given.get("sinks"), lse2[:0]
    sink2 = None if sinks is None else sinks[:, BRANCH].contiguous() * LOG2E
    return sink2, sunk_rows(sinks, none, lse2, none)[BRANCH]


def assert_right(case: Case, given: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    exact = written_out(case, given, torch.float64)
    plain = written_out(case, given, DTYPES[case.dtype])
    empty = exact["lse2"] == float("-inf")
    assert torch.equal(got["lse2"] == float("-inf"), empty)
    for results in (got, exact, plain):
        results["lse2"] = results["lse2"].masked_fill(empty, 0.0)
    for name, value in got.items():
        assert_as_accurate(name, value, plain[name], exact[name], magnitude=10.0)


def planned_for(case: Case) -> tuple[Given, Plan, Sequences]:
    """Inputs of a case, and the plan of their blocks."""
    given, sequences = case.draw(), case.sequences()
    return given, plan(given["blocks"], sequences, case.group), sequences
