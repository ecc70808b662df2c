"""The table of input distributions: what models feed attention, as changes to white noise.

White noise is what kernels are usually tested on, and what no trained model feeds them. Every row
of DISTRIBUTIONS changes white tensors in one way that models have: a mean per channel, another
scale, a channel or a key far larger than the rest, scores without differences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """The sizes of a call: one sequence, and k and v shared by the branches or one for each."""

    tokens: int
    dim: int
    dtype: str
    kv_heads: int = 2
    group: int = 8
    shared: bool = True
    config: NSAConfig = field(default_factory=NSAConfig)
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


def sink_token(inputs: Inputs) -> None:
    """Gives the first key a norm of 20 deviations a channel where queries lean, its value none."""
    for x in inputs.k:
        lean = inputs.noise(1, 1, *x.shape[2:])
        x[:, :1] = 20 * lean
        inputs.q += 0.5 * lean.repeat_interleave(inputs.setting.group, 2)
    for x in inputs.v:
        x[:, :1] *= 0.05


def padding_rows(inputs: Inputs) -> None:
    """Zeros in the last third of the tokens, which no loss looks at."""
    first = 2 * inputs.q.shape[1] // 3
    for x in (inputs.q, *inputs.k, *inputs.v, inputs.do):
        x[:, first:] = 0


def correlated(what: str, coefficient: float = 0.98) -> Change:
    """Makes an AR(1) process over tokens of the noise, with its variance."""

    def change(inputs: Inputs) -> None:
        for x in inputs.named(what):
            x[:, 1:] *= (1 - coefficient**2) ** 0.5
            step = 1  # x[t] + a x[t-1] + a^2 x[t-2] ..., by doubling
            while step < x.shape[1]:
                x[:, step:] = x[:, step:] + coefficient**step * x[:, :-step]
                step *= 2

    return change


def heavy_tails(what: str) -> Change:
    """Student's t of three degrees of freedom, at most 60."""

    def change(inputs: Inputs) -> None:
        for x in inputs.named(what):
            square = sum(inputs.noise(*x.shape) ** 2 for _ in range(3)) / 3
            x[:] = (x / square.sqrt()).clamp(-60, 60)

    return change


def low_rank(what: str, rank: int = 4) -> Change:
    """Rows out of a space of few dimensions, the same in every head, with the noise's norm."""

    def change(inputs: Inputs) -> None:
        basis = inputs.noise(inputs.setting.dim, rank) / rank**0.5
        for x in inputs.named(what):
            x[:] = x[..., :rank] @ basis.T

    return change


def qk_norm(gain: float) -> Change:
    """Rows of queries and keys of one norm, as RMSNorm with that gain leaves them."""

    def change(inputs: Inputs) -> None:
        for x in (inputs.q, *inputs.k):
            x *= gain / x.square().mean(-1, keepdim=True).sqrt()

    return change


def rotated_offset(deviations: float) -> Change:
    """Adds a mean to queries and keys that turns with the position, as rotary embedding turns it.

    The slow channels stay a mean for thousands of tokens.
    """

    def change(inputs: Inputs) -> None:
        tokens, half = inputs.q.shape[1], inputs.setting.dim // 2
        device = inputs.q.device
        speeds = 1e4 ** -(torch.arange(half, device=device) / half)
        angles = torch.arange(tokens, device=device)[:, None] * speeds
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for x in (inputs.q, *inputs.k):
            a, b = (deviations * inputs.noise(x.shape[2], half) for _ in range(2))
            x += torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return change


def drifting_values(inputs: Inputs) -> None:
    """Adds a mean per channel that grows with the position, from none to ten deviations."""
    for x in inputs.v:
        way = torch.linspace(0, 10, x.shape[1], device=x.device)[:, None, None]
        x += way * inputs.noise(1, 1, *x.shape[2:])


def every_value_equal(inputs: Inputs) -> None:
    """Repeats the first value of each head: no output depends on a score."""
    for x in inputs.v:
        x[:] = x[:, :1].clone()


def one_hot_gates(inputs: Inputs) -> None:
    """Lets each query have one branch, the next one the next branch."""
    branch = torch.arange(inputs.gates.shape[1], device=inputs.gates.device) % 3
    inputs.gates[:] = torch.nn.functional.one_hot(branch, 3)[:, None].to(inputs.gates)


def loss_of_the_last_token(inputs: Inputs) -> None:
    """Has one query alone pass a gradient back."""
    inputs.do[:, :-1] = 0


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


LATE = {
    "sink token": sink_token,
    "padding rows": padding_rows,
    "AR(1) queries": correlated("q"),
    "AR(1) all, v+3": (*(correlated(x) for x in "qkv"), offset("v", 3.0)),
    "heavy tails": tuple(heavy_tails(x) for x in ("q", "k", "v", "do")),
    "low-rank keys": low_rank("k"),
    "qk-norm, gain 3": qk_norm(3.0),
    "rotated mean of q, k": rotated_offset(2.0),
    "drifting values": drifting_values,
    "every value equal": every_value_equal,
    "zero gates": scaled("gates", 0.0),
    "gates*30": scaled("gates", 30.0),
    "one-hot gates, v+3": (one_hot_gates, offset("v", 3.0)),
    "mean loss: do/T": lambda inputs: scaled("do", 1 / inputs.setting.tokens)(inputs),
    "loss of the last token, v+3": (loss_of_the_last_token, offset("v", 3.0)),
}
DISTRIBUTIONS += _rows(LATE, True)


def by_name(name: str) -> Distribution:
    """The distribution of that name."""
    return next(x for x in DISTRIBUTIONS if x.name == name)
