"""The ranks that share a sequence: their group, and agreement on a call before it begins."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.parallel.layout import Layout, Sharded, layout_of, shard_sequence
from nsa.spelling import choice

METHODS = ("gather", "ulysses")
DIMENSION = "cp"


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place among the P ranks that share each sequence; made by `over`.

    method: "gather" collects keys and values of all tokens on each rank, for any P; "ulysses"
    exchanges tokens for heads, for P that divide the KV heads.
    heads_at_once: KV heads whose keys and values "gather" holds at a time, None for all. The next
    ones are sent while these are computed, so the buffers of two such groups exist at once.
    check: compare the sizes of each call over the ranks first, so that all raise if one has others.
    It sends a few hundred bytes and makes the host wait for them.
    """

    group: dist.ProcessGroup | None = None  # None for a single rank
    rank: int = 0
    ranks: int = 1
    method: str = "gather"
    heads_at_once: int | None = None
    check: bool = True

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        if self.heads_at_once is not None and self.heads_at_once < 1:
            raise ValueError(f"heads_at_once={self.heads_at_once} must be at least 1, or None")

    @classmethod
    def over(cls, mesh: DeviceMesh, **options: Any) -> "ContextParallel":
        """Place of this rank in the dimension "cp" of a mesh, whatever others it has.

        options: method, heads_at_once and check. Raises ValueError for a mesh without it.
        """
        names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
        if names is None or DIMENSION not in names:
            got = type(mesh).__name__ if not isinstance(mesh, DeviceMesh) else f"dimensions {names}"
            raise ValueError(
                f"context parallelism needs a DeviceMesh with a dimension {DIMENSION!r}, got {got};"
                f' init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", {DIMENSION!r})) is one'
            )
        group = mesh.get_group(DIMENSION)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), **options)

    def layout(self, rows: int) -> Layout:
        """Layout of a sequence of which each rank has `rows` rows, padding included. Raises
        ValueError for an odd number, which is not two chunks."""
        if rows % 2:
            raise ValueError(
                f"{rows} rows on a rank are not a head and a tail chunk of equal length; "
                "shard_sequence cuts and pads a sequence"
            )
        return layout_of(rows * self.ranks, self.ranks)

    def shard_sequence(self, *tensors: Tensor | None, **options: Any) -> Sharded:
        """`shard_sequence` for this rank."""
        return shard_sequence(*tensors, rank=self.rank, ranks=self.ranks, **options)

    def check_heads(self, kv_heads: int) -> None:
        """Raise ValueError for KV heads that the method cannot split."""
        held = self.heads_at_once
        divisors = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        if self.method == "ulysses" and kv_heads % self.ranks:
            raise ValueError(
                f"method='ulysses' gives each of {self.ranks} ranks as many of the HKV={kv_heads} "
                f"KV heads, which cannot be; {divisors} rank(s) or method='gather' would do"
            )
        if self.method == "gather" and held is not None and kv_heads % held:
            raise ValueError(
                f"heads_at_once={held} does not divide HKV={kv_heads} KV heads; {divisors} would"
            )

    def agree(self, sizes: Mapping[str, Any], error: Exception | None = None) -> None:
        """Raise on every rank if one has an `error` or other `sizes`; collective with `check`.

        Raises `error` itself where there is one, elsewhere a ValueError that names its rank.
        """
        said: list[Any] = []
        if self.check and self.ranks > 1:
            said = [None] * self.ranks
            plain = {name: str(size) for name, size in sizes.items()}
            mine = plain, None if error is None else str(error)
            with self.naming("comparing the ranks' inputs"):
                dist.all_gather_object(said, mine, group=self.group)
        if error is not None:
            raise error
        for rank, (_, refused) in enumerate(said):
            if refused is not None:
                raise ValueError(f"rank {rank} of {self.ranks} refused its inputs: {refused}")
        for rank, (theirs, _) in enumerate(said):
            first = said[0][0]
            for name in (n for n in {**first, **theirs} if first.get(n) != theirs.get(n)):
                raise ValueError(
                    f"ranks that share a sequence need equal sizes and options, and {name} is "
                    f"{first.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}"
                )

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Name the collective, its ranks and the usual cause in the error of a failed one."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"context parallelism: rank {self.rank} of {self.ranks} failed while {doing}: "
                f"{str(error).splitlines()[0]}. If another of ranks "
                f"{dist.get_process_group_ranks(self.group)} has ended or hangs, its own log has "
                "the cause"
            ) from error
