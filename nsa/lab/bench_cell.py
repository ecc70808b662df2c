"""One implementation at one shape: accuracy, then time and memory, and how it ended."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import asdict

import torch

from nsa.attention.witness import recording
from nsa.blocks import count_selectable
from nsa.lab import implementations, row_check, timing
from nsa.lab.accuracy import Red
from nsa.lab.attention_inputs import Drawn, draw, importance_at, mean_union, select_at
from nsa.lab.clock import Clock, NoTime
from nsa.lab.implementations import NSA, Implementation
from nsa.lab.out_of_memory import is_out_of_memory
from nsa.lab.shapes import Shape
from nsa.reference.compress import Phi, compress_keys

REVEAL_S = 10.0  # what finding out a selection at a benchmark's own T may take
GRAPH_TOKENS = 4096  # launches are felt at short T alone
GRAPH_MS = 20.0
UNION_TILES = 64


def empty(shape: Shape, implementation: Implementation) -> dict:
    """A cell of `nsa.lab.bench.bench` that nobody has filled yet."""
    return {
        "shape": shape.to_dict(),
        "name": implementation.name,
        "operation": implementation.operation,
        "outcome": "",
        "message": implementation.other,
        "checked": "",
        **{name: {} for name in ("errors", "latency_ms", "memory_mib", "paths")},
    }


class Runner:
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
        self.clock.start()  # and the backward's
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
            ms = 0.0
            if shape != small:
                with torch.no_grad():
                    ms = timing.once_ms(lambda: implementation.call(first, None), self.device)
            self.clock.start()  # some of its kernels are compiled now
            self.small[key] = (f"T={small.tokens}: {checked.what}", ms / 1e3)
            _note(cell, checked)
        cell["checked"], small_s = self.small[key]
        # A first guess: linear in T, which scores and masks exceed.
        guess_s = small_s * shape.batch * shape.tokens / (small.batch * small.tokens)
        self.clock.check(6 * guess_s if guess_s > 1 else 0.0, "this T")
        if shape == small:
            return
        with torch.no_grad():
            implementation.call(drawn, None)
            self.clock.start()  # and those for this T
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

        warm = device.type == "cuda"  # on a CPU the check has run it before, and time means little
        if warm:
            forward()
        record("forward", forward)
        if backward:
            o = forward()
            if warm:
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
        if backward and warm:
            self.clock.check(3 * both_s, "step")
            record("step", lambda: timing.gradients(forward(), leaves, do))
        short = drawn.shape.tokens <= GRAPH_TOKENS and found["forward"][0] <= GRAPH_MS
        if device.type == "cuda" and backward and short and implementation.graph:
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
        if self.device.type == "cuda" and not self.broken:
            gc.collect()
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
