"""Entries for tests/nsa/parallel: `python cp_entries.py FOLDER ENTRY *ARGUMENTS`.

Leaves FOLDER/rank<r>.pt: what the entry returned.
"""

import gc
import itertools
import os
import queue
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import quick_interpreter
import torch
import torch.distributed as dist
from cases import EVEN, ODD, TINY, Case, draw
from tiny_models import tiny, tokens
from torch.distributed.device_mesh import init_device_mesh

from nsa.attention import registry
from nsa.attention.registry import get
from nsa.model.llama import LanguageModel
from nsa.parallel import attention
from nsa.parallel.attention import context_parallel_attention
from nsa.parallel.collectives import gather_sequence
from nsa.parallel.mesh import ContextParallel
from nsa.reference.nsa import nsa

BY_TOKEN = "q", "k", "v", "gates"  # first parts of the names of leaves that have a row a token


def mesh_of(cp: int):
    """Mesh of all ranks, `cp` in each group that shares a sequence."""
    sizes = (dist.get_world_size() // cp, cp)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))


def drawn_case(seed: int, ranks: int) -> Case:
    """A case whose tokens `ranks` ranks can share; at least one KV head for each in every third.
    Every fourth, of two ranks, has compressed keys that are rotated and made by one rank each."""
    of = random.Random(seed)
    if seed % 4 == 1:
        sizes = {"kv_heads": 2, "dim": 8, "value_dim": 4, "phi": of.choice(["mean", "mlp"])}
        tokens = 2 * ranks * of.choice([4, 6, 8])
        return Case(tokens, config=TINY, compress_rope=True, shared=of.random() < 0.5, **sizes)
    tokens = 2 * ranks * of.choice([1, 2, 3, 4, 5, 8, 12, 13])
    kv_heads = ranks if seed % 3 == 0 else of.choice([1, 2, 3])
    packed, left = [], tokens
    while of.random() < 0.6 and left > 1 and len(packed) < 5:
        packed.append(of.randint(0, left - 1))
        left -= packed[-1]
    packed = (*packed, left) if packed else ()
    return Case(
        tokens,
        kv_heads=kv_heads,
        group=of.choice([1, 2, 3]),
        dim=of.choice([4, 8]),
        value_dim=of.choice([4, 6]),
        batch=1 if packed else of.choice([1, 2]),
        config=of.choice([TINY, TINY, EVEN, ODD]),
        phi=of.choice(["mean", "linear", "mlp"]),
        shared=of.random() < 0.4,
        packed=packed,
        compress_rope=of.random() < 0.3,
        sinks=of.choice(["", "heads", "branches"]),
    )


def gradients(o, do, leaves):
    """{name: gradient} of sum(o do), zeros where none arrives."""
    found = torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)
    return {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(leaves.items(), found, strict=True)
    }


def off(mine, whole):
    """Largest difference, relative to the largest value or 1."""
    if not whole.numel():
        return 0.0
    return float((mine - whole).abs().max() / whole.abs().max().clamp(min=1))


def compared(
    case: Case,
    seed: int,
    context: ContextParallel,
    backend: str = "gather",
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:
    """Error of o and of each gradient of this rank against the definition over all tokens."""
    torch.manual_seed(seed)
    whole = draw(case)
    layout = context.layout(case.tokens // context.ranks)
    if seed % 5 == 1:  # the selection of the definition as the caller's
        args, options = whole.arguments()
        whole.blocks = nsa(*args, **options).blocks
    args, options = whole.arguments()
    o = nsa(*args, **options).o
    do = torch.randn_like(o)
    wanted = gradients(o, do, whole.leaves)

    mine = whole.to(dtype)
    for name, leaf in mine.leaves.items():
        if name.partition("_")[0] in BY_TOKEN:
            mine.leaves[name] = layout.shard(leaf.detach(), context.rank).requires_grad_()
    if whole.blocks is not None:
        mine.blocks = layout.shard(whole.blocks, context.rank)
    args, options = mine.arguments()
    if case.compress_rope:
        tables = whole.arguments()[1]["phi"].rotary  # of all tokens, not of this rank's rows
        options["phi"] = replace(options["phi"], rotary=tuple(x.to(dtype) for x in tables))
    own = context_parallel_attention(*args, context, **options, backend=backend)
    found = gradients(own, layout.shard(do, context.rank).to(dtype), mine.leaves)
    distances = {"o": off(own, layout.shard(o, context.rank))}
    distances["o, gathered"] = off(gather_sequence(own, context, case.tokens - 1), o[:, :-1])
    for name, gradient in found.items():
        if name.partition("_")[0] in BY_TOKEN:
            distances[name] = off(gradient, layout.shard(wanted[name], context.rank))
        else:
            dist.all_reduce(gradient, group=context.group)
            distances[name] = off(gradient, wanted[name])
    return distances


def cases(first: int, count: int) -> dict[str, dict[str, float]]:
    """{case and method: distances} of drawn cases over 1, 2 and all ranks, all KV heads at once or
    one at a time."""
    found, pooled = {}, Mock(wraps=attention.pooled)
    attention.pooled = pooled
    ranks = dist.get_world_size()
    meshes = {cp: mesh_of(cp) for cp in {1, 2, ranks}}
    for seed in range(int(first), int(first) + int(count)):
        cp = (1, 2, ranks, ranks)[seed % 4]
        case = drawn_case(seed, cp)
        methods = [{"method": "gather"}] + [{"method": "ulysses"}] * (case.kv_heads % cp == 0)
        if seed % 2:
            methods[0]["heads_at_once"] = 1
        for options in methods:
            context = ContextParallel.over(meshes[cp], **options)
            before = pooled.call_count
            distances = compared(case, seed, context)
            how = "pooled" if pooled.call_count > before else "gathered"
            found[f"{case} {case.packed} over {cp} by {options}, {how}"] = distances
    return found


def interpreted() -> dict[str, dict[str, float]]:
    """{case: distances in fp32} of the Triton kernels, which also make the compressed keys."""
    context, of = ContextParallel.over(mesh_of(dist.get_world_size())), get("triton")
    quick_interpreter.install()
    called = Mock(wraps=of.compress)
    registry._loaded["triton"] = replace(of, compress=called)
    found = {}
    for phi, rotated in (("mean", True), ("mlp", False)):
        case = Case(16, group=1, phi=phi, compress_rope=rotated, shared=True)
        found[str(case)] = compared(case, 1, context, "triton", torch.float32)
    return found | {"calls": {"compress": called.call_count}}


def bytes_held() -> int:
    return sum(x.nbytes for x in gc.get_objects() if isinstance(x, torch.Tensor))


def frees() -> dict[str, list[int]]:
    """{method: bytes of tensors after each of three steps} where no cycle is collected."""
    found = {}
    gc.disable()
    for method, at_once in (("gather", None), ("gather", 1), ("ulysses", None)):
        model = LanguageModel(tiny().with_(checkpoint="all"))
        options = {"method": method, "heads_at_once": at_once}
        model.share_sequences(ContextParallel.over(mesh_of(dist.get_world_size()), **options))
        held = found[f"{method} {at_once}"] = []
        for step in range(3):
            model.zero_grad()
            model(tokens(1, 32, seed=step), tokens(1, 32, seed=step + 1))[1].backward()
            held.append(bytes_held())
            # A thread of the collectives lets go of its buffer a moment later; a cycle never does.
            until = time.monotonic() + 10.0
            while step == 2 and held[2] - held[1] >= 1024 and time.monotonic() < until:
                time.sleep(0.05)
                held[-1] = bytes_held()
        del model
    return found


def said(call) -> str:
    """The error's class and message, or what it did not do."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bad() -> dict[str, str]:
    """{what is wrong: the error here}; each leaves the ranks able to go on with the next."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, last = mesh_of(ranks), rank == ranks - 1

    def call(case, options=None, change=lambda drawn: None, **more):
        torch.manual_seed(0)
        drawn = draw(case)
        change(drawn)
        args, given = drawn.arguments()
        context = ContextParallel.over(mesh, **options or {})
        return said(lambda: context_parallel_attention(*args, context, **given | more))

    def narrow(drawn):
        if last:
            drawn.leaves["k_win"] = drawn.leaves["k_win"].detach().float()

    def borders(*bounds):
        return {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}

    model = LanguageModel(tiny(max_tokens=30 * ranks))
    model.share_sequences(ContextParallel.over(mesh))
    return {
        "other lengths": call(Case(16 + 2 * last)),
        "a dtype of one rank": call(Case(16), change=narrow),
        "an odd chunk": call(Case(15)),
        "heads": call(Case(16, kv_heads=3), {"method": "ulysses"}),
        "heads at once": call(Case(16, kv_heads=3), {"heads_at_once": 2}),
        "borders": call(Case(16), **borders(0, 16)),
        "other borders": call(Case(16), **borders(0, 8 + last, 16 * ranks)),
        "other options": call(Case(16), scale=0.5 + last),
        "other tokens": said(lambda: model(tokens(1, 16 + 2 * last))),
        "too many tokens": said(lambda: model(tokens(1, 32))),
        "a mesh": said(lambda: ContextParallel.over(init_device_mesh("cpu", (ranks,)))),
        "good after all": call(Case(16)),
    }


def dies() -> str:
    """The error of the ranks that are left when the last one ends between forward and backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    args, given = draw(Case(16)).arguments()
    o = context_parallel_attention(*args, ContextParallel.over(mesh_of(ranks)), **given)
    if rank == ranks - 1:
        os._exit(0)
    return said(o.sum().backward)


def wait_for_an_answer(*_) -> None:
    """A fault: nobody puts anything into this queue."""
    queue.Queue().get()


def hangs() -> None:
    """Steps of a model on shared sequences, in which the last rank hangs from the fifth on."""
    ranks = dist.get_world_size()
    model = LanguageModel(tiny())
    model.share_sequences(ContextParallel.over(mesh_of(ranks)))
    for step in itertools.count():
        if step == 5 and dist.get_rank() == ranks - 1:
            model.blocks[1].attention.register_forward_pre_hook(wait_for_an_answer)
        model(tokens(1, 32, seed=step), tokens(1, 32, seed=step + 1))[1].backward()


def main(folder, entry, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = globals()[entry](*arguments)
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))
    if entry != "dies":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
