"""Launches with and without knowing the call: a program of its own, without a GPU.

Triton works out each launch as ever, but what it would compile and load is a name here, made of all
that a kernel is compiled for; a launch is written down with its arguments. Prints, as JSON, what
random calls launched otherwise the second and third time than Triton by itself would, and how many
of them do where a call is known by less than all that matters.
"""

import json
import random
import sys
from typing import Any

import torch
import triton
from compiled import Absent, nothing_is_written
from decode_inputs import Step, draw
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa import NSAConfig, nsa_attention
from nsa.attention.backends import triton as backend
from nsa.kernels import decode, launch, rotary

LAUNCHED: list[tuple] = []
CONFIG = NSAConfig(compress_block=16, compress_stride=8, select_block=32, select_count=4, window=64)


class Compiled:
    """In place of what Triton compiles: it is called as that is, and knows what it is for."""

    def __init__(self, src: Any, options: dict) -> None:
        parts = src.signature, src.constants, src.attrs
        self.what = src.fn.__name__, *(repr(sorted(x.items(), key=repr)) for x in parts)
        self.what += (repr(sorted(options.items(), key=repr)),)
        self.function = self.packed_metadata = self.metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        LAUNCHED.append((self.what, (x, y, z), tuple(map(told, args))))

    def __getitem__(self, grid):
        return lambda *args: self.run(*grid, 0, None, None, None, None, None, *args)


def told(x: Any) -> Any:
    """An argument without its address, which no two calls share, but how it is aligned."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.data_ptr() % 16
    if isinstance(x, TensorDescriptor):
        return told(x.base), x.shape, x.strides, x.block_shape
    return tuple(map(told, x)) if isinstance(x, tuple) else x


def drawn(rng, how: str, *shape: int, dtype: torch.dtype, learned: bool) -> Tensor:
    """Draw a tensor of that shape, by itself or a part of something wider, beginning anywhere."""
    room, late = 17 if how == "wide" else rng.choice([0, 0, 16, 1]), int(how == "late")
    wide = torch.zeros(*shape[:-1], shape[-1] + room, dtype=dtype)
    x = torch.zeros(wide.numel() + late, dtype=dtype)[late:].view_as(wide)
    return x[..., room : room + shape[-1]].detach().requires_grad_(learned)


WAYS = "plain", "late", "wide", "longer", "double"  # in which a call differs from its likes


def call(seed: int, how: str) -> list[tuple]:
    """Launches of one step on any shape and layout, with some inputs that need gradients."""
    rng = random.Random(seed)
    (group, heads), dim = rng.choice([(1, 2), (4, 1), (16, 2)]), rng.choice([16, 24, 64, 128])
    dtype = rng.choice([torch.float16, torch.float16, torch.float32])
    tokens, batch = rng.choice([1, 15, 63, 64, 100, 256, 300, 1100]), rng.choice([1, 1, 2, 3])
    if seed % 16 == 0:  # where the selection is sorted, and blocks have parts
        tokens, batch, group, dim = 9000, 1, 4, 16
    tokens += how == "longer"
    if how == "double":
        dtype = torch.float32 if dtype == torch.float16 else torch.float16
    packed = batch == 1 and tokens > 60 and rng.random() < 0.3
    cu = torch.tensor([0, 20, 21, tokens], dtype=torch.int32) if packed else None
    learned = rng.random() < 0.8
    frozen = rng.random() < 0.2
    shape = batch, tokens, heads

    def one(*size: int, learns: bool = learned) -> Tensor:
        return drawn(rng, how, *size, dtype=dtype, learned=learns)

    q = one(batch, tokens, heads * group, dim)
    shared = rng.random() < 0.3
    names = ("cmp",) if shared else ("cmp", "slc", "win")
    k, v = ({b: one(*shape, dim, learns=learned and not frozen) for b in names} for _ in "kv")
    gates = one(batch, tokens, heads * group, 3)
    branches = rng.choice([("cmp", "slc", "win")] * 3 + [("slc",), ("win",), ("cmp", "win")])
    blocks = torch.zeros(*shape, 4, dtype=torch.int32) if rng.random() < 0.2 else None
    given = (q, k["cmp"], v["cmp"]) if shared else (q, k, v)
    LAUNCHED.clear()
    options = {"cu_seqlens": cu, "blocks": blocks, "branches": branches, "backend": "triton"}
    o = nsa_attention(*given, gates, CONFIG, **options)
    leaves = [x for x in (q, *k.values(), *v.values(), gates) if x.requires_grad]
    if leaves:
        torch.autograd.grad(o, leaves, torch.zeros_like(o), allow_unused=True)
    table = torch.zeros(tokens, dim // 2)
    rotary.rotate(table, table, None, False, [q, k["cmp"]])
    return list(LAUNCHED)


def step(seed: int, how: str) -> list[tuple]:
    """The launches of a step from a cache, likewise."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice([0, 40, 300]) for _ in range(rng.choice([1, 2, 5])))
    phi, group = rng.choice(["mean", "mean", "linear", "mlp"]), rng.choice([1, 4, 16])
    dtype = rng.choice([torch.float16, torch.float32])
    if how == "double":
        dtype = torch.float32 if dtype == torch.float16 else torch.float16
    new, page = rng.choice([1, 1, 3]) + (how == "longer"), rng.choice([None, None, 64])
    made = Step(
        lengths, CONFIG, new, kv_heads=rng.choice([1, 2]), group=group, phi=phi, page=page,
        dtype=dtype, capacity=512, rotary=rng.random() < 0.3,
    )  # fmt: skip
    (q, k, v, gates), options = draw(made).arguments()
    if how in ("late", "wide"):
        room = 17 if how == "wide" else 1
        q = torch.zeros(*q.shape[:2], q.shape[2] + room, q.shape[3], dtype=dtype)[:, :, room:]
        if how == "late":
            gates = torch.zeros(gates.numel() + 1, dtype=gates.dtype)[1:].view_as(gates)
    LAUNCHED.clear()
    decode.decode(q, k, v, gates, **options)
    return list(LAUNCHED)


def counted(run: Any) -> Any:
    def counting(self, *args: Any, **kwargs: Any) -> Any:
        LOOKED.append(self.__name__)
        return run(self, *args, **kwargs)

    return counting


LOOKED: list[str] = []  # the launches that Triton looked at


def otherwise(seeds: int) -> dict[str, Any]:
    """Launches that differ where the call is known, of so many calls in all WAYS."""
    launch._known.clear()
    other, launches, looked, kernels = [], 0, 0, set()
    for seed, how in [(seed, how) for seed in range(seeds) for how in WAYS]:
        found = []
        for known in (False, True, True):
            launch.compiles_for = lambda x, known=known: known
            LOOKED.clear()
            found.append((step if seed % 4 == 1 else call)(seed, how))
        looked += len(LOOKED)
        launches += len(found[0])
        kernels |= {one[0][0] for one in found[0]}
        if not found[0] == found[1] == found[2]:
            other.append([seed, how])
    told = {"launches": launches, "looked at again": looked, "other": other}
    return told | {"kernels": sorted(kernels)}


def main() -> None:
    torch.set_num_threads(1)
    nothing_is_written()
    torch.linalg.vector_norm = lambda *_, **__: torch.ones(())
    triton.compiler.compile = lambda src, target, options: Compiled(src, options)
    JITFunction.run = counted(JITFunction.run)
    driver.set_active(Absent(90))
    backend.INTERPRETED = True
    launch.MOST = 10**6
    found, kind = {"all": otherwise(int(sys.argv[1]))}, launch._kind
    for fault, known_by in {
        "without alignment": lambda x: kind(x)[:-1],
        "without strides": lambda x: (x.shape, x.dtype, x.data_ptr() % 16),
        "without dtype": lambda x: (x.shape, x.stride(), x.data_ptr() % 16),
        "without shape": lambda x: (x.stride(), x.dtype, x.data_ptr() % 16),
    }.items():
        launch._kind = lambda x, f=known_by: f(x) if isinstance(x, Tensor) else kind(x)
        found[fault] = otherwise(int(sys.argv[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
