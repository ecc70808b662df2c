"""What an exhibit is built as: its sizes, its path, and the case study's defects that it has."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nsa.config import NSAConfig
from nsa.lab.training import check_fields
from nsa.spelling import choice, nearest

PATHS = ("loop", "masked")
DEFECTS = {
    "truncated_cache": "the window branch reads absolute positions in a cache of the last w tokens",
    "one_key": "one query with is_causal=True sees the first key alone: window and compressed",
    "heads_as_time": "heads of a group stand as queries of one time each: head i sees i + 1 keys",
    "first_compressed": "the compressed branch returns the first compressed value",
    "drop_current": "a block counts as selectable once it has ended, so a token's own never does",
    "future_scores": "blocks are scored by a softmax over all compressed keys, later ones included",
    "late_checkpoint": "checkpoint(lambda x: block(x), x) in a loop recomputes the last block",
    "fp16_adamw": "weights and AdamW's states in fp16, where its eps of 1e-8 is 0",
}
# What its sequential path did, which is the one that every report ran.
SEQUENTIAL = ("truncated_cache", "one_key", "heads_as_time", "future_scores")
LOOP_ONLY = ("truncated_cache", "one_key", "heads_as_time")


@dataclass(frozen=True)
class Design:
    """Sizes as the case study names them, `path` and `defects`.

    path: "loop" attends one token at a time, "masked" computes the same with dense masks. `masked`
    has no window cache and no single query, so it refuses the defects that live there.

    Raises ValueError for an unknown path or defect, and for sizes that do not fit.
    """

    layers: int = 1
    dim: int = 768
    heads: int = 12
    groups: int = 2
    vocab: int = 256
    nsa: NSAConfig = field(default_factory=NSAConfig)
    path: str = "loop"
    defects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choice("path", self.path, PATHS)
        for name in self.defects:
            if name not in DEFECTS:
                raise ValueError(f"no defect {name!r}; {nearest(name, DEFECTS)}")
        alone = set(LOOP_ONLY) & set(self.defects)
        if self.path == "masked" and alone:
            raise ValueError(f"path='masked' cannot have {', '.join(sorted(alone))}; 'loop' can")
        if self.layers < 1 or self.heads % self.groups or self.dim % self.heads:
            raise ValueError(
                f"layers={self.layers}, dim={self.dim}, heads={self.heads}, groups={self.groups}: "
                "dim must be a multiple of heads, heads of groups, and layers at least 1"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def has(self, defect: str) -> bool:
        return defect in self.defects

    def with_(self, **changes: Any) -> "Design":
        """A copy; `nsa` may be a mapping of its own changes."""
        if isinstance(changes.get("nsa"), dict):
            changes["nsa"] = replace(self.nsa, **changes["nsa"])
        if "defects" in changes:
            changes["defects"] = tuple(changes["defects"])
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same design back."""
        return asdict(self) | {"defects": list(self.defects)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Design":
        """The design of `to_dict`. ValueError names the nearest of an unknown field."""
        check_fields(cls, values, "an exhibit", needed=())
        given = dict(values)
        if isinstance(given.get("nsa"), dict):
            given["nsa"] = NSAConfig(**given["nsa"])
        return cls(**given | {"defects": tuple(given.get("defects", ()))})


_SMALL_BLOCKS = NSAConfig(
    compress_block=16, compress_stride=8, select_block=32, select_count=8, window=256
)
_TINY_BLOCKS = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, select_count=4, window=16
)


def production(layers: int = 12) -> Design:
    """Of its memory and timing tables: 78,295,332 parameters in 195 tensors with 12 layers."""
    return Design(layers=layers, defects=SEQUENTIAL)


def smoke(layers: int = 6) -> Design:
    """Of its RTX 3090 report, on which it looked for its step-5 hang: T 1024."""
    return Design(layers, 256, 8, 2, nsa=_SMALL_BLOCKS, defects=SEQUENTIAL)


def tiny(layers: int = 1) -> Design:
    """The same design, small enough for a CPU's seconds."""
    return Design(layers, 32, 4, 2, nsa=_TINY_BLOCKS, defects=SEQUENTIAL)


DESIGNS = {make.__name__: make for make in (production, smoke, tiny)}


def design(name: str, **changes: Any) -> Design:
    """The design of that name with some fields changed; ValueError names the nearest."""
    if name not in DESIGNS:
        raise ValueError(f"no exhibit {name!r}; {nearest(name, DESIGNS)}")
    try:
        return DESIGNS[name]().with_(**changes)
    except TypeError as error:
        raise ValueError(str(error)) from None
