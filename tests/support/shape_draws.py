"""Shapes drawn by a seed, of every kind that kernels take.

A kernel is compiled for dims, group, dtype and config, so that these come out of a limited number
of FORMS; tokens, sequences, layouts and branches are drawn freely for each shape.
"""

import random
from dataclasses import asdict, dataclass, replace

import torch
from cases import EVEN, ODD, SMALL, TINY, Case, Drawn, draw
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIGS = [
    NSAConfig(), TINY, SMALL, EVEN, ODD,
    NSAConfig(64, 16, 64, 4, 2, 1, 512), NSAConfig(16, 16, 16, 1, 0, 1, 1),
    NSAConfig(24, 8, 72, 7, 3, 4, 100), NSAConfig(32, 16, 128, 5, 1, 2, 65),
]  # fmt: skip
DIMS = 16, 20, 32, 33, 40, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 250, 256
GROUPS = 1, 2, 3, 4, 5, 6, 7, 8, 12, 16
LAYOUTS = "plain", "heads first", "part of wider rows", "late", "gates shared by heads"
MOST_ROWS = 1 << 18  # tokens times query heads of one call


@dataclass(frozen=True)
class Form:
    """Properties that kernels are compiled for."""

    dim: int
    value_dim: int
    group: int
    dtype: str
    config: NSAConfig


# The one that crashed first, its neighbours, and those that specialized warps serve.
KNOWN = Form(96, 16, 16, "bf16", CONFIGS[5])
FIXED = [
    KNOWN, Form(128, 32, 8, "fp16", NSAConfig()), Form(80, 16, 3, "fp16", SMALL),
    Form(96, 32, 1, "bf16", NSAConfig()),
]  # fmt: skip
LONG = [Form(d, d, g, t, NSAConfig()) for d, g, t in ((128, 8, "bf16"), (64, 4, "fp16"))]


@dataclass(frozen=True)
class Shape:
    """A call: `lengths` of packed sequences add up to tokens, some of them 0 or 1.

    kernels: as `distributions.kernels` takes it.
    """

    form: Form
    tokens: int
    kv_heads: int = 1
    batch: int = 1
    shared: bool = True
    lengths: tuple[int, ...] = ()
    branches: tuple[str, ...] = BRANCHES
    layout: str = "plain"
    phi: str = "mean"
    kernels: str = "auto"
    seed: int = 0

    def __str__(self) -> str:
        form = self.form
        text = f"T={self.tokens} B={self.batch} HKV={self.kv_heads} G={form.group} D={form.dim} "
        text += f"DV={form.value_dim} {form.dtype} {'shared' if self.shared else 'own'} k, v"
        text += f" lengths={self.lengths}" * bool(self.lengths)
        return f"{text} {'+'.join(self.branches)} {self.layout} {self.phi} {form.config}"

    def to_dict(self) -> dict:
        """Plain values, fit for JSON; `from_dict` brings the shape back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Shape":
        """The shape of such values."""
        form = values["form"]
        form = Form(**form | {"config": NSAConfig(**form["config"])})
        tuples = {name: tuple(values[name]) for name in ("lengths", "branches")}
        return cls(**values | tuples | {"form": form})

    def draw(self, device: str) -> Drawn:
        """Its tensors, by the seed; in its layout they are leaves that are not contiguous."""
        torch.manual_seed(self.seed)
        form = self.form
        case = Case(
            self.tokens, self.kv_heads, form.group, form.dim, form.value_dim, self.batch,
            form.config, self.phi, self.shared, self.lengths,
        )  # fmt: skip
        drawn = draw(case, DTYPES[form.dtype], device)
        leaves = {name: self._laid_out(name, x.detach()) for name, x in drawn.leaves.items()}
        return replace(drawn, leaves={n: x.requires_grad_() for n, x in leaves.items()})

    def _laid_out(self, name: str, x: Tensor) -> Tensor:
        if name.startswith("phi_"):
            return x
        if name == "gates" and self.layout == "gates shared by heads":
            return x[:, :, :1].expand(x.shape)
        if self.layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "part of wider rows" and name != "gates":
            wide = torch.full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 3), 7.0).to(x)
            wide[:, :, 1:, 3:] = x
            return wide[:, :, 1:, 3:]
        if self.layout == "late":
            room = x.new_full((x.numel() + 1,), 7.0)
            room[1:] = x.flatten()
            return room[1:].view(x.shape)
        return x


def legal(seed: int, count: int, forms: int = 36) -> list[Shape]:
    """`count` legal shapes; the first one is that of the crash, and one in twenty is long."""
    rng = random.Random(seed)
    every = FIXED + [_form(rng) for _ in range(forms - len(FIXED) - len(LONG))]
    shapes = [Shape(KNOWN, 1, kv_heads=2)]
    while len(shapes) < count:
        number = len(shapes)
        long = number % 20 == 10
        shapes.append(_long(rng, number) if long else _shape(rng, rng.choice(every), number))
    return shapes


def _form(rng: random.Random) -> Form:
    dim = rng.choice(DIMS)
    value_dim = rng.choice([dim, dim, 16, 32, rng.choice(DIMS), rng.choice(DIMS)])
    dtype = rng.choice(["bf16", "bf16", "fp16", "fp16", "fp32"])
    config = rng.choice([CONFIGS[0], *CONFIGS])
    return Form(dim, value_dim, rng.choice(GROUPS), dtype, config)


def _shape(rng: random.Random, form: Form, seed: int, most: int = 4000) -> Shape:
    kind = rng.random()
    if kind < 0.2:
        tokens = rng.choice([1, 1, 2, 3])
    elif kind < 0.65:
        tokens = rng.randrange(4, min(most, 300))
    else:
        tokens = rng.randrange(min(most, 300) - 1, 1 + (most if kind > 0.92 else min(most, 1500)))
    fit = max(1, min(8, MOST_ROWS // 2 // (tokens * form.group)))
    kv_heads = rng.randint(1, fit)
    batch = rng.choice([1, 1, 2, 3]) if tokens * form.group * kv_heads * 3 < MOST_ROWS // 4 else 1
    packed = batch == 1 and rng.random() < 0.3
    alone = rng.random() < 0.2
    branches = (rng.choice(BRANCHES),) if alone else BRANCHES
    if rng.random() < 0.1:
        branches = rng.choice([("cmp", "slc"), ("slc", "win"), ("cmp", "win")])
    return Shape(
        form, tokens, kv_heads, batch, rng.random() < 0.5,
        _lengths(rng, tokens) if packed else (), branches, rng.choice(["plain", *LAYOUTS]),
        rng.choice(["mean"] * 7 + ["linear", "mlp"]), seed=seed,
    )  # fmt: skip


def _lengths(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """Lengths that add up to so many tokens, empty and one-token sequences among them."""
    found, left = [], tokens
    while left:
        size = rng.choice([0, 1, 1, rng.randint(1, left), rng.randint(1, left)])
        size = left if len(found) > 5 else min(size, left)
        found.append(size)
        left -= size
    return (*found, 0) if rng.random() < 0.3 else tuple(found)


def _long(rng: random.Random, seed: int) -> Shape:
    """Shapes that specialized warps serve: by speed, or wherever they can."""
    form, tokens = rng.choice(LONG), rng.choice([8192, 8192, 9001, 12288, 16384, 33024])
    fit = max(1, min(4, MOST_ROWS // (tokens * form.group)))
    return Shape(
        form, tokens, rng.randint(1, fit), shared=rng.random() < 0.6,
        kernels=rng.choice(["auto", "warps"]), seed=seed,
    )  # fmt: skip
