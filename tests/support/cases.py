"""The shapes that every backend is tested on, and how their tensors are drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.compress import Phi, PhiWeights
from nsa.reference.nsa import BRANCHES

TINY = NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=4, window=6)
SMALL = NSAConfig(compress_block=16, compress_stride=8, select_block=32, select_count=4, window=24)
EVEN = NSAConfig(
    compress_block=8, compress_stride=8, select_block=8, select_count=3, select_local=1, window=1
)
ODD = NSAConfig(
    compress_block=12, compress_stride=4, select_block=20, select_count=5, select_initial=2,
    window=300,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One shape. `packed` holds the lengths of packed sequences, which then add up to `tokens`."""

    tokens: int
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    value_dim: int = 16
    batch: int = 1
    config: NSAConfig = TINY
    phi: str = "mean"
    shared: bool = False
    packed: tuple[int, ...] = ()
    compress_rope: bool = False
    sinks: str = ""  # or "heads", one for all branches, or "branches"

    def __str__(self) -> str:
        parts = [f"T{self.tokens}", f"HKV{self.kv_heads}", f"G{self.group}", f"D{self.dim}"]
        parts += [f"DV{self.value_dim}", f"B{self.batch}", self.phi]
        parts += ["shared"] * self.shared + ["packed"] * bool(self.packed)
        return "-".join(
            parts
            + ["rope-after"] * self.compress_rope
            + [f"sinks-of-{self.sinks}"] * bool(self.sinks)
        )


# Odd lengths, groups and head dims, each value at least twice, with D = DV and D != DV.
CASES = [
    Case(1, group=1, dim=16, value_dim=48, batch=2),
    Case(1, kv_heads=1, group=3, dim=64, value_dim=64, config=ODD, phi="mlp"),
    Case(2, group=6, kv_heads=1, dim=48, value_dim=48, config=EVEN),
    Case(2, group=2, dim=128, value_dim=64, shared=True, phi="linear"),
    Case(15, group=3, dim=16, value_dim=16, batch=2, phi="linear"),
    Case(15, group=16, kv_heads=1, dim=64, value_dim=48, config=SMALL),
    Case(63, group=2, dim=48, value_dim=64, batch=2, config=EVEN, phi="mlp"),
    Case(63, group=1, kv_heads=3, dim=128, value_dim=128, config=ODD),
    Case(100, group=6, kv_heads=1, dim=16, value_dim=16, config=SMALL, shared=True),
    Case(100, group=16, kv_heads=1, dim=48, value_dim=16, phi="linear"),
    Case(257, group=3, dim=64, value_dim=64, config=SMALL, compress_rope=True),
    Case(257, group=2, kv_heads=1, dim=128, value_dim=48, config=ODD, phi="mlp", shared=True),
    Case(100, group=2, dim=16, value_dim=48, packed=(1, 36, 63)),
    Case(257, group=3, kv_heads=1, dim=48, value_dim=48, config=SMALL, packed=(15, 1, 241)),
]


@dataclass
class Drawn:
    """The tensors of a case, named, so that gradients can be asked for by name."""

    case: Case
    leaves: dict[str, Tensor]
    cu_seqlens: Tensor | None = None
    blocks: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Drawn":
        """The same values in another dtype, as new leaves."""
        leaves = {
            n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in self.leaves.items()
        }
        return Drawn(self.case, leaves, self.cu_seqlens, self.blocks)

    def otherwise_after(self, t: int) -> "Drawn":
        """A copy with other queries, keys and values behind token t."""
        later = self.to(self.leaves["q"].dtype)
        with torch.no_grad():
            for name, leaf in later.leaves.items():
                if name[0] in "qkv":
                    leaf[:, t + 1 :] = torch.randn_like(leaf[:, t + 1 :])
        return later

    def has_the_gradients_of(self, call: Callable[["Drawn"], Tensor]) -> bool:
        """torch's gradcheck of call(self) in every leaf."""

        def f(*leaves):
            return call(replace(self, leaves=dict(zip(self.leaves, leaves, strict=True))))

        return torch.autograd.gradcheck(f, tuple(self.leaves.values()), fast_mode=True)

    def arguments(self) -> tuple[tuple, dict]:
        """(args, kwargs) for the reference as well as for `nsa_attention`."""
        x, case = self.leaves, self.case
        k = {b: x["k" if case.shared else f"k_{b}"] for b in BRANCHES}
        v = {b: x["v" if case.shared else f"v_{b}"] for b in BRANCHES}
        args = (x["q"], k, v, x["gates"], case.config)
        options = {"phi": self._phi(), "cu_seqlens": self.cu_seqlens, "blocks": self.blocks}
        return args, options | ({"sinks": x["sinks"]} if case.sinks else {})

    def _phi(self) -> Phi:
        rotary = None
        if self.case.compress_rope:
            q, positions = self.leaves["q"], torch.arange(self.case.tokens, dtype=torch.float64)
            speeds = 1e4 ** -torch.linspace(0, 1, self.case.dim // 2, dtype=torch.float64)
            angles = torch.outer(positions, speeds).to(q.device)
            dtype = torch.promote_types(q.dtype, torch.float32)
            rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
        weights = []
        for side in ("phi_key_", "phi_value_"):
            own = {n.removeprefix(side): x for n, x in self.leaves.items() if n.startswith(side)}
            weights.append(PhiWeights(**own) if own else None)
        return Phi(self.case.phi, *weights, rotary)


def of(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Ones, for calls that are refused for what their tensors are."""
    return torch.ones(shape, dtype=dtype, device=device)


def draw(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Drawn:
    """Standard normal tensors (gates uniform), rounded to `dtype` first and fp64 never finer."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64) * scale
        return x.to(device, dtype).requires_grad_()

    heads = case.kv_heads * case.group
    leaves = {"q": normal(case.batch, case.tokens, heads, case.dim)}
    for branch in ("",) if case.shared else tuple(f"_{b}" for b in BRANCHES):
        leaves[f"k{branch}"] = normal(case.batch, case.tokens, case.kv_heads, case.dim)
        leaves[f"v{branch}"] = normal(case.batch, case.tokens, case.kv_heads, case.value_dim)
    gates = torch.rand(case.batch, case.tokens, heads, 3, dtype=torch.float64)
    leaves["gates"] = gates.to(device, dtype).requires_grad_()
    for side, dim in (("key", case.dim), ("value", case.value_dim)):
        for name, shape in _phi_shapes(case, dim).items():
            fan_in = shape[1] if len(shape) == 3 else 1
            leaves[f"phi_{side}_{name}"] = normal(*shape, scale=fan_in**-0.5)
    if case.sinks:
        leaves["sinks"] = normal(heads, *[3] * (case.sinks == "branches"), scale=2.0)
    bounds = torch.tensor([0, *case.packed], dtype=torch.int32, device=device)
    cu_seqlens = bounds.cumsum(0, dtype=torch.int32) if case.packed else None
    return Drawn(case, leaves, cu_seqlens)


def _phi_shapes(case: Case, dim: int) -> dict[str, tuple[int, ...]]:
    if case.phi == "mean":
        return {}
    length, hidden = case.config.compress_block, 24 if case.phi == "mlp" else dim
    shapes = {"position": (length, dim), "weight1": (length * dim, hidden)}
    if case.phi == "mlp":
        shapes |= {"bias1": (hidden,), "weight2": (hidden, dim), "bias2": (dim,)}
    return {name: (case.kv_heads, *shape) for name, shape in shapes.items()}
