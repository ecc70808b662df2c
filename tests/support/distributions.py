"""Inputs as people have them: a table of distributions, and what each costs in accuracy.

White noise is what kernels are usually tested on, and what no trained model feeds them. Every row
of DISTRIBUTIONS changes white tensors in one way that models have: a mean per channel, another
scale, a channel or a key far larger than the rest, scores without differences.

A program too, for a machine with a GPU and without pytest:

    PYTHONPATH=. python tests/support/distributions.py --out DIR

prints the error of o and of each gradient in units of plain torch's and writes them as JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
from nsa.lab.measure.accuracy import AccuracyError, hold
from nsa.reference.nsa import BRANCHES, nsa

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFINED = 1024  # tokens up to which the definition itself says what is exact
TWICE = 2.0


@dataclass(frozen=True)
class Setting:
    """The sizes of a call: one sequence, and k and v shared by the branches or one for each."""

    tokens: int
    dim: int
    dtype: str
    kv_heads: int = 2
    group: int = 8
    shared: bool = True
    config: NSAConfig = NSAConfig()
    seed: int = 5

    def __str__(self) -> str:
        text = f"T{self.tokens}-D{self.dim}-{self.dtype}-HKV{self.kv_heads}-G{self.group}"
        return text + "-own" * (not self.shared)


@dataclass
class Inputs:
    """The tensors of a call: k and v hold one tensor, or one for each branch."""

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    gates: Tensor
    do: Tensor
    setting: Setting
    generator: torch.Generator

    def named(self, what: str) -> list[Tensor]:
        """The tensors of one of "q", "k", "v", "gates", "do"."""
        found = getattr(self, what)
        return found if isinstance(found, list) else [found]

    def noise(self, *shape: int) -> Tensor:
        """Standard normal numbers, as many as asked for."""
        return torch.randn(*shape, generator=self.generator, device=self.q.device)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values in another dtype, as leaves that no graph has seen."""

        def cast(x: Tensor) -> Tensor:
            return x.detach().to(dtype, copy=True).requires_grad_()

        k, v = ([cast(x) for x in side] for side in (self.k, self.v))
        q, gates, do = cast(self.q), cast(self.gates), self.do.detach().to(dtype)
        return replace(self, q=q, k=k, v=v, gates=gates, do=do)

    def leaves(self) -> dict[str, Tensor]:
        """Every input by name: q, k or k_cmp and so on, v likewise, gates."""
        found = {"q": self.q}
        for name, side in (("k", self.k), ("v", self.v)):
            names = [name] if len(side) == 1 else [f"{name}_{b}" for b in BRANCHES]
            found |= dict(zip(names, side, strict=True))
        return found | {"gates": self.gates}

    def arguments(self) -> tuple:
        """q, k, v, gates and config as `nsa_attention` and the definition take them."""
        k, v = (
            dict.fromkeys(BRANCHES, side[0])
            if len(side) == 1
            else dict(zip(BRANCHES, side, strict=True))
            for side in (self.k, self.v)
        )
        return self.q, k, v, self.gates, self.setting.config


Change = Callable[[Inputs], None]


@dataclass(frozen=True)
class Distribution:
    """Changes to white inputs. late: written after the rule was fixed and the others had run."""

    name: str
    changes: tuple[Change, ...]
    late: bool = False

    def draw(self, setting: Setting, device: str | torch.device) -> Inputs:
        """The inputs in the setting's dtype; the same on the same device each time."""
        generator = torch.Generator(device).manual_seed(setting.seed)
        options = {"generator": generator, "device": device}
        heads, sides = setting.kv_heads * setting.group, 1 if setting.shared else len(BRANCHES)

        def normal(heads: int) -> Tensor:
            return torch.randn(1, setting.tokens, heads, setting.dim, **options)

        q, do = normal(heads), normal(heads)
        k, v = ([normal(setting.kv_heads) for _ in range(sides)] for _ in "kv")
        gates = torch.rand(1, setting.tokens, heads, 3, **options)
        inputs = Inputs(q, k, v, gates, do, setting, generator)
        for change in self.changes:
            change(inputs)
        return inputs.to(DTYPES[setting.dtype])


def offset(what: str, deviations: float) -> Change:
    """Adds a mean to every channel of every head, of so many of the noise's deviations."""

    def change(inputs: Inputs) -> None:
        for x in inputs.named(what):
            x += deviations * inputs.noise(1, 1, *x.shape[2:])

    return change


def scaled(what: str, factor: float) -> Change:
    """Multiplies a tensor."""

    def change(inputs: Inputs) -> None:
        for x in inputs.named(what):
            x *= factor

    return change


def outlier_channel(what: str, factor: float) -> Change:
    """Multiplies one channel, the same in every head."""

    def change(inputs: Inputs) -> None:
        for x in inputs.named(what):
            x[..., x.shape[-1] // 3] *= factor

    return change


def every_key_equal(inputs: Inputs) -> None:
    """Repeats the first key of each head."""
    for x in inputs.k:
        x[:] = x[:, :1].clone()


def every_block_equal(inputs: Inputs) -> None:
    """Repeats the keys of the first selectable block: its copies have equal importance."""
    for x in inputs.k:
        place = torch.arange(x.shape[1], device=x.device) % inputs.setting.config.select_block
        place = place.clamp(max=x.shape[1] - 1)
        x[:] = x[:, place]


def one_key_takes_all(inputs: Inputs) -> None:
    """Has every query point at the key in the middle, and no other key point there."""
    group = inputs.setting.group
    for x in inputs.k:
        middle = x.shape[1] // 2
        loud = x[:, middle] / x[:, middle].norm(dim=-1, keepdim=True)
        x -= (x * loud[:, None]).sum(-1, keepdim=True) * loud[:, None]
        x[:, middle] = loud * 30
        inputs.q += 10 * loud.repeat_interleave(group, 1)[:, None]


def _rows(names: dict[str, tuple[Change, ...] | Change], late: bool) -> list[Distribution]:
    """Distributions by name, of one change or several."""
    return [
        Distribution(name, changes if isinstance(changes, tuple) else (changes,), late)
        for name, changes in names.items()
    ]


OFFSETS = [0.25, 1.0, 3.0, 10.0, 30.0]
DISTRIBUTIONS = [
    Distribution("white", ()),
    *_rows({f"v+{size:g}": offset("v", size) for size in OFFSETS}, False),
    *_rows({f"k+{size:g}": offset("k", size) for size in (3.0, 30.0)}, False),
    *_rows({f"q+{size:g}": offset("q", size) for size in (3.0, 30.0)}, False),
    *_rows(
        {f"all+{size:g}": tuple(offset(x, size) for x in "qkv") for size in (1.0, 10.0, 30.0)},
        False,
    ),
    *_rows(
        {f"{x}*{size:g}": scaled(x, size) for x in ("q", "k", "v", "do") for size in (0.1, 30.0)},
        False,
    ),
    *_rows(
        {
            "q*5 k*5": (scaled("q", 5.0), scaled("k", 5.0)),
            "outlier channel of q, k": (outlier_channel("q", 10.0), outlier_channel("k", 10.0)),
            "outlier channel of v": outlier_channel("v", 30.0),
            "every key equal": every_key_equal,
            "every block equal": every_block_equal,
            "q=0": scaled("q", 0.0),
            "k=0": scaled("k", 0.0),
            "one key takes all": one_key_takes_all,
        },
        False,
    ),
]


def by_name(name: str) -> Distribution:
    """The distribution of that name."""
    return next(x for x in DISTRIBUTIONS if x.name == name)


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
    """What a backend makes of the inputs in that dtype; kernels tell what they selected."""
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


def judged(got: dict, plain: dict, exact: dict, dtype: torch.dtype) -> dict[str, dict]:
    """By tensor: errors relative to exact's norm, their ratio, and what breaks the accuracy rule.

    The rule is `nsa.lab.measure.accuracy.hold`. Of norms, twice torch's plus a quarter of epsilon
    is the most: what comes on top there, too.
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
        try:
            hold(name, got[name], plain[name], truth, dtype=dtype, magnitude=magnitude)
        except AccuracyError as red:
            broken = str(red)
        if size > 1e-6 * magnitude and not ours <= TWICE * torchs + grain:
            broken = broken or f"{name}: norm of the error {ours:.2e}, plain torch's {torchs:.2e}"
        ratio = ours / torchs if torchs else (1.0 if ours == 0 else float("inf"))
        found[name] = {"ours": ours, "torch": torchs, "ratio": ratio, "broken": broken}
    return found


def overflows(tensors: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """The tensors that hold numbers past the largest one of the dtype."""
    most = torch.finfo(dtype).max
    return [name for name, x in tensors.items() if not float(x.abs().max()) <= most]


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two runs agree in every bit, NaN included."""
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
    """What the program measures: every distribution at MAIN and LENGTHS, some at the others."""
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
