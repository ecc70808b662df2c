"""A program that compiles and exports for many lengths, apart from the tests' type checks.

traced_lengths.py KIND...: one line of JSON, {kind: {case: {"graphs": how many, "error": ...}}}.
"""

import json
import sys

import torch
from tiny_models import tiny, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel

LENGTHS = (64, 77, 100, 128, 200)  # on either side of the window, and of n blocks
SIZES = {"compress_block": 16, "compress_stride": 8, "select_block": 16, "window": 96}
CONFIG = NSAConfig(**SIZES, select_count=8)
LEAST = 24  # two compressed keys
KINDS = {"layer": NSAAttention, "model": LanguageModel}
# Of each kind (what runs, its backend, its phi, torch.compile's backend).
CASES = {
    "calls": [
        *(("call", b, "mean", "eager") for b in ("gather", "sdpa")),
        ("sinks", "auto", "mean", "eager"),
    ],
    "marked": [("call", b, "mean", "eager") for b in ("auto", "masked")],
    "steps": [("model", "auto", "mlp", "aot_eager")],
    "generated": [("layer", "auto", "mean", "inductor")],
    "exported": [
        ("model", "auto", "linear", ""),
        ("model", "gather", "mlp", ""),
    ],
}


def call(backend, what):
    """nsa_attention as a function of its tensors; with sinks and the log-sum-exps beside o."""
    if what == "call":
        return lambda *given: nsa_attention(*given, CONFIG, backend=backend)

    def with_sinks(*given):
        options = {"sinks": torch.ones(4), "return_lse": True, "backend": backend}
        o, lse, combined = nsa_attention(*given, CONFIG, **options)
        lse = lse.masked_fill(lse.isneginf(), 0.0)
        return torch.cat([o, lse, combined[..., None]], dim=-1)

    return with_sinks


def inputs(kind, length):
    torch.manual_seed(length)
    if kind == "model":
        return [tokens(2, length), tokens(2, length, 1)]
    if kind == "layer":
        return [torch.randn(2, length, 32)]
    return [torch.randn(2, length, *shape) for shape in ((4, 8), (2, 8), (2, 8), (4, 3))]


def results(function, model, given):
    """o, and the gradients of a model's parameters; None for what no loss reaches."""
    o = function(*given)
    if not isinstance(model, torch.nn.Module):
        return [o]
    o = o[1] if isinstance(o, tuple) else o.square().mean()
    return [o, *torch.autograd.grad(o, list(model.parameters()), allow_unused=True)]


def error(found, wanted):
    """The largest, of the largest value of each; where none is wanted zeros may stand."""
    pairs = [(x, y) for x, y in zip(found, wanted, strict=True) if y is not None]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)) for x, y in pairs)


def compiled(kind, backend, phi, generator, marked):
    torch._dynamo.reset()
    config = tiny(nsa=CONFIG, backend=backend, phi=phi, layers=1)
    model = KINDS[kind](config) if kind in KINDS else call(backend, kind)
    counter, errors = CompileCounterWithBackend(generator), []
    function = torch.compile(model, backend=counter, fullgraph=True)
    for length in LENGTHS:
        given = inputs(kind, length)
        for x in given if marked else ():
            torch._dynamo.mark_dynamic(x, 1)
        errors.append(error(*(results(f, model, given) for f in (function, model))))
    return {"graphs": counter.frame_count, "error": max(errors)}


def exported(kind, backend, phi):
    model = KINDS[kind](tiny(nsa=CONFIG, backend=backend, phi=phi)).eval()
    any_length = ({1: Dim("T", min=LEAST, max=4096)},)
    program = export(model, tuple(inputs(kind, 80)[:1]), dynamic_shapes=any_length).module()
    errors = []
    for length in (LEAST, 33, 80, 127, 300):
        x = inputs(kind, length)[0]
        found = [o[0] if isinstance(o, tuple) else o for o in (program(x), model(x))]
        errors.append(typical(*found))
    return {"graphs": 1, "error": max(errors)}


def typical(a, b):
    """Error of all tokens but 2 %: where two blocks' scores nearly tie, rounding selects."""
    by_token = (a - b).abs().flatten(2).amax(-1) / b.abs().max()
    return float(by_token.flatten().quantile(0.98))


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {kind: {} for kind in sys.argv[1:]}
    for named, cases in made.items():
        for what, backend, phi, generator in CASES[named]:
            run = exported(what, backend, phi) if named == "exported" else None
            run = run or compiled(what, backend, phi, generator, named == "marked")
            cases[f"{what} {backend} {phi}"] = run
    print(json.dumps(made))
