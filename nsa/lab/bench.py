"""Every implementation side by side on the same inputs in one process: accuracy first, then speed.

How an implementation ended is a value: a cell is a flat dict with an `outcome` of OUTCOMES. Only
"ok" carries speed.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from nsa.attention.witness import recording
from nsa.blocks import count_selectable
from nsa.lab import dense, implementations, limits, peers, row_check, timing
from nsa.lab.accuracy import Red
from nsa.lab.attention_inputs import Drawn, draw, importance_at, mean_union, select_at
from nsa.lab.implementations import DENSE, NSA, Implementation
from nsa.lab.limits import Ceilings
from nsa.lab.out_of_memory import is_out_of_memory
from nsa.lab.shapes import Shape
from nsa.reference.compress import Phi, compress_keys

OUTCOMES = ("ok", "red", "declined", "skipped", "oom", "error", "not run")
CAP_S = 120.0  # one implementation's share of the time at one shape
REVEAL_S = 10.0  # what finding out a selection at a benchmark's own T may take
GRAPH_TOKENS = 4096  # launches are felt at short T alone
GRAPH_MS = 20.0
UNION_TILES = 64

Say = Callable[[str], None]


class Clock:
    """What is left of the whole time and of one implementation's share, in seconds."""

    def __init__(self, budget_s: float | None, cap_s: float = CAP_S) -> None:
        now = time.monotonic()
        self.end = float("inf") if budget_s is None else now + budget_s
        self.cap_s = cap_s
        self.share = now + cap_s

    def start(self) -> None:
        """The next implementation's share begins."""
        self.share = time.monotonic() + self.cap_s

    def check(self, needed_s: float, what: str) -> None:
        """Raises NoTime where `what`, which takes needed_s, does not fit any more."""
        now = time.monotonic()
        for end, name in ((self.end, "the budget"), (self.share, "this implementation's share")):
            if now + needed_s > end:
                left = max(0.0, end - now)
                raise NoTime(f"{what} needs {needed_s:.3g} s, {name} has {left:.3g} s left")


class NoTime(Exception):
    """What was to come does not fit into the time that is left."""


def all_implementations(
    backends: Sequence[str] | None = None,
    paths: Sequence[str] = (),
    with_dense: bool = True,
) -> list[Implementation]:
    """Backends, dense attention, fla-core and peers; those that T x T slows down come last."""
    ours = implementations.backends(backends)
    theirs = [*(dense.providers() if with_dense else []), peers.fla(), *map(peers.peer, paths)]
    first = [i for i in ours if i.name in ("triton", "flash")]
    return [*first, *theirs, *(i for i in ours if i not in first)]


def bench(
    shapes: Sequence[Shape],
    *,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] = (),
    with_dense: bool = True,
    device: str | torch.device = "cpu",
    budget_s: float | None = None,
    cap_s: float = CAP_S,
    cpu_memory: bool = False,
    say: Say = lambda line: None,
) -> list[dict]:
    """One cell for each shape and implementation, in that order.

    A cell has `shape` (Shape.to_dict), `name`, `operation`, `outcome`, `message`, `checked`,
    `errors` {mode: [worst, limit]}, `latency_ms` {mode: [median, q20, q80]}, `limit_ms` {mode},
    `memory_mib` {mode}, `paths` (the witness), `union` {neighbours: blocks}, `ceilings` and
    `timing`: "absolute" on a GPU, "not meaningful" on a CPU. Modes: forward, backward, step,
    graph_forward, graph_backward.

    `cpu_memory`: record memory on a CPU, too, by torch's profiler,
    some builds of which write to stderr. ValueError for an unknown backend, before anything runs.
    """
    chosen = all_implementations(backends, peers, with_dense)
    device = torch.device(device)
    clock = Clock(budget_s, cap_s)
    ceilings: dict[str, Ceilings] = {}
    bench_one = _Bench(device, clock, cpu_memory)
    cells = []
    for shape in shapes:
        if shape.dtype not in ceilings:
            ceilings[shape.dtype] = limits.measure_ceilings(device, shape.torch_dtype)
        common = {"ceilings": asdict(ceilings[shape.dtype]), "union": {}}
        common["timing"] = "absolute" if device.type == "cuda" else "not meaningful"
        say(f"{shape}")
        drawn, why = bench_one.draw(shape)
        if drawn is not None:
            common["union"] = bench_one.union(drawn)
        for implementation in chosen:
            work = limits.work(shape, implementation.operation)
            limit_ms = {m: w.limit_ms(ceilings[shape.dtype]) for m, w in work.items()}
            cell = _empty(shape, implementation) | common | {"limit_ms": limit_ms}
            cell |= {"outcome": "not run", "message": why} if drawn is None else {}
            if drawn is not None:
                bench_one.fill(cell, implementation, drawn)
            cells.append(cell)
            say("  " + line_of(cell))
        del drawn
        bench_one.release()
    return cells


def _empty(shape: Shape, implementation: Implementation) -> dict:
    return {
        "shape": shape.to_dict(),
        "name": implementation.name,
        "operation": implementation.operation,
        "outcome": "",
        "message": implementation.other,
        "checked": "",
        **{name: {} for name in ("errors", "latency_ms", "memory_mib", "paths")},
    }


class _Bench:
    """One process's device, clock and what was found out about implementations so far."""

    def __init__(self, device: torch.device, clock: Clock, cpu_memory: bool) -> None:
        self.device, self.clock = device, clock
        self.memory = cpu_memory or device.type == "cuda"
        self.stage = ""
        self.broken = ""  # the device no longer answers, and why
        self.small: dict[tuple[str, Shape], tuple[str, float]] = {}

    def draw(self, shape: Shape) -> tuple[Drawn | None, str]:
        """The inputs, or None and the reason."""
        found, why = None, self.broken
        if not why:
            try:
                self.clock.check(0.0, "the inputs")
                found = draw(shape, self.device)
            except Exception as error:
                why = _message(error)
        if found is None:
            self.release()
        return found, why

    def union(self, drawn: Drawn) -> dict[str, float]:
        """Mean distinct blocks of 4 and 8 neighbouring queries, from a sample of tiles."""
        shape, found = drawn.shape, {}
        with contextlib.suppress(Exception), torch.no_grad():
            rows = _tiles(shape.tokens, self.device)
            k = drawn.by_branch("k")["cmp"].float()
            k_cmp = compress_keys(k, Phi(), shape.config)
            scores = importance_at(
                drawn.q[:, rows].float(), k_cmp, rows, shape.tokens, shape.config
            )
            blocks = select_at(scores, rows, shape.config)
            found = {str(n): mean_union(blocks, n) for n in (4, 8)}
        return found

    def fill(self, cell: dict, implementation: Implementation, drawn: Drawn) -> None:
        """Runs it and writes into the cell how that went."""
        if self.broken:
            cell |= {"outcome": "not run", "message": self.broken}
            return
        self.clock.start()
        self.stage = "start"
        try:
            cell["outcome"] = "ok"
            self._measure(cell, implementation, drawn)
        except NoTime as error:
            cell["outcome"] = "ok" if "forward" in cell["latency_ms"] else "not run"
            _add(cell, str(error))
        except Red as error:
            cell |= {"outcome": "red", "message": str(error)}
        except Exception as error:
            cell["outcome"] = "oom" if is_out_of_memory(error) else "error"
            _add(cell, f"{self.stage}: {_message(error)}")
        self.release()
        if self.broken:
            self.broken = f"the device failed in {implementation.name}: {self.broken}"

    def _measure(self, cell, implementation, drawn) -> None:
        reasons = implementation.why_not(drawn)
        backward = not reasons
        if reasons:
            with torch.no_grad():
                if implementation.why_not(drawn):
                    cell |= {"outcome": "declined", "message": "; ".join(reasons)}
                    return
            _add(cell, f"forward only: {'; '.join(reasons)}")
        held = implementation.held_bytes(drawn.shape) / 2**30
        free = implementations.free_bytes(self.device) / 2**30
        if held > free:
            why = f"its T x T tensors take {held:.3g} GiB, {free:.3g} GiB are free"
            cell |= {"outcome": "skipped", "message": why}
            return
        self.stage = "accuracy check"
        self.clock.check(0.0, "the accuracy check")
        with recording() as witness:
            self._check(cell, implementation, drawn, backward)
            cell["paths"] = {b: sorted(p) for b, p in witness.record()["paths"].items()}
        self.clock.start()  # kernels are compiled now
        self._time(cell, implementation, drawn, backward)

    def _check(self, cell, implementation, drawn, backward) -> None:
        if implementation.other:
            cell["checked"] = "not compared: it computes another function"
            with torch.set_grad_enabled(backward):
                implementation.call(drawn, None)
            return
        shape = drawn.shape
        small = row_check.small(shape)
        key = (implementation.name, small)
        if key not in self.small:
            first = draw(small, self.device)
            checked = row_check.check(implementation, first, backward=backward)
            with torch.no_grad():
                ms = timing.once_ms(lambda: implementation.call(first, None), self.device)
            self.small[key] = (f"T={small.tokens}: {checked.what}", ms / 1e3)
            _note(cell, checked)
        cell["checked"], small_s = self.small[key]
        # A first guess: linear in T, which scores and masks exceed.
        guess_s = small_s * shape.batch * shape.tokens / (small.batch * small.tokens)
        self.clock.check(6 * guess_s if guess_s > 1 else 0.0, "this T")
        if shape.tokens == small.tokens and shape.heads == small.heads:
            return
        with torch.no_grad():
            implementation.call(drawn, None)
            forward_s = timing.once_ms(lambda: implementation.call(drawn, None), self.device) / 1e3
        self.clock.check(5 * forward_s, "the accuracy check at this T")
        passes = -(-count_selectable(shape.tokens, shape.config) // shape.value_dim)
        reveal = passes <= row_check.MOST_PASSES and passes * forward_s <= REVEAL_S
        if implementation.operation == NSA and not (reveal or implementation.takes_blocks):
            cell["checked"] += f"; T={shape.tokens}: not checked, it takes {passes} more forwards"
            return
        checked = row_check.check(implementation, drawn, backward=backward, reveal=reveal)
        _note(cell, checked)
        cell["checked"] += f"; T={shape.tokens}: {checked.what}"

    def _time(self, cell, implementation, drawn, backward) -> None:
        found, device = cell["latency_ms"], self.device
        leaves = [drawn.leaves()[n] for n in implementation.reaches(drawn)]
        do = drawn.do

        def forward():
            with torch.set_grad_enabled(backward):
                return implementation.call(drawn, None)

        def record(mode: str, call: Callable[[], object]) -> None:
            self.stage = mode
            self.clock.check(0.0, mode)
            taken = timing.latency(call, device)
            found[mode] = [taken.median, taken.q20, taken.q80]

        forward()
        record("forward", forward)
        if backward:
            o = forward()
            timing.gradients(o, leaves, do, keep=True)
            self.clock.check(0.004 * found["forward"][0], "backward")
            record("backward", lambda: timing.gradients(o, leaves, do, keep=True))
            del o
        both_s = (found["forward"][0] + found.get("backward", [0])[0]) / 1e3
        if self.memory:
            self.stage = "memory"
            self.clock.check(both_s, "memory")
            gc.collect()
            memory = timing.extra_memory(forward, leaves, do, backward)
            cell["memory_mib"] = {m: v for m, v in asdict(memory).items() if v is not None}
        if backward:
            self.clock.check(3 * both_s, "step")
            record("step", lambda: timing.gradients(forward(), leaves, do))
        short = drawn.shape.tokens <= GRAPH_TOKENS and found["forward"][0] <= GRAPH_MS
        if device.type == "cuda" and backward and short:
            self._graph(cell, forward, leaves, do)

    def _graph(self, cell, forward, leaves, do) -> None:
        try:
            ahead, back = timing.graph_latency(forward, leaves, do)
        except Exception as error:
            _add(cell, f"no CUDA graph: {_message(error)}")
            return
        for mode, taken in (("graph_forward", ahead), ("graph_backward", back)):
            cell["latency_ms"][mode] = [taken.median, taken.q20, taken.q80]

    def release(self) -> None:
        """Gives back what a failed call held, and sees whether the device still answers."""
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except Exception as error:
                self.broken = _message(error)


def _tiles(tokens: int, device: torch.device) -> torch.Tensor:
    """Positions of up to UNION_TILES tiles of 8 neighbours, spread evenly over the sequence."""
    tiles = tokens // 8
    count = min(tiles, UNION_TILES)
    first = torch.linspace(0, tiles - 1, count, device=device).long() * 8
    return (first[:, None] + torch.arange(8, device=device)).flatten()


def _note(cell: dict, checked: row_check.Checked) -> None:
    """Keeps the errors of the check at the longer T, which comes last."""
    cell["errors"] = {"forward": [checked.forward.worst, checked.forward.limit]}
    if checked.backward is not None:
        cell["errors"]["backward"] = [checked.backward.worst, checked.backward.limit]


def _add(cell: dict, text: str) -> None:
    cell["message"] = "; ".join(filter(None, (cell["message"], text)))


def _message(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def measure_spec(spec: dict) -> dict:
    """`bench` as a trial: {"shapes", and its keyword arguments} -> {"cells"}."""
    given = dict(spec)
    shapes = [Shape.from_dict(values) for values in given.pop("shapes")]
    threads = given.pop("threads", None)
    if threads:
        torch.set_num_threads(threads)
    return {"cells": bench(shapes, say=lambda line: print(line, flush=True), **given)}


def line_of(cell: dict) -> str:
    """One line for a person who waits."""
    times = [
        f"{mode} {cell['latency_ms'][mode][0]:.3g}"
        for mode in ("forward", "backward", "graph_forward", "graph_backward")
        if mode in cell["latency_ms"]
    ]
    said = ", ".join(times) + " ms" * bool(times)
    return f"{cell['name']}: {' '.join(filter(None, (cell['outcome'], said, cell['message'])))}"


def limits_as_cells(cells: Sequence[dict]) -> Iterator[dict]:
    """The limit of each shape and operation as a cell of its own, for tables and plots."""
    seen = set()
    for cell in cells:
        key = (repr(cell["shape"]), cell["operation"])
        if key not in seen:
            seen.add(key)
            latency = {mode: [ms, ms, ms] for mode, ms in cell["limit_ms"].items()}
            name = "limit" if cell["operation"] != DENSE else "dense limit"
            yield cell | {
                "name": name, "outcome": "ok", "message": "", "checked": "", "errors": {},
                "latency_ms": latency, "memory_mib": {}, "paths": {},
            }  # fmt: skip
