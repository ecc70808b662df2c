"""Accuracy that each distribution of `drawn_inputs` costs, against plain torch.

A program too, for a machine with a GPU and without pytest:

    PYTHONPATH=. python tests/support/distributions.py --out DIR

prints the error of o and of each gradient in units of plain torch's and writes them as JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from drawn_inputs import DISTRIBUTIONS, DTYPES, Distribution, Inputs, Setting, by_name
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
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
    """Results of a backend for the inputs in that dtype; kernels tell what they selected."""
    given = inputs.to(dtype)
    with selection() as seen:
        o = nsa_attention(*given.arguments(), backend=backend, blocks=blocks)
    own = seen[0].unflatten(0, given.q.shape[:2]) if seen and blocks is None else blocks
    return Outcome(_with_gradients(o, given), own)


@contextmanager
def selection() -> Iterator[list[Tensor]]:
    """Collects the blocks [tokens, HKV, n] that the kernels select meanwhile."""
    try:
        from nsa.kernels import ops
    except ImportError:  # no Triton
        yield []
        return
    seen, plain = [], ops.attend

    def attend(*args):
        found = plain(*args)
        seen.append(found[-1])
        return found

    ops.attend = attend
    try:
        yield seen
    finally:
        ops.attend = plain


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


def measure(
    distribution: Distribution, setting: Setting, device: str, kinds: tuple[str, ...]
) -> list[dict]:
    """One record for each kind of kernels, on the same inputs.

    Each is judged with the selection that the first made itself, by the path that users take; where
    another kind's own differs, as near ties may, it is handed the first one's.
    """
    inputs, dtype = distribution.draw(setting, device), DTYPES[setting.dtype]
    records, blocks, exact, plain = [], None, None, None
    for kind in kinds:
        began = time.perf_counter()
        with kernels(kind):
            got = by_backend("triton", inputs, dtype)
            agrees = blocks is None or torch.equal(got.blocks, blocks)
            if not agrees:
                got = by_backend("triton", inputs, dtype, blocks)
            again = by_backend("triton", inputs, dtype, None if agrees else blocks)
        if blocks is None:
            blocks = got.blocks
            exact, plain = exact_and_plain(inputs, blocks, "gather")
        record = {
            "distribution": distribution.name, "late": distribution.late, "kernels": kind,
            "setting": asdict(setting), "same_selection": agrees,
            "repeats": same_bits(got.tensors, again.tensors), "errors": {}, "skipped": "",
        }  # fmt: skip
        if beyond := overflows(exact, dtype):
            record["skipped"] = f"{', '.join(beyond)} beyond {setting.dtype}"
        else:
            record["errors"] = judged(got.tensors, plain, exact, dtype)
        records.append(record | {"seconds": round(time.perf_counter() - began, 2)})
    return records


SHORT = ["v+3", "v+30", "all+10"]
LENGTHS = [Setting(1024, 64, "bf16"), Setting(1024, 128, "fp16")]
MAIN = [Setting(8192, 128, "bf16"), Setting(8192, 64, "fp16")]
CROSSED = [Setting(8192, 64, "bf16"), Setting(8192, 128, "fp16"), Setting(1024, 64, "fp32")]
LONG = [Setting(33024, 128, "bf16"), Setting(33024, 64, "fp16")]
GROUPS = [
    Setting(8192, 128, "bf16", group=4), Setting(8192, 128, "bf16", group=16),
    Setting(8192, 128, "bf16", shared=False), Setting(8191, 128, "bf16"),
]  # fmt: skip


def plan(every: bool) -> list[tuple[Distribution, Setting]]:
    """Cases to be measured: every distribution at MAIN and LENGTHS, some at the others."""
    some = [x for x in DISTRIBUTIONS if x.late or x.name in [*SHORT, "white", "v+1", "v+10"]]
    few = [by_name(name) for name in ("white", *SHORT)]
    if every:
        some = few = DISTRIBUTIONS
    grid = [(MAIN, DISTRIBUTIONS), (LENGTHS, DISTRIBUTIONS), (CROSSED, some)]
    grid += [(GROUPS, few), (LONG, few)]
    return [(d, setting) for settings, found in grid for setting in settings for d in found]


NAMES = "o", "dq", "dk", "dv", "dgates"


def line(record: dict) -> str:
    """A record as a line of the table: of one k and v a branch, the worst."""
    setting = Setting(**record["setting"] | {"config": NSAConfig(**record["setting"]["config"])})
    head = f"{record['distribution']:<25}{setting!s:<29}{record['kernels']:<7}"
    if record["skipped"]:
        return f"{head} {record['skipped']}"
    cells = []
    for name in NAMES:
        parts = [x for n, x in record["errors"].items() if n.split("_")[0] == name]
        worst = max(parts, key=lambda x: x["ratio"])
        cells.append(f"{worst['ratio']:7.2f}{'!' if any(x['broken'] for x in parts) else ' '}")
    notes = "" if record["repeats"] else " bits differ"
    return head + "".join(cells) + notes


def main() -> int:
    """Measures, prints and writes; 1 where the rule is broken or bits are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for distributions.json")
    parser.add_argument("--every", action="store_true", help="every distribution at every setting")
    parser.add_argument("--seconds", type=float, default=220, help="no new one is begun after that")
    parser.add_argument("--only", default="", help="distributions with this in their name")
    parser.add_argument("--kernels", nargs="+", default=["triton", "warps"])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    began, records, todo = time.perf_counter(), [], plan(options.every)
    todo = [pair for pair in todo if options.only in pair[0].name]
    print(f"{'':61}" + "".join(f"{name:>7} " for name in NAMES))
    left = 0
    for distribution, setting in todo:
        if time.perf_counter() - began > options.seconds:
            left += 1
            continue
        # fp32 has no specialized warps.
        kinds = tuple(options.kernels[:1] if setting.dtype == "fp32" else options.kernels)
        for record in measure(distribution, setting, "cuda", kinds):
            records.append(record)
            print(line(record), flush=True)
    broken = [r for r in records if any(x["broken"] for x in r["errors"].values())]
    for record in broken:
        for error in record["errors"].values():
            if error["broken"]:
                print(f"broken: {record['distribution']}, {record['kernels']}: {error['broken']}")
    unsteady = sum(not r["repeats"] for r in records)
    print(f"{len(records)} records in {time.perf_counter() - began:.0f} s: {len(broken)} break the")
    print(f"accuracy rule ({sum(r['late'] for r in broken)} of them late distributions),")
    print(f"{unsteady} do not repeat their bits; {left} of {len(todo)} were not begun for time")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name()
        about = {"device": device, "torch": torch.__version__, "not_begun": left}
        text = json.dumps(about | {"records": records}, indent=1)
        (options.out / "distributions.json").write_text(text + "\n")
    return int(bool(broken or unsteady))


if __name__ == "__main__":
    sys.exit(main())
