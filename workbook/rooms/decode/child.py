"""Child process: every implementation's step at one size, checked first, then timed."""

import gc
import math
import pkgutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.attention.cache import LayerCache
from nsa.attention.decode import nsa_decode
from nsa.attention.registry import Declined
from nsa.model.capture import on_stream
from nsa.reference.attend import attend
from whyhung.process.child import is_out_of_memory, so_far
from workbook.lab.measure import accuracy, limits, timing
from workbook.lab.measure.accuracy import AccuracyError
from workbook.lab.measure.recorders import live_cpu_storages
from workbook.rooms.decode import check
from workbook.rooms.decode.cells import PLAIN, Cell, layouts
from workbook.rooms.decode.check import New

NSA, DENSE = "nsa_decode", "dense_decode"
MOST_LAYERS = 32  # caches that a timed call cycles through, as a model's layers
LAYERS_BYTES = 4 << 30  # of all of them together
L2_TIMES = 2  # they read this many times the capacity of the L2 cache
ONLY_THEIR_OWN = ("triton", "gather")  # backends that load no masked key
FUSED = ("triton", "gather")  # backends whose scores are summed and kept in fp32
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Subject:
    """One implementation with one layout of its cache."""

    name: str  # in tables
    operation: str
    backend: str = ""  # of nsa_decode
    layout: str = PLAIN
    page: int | None = None
    peer: str = ""  # import.path:function


def subjects(
    backends: Sequence[str], pages: Sequence[int], dense: bool, peers: Sequence[str], gpu: bool
) -> list[Subject]:
    """Subjects, in the order in which they are measured."""
    chosen = []
    for backend in backends or (["triton"] if gpu else ["gather"]):
        for layout, page in layouts(pages).items():
            name = backend if page is None else f"{backend}, {layout}"
            chosen.append(Subject(name, NSA, backend, layout, page))
    if dense:
        chosen += [Subject(f"dense-{n}", DENSE, n) for n in (SDPA if gpu else ("flash",))]
    return chosen + [Subject(f"peer {path}", NSA, peer=path) for path in peers]


def measure_cell(spec: dict) -> dict:
    """Entry: {"cell", "device", "threads", arguments of `subjects`} -> {"rows", "ceilings"}.

    There is one row per subject: its outcome, errors, times, bytes, and what it read.
    """
    given = dict(spec)
    cell, device = Cell.from_dict(given.pop("cell")), torch.device(given.pop("device"))
    if threads := given.pop("threads", None):
        torch.set_num_threads(threads)
    ceilings = limits.measure_ceilings(device, cell.torch_dtype)
    rows = []
    for subject in subjects(**given, gpu=device.type == "cuda"):
        row = {"name": subject.name, "operation": subject.operation, "layout": subject.layout}
        row |= {"outcome": "ok", "message": "", "ms": {}}
        try:
            with torch.no_grad():
                run = _dense if subject.operation == DENSE else _nsa
                run(cell, subject, device, row)
        except AccuracyError as error:
            row |= {"outcome": "red", "message": str(error), "ms": {}}
        except Declined as error:
            row |= {"outcome": "declined", "message": str(error)}
        except Exception as error:
            kind = "oom" if is_out_of_memory(error) else "error"
            row |= {"outcome": kind, "message": _brief(error), "ms": {}}
        rows.append(row)
        so_far({"rows": rows, "ceilings": asdict(ceilings)})
        print(f"{subject.name}: {row['outcome']} {row['ms']} {row['message']}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows, "ceilings": asdict(ceilings)}


def _nsa(cell: Cell, subject: Subject, device: torch.device, row: dict) -> None:
    step = _step(subject)
    new, held = check.new_token(cell, device), _held(device)
    cache = check.filled(cell, subject.page, device, cell.seed)
    row["cache_bytes"] = _held(device) - held
    row["foretold_bytes"] = cell.cache_bytes(subject.page)
    o = step(new, cache)
    check.written(cell, new, cache)
    exact_scores = subject.backend in FUSED or cell.torch_dtype == torch.float32
    eps = torch.finfo(cell.torch_dtype).eps
    true = check.truth(cell, new, cache, check.CLEAR if exact_scores else 16 * eps)
    error = check.hold(cell, subject.name, o, true)
    row["error"] = [error.worst, error.limit]
    row["clear"] = [int(true.clear.sum()), true.clear.numel()]
    row["blocks"] = true.blocks[0, 0].tolist()
    caches = [cache]
    for layer in range(1, _layers(row["foretold_bytes"], cell.bytes_read(), device)):
        caches.append(check.filled(cell, subject.page, device, cell.seed + layer))
    _time(row, [partial(step, new, one) for one in caches], device)
    if subject.backend in ONLY_THEIR_OWN:
        row["reads"] = asdict(check.reads(cell, cache, true, o, partial(step, new, cache)))


def _step(subject: Subject) -> Callable[[New, LayerCache], Tensor]:
    """Return a step that leaves the lengths unchanged, so that it can be repeated. A peer also
    appends and attends: f(q, k, v, gates, cache) -> o, with k and v by branch and a LayerCache."""
    if subject.peer:
        try:
            function = pkgutil.resolve_name(subject.peer)
        except Exception as error:  # third-party modules may raise anything
            text = f"{type(error).__name__}: {error}"
            raise Declined(f"{subject.peer} cannot be imported: {text}") from error
        return lambda new, cache: function(new.q, new.k, new.v, new.gates, cache)
    options = {"backend": subject.backend, "advance": False}
    return lambda new, cache: nsa_decode(new.q, new.k, new.v, new.gates, cache, **options)


def _dense(cell: Cell, subject: Subject, device: torch.device, row: dict) -> None:
    """Measure torch's attention of G queries per KV head over all cached keys, excluding the
    storing of the new one."""
    new, heads = check.new_token(cell, device), cell.kv_heads
    q = new.q.view(cell.batch, heads, -1, cell.dim)  # [B, HKV, G, D]: no copy of keys per query
    held, caches = _held(device), []
    for layer in range(_layers(cell.dense_bytes, cell.dense_bytes, device)):
        generator = torch.Generator(device).manual_seed(cell.seed + layer)
        size = (2, cell.batch, cell.tokens, heads, cell.dim)
        options = {"generator": generator, "device": device, "dtype": cell.torch_dtype}
        caches.append(torch.randn(size, **options).transpose(2, 3))
        if not layer:
            row["cache_bytes"] = _held(device) - held
    row["foretold_bytes"] = cell.dense_bytes

    def step(kv: Tensor) -> Tensor:
        with sdpa_kernel([SDPA[subject.backend]]):
            o = F.scaled_dot_product_attention(q, kv[0], kv[1])
        return o.view(cell.batch, 1, -1, cell.dim)

    got, visible = step(caches[0])[:1], torch.ones(1, 1, 1, cell.tokens, dtype=bool, device=device)
    exact, same = (
        attend(new.q[:1].to(d), *caches[0][:, :1].transpose(2, 3).to(d), visible, cell.dim**-0.5)[0]
        for d in (torch.float64, cell.torch_dtype)
    )
    error = accuracy.hold(subject.name, got, same, exact, dtype=cell.torch_dtype)
    row["error"] = [error.worst, error.limit]
    _time(row, [partial(step, kv) for kv in caches], device)


def _brief(error: Exception) -> str:
    """Type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _layers(size: int, read: int, device: torch.device) -> int:
    """Number of caches of `size` bytes to cycle through, of which a step reads `read`."""
    if device.type != "cuda":
        return 1
    needed = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_LAYERS, LAYERS_BYTES // size, math.ceil(needed / read)))


def _held(device: torch.device) -> int:
    """Bytes of all live tensors, after collecting garbage."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return sum(live_cpu_storages().values())


def _time(row: dict, steps: Sequence[Callable[[], Tensor]], device: torch.device) -> None:
    """Time one step in ms, eager and, on a GPU, replayed from a CUDA graph of all of them.

    It cycles through the caches, so that keys come from memory, as in a model with many layers.
    Replays run back to back, as steps do.
    """

    def all_steps() -> Tensor:
        for step in steps:
            o = step()
        return o

    def record(mode: str, ms: timing.Latency) -> None:
        row["ms"][mode] = [x / len(steps) for x in (ms.median, ms.q20, ms.q80)]

    all_steps()
    if device.type != "cuda":
        taken = sorted(timing.once_ms(all_steps, device) for _ in range(7))
        row["ms"]["eager"] = [statistics.median(taken), taken[1], taken[-2]]
        return
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    want = steps[-1]()
    row["workspace_bytes"] = torch.cuda.max_memory_allocated(device) - held
    record("eager", timing.latency(all_steps, device))
    graph = _captured(all_steps, want)
    if isinstance(graph, str):
        row["message"] = f"no CUDA graph: {graph}"
    else:
        record("graph", timing.in_a_row(graph, device))


def _captured(call: Callable[[], Tensor], want: Tensor) -> Callable[[], None] | str:
    """Return a graph replay with the same result as the call, or why there is none."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    outside = torch.cuda.current_stream()
    try:
        with on_stream(stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            o = call()
        o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        timing.same_as([want], [o])
    except Exception as error:
        return _brief(error)
    finally:
        torch.cuda.set_stream(outside)
    return graph.replay
