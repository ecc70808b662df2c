"""Ranks of one launch: equality, time and memory of the operation over shared sequences."""

import gc
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

from nsa.attention.api import nsa_attention
from nsa.model import parallel
from nsa.parallel.attention import context_parallel_attention
from nsa.parallel.mesh import ContextParallel
from whyhung.process.child import is_out_of_memory
from workbook.lab.measure.attention_inputs import Drawn, draw
from workbook.lab.measure.kernels import activities_of, device_work, gaps
from workbook.lab.measure.recorders import MIB
from workbook.lab.measure.shapes import Shape
from workbook.lab.measure.timing import extra_memory, gradients, mark, seconds_between, wait
from workbook.rooms.long_context.cells import Cell

REPEATS, FEW, LONG_MS = 7, 3, 300.0  # calls that are timed, and those of a longer call
COMPARED = 1 << 15  # rows of queries compared at once
MOST = 2.0**-7  # of the largest number: two units in the last place of bf16


def measure_rank(spec: dict) -> None:
    """Measure {"cells": [Cell.to_dict()], "device", "backend", "equal_up_to": T, "file"}.

    Rank 0 appends a row of each to `file` at once, see `Subject.measure` and `about`. A cell of
    fewer ranks than the launch has runs on every group of so many, and has the slowest group's time
    and the largest memory. Up to `equal_up_to` tokens every rank also computes the whole sequence
    alone, and compares.
    """
    place = parallel.start("ddp", device=spec["device"])
    try:
        device = torch.device(place.device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        known = about(device)
        for values in spec["cells"]:
            cell = Cell.from_dict(values)
            row = Subject(cell, device, spec["backend"]).measure(spec["equal_up_to"])
            if place.rank == 0:
                with Path(spec["file"]).open("a", encoding="utf-8") as file:
                    print(json.dumps({"cell": values} | row | known), file=file, flush=True)
    finally:
        place.close()


class Subject:
    """The operation over one cell's sequence, as this rank runs it."""

    def __init__(self, cell: Cell, device: torch.device, backend: str) -> None:
        self.cell, self.device, self.backend = cell, device, backend
        world = dist.get_world_size()
        options = {"method": cell.method, "heads_at_once": cell.heads_at_once, "check": False}
        self.context = ContextParallel()
        if cell.ranks > 1:
            sizes, names = (world // cell.ranks, cell.ranks), ("dp", "cp")
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
            self.context = ContextParallel.over(mesh, **options)

    def measure(self, equal_up_to: int) -> dict[str, Any]:
        """Row of the cell.

        outcome: "ok", "oom" or "error", with `message`. ms: {"forward", "backward"} from idle to
        idle, the median of calls, of the slowest rank each. memory_mib: peaks beyond inputs and
        outputs. allocated_mib, on a GPU: {"forward", "both"}, peaks of all tensors, in a forward
        alone and with the backward. difference: {name: largest difference from one rank's result
        over the largest value}. sending: {"sent_ms", "alone_ms", "step_ms"} of a profiled forward
        and backward on a GPU: collectives, those of them while nothing else ran, and all.
        """
        row: dict[str, Any] = {"outcome": "ok", "message": ""}
        try:
            if self.cell.ranks > 1 and self.cell.shape.tokens <= equal_up_to:
                row["difference"] = self._merged(self._difference(), largest)
            row |= self._timed(self._own())
        except Exception as error:
            ended = "oom" if is_out_of_memory(error) else "error"
            lines = str(error).splitlines() or [""]
            row |= {"outcome": ended, "message": f"{type(error).__name__}: {lines[0][:200]}"}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _own(self) -> Drawn:
        """This rank's rows; keys and values other than those of `_difference`, of their size."""
        shape = self.cell.own
        return draw(replace(shape, seed=shape.seed + dist.get_rank()), self.device)

    def _call(self, drawn: Drawn, blocks: Tensor | None = None) -> Tensor:
        inputs = (drawn.q, drawn.k, drawn.v, drawn.gates, self.cell.shape.config)
        options = {"backend": self.backend, "blocks": blocks}
        return context_parallel_attention(*inputs, self.context, **options)

    def _difference(self) -> dict[str, float]:
        """Differences of o and of gradients from the whole sequence on one rank, in fp64 on a CPU,
        else in the shape's dtype.

        On a GPU the selection is drawn and given to both: 16-bit compressed keys whose sums were
        added in another order decide ties otherwise. "rows" is then the share of queries and heads
        whose o differs by more than MOST where both select for themselves.
        """
        whole, blocks = draw(self.cell.shape, self.device), None
        layout = self.context.layout(self.cell.own.tokens)
        if self.device.type == "cpu":
            whole = wide(whole)
        else:
            blocks = some_blocks(self.cell.shape, self.device)
        mine = whole.fresh(lambda x: layout.shard(x, self.context.rank))
        config, leaves = self.cell.shape.config, whole.leaves()
        given, options = (whole.q, whole.k, whole.v, whole.gates, config), {"backend": self.backend}
        o = nsa_attention(*given, **options, blocks=blocks)
        wanted = [o.detach(), *gradients(o, list(leaves.values()), whole.do)]
        del o
        own = None if blocks is None else layout.shard(blocks, self.context.rank)
        got = self._call(mine, own)
        found = [got.detach(), *gradients(got, list(mine.leaves().values()), mine.do)]
        differ = {
            name: furthest(x, layout.shard(y, self.context.rank), float(y.abs().max()))
            for name, x, y in zip(("o", *leaves), found, wanted, strict=True)
        }
        if blocks is not None:
            del got, found, wanted
            with torch.no_grad():
                o = nsa_attention(*given, **options)
                apart = (self._call(mine) - layout.shard(o, self.context.rank)).abs().amax(-1)
                differ["rows"] = float((~(apart <= MOST * o.abs().max())).double().mean())
        return differ

    def _timed(self, drawn: Drawn) -> dict[str, Any]:
        leaves, do = list(drawn.leaves().values()), drawn.do
        o = self._call(drawn)
        gradients(o, leaves, do)  # kernels are compiled, buffers exist
        del o
        first = self._once(lambda: self._call(drawn).shape)
        repeats = REPEATS if first < LONG_MS else FEW
        forward, backward = [], []
        for _ in range(repeats):
            held: list[Tensor] = []
            forward.append(self._once(lambda: held.append(self._call(drawn))))  # noqa: B023
            backward.append(self._once(lambda: gradients(held.pop(), leaves, do)))  # noqa: B023
        base = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        memory = extra_memory(lambda: self._call(drawn), leaves, do, True)
        mib = {"forward": memory.forward, "backward": memory.backward}
        row = {"ms": {"forward": statistics.median(forward)}}
        row["ms"] |= {"backward": statistics.median(backward)}
        row["each_ms"] = {"forward": forward, "backward": backward}
        row["memory_mib"] = self._merged(mib, max)
        if self.device.type == "cuda":
            ahead = base / MIB + memory.forward + do.nbytes / MIB  # o is as large as its gradient
            back = ahead - memory.forward + memory.backward + sum(x.nbytes for x in leaves) / MIB
            row["allocated_mib"] = self._merged({"forward": ahead, "both": max(ahead, back)}, max)
            row["sending"] = self._sending(lambda: gradients(self._call(drawn), leaves, do))
        return row

    def _once(self, call: Callable[[], object]) -> float:
        """ms of one call that all ranks begin together, by the slowest."""
        wait(self.device)
        dist.barrier()
        began = mark(self.device)
        call()
        ended = mark(self.device)
        wait(self.device)
        return self._merged({"": 1e3 * seconds_between(began, ended)}, max)[""]

    def _sending(self, call: Callable[[], object]) -> dict[str, float]:
        wait(self.device)
        dist.barrier()
        with profile(activities=activities_of(self.device)) as seen:
            call()
            wait(self.device)
        work = device_work(seen.events())
        sent = [at for name, spans in work.items() if "nccl" in name.lower() for at in spans]
        other = [at for name, spans in work.items() if "nccl" not in name.lower() for at in spans]
        both = gaps(sent + other)
        return {
            "step_ms": both["step_ms"],
            "sent_ms": gaps(sent)["busy_ms"] if sent else 0.0,
            "alone_ms": both["busy_ms"] - gaps(other)["busy_ms"],
        }

    def _merged(self, values: Mapping[str, float], how: Callable) -> dict[str, float]:
        """Values of all ranks of the launch by `how`."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, dict(values))
        return {name: how(each[name] for each in every) for name in values}


def about(device: torch.device) -> dict[str, str | None]:
    """Names of the device, and versions of torch and of Triton, None without it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    triton = version("triton") if find_spec("triton") else None
    return {"device": name, "torch": torch.__version__, "triton": triton}


def wide(drawn: Drawn) -> Drawn:
    """The same inputs in fp64."""
    return drawn.fresh(Tensor.double)


def some_blocks(shape: Shape, device: torch.device) -> Tensor:
    """A selection [B, T, HKV, n] int32, one for both sides: a query's own block, and others."""
    config, generator = shape.config, torch.Generator(device).manual_seed(shape.seed)
    own = torch.arange(shape.tokens, device=device)[:, None, None] // config.select_block
    size = (shape.batch, shape.tokens, shape.kv_heads, config.select_count)
    drawn = torch.rand(size, generator=generator, device=device) * (own + 1)
    # Spread over the past, so that no block is there twice but for early queries.
    slot = torch.arange(config.select_count, device=device)
    spread = (drawn + slot * (own + 1)) / config.select_count
    blocks = spread.int().clamp(max=own.int())
    twice = torch.nn.functional.pad(blocks.diff(dim=-1) == 0, (1, 0))
    none = torch.iinfo(torch.int32).max
    blocks = blocks.masked_fill(twice, none).sort(-1).values  # ascending, and none last
    return blocks.masked_fill(blocks == none, -1)


def largest(values: Iterable[float]) -> float:
    """Largest value, NaN if one is: Python's own `max` may lose it."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def furthest(x: Tensor, y: Tensor, of: float) -> float:
    """Largest difference of [B, T, ...] relative to `of`, some rows at a time."""
    pairs = zip(x.split(COMPARED, 1), y.split(COMPARED, 1), strict=True)
    return largest(float((a.double() - b.double()).abs().max()) for a, b in pairs) / (of or 1.0)
