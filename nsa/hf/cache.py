"""NSACache with the interface of transformers' generate, which counts columns and padding."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache

from nsa.hf.config import NSAConfig
from nsa.model.cache import NSACache, shape_of
from nsa.model.config import ModelConfig

ASSISTED = 64  # columns that assisted decoding can remove


class GenerationCache(Cache):
    """Cache of a model's sequences between forwards; `nsa` is the NSACache inside.

    transformers counts columns [B, COLUMNS] of a batch, including padding; NSA stores only the
    real tokens of each sequence, at positions 0, 1, ... . So one sequence may have more tokens
    than another, and padding costs nothing. The NSACache is created in the first forward, with
    room for `capacity` tokens per sequence, and is replaced by one twice as large when full.

    Args:
        capacity: initial room in tokens per sequence.
        page: tokens per page; None: contiguous. Beams share the pages that they have in common.
        slack: maximum number of columns that `crop` removes.
        backend: decoding backend, see `nsa.attention.decode.nsa_decode`.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        config: NSAConfig | ModelConfig,
        capacity: int = 256,
        *,
        page: int | None = None,
        slack: int = 16,
        backend: str = "auto",
    ) -> None:
        super().__init__(layers=[])
        self.config = config.model_config() if isinstance(config, NSAConfig) else config
        self.capacity, self.page, self.slack, self.backend = capacity, page, slack, backend
        shape_of(self.config, 1, capacity, page=page, slack=slack)  # raises if sizes do not fit
        self.nsa: NSACache | None = None
        self.columns = 0
        self.real: Bool[Tensor, "B COLUMNS"] | None = None  # None: there is no padding

    def room(self, batch: int, new: int, dtype: torch.dtype, device: torch.device) -> NSACache:
        """Return the NSACache, with room for `new` more tokens of each sequence."""
        if self.nsa is None:
            sizes = {"page": self.page, "slack": self.slack, "backend": self.backend}
            capacity = max(self.capacity, new)
            self.nsa = NSACache(self.config, batch, capacity, dtype=dtype, device=device, **sizes)
        full, wanted = self.nsa.shape.capacity, self.nsa.longest + new
        if wanted > full:
            self.nsa = self.nsa.select(range(self.nsa.shape.batch), max(wanted, 2 * full))
        return self.nsa

    def saw(self, new: int, real: Bool[Tensor, "B NEW"] | None) -> None:
        """Add `new` columns, of which `real` are tokens."""
        if real is not None or self.real is not None:
            shape, device = (self.nsa.shape.batch, new), self.nsa.device
            before = self.real
            if before is None:
                before = torch.ones(shape[0], self.columns, dtype=torch.bool, device=device)
            now = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
            self.real = torch.cat([before, now], dim=1)
        self.columns += new

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -n columns, as assisted decoding does; a positive n is the number of
        columns to keep, as in older versions of transformers. ValueError for more than there are,
        and for more than `slack` once tokens before them are overwritten."""
        n = tokens_to_remove
        kept = min(n, self.columns) if n > 0 else self.columns + n
        if kept < 0:
            raise ValueError(f"the cache has {self.columns} columns and {-n} cannot be removed")
        if kept == self.columns:
            return
        gone = self.columns - kept if self.real is None else self.real[:, kept:].sum(1)
        self.nsa.crop(self.nsa.lengths - gone)
        self.columns = kept
        self.real = None if self.real is None else self.real[:, :kept]

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Replace sequence b by sequence beam_idx[b]."""
        if self.nsa is not None:
            self.nsa.reorder(beam_idx)
            self.real = None if self.real is None else self.real[beam_idx.to(self.real.device)]

    def batch_select_indices(self, indices: Sequence[int] | Tensor) -> None:
        """Keep only these sequences, in this order; one may occur twice."""
        if self.nsa is not None:
            rows = torch.as_tensor(indices, device=self.nsa.device)
            self.nsa = self.nsa.select(rows)
            self.real = None if self.real is None else self.real[rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies adjacent."""
        if self.nsa is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Empty all sequences and keep the memory."""
        if self.nsa is not None:
            self.nsa.reset()
        self.columns, self.real = 0, None

    def activate_past_recording(self) -> None:
        """Prepare for crops: raise `slack` so that enough columns can be removed."""
        if self.nsa is None:
            self.slack = max(self.slack, ASSISTED)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache grows."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + query_length, 0

    def update(self, *states, **options):
        raise NotImplementedError(
            "an NSA layer puts its keys into the cache itself; those of another have no place here"
        )

    @property
    def batch_size(self) -> int:
        return -1 if self.nsa is None else self.nsa.shape.batch

    @property
    def is_initialized(self) -> bool:
        return self.nsa is not None

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    is_sliding = is_linear

    def __len__(self) -> int:
        return self.config.layers

    def __repr__(self) -> str:
        return f"GenerationCache(batch={self.batch_size}, columns={self.columns})"
