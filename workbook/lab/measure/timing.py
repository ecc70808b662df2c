"""Latency and memory of a call, interleaved A/B timing of steps, and benchmark time budgets."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.model.capture import on_stream
from nsa.model.train import Trainer
from workbook.lab.measure.recorders import MIB, CpuRecorder, live_cpu_storages

CAP_S = 60.0  # an implementation's share, restarted when kernels may have been compiled
SLOW_MS = 300.0  # a slower call is repeated a few times, not for a fixed time
VERY_SLOW_MS = 5000.0
LEAST = 9  # minimum calls per median, below SLOW_MS
ROWS, ROW_MS = 15, 5.0  # rows of consecutive calls, and duration of a row
ORDER = 0.02  # of the largest value: tolerance for bf16 sums in another order


class Clock:
    """Remaining seconds of the total budget and of one implementation's share."""

    def __init__(self, budget_s: float | None, cap_s: float = CAP_S) -> None:
        now = time.monotonic()
        self.end = float("inf") if budget_s is None else now + budget_s
        self.cap_s, self.share = cap_s, now + cap_s

    def start(self) -> None:
        """Start the next implementation's share."""
        self.share = time.monotonic() + self.cap_s

    def check(self, needed_s: float, what: str) -> None:
        """Raise NoTime if `what`, which takes needed_s, no longer fits."""
        now = time.monotonic()
        for end, name in ((self.end, "the budget"), (self.share, "this implementation's share")):
            if now + needed_s > end:
                if now >= end:
                    raise NoTime(f"{name} was used up before {what}")
                raise NoTime(f"{what} needs {needed_s:.3g} s, {name} has {end - now:.3g} s left")


class NoTime(Exception):
    """The next measurement does not fit into the remaining time."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds: the median and the 20 % and 80 % quantiles."""

    median: float
    q20: float
    q80: float


@dataclass(frozen=True)
class Memory:
    """Peak MiB excluding inputs and outputs. Backward includes tensors saved by the forward."""

    forward: float
    backward: float | None


def latency(call: Callable[[], object], device: torch.device) -> Latency:
    """Measure the latency of a warm call: with triton's do_bench on a GPU, a clock on a CPU."""
    first = once_ms(call, device)
    if device.type == "cuda" and first < SLOW_MS:
        from triton.testing import do_bench

        rep = max(200, LEAST * first)  # ms; do_bench does as many calls as fit
        median, q20, q80 = do_bench(call, warmup=50, rep=rep, quantiles=[0.5, 0.2, 0.8])
        return Latency(median, q20, q80)
    times = [first]
    if first < (VERY_SLOW_MS if device.type == "cuda" else SLOW_MS):
        times += [once_ms(call, device) for _ in range(2 if first > SLOW_MS else 4)]
    low, high = min(times), max(times)
    if len(times) >= 5:
        low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Latency(statistics.median(times), low, high)


def in_a_row(call: Callable[[], object], device: torch.device) -> Latency:
    """Measure the latency of a warm, fast call as one of many consecutive calls.

    `latency` flushes L2 before each call, and the flush's data is written back during it: a
    microsecond replay that reads data not in L2 then appears slower than it is.
    """
    count, taken = max(1, math.ceil(ROW_MS / once_ms(call, device))), []
    for _ in range(ROWS):
        started = mark(device)
        for _ in range(count):
            call()
        ended = mark(device)
        wait(device)
        taken.append(1e3 * seconds_between(started, ended) / count)
    low, *_, high = statistics.quantiles(taken, n=5)
    return Latency(statistics.median(taken), low, high)


def once_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time one call in ms, from idle device to idle device."""
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return (time.perf_counter() - started) * 1e3


def wait(device: torch.device) -> None:
    """Wait until the GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> "torch.cuda.Event | float":
    """Return a time mark: a CUDA event after all queued work, on a CPU seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: "torch.cuda.Event | float", second: "torch.cuda.Event | float") -> float:
    """Seconds between two completed marks."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3


def gradients(o: Tensor, leaves: Sequence[Tensor], do: Tensor, keep: bool = False):
    """Gradients of the leaves; the graph is retained if `keep`, else freed."""
    return torch.autograd.grad(o, leaves, do, retain_graph=keep)


def extra_memory(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor, backward: bool
) -> Memory:
    """Measure the memory of one forward, and of the gradients of `leaves` if `backward`."""

    def outputs() -> Iterator[int]:
        """Yield the bytes of the outputs after each of the two."""
        o = forward()
        yield o.nbytes
        if backward:
            grads = gradients(o, leaves, do)
            yield o.nbytes + sum(g.nbytes for g in grads)

    peaks = (_cuda_peaks if do.is_cuda else _cpu_peaks)(outputs())
    mib = [max(0.0, peak / MIB) for peak in peaks]
    return Memory(mib[0], mib[1] if backward else None)


def _cuda_peaks(outputs: Iterator[int]) -> Iterator[int]:
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for size in outputs:
        torch.cuda.synchronize()
        yield torch.cuda.max_memory_allocated() - base - size
        torch.cuda.reset_peak_memory_stats()


def _cpu_peaks(outputs: Iterator[int]) -> list[int]:
    base, sizes = sum(live_cpu_storages().values()), {}
    with CpuRecorder(dict) as recorder:
        for phase in ("forward", "backward"):
            recorder.on_phase(phase, 0)
            sizes[phase] = next(outputs, None)
        recorder.on_phase("end", 0)
    peaks = recorder.record()["phases"]
    return [peaks[phase] - base - size for phase, size in sizes.items() if size is not None]


def graph_latency(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor
) -> tuple[Latency, Latency]:
    """Return latencies of (forward, backward) replayed from CUDA graphs. Capture errors propagate.

    The leaves must come from `Drawn.fresh`. RuntimeError if a replay's result differs from the same
    call without a graph.
    """
    outside, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    try:
        with on_stream(stream):
            for _ in range(3):
                o = forward()
                want = [o.detach(), *gradients(o, leaves, do)]
                del o  # and with it everything tied to a stream
        torch.cuda.synchronize()
        ahead, back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(ahead, stream=stream):
            o = forward()
        with torch.cuda.graph(back, pool=ahead.pool(), stream=stream):
            kept = gradients(o, leaves, do, keep=True)
        for x in (o.detach(), *kept):
            x.fill_(float("nan"))
        ahead.replay()
        back.replay()
        torch.cuda.synchronize()
        same_as(want, [o.detach(), *kept])
        del want
        return latency(ahead.replay, do.device), latency(back.replay, do.device)
    finally:
        torch.cuda.set_stream(outside)  # a failed capture does not restore it


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread: for steps this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_as(want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless both are equal up to the order of summation."""
    for index, (x, y) in enumerate(zip(want, got, strict=True)):
        largest = float(x.abs().max())
        error = float((x.float() - y.float()).abs().max())
        if not error <= ORDER * largest:
            what = f"gradient {index}" if index else "o"
            raise RuntimeError(f"replayed, {what} differs by {error:.2e} of at most {largest:.2e}")


@dataclass(frozen=True)
class Interleaved:
    """ms per step, plain and watched, the median of the rounds' ratios, and the clock used."""

    plain_ms: float
    watched_ms: float
    ratio: float
    clock: str


def interleaved(
    trainer: Trainer,
    watching: Callable[[], AbstractContextManager],
    *,
    rounds: int,
    steps: int,
    wall: bool = False,
) -> Interleaved:
    """Time `steps` steps inside `watching()` and as many outside, in `rounds` rounds.

    Both are interleaved, in alternating order, so that a slowdown of the machine affects both.
    Timed from idle device to idle device; on a CPU, unless `wall` (as for waits for another rank),
    the processor time of all threads counts, since cores are shared.

    Not timed are one warm-up round and the first step of every turn, whose costs a training pays
    once, nor a full garbage collection of Python, which takes longer than a step: one runs before
    each turn.
    """
    clock, name = time.process_time, "processor time"
    if wall or trainer.device.type == "cuda":
        clock, name = time.perf_counter, "until the device is done"

    def turn(watched: bool) -> float:
        gc.collect()
        with watching() if watched else nullcontext():
            trainer.step(trainer.steps_done)
            wait(trainer.device)
            began = clock()
            for step in range(trainer.steps_done, trainer.steps_done + steps):
                trainer.step(step)
            wait(trainer.device)
            return 1e3 * (clock() - began) / steps

    found = []
    for number in range(rounds + 1):
        ms = {watched: turn(watched) for watched in (number % 2 == 0, number % 2 == 1)}
        found.append((ms[False], ms[True]))
    plain, watched, ratio = zip(*((a, b, b / a) for a, b in found[1:]), strict=True)
    return Interleaved(*map(statistics.median, (plain, watched, ratio)), name)
