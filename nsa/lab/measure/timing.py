"""Latency and memory of one call, steps in interleaved A/B, and the time a benchmark may take."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.lab.measure.recorders import MIB, CpuRecorder, live_cpu_storages
from nsa.model.train import Trainer

CAP_S = 60.0  # an implementation's share, anew whenever kernels may have been compiled
SLOW_MS = 300.0  # a call that takes longer is repeated a few times, not for a given while
VERY_SLOW_MS = 5000.0
LEAST = 9  # calls that a median is taken of, below SLOW_MS
ROWS, ROW_MS = 15, 5.0  # of calls in a row, and how long one of them is
ORDER = 0.02  # of the largest value: what bf16 sums in another order may differ by


class Clock:
    """What is left of the whole time and of one implementation's share, in seconds."""

    def __init__(self, budget_s: float | None, cap_s: float = CAP_S) -> None:
        now = time.monotonic()
        self.end = float("inf") if budget_s is None else now + budget_s
        self.cap_s, self.share = cap_s, now + cap_s

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


@dataclass(frozen=True)
class Latency:
    """Milliseconds: the median and the 20 % and 80 % quantiles."""

    median: float
    q20: float
    q80: float


@dataclass(frozen=True)
class Memory:
    """MiB at the peak beyond inputs and outputs. Backward counts what the forward kept for it."""

    forward: float
    backward: float | None


def latency(call: Callable[[], object], device: torch.device) -> Latency:
    """Of a call that ran before: by triton's do_bench on a GPU, by the clock on a CPU."""
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
    """Of a call that ran before and is not slow: one of many that follow one another.

    `latency` has L2 flushed before each call, and what was put there is written back during it: a
    replay of microseconds that reads what L2 does not hold is slower behind that than it is.
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
    """One call, from an idle device to an idle device."""
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return (time.perf_counter() - started) * 1e3


def wait(device: torch.device) -> None:
    """Until the GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> "torch.cuda.Event | float":
    """Now, by the device's own clock: an event behind all that it was given, on a CPU seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: "torch.cuda.Event | float", second: "torch.cuda.Event | float") -> float:
    """Of two marks that were passed."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3


def gradients(o: Tensor, leaves: Sequence[Tensor], do: Tensor, keep: bool = False):
    """Those of the leaves, the graph kept or freed."""
    return torch.autograd.grad(o, leaves, do, retain_graph=keep)


def extra_memory(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor, backward: bool
) -> Memory:
    """One forward, and the gradients of `leaves` where `backward`."""

    def outputs() -> Iterator[int]:
        """Bytes that are left after each of the two."""
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
    """(forward, backward) replayed from CUDA graphs. Raises what capturing raises.

    The leaves must be those of `Drawn.fresh`. RuntimeError where a replay does not give what the
    same call gives without a graph.
    """
    outside, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    try:
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(3):
                o = forward()
                want = [o.detach(), *gradients(o, leaves, do)]
                del o  # and with it all that remembers a stream
        outside.wait_stream(stream)
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
        torch.cuda.set_stream(outside)  # a capture that fails does not go back to it


def same_as(want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """RuntimeError unless both are the same but for the order in which sums are taken."""
    for index, (x, y) in enumerate(zip(want, got, strict=True)):
        largest = float(x.abs().max())
        error = float((x.float() - y.float()).abs().max())
        if not error <= ORDER * largest:
            what = f"gradient {index}" if index else "o"
            raise RuntimeError(f"replayed, {what} differs by {error:.2e} of at most {largest:.2e}")


@dataclass(frozen=True)
class Interleaved:
    """ms of a step, plain and watched, the median of the rounds' ratios, and what was timed."""

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
    """Times `steps` steps inside `watching()` and as many outside, in `rounds` rounds.

    Both take turns, in changing order, so that a machine that slows down slows both. From idle
    device to idle device; without one, and unless `wall`, as for a wait for another rank, the
    processor time of all threads counts, for its cores are shared.

    Not timed are one round before and the first step of every turn, whose costs a training pays
    once, nor a full collection of Python's garbage, which takes longer than a step: one is made
    before each turn.
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
