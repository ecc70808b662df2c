"""Compiles what the launchers launch, for a GPU that need not be there: a program of its own.

Interpreted kernels cannot be compiled, so this runs apart from the tests. It stands in for Triton's
driver and stops every launch once it is compiled; the launchers themselves run on CPU tensors.
"""

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from decode_inputs import Step, draw
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa.config import NSAConfig

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Head dims, dtype, group: the aims' shape and such as take other paths.
SHAPES = {
    "main": (128, 128, torch.bfloat16, 16),
    "narrow": (64, 64, torch.bfloat16, 6),
    "fp32": (64, 64, torch.float32, 4),
    "wide": (192, 128, torch.float16, 16),
    "six": (192, 128, torch.bfloat16, 6),
    "thin": (96, 16, torch.bfloat16, 16),
}
REDUCE = r"\"tt\.reduce\"\(.*?<\{axis = (\d+) : i32\}>.*?\}\) : \((tensor<[^#]*?, (#.*?)>)[,)]"
DOT = r"tt\.dot .*: tensor<(\d+)x"  # the rows of a product
TOKENS = 2048, 16384  # beyond the window and what a query selects; what is done otherwise if long


class Absent:
    """A driver for a GPU of the given architecture that is not there."""

    def __init__(self, architecture: int):
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record(architecture: int, only: str) -> dict:
    """Makes launches compile and no more; returns what fills with (kernel name, binary).

    only: in the names of modules whose kernels are compiled; others are not launched at all.
    """
    from nsa.kernels import tiles

    # Before a launcher's module takes over the name.
    tiles.architecture = lambda device: architecture
    driver.set_active(Absent(architecture))
    plain, found = JITFunction.run, {}

    def run(self, *args, grid, warmup, **kwargs):
        if only not in self.__module__:
            return None
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        found[kernel.hash] = f"{self.__module__}.{self.__name__}", kernel
        return kernel

    JITFunction.run = run
    nothing_is_written()
    return found


def nothing_is_written() -> None:
    """Zero all memory where nothing is launched: torch must not index with what memory held."""
    torch.empty = torch.zeros
    torch.empty_like = torch.zeros_like
    Tensor.new_empty = Tensor.new_zeros


def reach_warps(name: str, sinks: bool, offset: bool = False) -> None:
    """Launches what specialized warps ever take of a forward and a backward, and little else."""
    from nsa.kernels import ops
    from nsa.kernels.hopper import launches
    from nsa.kernels.registration import sizes_of

    launches.compiles_for = lambda x: True
    plain = launches.tile_for

    def if_ever(kernel, asked, span, *given):
        looks_back = span is not None and span.lookback is not None
        known = (kernel, SHAPES[name][0], looks_back) in launches.FASTER
        return plain(kernel, known, span, *given)

    launches.tile_for = if_ever
    (dim, value_dim, dtype, group), heads, tokens = SHAPES[name], 2, TOKENS[0]

    def tensor(rows: int, heads: int, width: int) -> Tensor:
        return torch.zeros(rows, heads, width, dtype=dtype)

    q, gates = tensor(tokens, heads * group, dim), tensor(tokens, heads * group, 3)
    k, v = tensor(tokens, heads, dim), tensor(tokens, heads, value_dim)
    given = q, k[:127], v[:127], k, v, k, v, gates, torch.zeros(heads * group, 3) if sinks else None
    where, among = (None, 1, sizes_of(NSAConfig()), dim**-0.5), ()
    if offset:
        among = torch.full((1,), tokens // 2, dtype=torch.int32), None, tokens
        given = (q[: tokens // 2], *given[1:7], gates[: tokens // 2], given[-1])
    o, *kept, blocks = ops.attend(*given, None, *where, True, *among)
    ops.attend_backward(o, *given, blocks, None, o, *kept, *where[1:], True, *among)


def reach_one_key(name: str) -> None:
    """Launches dq of one compressed block and a sink by specialized warps, and makes delta."""
    from nsa.blocks import compressed_span
    from nsa.kernels.hopper import launches
    from nsa.kernels.sequences import Axis
    from nsa.kernels.span_bwd import span_dq

    launches.compiles_for = lambda x: True
    dim, _, dtype, _ = SHAPES[name]
    span = compressed_span(NSAConfig())
    q, gates = (torch.zeros(span.length, 2, width, dtype=dtype) for width in (dim, 3))
    k, rows = q[:1], torch.zeros(2, span.length)
    along = span, Axis(1, span.length), Axis(1, 1), dim**-0.5
    kept, dgates = rows.clone(), gates.float()
    span_dq(q, k, k, q, rows, gates, 0, *along, specialized=True, kept=kept, dgates=dgates)


def reach(
    name: str,
    tokens: int,
    packed: bool,
    late: bool = False,
    sinks: bool = False,
    offset: bool = False,
) -> None:
    """Launches every kernel that a forward and a backward of the shape need.

    late: of tensors that begin where TMA cannot fetch; offset: of the newest half of the queries.
    """
    from nsa.attention.backends.triton import SOUND
    from nsa.kernels import compress, ops, rotary
    from nsa.kernels.registration import sizes_of

    (dim, value_dim, dtype, group), kv_heads, config = SHAPES[name], 2, NSAConfig()
    sizes, scale = sizes_of(config), dim**-0.5
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32) if packed else None
    value_dim = max(value_dim, SOUND) if dtype.itemsize == 2 else value_dim  # as the backend does

    def tensor(heads: int, width: int) -> Tensor:
        all_of_it = torch.zeros(tokens * heads * width + late, dtype=dtype)
        return all_of_it[int(late) :].view(tokens, heads, width)

    q, k, v = tensor(kv_heads * group, dim), tensor(kv_heads, dim), tensor(kv_heads, value_dim)
    gates = tensor(kv_heads * group, 3)
    where = cu_seqlens, 1, sizes
    k_cmp, v_cmp = compress.compress_mean(k, v, *where)
    compress.compress_mean_backward(k_cmp, v_cmp, cu_seqlens, tokens, 1, sizes)
    among = ()
    if offset:
        q, gates = q[: tokens // 2], gates[: tokens // 2]
        starts = torch.full((1,), tokens // 2, dtype=torch.int32)
        among = starts, cu_seqlens // 2 if packed else None, tokens
    ops.select(q, k_cmp, *where, scale, *among)
    given = q, k_cmp, v_cmp, k, v, k, v, gates, torch.zeros(q.shape[1], 3) if sinks else None
    o, *kept, blocks = ops.attend(*given, None, *where, scale, True, *among)
    plain = 1, sizes, scale, True, *among
    ops.attend_backward(o, *given, blocks, cu_seqlens, o, *kept, *plain)
    table, positions = torch.zeros(tokens, dim // 2), torch.arange(tokens) if packed else None
    for back in (False, True):
        rotary.rotate(table, table, positions, back, [q[None], k[None]])


# Batch, new tokens, page and phi of a decode step: few sequences, cut up, and many, in pages.
STEPS = (1, 2, None, "mlp"), (256, 1, 64, "mean")
FEW = ((2, 1, None, "mean"),)


def reach_decode(
    name: str, tokens: int, architecture: int, steps=STEPS, sinks: bool = False
) -> None:
    """Launch every kernel of these decode steps."""
    from nsa.kernels import decode

    (dim, value_dim, dtype, group), heads, config = SHAPES[name], 2, NSAConfig()
    for batch, new, page, phi in steps:
        call = decode.Call(
            batch, heads, group, dim, value_dim, new, tokens, config, dtype == torch.float32,
            architecture, 132,
        )  # fmt: skip
        step = Step(
            (0,) * batch, config, new, kv_heads=heads, group=group, dim=dim, value_dim=value_dim,
            phi=phi, rotary=phi != "mean", page=page, dtype=dtype, capacity=tokens,
        )  # fmt: skip
        args, kwargs = draw(step).arguments()
        kwargs["sinks"] = torch.zeros(args[0].shape[2], 3) if sinks else None
        decode.decode(*args, **kwargs, tuned=decode.tuning(call))


def serialized(ptx: str) -> bool:
    """True if ptxas makes each product of a warpgroup wait for the one before."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [BIN / "ptxas", "-v", "--gpu-name", "sm_90a", "-o", os.devnull, file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return "wgmma.mma_async instructions are serialized" in said


def kernels() -> list[str]:
    """Every kernel of nsa.kernels but those for specialized warps, which are in a folder of theirs:
    the compiled functions that no other one calls."""
    import nsa.kernels

    names, called = [], set()
    for module in pkgutil.iter_modules(nsa.kernels.__path__, "nsa.kernels."):
        for name, x in vars(importlib.import_module(module.name)).items():
            if isinstance(x, JITFunction) and x.__module__ == module.name:
                names.append(f"{module.name}.{name}")
                calls = [n.func for n in ast.walk(ast.parse(x.src)) if isinstance(n, ast.Call)]
                found = (x.fn.__globals__.get(f.id) for f in calls if isinstance(f, ast.Name))
                jitted = [f for f in found if isinstance(f, JITFunction)]
                called |= {f"{f.__module__}.{f.__name__}" for f in jitted}
    return [name for name in names if name not in called]


def lanes_along(axis: int, layout: str, named: dict[str, str]) -> list[int]:
    """Steps along an axis by each bit of a lane's number, where a layout says so."""
    if layout.startswith("#ttg.slice"):
        dim, parent = re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout).groups()
        return lanes_along(axis + (axis >= int(dim)), parent, named)
    written = re.search(r"ttg\.linear<.*lane = (\[.*?\]), warp", named.get(layout, layout))
    return [step[axis] for step in json.loads(written[1])] if written else []


def apart(ttgir: str) -> list[str]:
    """Reductions over lanes that are not neighbours: Triton 3.6 leaves some of those lanes out.

    It combines lanes of neighbouring bits, as many as the axis has, from its lowest bit on.
    """
    named, found = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE)), []
    for axis, kind, layout in re.findall(REDUCE, ttgir, re.DOTALL):
        bits = [i for i, step in enumerate(lanes_along(int(axis), layout, named)) if step]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(f"{kind} over axis {axis}")
    return found


def crossed(sass: str) -> list[str]:
    """Additions of 64 bits that take both halves of a sum out of one uniform register.

    ptxas does so with the address of a product's second operand, of 16 or 32 columns, where Triton
    unrolls a loop over the one key of one token: wgmma then reads outside of shared memory.
    """
    found, low, wrote = [], {}, {}
    for number, line in enumerate(sass.splitlines()):
        told = re.search(r"\*/ +(?:@!?U?P\d +)?(U\w[\w.]*|R2UR) (UR\d+|UP\d)(.*)", line)
        if not told:
            continue
        kind, into, rest = told.groups()
        if high := re.match(r", (UR\d+), (?:-?0x\w+|UR\d+), URZ, (UP\d)", rest):
            source, carry = high.groups()
            begun = low.get(carry)
            same = begun is not None and begun[0] == source
            if kind == "UIADD3.X" and same and wrote.get(source, -1) < begun[1]:
                found.append(line.split("/*")[1].split("*/")[1].strip(" ;"))
        wrote[into] = number
        if ".64" in kind or "WIDE" in kind:
            wrote[f"UR{int(into[2:]) + 1}"] = number
        if first := re.match(r", (UP\d), (UR\d+), 0x", rest):
            low[first[1]] = first[2], number
    return found


def dropped(ptx: str, sass: str) -> int:
    """Products of warpgroups in the PTX that the machine code lacks.

    ptxas leaves those out whose sums, of a loop unrolled to one step, are first of all negated.
    """
    made = re.findall(r"HGMMA\.\S+ (?!RZ, gdesc\[URZ\])", sass)
    return ptx.count("wgmma.mma_async.") - len(made)


def facts(name: str, kernel, read: bool) -> dict:
    """Costs of one binary: bytes of shared memory, registers of a thread, bytes of them spilled.

    `rows` are those of its largest product; `wgmma` says whether it uses Hopper's. read: whether
    to read its machine code.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [BIN / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [BIN / "cuobjdump", "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True).stdout if read else ""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "kernel": name,
        "shared": kernel.metadata.shared,
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "warps": kernel.metadata.num_warps,
        "rows": max((int(m) for m in re.findall(DOT, kernel.asm.get("ttir", ""))), default=0),
        "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
        "apart": apart(kernel.asm["ttgir"]),
        "crossed": crossed(sass),
        "dropped": dropped(kernel.asm["ptx"], sass) if read else 0,
        "serialized": "ttir" not in kernel.asm and serialized(kernel.asm["ptx"]),
    }


if __name__ == "__main__":
    target, shape, kind = sys.argv[1:]
    torch.set_num_threads(1)
    binaries = record(int(target), ".hopper." if kind.startswith("warps") else "")
    sinks = kind.endswith("sinks")
    if kind == "one-key":
        reach_one_key(shape)
    elif kind.startswith("warps"):
        reach_warps(shape, sinks, kind.endswith("offset"))
    else:
        # What is otherwise in long sequences is so whatever the call has beside them.
        lengths = TOKENS if (shape, kind) == ("main", "dense") else TOKENS[:1]
        lengths = {"one": (1,), "odd": (70,)}.get(kind, lengths)
        for tokens in lengths:
            options = kind == "odd", sinks, "offset" in kind
            reach(shape, tokens, "packed" in kind, *options)
    if shape == "main" and kind in ("dense", "sinks", "packed-sinks"):
        reach_decode(shape, TOKENS[-1], int(target), sinks=sinks)
    if (shape, kind) == ("main", "dense"):
        reach_decode("six", 2944, int(target), FEW)
    compiled = [facts(*found, kind in ("one", "odd", "one-key")) for found in binaries.values()]
    print(json.dumps({"compiled": compiled, "kernels": kernels()}))
