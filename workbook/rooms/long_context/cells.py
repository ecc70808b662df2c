"""Cells of the long-context notebook: a shape, the ranks that share it, and the bytes they send."""

from dataclasses import asdict, dataclass, replace

from nsa.blocks import count_compressed
from nsa.parallel.mesh import METHODS
from nsa.spelling import choice
from workbook.lab.measure.shapes import Shape

WIDE = 4  # bytes of a gradient that ranks add


@dataclass(frozen=True)
class Cell:
    """One operation over a sequence of `shape.tokens` tokens on `ranks` ranks.

    Raises ValueError for an unknown method, for ranks that do not divide the sequence into chunks
    of whole blocks, and for KV heads that the method cannot split.
    """

    shape: Shape
    ranks: int = 1
    method: str = "gather"
    heads_at_once: int | None = None  # KV heads whose keys and values "gather" holds; None: all

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        unit = 2 * self.ranks * self.shape.config.select_block
        if self.ranks > 1 and self.shape.tokens % unit:
            raise ValueError(
                f"tokens={self.shape.tokens} on {self.ranks} ranks are no chunks of whole blocks; "
                f"a multiple of {unit} would do"
            )
        parts = self.ranks if self.method == "ulysses" else self.heads_at_once or 1
        if self.shape.kv_heads % parts:
            name = "ranks" if self.method == "ulysses" else "heads_at_once"
            raise ValueError(
                f"{name}={parts} does not divide kv_heads={self.shape.kv_heads} for method="
                f"{self.method!r}"
            )

    @property
    def own(self) -> Shape:
        """Shape of one rank's rows."""
        return replace(self.shape, tokens=self.shape.tokens // self.ranks)

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that one rank receives: {"forward", "backward"}.

        "gather": keys and values of the other ranks, and their compressed ones; backward the same
        numbers in fp32. "ulysses": its heads' part of q, k, v, gates and o from the others.
        """
        shape, others = self.shape, self.ranks - 1
        size, kv = shape.torch_dtype.itemsize, shape.kv_heads * (shape.dim + shape.value_dim)
        rows = shape.batch * shape.tokens // self.ranks
        if self.method == "ulysses":
            a_row = shape.heads * (shape.dim + shape.value_dim + 3) + kv
            sent = others * rows * a_row * size // self.ranks
            return {"forward": sent, "backward": sent}
        compressed = shape.batch * count_compressed(shape.tokens, shape.config) // self.ranks
        numbers = others * (rows + compressed) * kv
        return {"forward": numbers * size, "backward": numbers * WIDE}

    def to_dict(self) -> dict:
        """Return plain, JSON-compatible values; `from_dict` restores an equal cell."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Cell":
        return cls(**values | {"shape": Shape.from_dict(values["shape"])})

    def __str__(self) -> str:
        how = "" if self.ranks == 1 else f" {self.method}"
        held = f" {self.heads_at_once} KV heads at once" * (self.heads_at_once is not None)
        return f"T={self.shape.tokens} on {self.ranks}{how}{held}"
