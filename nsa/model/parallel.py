"""One model on several processes: DDP or FSDP2, applied from outside the model code.

Every rank draws the same global batch and uses its own rows of it, and gradients are averaged over
ranks: training does not depend on the number of ranks. With `cp` so many neighbouring ranks use the
same rows, and each its own tokens of them. FSDP2 uses autocast for mixed precision too,
since its MixedPrecisionPolicy would run norms and the residual stream in bf16: another model.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from nsa.parallel.layout import shard_sequence
from nsa.parallel.mesh import METHODS, ContextParallel
from nsa.spelling import choice

KINDS = ("none", "ddp", "fsdp")
COMM_HOOKS = ("none", "bf16")
GATHERED = ("fp32", "bf16")


@dataclass(frozen=True)
class Parallel:
    """Rank and settings of this process in the training of one model; from `start`, or SINGLE."""

    kind: str = "none"
    rank: int = 0
    ranks: int = 1
    device: str = "cpu"
    static_graph: bool = False
    find_unused_parameters: bool = False
    bucket_mb: float | int = 25
    gradient_as_bucket_view: bool = True  # False: gradients are stored twice
    comm_hook: str = "none"  # "bf16": gradients are averaged in bf16, half the bytes are sent
    fsdp_blocks: int = 1  # neighbouring blocks that are gathered by one collective
    fsdp_reshard: bool = True  # False: gathered weights are kept from the forward to the backward
    fsdp_gather: str = "fp32"  # "bf16": linear weights are gathered in bf16, half the bytes
    cp: int = 1  # ranks that share each sequence
    cp_method: str = "gather"  # or "ulysses", see nsa.parallel.mesh
    joined: bool = True  # by `start`, so that `close` leaves the process group
    _learned: WeakSet = field(default_factory=WeakSet, init=False, repr=False, compare=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model that is on its device; FSDP2 changes it in place.

        FSDP2 shards every `fsdp_blocks` blocks and then the rest, so that so many at a time are
        gathered. With fsdp_gather="bf16" these are the blocks' linear weights alone; what is small
        is gathered with the rest, in fp32, and autocast computes the same bits as before. Create
        the optimizer afterwards, from the model's parameters, since FSDP2 replaces them. With `cp`
        a mesh ("dp", "cp") of all ranks is made, and the model shares sequences over its "cp"; its
        gradients are reduced over both dimensions.
        """
        if self.cp > 1:
            model.share_sequences(self._context(next(model.parameters()).device.type))
        if self.kind == "ddp":
            on_gpu = next(model.parameters()).is_cuda
            wrapped = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[torch.device(self.device).index] if on_gpu else None,
                bucket_cap_mb=self.bucket_mb,
                find_unused_parameters=self.find_unused_parameters,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                static_graph=self.static_graph,
            )
            if self.comm_hook == "bf16":
                wrapped.register_comm_hook(wrapped.process_group, averaged_in_bf16)
            return wrapped
        return self._sharded(model) if self.kind == "fsdp" else model

    def _sharded(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.ranks,))
        options = {"mesh": mesh, "reshard_after_forward": self.fsdp_reshard}
        if self.fsdp_gather == "bf16":
            # Not the blocks: a policy of theirs would also run norms and phi in bf16.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            options["mp_policy"] = policy
        for first in range(0, len(model.blocks), self.fsdp_blocks):
            unit = list(model.blocks[first : first + self.fsdp_blocks])
            if self.fsdp_gather == "bf16":
                unit = [x for block in unit for x in block.modules() if isinstance(x, nn.Linear)]
            fully_shard(unit, **options)
        return fully_shard(model, mesh=mesh)

    def _context(self, device: str) -> ContextParallel:
        from torch.distributed import device_mesh

        sizes, names = (self.ranks // self.cp, self.cp), ("dp", "cp")
        mesh = device_mesh.init_device_mesh(device, sizes, mesh_dim_names=names)
        # All ranks draw the same batch, so that there are no sizes to compare.
        return ContextParallel.over(mesh, method=self.cp_method, check=False)

    def shard(self, tokens: Tensor, targets: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens of rows [B, T] and their targets, padded; see `shard_sequence`."""
        if self.cp == 1:
            return tokens, targets
        place = {"rank": self.rank % self.cp, "ranks": self.cp}
        return shard_sequence(tokens, targets, multiple=multiple, **place)[:2]

    def rows(self, batch: int, accumulate: int = 1) -> slice:
        """This rank's rows of a global batch, an integer number for each micro-batch; the ranks
        that share sequences have the same. Raises ValueError unless cp divides the ranks and
        ranks / cp * accumulate the batch."""
        check_cp(self.cp, self.ranks)
        groups = self.ranks // self.cp
        parts = groups * accumulate
        if batch % parts:
            near = max(parts, batch // parts * parts)
            over = f"{groups} group(s) of {self.cp} rank(s)" if self.cp > 1 else f"{groups} rank(s)"
            raise ValueError(
                f"batch={batch} cannot be split over {over} x {accumulate} "
                f"micro-batch(es); nearest that can: {near} and {near + parts}"
            )
        mine, group = batch // groups, self.rank // self.cp
        return slice(group * mine, (group + 1) * mine)

    @contextmanager
    def micro(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Context of one micro-batch's forward and backward: only the last reduces gradients.

        Under FSDP2 the gradients of the others stay unsharded on every rank until then. The very
        first backward of a static graph is reduced as well, since DDP records the graph in it.
        """
        if self.kind == "ddp" and self.static_graph and wrapped not in self._learned:
            self._learned.add(wrapped)
            last = True
        if self.kind == "ddp" and not last:
            with wrapped.no_sync():
                yield
            return
        if self.kind == "fsdp":
            wrapped.set_requires_gradient_sync(last)
        yield

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most max_norm over the whole model; return the norm."""
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor() if self.kind == "fsdp" else norm

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm as `clip` does, without changing gradients."""
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norm.full_tensor() if self.kind == "fsdp" else norm

    def mean(self, loss: Tensor) -> Tensor:
        """Mean over ranks; nothing waits for a GPU."""
        if self.ranks == 1:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total)  # gloo has no average
        return total.div_(self.ranks)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """{"model", "optimizer"}: full tensors by parameter name, on rank 0; empty elsewhere.

        On the CPU if there are several ranks. A collective call; any number of ranks of any kind
        can load it. `model` is the unwrapped one.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=self.ranks > 1)
        weights, optimized = get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": optimized} if self.rank == 0 else {}

    def load_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load the `state` of rank 0; every rank passes all of it."""
        from torch.distributed.checkpoint import state_dict as whole

        # A copy, because torch puts sharded tensors into its argument.
        options = whole.StateDictOptions(full_state_dict=True)
        whole.set_model_state_dict(model, dict(state["model"]), options=options)
        # A parameter that no loss has reached has no optimizer state, which strict would refuse.
        options = whole.StateDictOptions(full_state_dict=True, strict=False)
        whole.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.ranks > 1:
            dist.barrier()

    def close(self) -> None:
        """Destroy the process group; no effect if there is none or `start` did not create it."""
        if self.kind != "none" and self.joined and dist.is_initialized():
            dist.destroy_process_group()


SINGLE = Parallel()


def averaged_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket):
    """torch's bf16_compress_hook: each rank's gradient / ranks in bf16, summed, back to fp32.

    Under its own name DDP rejects it without NCCL, although gloo can sum bf16 as well.
    """
    return bf16_compress_hook(group, bucket)


def start(
    kind: str,
    *,
    backend: str | None = None,
    device: str = "auto",
    timeout_s: float | int = 600,
    **options: Any,
) -> Parallel:
    """Join the processes that torchrun started; return this one's rank and settings.

    An existing process group is used as it is and must have the same backend.
    device: "cuda", "cpu", or "auto": a GPU for each rank if there are so many, else the CPU.
    backend: "nccl" or "gloo"; None is "nccl" for GPUs and "gloo" for CPUs. `timeout_s` is how long
    a collective may wait. options: fields of Parallel that are options of DDP, FSDP2 and `cp`.

    Raises ValueError for unknown names, options that exclude each other, no torchrun, NCCL without
    a GPU for each rank, and a failed rendezvous (a port in use).
    """
    check(kind, backend, **options)
    if kind == "none":
        return SINGLE
    made = Parallel(kind, **options)
    rank, ranks, local = place()
    check_cp(made.cp, ranks)
    on_gpu, backend = devices(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), backend, device)
    if on_gpu:
        torch.cuda.set_device(local)
    joined, own = not dist.is_initialized(), f"cuda:{local}" if on_gpu else "cpu"
    if joined:
        bound = torch.device("cuda", local) if backend == "nccl" else None
        try:
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, timeout=timeout, device_id=bound)
        except dist.DistError as error:
            address, port = (os.environ[f"MASTER_{name}"] for name in ("ADDR", "PORT"))
            if "EADDRINUSE" in str(error):
                raise ValueError(
                    f"port {port} is in use; give torchrun --master-port another one, or "
                    "--standalone, which finds a free one"
                ) from error
            reason = str(error).splitlines()[0]
            raise ValueError(f"no meeting of ranks at {address}:{port}: {reason}") from error
    elif backend not in dist.get_backend():
        raise ValueError(f"this process meets the others by {dist.get_backend()}, not by {backend}")
    return replace(made, rank=rank, ranks=ranks, device=own, joined=joined)


def check(kind: str, backend: str | None = None, **options: Any) -> None:
    """Raise ValueError for options of `start` that are invalid for any number of ranks."""
    choice("parallel", kind, KINDS)
    made = Parallel(kind, **options)
    choice("fsdp_gather", made.fsdp_gather, GATHERED)
    choice("cp_method", made.cp_method, METHODS)
    if kind == "none" and made.cp != 1:
        raise ValueError(f"cp={made.cp} needs several ranks: parallel='ddp' or 'fsdp' would do")
    if made.cp < 1:
        raise ValueError(f"cp={made.cp} must be at least 1 rank")
    choice("comm_hook", made.comm_hook, COMM_HOOKS)
    if backend is not None:
        choice("backend", backend, ("gloo", "nccl"))
    if made.static_graph and made.find_unused_parameters:
        raise ValueError(
            "static_graph=True with find_unused_parameters=True: a static graph finds unused "
            "parameters once, in step 1, and searching again each step would undo what it saves; "
            "static_graph=True alone also trains a model with unused parameters, as long as they "
            "are the same in every step"
        )
    of_ddp = {
        "static_graph": made.static_graph,
        "find_unused_parameters": made.find_unused_parameters,
        "comm_hook": made.comm_hook != "none",
        "gradient_as_bucket_view=False": not made.gradient_as_bucket_view,
    }
    of_fsdp = {
        f"fsdp_blocks={made.fsdp_blocks}": made.fsdp_blocks != 1,
        "fsdp_reshard=False": not made.fsdp_reshard,
        f"fsdp_gather={made.fsdp_gather}": made.fsdp_gather != "fp32",
    }
    for owner, name, known in (("ddp", "DDP", of_ddp), ("fsdp", "FSDP2", of_fsdp)):
        given = [option for option, on in known.items() if on]
        if kind != owner and given:
            raise ValueError(
                f"{', '.join(given)}: options that are {name}'s; parallel={kind!r} has no use for "
                f"them, parallel={owner!r} would do"
            )
    if made.fsdp_blocks < 1:
        raise ValueError(f"fsdp_blocks={made.fsdp_blocks} must be at least 1 block")
    if not made.bucket_mb > 0:
        raise ValueError(f"bucket_mb={made.bucket_mb} must be more than 0; DDP's default is 25")


def check_gathered(fsdp_gather: str, precision: str, compile: bool) -> None:
    """Raise ValueError unless weights may be gathered in bf16: autocast would round them anyway,
    and no Dynamo traces FSDP2's hooks within a block."""
    if fsdp_gather == "bf16" and (precision != "bf16" or compile):
        found = "compile=True" if compile else f"precision={precision!r}"
        raise ValueError(
            f"fsdp_gather='bf16' with {found}: it needs precision='bf16' without compile, and "
            "fsdp_gather='fp32' would do"
        )


def check_cp(cp: int, ranks: int) -> None:
    """Raise ValueError unless groups of `cp` ranks divide all of them."""
    if cp < 1 or ranks % cp:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ValueError(f"cp={cp} does not divide {ranks} rank(s); cp may be {divisors}")


def devices(ranks: int, backend: str | None = None, device: str = "auto") -> tuple[bool, str]:
    """(True if on GPUs, backend) of `ranks` ranks on this machine. Raises ValueError for NCCL or
    device "cuda" without a GPU for each."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = "backend='nccl'" if backend == "nccl" else "device='cuda'" if device == "cuda" else ""
    if device == "cpu" and backend == "nccl":
        raise ValueError("backend='nccl' moves what is on GPUs only; backend='gloo' runs on CPUs")
    if wanted and gpus < ranks:
        found = "no GPU" if not gpus else "one GPU" if gpus == 1 else f"{gpus} GPUs"
        raise ValueError(
            f"{wanted} needs a GPU for each of {ranks} rank(s) and torch finds {found}; "
            "backend='gloo' on CPUs would do" + (f", or {gpus} rank(s)" if gpus else "")
        )
    on_gpu = device != "cpu" and ranks <= gpus
    return on_gpu, backend or ("nccl" if on_gpu else "gloo")


def place() -> tuple[int, int, int]:
    """(rank, ranks, local rank) from torchrun's environment. Raises ValueError without it."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise ValueError(
            f"parallel training starts under torchrun, which sets {', '.join(missing)}: "
            "torchrun --nproc-per-node 2 -m nsa train --parallel ddp, or nsa train --ranks 2"
        )
    return tuple(int(os.environ[name]) for name in needed[:3])
