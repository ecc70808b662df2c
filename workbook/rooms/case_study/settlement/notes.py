"""Micro-trials of the case study's research notes: their statements on torch, tested in isolation.

Times are ratios of interleaved variants. Trials that need a GPU are declined without one.
"""

import itertools
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from workbook.rooms.case_study.loop import model
from workbook.rooms.case_study.loop.subject import make

Found = dict[str, Any]
NO_GPU = {"declined": "only a GPU shows it, and torch sees none here"}


def device_name() -> str:
    """Device of a trial that uses a GPU if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def dense_mask() -> Found:
    """A causal mask of -inf over 64 tokens, compared with attention row by row without a mask."""
    tokens = 64
    q, k, v, weight = (torch.randn(1, 2, tokens, 16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.zeros(tokens, tokens).masked_fill(
        torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf
    )

    def dense() -> Tensor:
        return attend(q, k, v, attn_mask=bias)

    def by_row() -> Tensor:
        rows = [attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
                for t in range(tokens)]  # fmt: skip
        return torch.cat(rows, dim=2)

    def gradients(attention: Callable[[], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((attention() * weight).sum(), leaves))

    error = _apart(gradients(dense), gradients(by_row))
    seconds = fastest({"one": lambda: gradients(dense), "many": lambda: gradients(by_row)})
    return {"gradient_error": error, "calls_over_one": seconds["many"] / seconds["one"]}


def duplicates() -> Found:
    """index_add, scatter_add and advanced indexing with duplicate indices, compared with a dense
    product; and the time of indexing's backward with 64 duplicates of each index and with none."""
    source, weight = torch.randn(24, 8, requires_grad=True), torch.randn(6, 8)
    index = torch.arange(24) % 6
    dense = torch.nn.functional.one_hot(index, 6).float()  # [24, 6]
    outs = (
        dense.T @ source,
        torch.zeros(6, 8).index_add(0, index, source),
        torch.zeros(6, 8).scatter_add(0, index[:, None].expand(-1, 8), source),
    )
    wanted, *found = [torch.autograd.grad((out * weight).sum(), source)[0] for out in outs]
    taken = torch.randn(6, 8, requires_grad=True)
    pairs = [torch.autograd.grad((out * source.detach()).sum(), taken)[0]
             for out in (dense @ taken, taken[index])]  # fmt: skip
    error = max(_apart(found, [wanted, wanted]), _apart(pairs[:1], pairs[1:]))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys = torch.randn(4096, 64, device=device, requires_grad=True)
    unique = torch.randperm(4096, device=device)
    outputs = {"none": keys[unique], "many": keys[unique // 64]}

    def backward(name: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(outputs[name].sum(), keys, retain_graph=True)

    seconds = fastest({name: backward(name) for name in outputs})
    slower = seconds["many"] / seconds["none"]
    return {"gradient_error": error, "indexing_slowdown": slower, "device": device_name()}


def varlen() -> Found:
    """Attention over three packed sequences and over each alone; bytes kept at T 512 over 256.

    Uses flash-attn if it is installed and there is a GPU, else torch's nested tensors.
    """
    device, lengths = ("cuda" if torch.cuda.is_available() else "cpu"), (5, 17, 9)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v, weight = (torch.randn(sum(lengths), 2, 32, device=device, dtype=dtype)
                       for _ in range(4))  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v)]
    packed = _packed(leaves, lengths)
    ends = list(itertools.accumulate(lengths, initial=0))
    rows = [attend(*(x[a:b].transpose(0, 1)[None] for x in leaves))[0].transpose(0, 1)
            for a, b in itertools.pairwise(ends)]  # fmt: skip
    apart = torch.cat(rows)
    pairs = [torch.autograd.grad((out * weight).sum(), leaves) for out in (packed, apart)]
    error = max(_apart([packed], [apart]), _apart(*pairs))
    if device == "cuda":
        error /= 100  # fp16 rounds to 1e-3, fp32 to 1e-6
    kept = {}
    for tokens in (256, 512):
        x = torch.randn(1, 2, tokens, 32, device=device, dtype=dtype, requires_grad=True)
        kept[tokens] = _kept(lambda x=x: attend(x, x, x, is_causal=True))
    twice = kept[512] / kept[256]
    return {"error": error, "bytes_at_twice_the_length": twice, "device": device_name()}


def _packed(leaves: list[Tensor], lengths: tuple[int, ...]) -> Tensor:
    """q, k, v [sum of lengths, heads, D] attended sequence by sequence in one call."""
    if leaves[0].is_cuda:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            pass
        else:
            ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda").int()
            return flash_attn_varlen_func(*leaves, ends, ends, max(lengths), max(lengths))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=leaves[0].device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        jagged = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2)
                  for x in leaves]  # fmt: skip
        return attend(*jagged).transpose(1, 2).values()


def pruning() -> Found:
    """Scores that only select integer indices: bytes kept for the backward, and the effect of
    detaching them."""
    x, values = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)

    def loss(detached: bool) -> Tensor:
        y = x.detach() if detached else x
        best = (y @ y.T).softmax(-1).topk(4, dim=-1).indices  # [64, 4]
        return (values[best].mean(1) * x).sum()

    kept = [_kept(lambda detached=detached: loss(detached)) for detached in (False, True)]
    gradients = [torch.autograd.grad(loss(detached), (x, values)) for detached in (False, True)]
    return {"bytes_kept": kept[0] - kept[1], "gradient_difference": _apart(*gradients)}


def fragmentation() -> Found:
    """On a GPU: 256 blocks of 4 MiB, every second freed, and a request larger than any gap."""
    if not torch.cuda.is_available():
        return NO_GPU
    blocks = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(256)]
    del blocks[::2]
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    started = time.perf_counter()
    large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del large
    apart = reserved / allocated
    return {"seconds": seconds, "reserved_over_allocated": apart, "device": device_name()}


FORWARD = """
import sys, torch
from workbook.rooms.case_study.loop.subject import make
loop = make({"design": "production", "changes": {"layers": 5}, "tokens": int(sys.argv[1]),
             "device": "cuda"})
out = loop.model(*loop.batch(0))
torch.cuda.synchronize()
print(torch.cuda.memory_allocated() / 2**20)
"""
ALLOCATORS = {"default": "", "expandable": "expandable_segments:True,max_split_size_mb:256"}


def allocators() -> Found:
    """On a GPU: MiB allocated after the rebuilt loop's forward of 5 layers, as the case study
    measured, at three T under the default allocator and under its own setting.

    RuntimeError if one of them fails.
    """
    if not torch.cuda.is_available():
        return NO_GPU
    found: dict[str, dict[str, float]] = {}
    for tokens in (512, 1024, 2048):
        variants = {
            name: subprocess.Popen(
                [sys.executable, "-c", FORWARD, str(tokens)],
                env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, setting in ALLOCATORS.items()
        }
        found[str(tokens)] = {}
        for name, variant in variants.items():
            told, error = variant.communicate()
            if variant.returncode:
                raise RuntimeError(f"{name} at T {tokens}: {error.strip().splitlines()[-1]}")
            found[str(tokens)][name] = float(told)
    return {"mib": found, "device": device_name()}


def syncs() -> Found:
    """On a GPU: the rebuilt loop's step, and the same with every .item() replayed from before."""
    if not torch.cuda.is_available():
        return NO_GPU
    sizes = {"design": "smoke", "changes": {"layers": 1}, "tokens": 256}
    loop = make(sizes | {"device": "cuda", "first": 0, "every": 1000})
    batch, merged, kept = loop.batch(0), model._merged, []

    def step() -> None:
        loop.model(*batch)[1].backward()
        torch.cuda.synchronize()

    def recording(blocks: Tensor, t: int, size: int) -> list[tuple[int, int]]:
        kept.append(merged(blocks, t, size))
        return kept[-1]

    with mock.patch.object(model, "_merged", recording):
        step()

    def replayed() -> None:
        again = iter(kept)

        def replaying(blocks: Tensor, t: int, size: int) -> list[tuple[int, int]]:
            list(blocks)  # the same views, none of them read
            return next(again)

        with mock.patch.object(model, "_merged", replaying):
            step()

    seconds = fastest({"with": step, "without": replayed})
    share = 1 - seconds["without"] / seconds["with"]
    return {"share": share, **seconds, "device": device_name()}


def interleaved(
    variants: dict[str, Callable[[], object]],
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            started = clock()
            variant()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(clock() - started)
    return times


def fastest(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each variant in its fastest round, since other work only adds time."""
    return {name: min(seconds) for name, seconds in interleaved(variants).items()}


def _kept(forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages, each once, that the graph of forward() alone keeps alive. Tensors that
    only live during the forward are not counted."""
    sizes: dict[int, int] = {}
    alive: list[Any] = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # an output that holds its own node is never freed
            alive.append(weakref.ref(self))

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        out = forward()
    for reference in alive:
        if (held := reference()) is not None:
            storage = held.tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    del out
    return sum(sizes.values())


def _apart(found: Any, wanted: Any) -> float:
    """Largest difference of tensors pair by pair; NaN if any is NaN."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


TRIALS = (dense_mask, duplicates, varlen, pruning, fragmentation, allocators, syncs)
