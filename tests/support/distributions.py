"""Accuracy that each distribution of `drawn_inputs` costs, against plain torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from drawn_inputs import DISTRIBUTIONS, DTYPES, Distribution, Inputs, Setting, by_name
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.reference.nsa import nsa
from workbook.lab.measure.accuracy import AccuracyError, hold

DEFINED = 1024  # tokens up to which the definition itself says what is exact
TWICE = 2.0


@dataclass
class Outcome:
    """o and the gradients by leaf, and the selection that was made or used [B, T, HKV, n]."""

    tensors: dict[str, Tensor]
    blocks: Tensor | None = None


def _with_gradients(o: Tensor, given: Inputs) -> dict[str, Tensor]:
    leaves = given.leaves()
    grads = torch.autograd.grad(o, list(leaves.values()), given.do, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    found = {f"d{name}": torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    return {"o": o.detach()} | found


def definition(inputs: Inputs, dtype: torch.dtype, blocks: Tensor | None = None) -> Outcome:
    """The definition in that dtype, with its own selection unless one is given."""
    given = inputs.to(dtype)
    result = nsa(*given.arguments(), blocks=blocks)
    return Outcome(_with_gradients(result.o, given), result.blocks)


def by_backend(
    backend: str, inputs: Inputs, dtype: torch.dtype, blocks: Tensor | None = None
) -> Outcome:
    """Results of a backend for the inputs in that dtype."""
    given = inputs.to(dtype)
    options = {"backend": backend, "blocks": blocks, "return_blocks": True}
    o, own = nsa_attention(*given.arguments(), **options)
    return Outcome(_with_gradients(o, given), own)


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Has Triton's own kernels serve ("triton"), or specialized warps wherever they can ("warps").

    Left alone, speed decides ("auto"): which serves depends on sizes and on the GPU.
    """
    from nsa.kernels.hopper import launches

    plain = {name: getattr(launches, name) for name in ("tile_for", "MANY", "ONE_TOKEN")}

    def tile_for(kernel, asked, span, tokens, keys, operands):
        looks_back = span is not None and span.lookback is not None
        known = (kernel, operands[2].shape[2], looks_back) in launches.FASTER
        if kind == "triton" or not known:
            return None
        try:
            return plain["tile_for"](kernel, True, span, tokens, keys, operands)
        except ValueError:  # they cannot take these
            return None

    if kind != "auto":
        launches.tile_for = tile_for
        launches.MANY = dict.fromkeys(launches.MANY, 0)
        launches.ONE_TOKEN = dict.fromkeys(launches.ONE_TOKEN, sys.maxsize)
    try:
        yield
    finally:
        for name, value in plain.items():
            setattr(launches, name, value)


def exact_and_plain(inputs: Inputs, blocks: Tensor, stick: str) -> tuple[dict, dict]:
    """(exact, plain torch's) o and gradients with the selection given.

    exact: in fp64, by the definition up to DEFINED tokens and by `gather`, which makes no T x T
    tensor, beyond. stick: "gather" or "definition", in the setting's dtype on the same inputs:
    plain torch, products of that dtype, softmax and sums in fp32.
    """
    dtype, short = DTYPES[inputs.setting.dtype], inputs.setting.tokens <= DEFINED

    def evaluate(by_definition: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        if by_definition:
            return definition(inputs, dtype, blocks).tensors
        return by_backend("gather", inputs, dtype, blocks).tensors

    return evaluate(short, torch.float64), evaluate(stick == "definition", dtype)


def judged(
    got: dict,
    plain: dict,
    exact: dict,
    dtype: torch.dtype,
    norms: bool = True,
    slack: float = TWICE,
) -> dict[str, dict]:
    """By tensor: errors relative to exact's norm, their ratio, and what breaks the accuracy rule.

    The rule is `workbook.lab.measure.accuracy.hold`. Of norms, twice torch's plus a quarter of
    epsilon is the most: what comes on top there, too. norms: whether that is asked as well.
    slack: times plain torch's error that is allowed.
    """
    grain = torch.finfo(dtype).eps / 4
    largest = max(float(x.abs().max()) for name, x in exact.items() if name != "o")
    found = {}
    for name, truth in exact.items():
        size = float(truth.norm())
        ours, torchs = (
            float((x[name].double() - truth).norm()) / (size or 1.0) for x in (got, plain)
        )
        broken = ""
        magnitude = 0.0 if name == "o" else largest
        # What shifts all keys has a gradient of rounding alone: as in `backend_calls.check`.
        most = 2 * TWICE if name.startswith("dphi_key_") else slack
        options = {"dtype": dtype, "slack": most, "magnitude": magnitude}
        try:
            hold(name, got[name], plain[name], truth, **options)
        except AccuracyError as red:
            broken = str(red)
        if norms and size > 1e-6 * magnitude and not ours <= slack * torchs + grain:
            broken = broken or f"{name}: norm of the error {ours:.2e}, plain torch's {torchs:.2e}"
        ratio = ours / torchs if torchs else (1.0 if ours == 0 else float("inf"))
        found[name] = {"ours": ours, "torch": torchs, "ratio": ratio, "broken": broken}
    return found


def overflows(tensors: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """The tensors that hold numbers past the largest one of the dtype."""
    most = torch.finfo(dtype).max
    return [name for name, x in tensors.items() if not float(x.abs().max()) <= most]


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """True if two runs agree in every bit, NaN included."""
    pairs = ((x, other[name]) for name, x in one.items())
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def measure(distribution: Distribution, setting: Setting, device: str, kind: str) -> dict:
    """Errors of the kernels with the selection that they made themselves, and if bits repeat."""
    inputs, dtype = distribution.draw(setting, device), DTYPES[setting.dtype]
    with kernels(kind):
        got, again = (by_backend("triton", inputs, dtype) for _ in range(2))
    exact, plain = exact_and_plain(inputs, got.blocks, "gather")
    record = {"repeats": same_bits(got.tensors, again.tensors), "errors": {}, "skipped": ""}
    if beyond := overflows(exact, dtype):
        record["skipped"] = f"{', '.join(beyond)} beyond {setting.dtype}"
    else:
        record["errors"] = judged(got.tensors, plain, exact, dtype)
    return record


SHORT = ["v+3", "v+30", "all+10"]
LENGTHS = [Setting(1024, 64, "bf16"), Setting(1024, 128, "fp16")]
MAIN = [Setting(8192, 128, "bf16"), Setting(8192, 64, "fp16")]
CROSSED = [Setting(8192, 64, "bf16"), Setting(8192, 128, "fp16"), Setting(1024, 64, "fp32")]
LONG = [Setting(33024, 128, "bf16"), Setting(33024, 64, "fp16")]
GROUPS = [
    Setting(8192, 128, "bf16", group=4), Setting(8192, 128, "bf16", group=16),
    Setting(8192, 128, "bf16", shared=False), Setting(8191, 128, "bf16"),
]  # fmt: skip


def plan() -> list[tuple[Distribution, Setting]]:
    """Cases to be measured: every distribution at MAIN and LENGTHS, some at the others."""
    some = [x for x in DISTRIBUTIONS if x.late or x.name in [*SHORT, "white", "v+1", "v+10"]]
    few = [by_name(name) for name in ("white", *SHORT)]
    grid = [(MAIN, DISTRIBUTIONS), (LENGTHS, DISTRIBUTIONS), (CROSSED, some)]
    grid += [(GROUPS, few), (LONG, few)]
    return [(d, setting) for settings, found in grid for setting in settings for d in found]
