"""Measure one implementation at one shape: accuracy, time, memory, outcome, and last, graphs.

A failed capture leaves state behind (a stream in error, an allocator that still records), which
would affect every implementation that is measured after it in the same process.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from nsa.attention.witness import recording
from nsa.blocks import count_selectable
from whyhung.process.child import is_out_of_memory
from workbook.lab.measure import limits, timing
from workbook.lab.measure.accuracy import AccuracyError
from workbook.lab.measure.attention_inputs import Drawn, draw, mean_union, select_at
from workbook.lab.measure.limits import Ceilings
from workbook.lab.measure.shapes import Shape
from workbook.lab.measure.timing import Clock, NoTime
from workbook.rooms.comparison import check, implementations
from workbook.rooms.comparison.implementations import NSA, Implementation

NOT_COMPARED = "not compared: it computes another function"
UNKNOWN = Ceilings(math.nan, math.nan)
REVEAL_S = 10.0  # time limit for revealing a selection at a benchmark's own T
UNION_TILES = 64
# Tolerated fraction of the limit. Its random-number matmul draws more power than attention, which
# lowers power-bound clocks: on an H100 FlashAttention-4 reached 104 % of it.
BEYOND = 1.10
LATER = ("memory", "step")  # stages after which the times that matter are known
GRAPH_TOKENS, GRAPH_MS = 4096, 20.0  # launches matter only at short T


def empty(
    shape: Shape, implementation: Implementation, device: str = "cpu", ceilings: Ceilings = UNKNOWN
) -> dict:
    """Return the cell of a measurement that has not begun: one implementation at one shape.

    Modes: forward and backward, on a GPU step, and for short T graph_forward and graph_backward.
    """
    work = limits.work(shape, implementation.operation)
    return {
        "shape": shape.to_dict(),
        "name": implementation.name,
        "operation": implementation.operation,
        "message": implementation.other,  # why it ended so, and remarks
        "timing": "absolute" if device.startswith("cuda") else "not meaningful",
        "ceilings": asdict(ceilings),
        "limit_ms": {mode: done.limit_ms(ceilings) for mode, done in work.items()},
        "outcome": "not run",  # or ok, red, declined, skipped, oom, error; only "ok" carries speed
        "checked": "",  # what was compared with the exact result
        "errors": {},  # {mode: [worst, limit]}
        "latency_ms": {},  # {mode: [median, q20, q80]}
        "memory_mib": {},  # {mode: MiB}
        "paths": {},  # {branch: what served it}
        "union": {},  # {neighbours: distinct blocks}
    }


def fail(cell: dict, outcome: str, text: str) -> None:
    """Record a failure; speed, memory and passed checks are removed."""
    for name in ("latency_ms", "memory_mib", "errors"):
        cell[name].clear()
    cell |= {"checked": "", "outcome": outcome}
    if outcome == "red":
        cell["message"] = ""
    add(cell, text)


def add(cell: dict, text: str) -> None:
    """Append a remark to a cell's message."""
    cell["message"] = "; ".join(filter(None, (cell["message"], text)))


def brief(error: BaseException) -> str:
    """Type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


class Runner:
    """Measure implementations one after another on a device, caching checks already made."""

    def __init__(self, device: torch.device, clock: Clock, cpu_memory: bool) -> None:
        self.device, self.clock = device, clock
        self.memory = cpu_memory or device.type == "cuda"
        self.stage = ""
        self.broken = ""  # the device no longer answers, and why
        self.small: dict[tuple[str, Shape], tuple[dict, str, float]] = {}
        self.mark: list[torch.Tensor] = []  # of the inputs as they were drawn

    def draw(self, shape: Shape) -> tuple[Drawn | None, str]:
        """Return the inputs, or None and the reason."""
        if self.broken:
            return None, self.broken
        try:
            self.clock.check(0.0, "the inputs")
            drawn = draw(shape, self.device)
            self.mark = drawn.fingerprint()
            return drawn, ""
        except Exception as error:
            drawn, why = None, brief(error)
        self.release()
        return drawn, why

    def union(self, drawn: Drawn) -> dict[str, float]:
        """Mean count of distinct blocks of 4 and 8 neighbouring queries, from a sample of tiles."""
        with contextlib.suppress(Exception), torch.no_grad():
            tiles = drawn.shape.tokens // 8
            count = min(tiles, UNION_TILES)
            first = torch.linspace(0, tiles - 1, count, device=self.device).long() * 8
            rows = (first[:, None] + torch.arange(8, device=self.device)).flatten()
            importance = check.importance(drawn, rows, torch.float32)
            blocks = select_at(importance, rows, drawn.shape.config)
            return {str(n): mean_union(blocks, n) for n in (4, 8)}
        return {}

    def fill(self, cell: dict, implementation: Implementation, drawn: Drawn) -> None:
        """Measure an implementation and write the result into its cell."""
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
            add(cell, str(error))
        except AccuracyError as error:
            fail(cell, "red", str(error))
        except (Exception, SystemExit) as error:
            text, memory = f"{self.stage}: {brief(error)}", is_out_of_memory(error)
            if memory and self.stage in LATER:
                add(cell, text)
            else:
                fail(cell, "oom" if memory else "error", text)
        self._restore(cell, drawn)
        self.release()
        if self.broken:
            self.broken = f"the device failed in {implementation.name}: {self.broken}"

    def _restore(self, cell: dict, drawn: Drawn) -> None:
        """Fail an implementation that writes to its inputs, and restore them for the next one."""
        try:
            pairs = zip(self.mark, drawn.fingerprint(), strict=True)
            if all(torch.equal(before, now) for before, now in pairs):
                return
            again = draw(drawn.shape, self.device)
            spoilt, whole = ((*one.leaves().values(), one.do) for one in (drawn, again))
            with torch.no_grad():
                for x, y in zip(spoilt, whole, strict=True):
                    x.data.copy_(y)
        except Exception as error:
            self.broken = brief(error)
            return
        fail(cell, "red", f"it changes its inputs ({cell['message'] or cell['outcome']})")

    def _measure(self, cell: dict, implementation: Implementation, drawn: Drawn) -> None:
        reasons = implementation.why_not(drawn)
        backward = not reasons
        if reasons:
            with torch.no_grad():
                if implementation.why_not(drawn):
                    cell |= {"outcome": "declined", "message": "; ".join(reasons)}
                    return
            add(cell, f"forward only: {'; '.join(reasons)}")
        held = implementation.held_bytes(drawn.shape) / 2**30
        free = implementations.free_bytes(self.device) / 2**30
        if held > free:
            why = f"its T x T tensors take {held:.3g} GiB, {free:.3g} GiB are free"
            cell |= {"outcome": "skipped", "message": why}
            return
        self.stage = "accuracy check"
        self.clock.check(0.0, "the accuracy check")
        with recording() as witness:
            try:
                checked = self._check(cell, implementation, drawn, backward)
            except check.NoGradient as error:
                add(cell, f"forward only: {error}")
                backward = False
                checked = self._check(cell, implementation, drawn, backward)
            cell["paths"] = {b: sorted(p) for b, p in witness.record()["paths"].items()}
        self.clock.start()  # and the backward's
        self._time(cell, implementation, drawn, backward, checked)

    def _check(self, cell, implementation, drawn, backward) -> check.Checked | None:
        """Check accuracy; return the check at this T, None if there was none. Fills the cell."""
        if implementation.other:
            cell["checked"] = NOT_COMPARED
            with torch.set_grad_enabled(backward):
                implementation.call(drawn, None)
            return None
        shape = drawn.shape
        small = check.small(shape)
        key = (implementation.name, small)
        if key not in self.small or shape == small:
            first = drawn if shape == small else draw(small, self.device)
            checked = check.check(implementation, first, backward=backward)
            ms = 0.0
            if shape != small:
                with torch.no_grad():
                    ms = timing.once_ms(lambda: implementation.call(first, None), self.device)
            self.clock.start()  # some of its kernels are now compiled
            self.small[key] = (checked.by_mode(), checked.what, ms / 1e3)
        errors, what, small_s = self.small[key]
        cell |= {"errors": dict(errors), "checked": f"T={small.tokens}: {what}"}
        # A first guess: linear in T, which scores and masks exceed.
        guess_s = small_s * shape.batch * shape.tokens / (small.batch * small.tokens)
        self.clock.check(6 * guess_s if guess_s > 1 else 0.0, "this T")
        if shape == small:
            return checked
        with torch.no_grad():
            implementation.call(drawn, None)
            self.clock.start()  # and the kernels for this T
            forward_s = timing.once_ms(lambda: implementation.call(drawn, None), self.device) / 1e3
        self.clock.check(5 * forward_s, "the accuracy check at this T")
        passes = -(-count_selectable(shape.tokens, shape.config) // shape.value_dim)
        reveal = passes <= check.MOST_PASSES and passes * forward_s <= REVEAL_S
        if implementation.operation == NSA and not (reveal or implementation.takes_blocks):
            cell["checked"] += f"; T={shape.tokens}: not checked, it takes {passes} more forwards"
            return None
        checked = check.check(implementation, drawn, backward=backward, reveal=reveal)
        cell["errors"] = checked.by_mode()
        cell["checked"] += f"; T={shape.tokens}: {checked.what}"
        return checked

    def _time(self, cell, implementation, drawn, backward, checked) -> None:
        found, device = cell["latency_ms"], self.device
        leaves = [drawn.leaves()[n] for n in implementation.reaches(drawn)]
        do, other = drawn.do, implementation.other

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
        self.stage = "accuracy after the timing"
        if checked is not None:
            checked.hold_again(forward(), self.stage)
        for mode, limit in cell["limit_ms"].items():
            if warm and mode in found and limit > BEYOND * found[mode][0] and not other:
                add(cell, f"{mode}: faster than the limit, so it does not do all of the work")

    def release(self) -> None:
        """Free what a failed call held, and note if the device no longer responds."""
        if self.device.type == "cuda" and not self.broken:
            gc.collect()
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except Exception as error:
                self.broken = brief(error)


def add_graphs(
    measured: Sequence[tuple[dict, Shape, Implementation]],
    runner: Runner,
    say: Callable[[dict], None] = lambda cell: None,
) -> None:
    """Write graph_forward and graph_backward into the cells that ran, are short, and can be
    captured; into the others' messages, the reason. The outcome is unchanged."""
    for shape in dict.fromkeys(shape for _, shape, _ in measured):
        mine = [(cell, i) for cell, s, i in measured if s == shape and _eligible(cell, i)]
        if not mine:
            continue
        drawn, why = runner.draw(shape)
        for cell, implementation in mine:
            if drawn is None or runner.broken:
                add(cell, f"no CUDA graph: {why or runner.broken}")
                continue
            runner.clock.start()
            try:
                runner.clock.check(0.0, "a CUDA graph")
                capture(cell, implementation, drawn)
            except NoTime as error:
                add(cell, f"no CUDA graph: {error}")
            except (Exception, SystemExit) as error:
                add(cell, f"no CUDA graph: {brief(error)}")
            runner.release()
            if runner.broken:
                runner.broken = f"that of {implementation.name} broke the device: {runner.broken}"
            say(cell)
        del drawn
        runner.release()


def _eligible(cell: dict, implementation: Implementation) -> bool:
    ms, tokens = cell["latency_ms"], cell["shape"]["tokens"]
    ran = implementation.graph and cell["outcome"] == "ok" and "backward" in ms
    return ran and tokens <= GRAPH_TOKENS and ms["forward"][0] <= GRAPH_MS


def capture(cell: dict, implementation: Implementation, drawn: Drawn) -> None:
    """Time CUDA graphs on fresh leaves, unused by a forward on any other stream."""
    fresh = drawn.fresh()
    leaves = [fresh.leaves()[name] for name in implementation.reaches(fresh)]
    taken = timing.graph_latency(lambda: implementation.call(fresh, None), leaves, fresh.do)
    for mode, found in zip(("graph_forward", "graph_backward"), taken, strict=True):
        cell["latency_ms"][mode] = [found.median, found.q20, found.q80]
