"""Judges shapes that are drawn by a seed: forward, selection and every gradient of the kernels.

An illegal memory access ends a process's use of its GPU, so that shapes run in child processes,
which name each on stderr before they begin it. `compute-sanitizer --target-processes all
python -m pytest -m gpu tests/nsa/kernels/test_shapes.py -o addopts=""` looks at their memory too.
"""

import sys
import traceback

import torch
from backend_calls import outcome
from cases import Drawn
from distributions import DEFINED, judged, kernels
from shape_draws import DTYPES, Shape
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.blocks import count_selectable
from nsa.reference.nsa import nsa

ROWS = 1 << 25  # query rows times tokens that the definition is evaluated on, 256 MiB of scores
DRAWS = 3  # of a shape that breaks the rule by the first draw; roundings can, a fault always does


def attend(drawn: Drawn, shape: Shape, **options):
    """o by `nsa_attention`, with its own selection unless one is given."""
    args, kwargs = drawn.arguments()
    return nsa_attention(*args, **kwargs | {"branches": shape.branches} | options)


def define(drawn: Drawn, shape: Shape, blocks: Tensor | None) -> Tensor:
    """o of the definition, or of `gather`, which makes no T x T tensor, where that is too large."""
    rows = drawn.leaves["q"].shape[0] * drawn.leaves["q"].shape[2] * shape.tokens**2
    if shape.tokens > 2 * DEFINED or rows > ROWS:
        return attend(drawn, shape, backend="gather", blocks=blocks)
    args, kwargs = drawn.arguments()
    return nsa(*args, **kwargs | {"branches": shape.branches, "blocks": blocks}).o


def wrong_selection(drawn: Drawn, shape: Shape, blocks: Tensor) -> str:
    """Mistakes in the kernels' selection of a sequence, "" where there is none or it is long.

    Near ties may fall either way: what is kept of the exact importance counts, and how many.
    """
    lengths, exact = shape.lengths or (shape.tokens,), drawn.to(torch.float64)
    heads = shape.batch * shape.kv_heads * shape.form.group
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        if not length or length > DEFINED or heads * length**2 > ROWS:
            continue
        args, kwargs = exact.arguments()
        q, k, v, gates, config = args
        q, gates = q[:, rows], gates[:, rows]
        k, v = ({b: x[:, rows] for b, x in side.items()} for side in (k, v))
        result = nsa(q, k, v, gates, config, phi=kwargs["phi"], branches=("slc",))
        mine, count = blocks[:, rows].long(), count_selectable(length, config)
        if int(mine.max()) >= count or int(mine.min()) < -1:
            return f"blocks from {int(mine.min())} to {int(mine.max())} of {count}"
        if not torch.equal((mine < 0).sum(-1), (result.blocks < 0).sum(-1)):
            return "another number of blocks than the definition selects"
        ranks = torch.where(mine < 0, count + torch.arange(mine.shape[-1]).to(mine), mine)
        if bool((ranks.diff(dim=-1) <= 0).any()):
            return "blocks that do not ascend"

        def kept(chosen, weight=result.importance):
            found = weight.gather(-1, chosen.clamp(min=0))
            return found.masked_fill(chosen < 0, 0.0).sum(-1)

        lost = float((kept(result.blocks.long()) - kept(mine)).max())
        most = 3 * torch.finfo(DTYPES[shape.form.dtype]).eps
        if lost > most * float(result.importance.sum(-1).max()):
            return f"blocks that lose {lost:.2e} of importance"
    return ""


def judge(shape: Shape, device: str) -> dict:
    """Runs a shape and holds o and each gradient to the accuracy rule: a record of it."""
    dtype = DTYPES[shape.form.dtype]
    drawn = shape.draw(device)
    selects = "slc" in shape.branches
    with kernels(shape.kernels):
        found = attend(drawn, shape, backend="triton", return_blocks=selects)
        o, blocks = found if selects else (found, None)
        do = torch.randn(o.shape, device=device).to(dtype)
        got = _named(*outcome(lambda _: o, drawn, do))
    exact_inputs = drawn.to(torch.float64)
    if selects and (wrong := wrong_selection(drawn, shape, blocks)):
        return {"outcome": "inaccurate", "why": wrong}
    exact, plain = (
        _named(*outcome(lambda x: define(x, shape, blocks), given, do))
        for given in (exact_inputs, drawn.to(dtype))
    )
    errors = judged(got, plain, exact, dtype, norms=False)
    broken = [error["broken"] for error in errors.values() if error["broken"]]
    ratios = {name: round(error["ratio"], 2) for name, error in errors.items()}
    found = {"outcome": "inaccurate" if broken else "ok", "ratios": ratios}
    return found | ({"why": "; ".join(broken)} if broken else {})


def _named(o: Tensor, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"o": o.detach()} | {f"d{name}": x for name, x in grads.items()}


def one(shape: Shape, device: str) -> dict:
    """The record of a shape: "ok", "inaccurate" or "raised"."""
    for draw in range(DRAWS):
        again = Shape(**vars(shape) | {"seed": shape.seed + 1000 * draw})
        try:
            record = judge(again, device) | {"draws": draw + 1}
        except Exception:
            return {"outcome": "raised", "why": traceback.format_exc(limit=-3)}
        if record["outcome"] == "ok":
            break
    return record


def in_turn(spec: dict) -> dict:
    """In a child process: {"bad": records of those of spec["shapes"] that are not right}."""
    from nsa.attention.backends import gather

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    gather.ELEMENTS |= {"cuda": 1 << 24}  # several processes share the memory
    bad = []
    for shape in map(Shape.from_dict, spec["shapes"]):
        print(shape, file=sys.stderr, flush=True)
        record = one(shape, spec["device"])
        if record["outcome"] != "ok":
            bad.append({"shape": shape.to_dict()} | record)
    return {"bad": bad}
