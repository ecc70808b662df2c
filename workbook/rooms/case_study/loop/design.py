"""Design of an exhibit, its defects one by one, and the bytes that a step of it holds.

Nothing is fitted. The case study's memory table grew neither with T nor with its square: it is
copies of keys and values, one set a token, of which the window's share shrinks once T exceeds the
window, because the truncated cache has ever less of it to give.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from nsa.blocks import compressed_span, count_compressed, count_selectable
from nsa.config import NSAConfig
from nsa.spelling import choice
from workbook.lab.training import check_fields

PATHS = ("loop", "masked")
DEFECTS = {
    "truncated_cache": "the window branch reads absolute positions in a cache of the last w tokens",
    "one_key": "one query with is_causal=True sees the first key alone: window and compressed",
    "heads_as_time": "heads of a group stand as queries of one time each: head i sees i + 1 keys",
    "future_scores": "blocks are scored by a softmax over all compressed keys, later ones included",
    "late_checkpoint": "checkpoint(lambda x: block(x), x) in a loop recomputes the last block",
    "fp16_adamw": "weights and AdamW's states in fp16, where its eps of 1e-8 is 0",
}
# Defects of its sequential path, which every report ran.
SEQUENTIAL = ("truncated_cache", "one_key", "heads_as_time", "future_scores")
FP32, INT64, MIB = 4, 8, 2**20


@dataclass(frozen=True)
class Design:
    """Sizes as the case study names them, `path` and `defects`.

    path: "loop" attends one token at a time, "masked" is the reference of NSA with its dense masks,
    so it refuses the loop's own defects.

    Raises ValueError for an unknown path or defect, and for inconsistent sizes.
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
            choice("defect", name, DEFECTS)
        alone = set(SEQUENTIAL) & set(self.defects)
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
        """Copy with changes; values may be JSON's, and `nsa` a mapping of changes to its fields.

        ValueError for an unknown field names the nearest.
        """
        check_fields(Design, changes, "an exhibit", needed=())
        if isinstance(changes.get("nsa"), dict):
            changes["nsa"] = replace(self.nsa, **changes["nsa"])
        if "defects" in changes:
            changes["defects"] = tuple(changes["defects"])
        return replace(self, **changes)


DESIGNS = {
    # From its memory and timing tables: 78,295,332 parameters in 195 tensors with 12 layers.
    "production": Design(12, defects=SEQUENTIAL),
    # From its RTX 3090 report, which searched for its step-5 hang: T 1024.
    "smoke": Design(6, 256, 8, 2, nsa=NSAConfig(16, 8, 32, 8, window=256), defects=SEQUENTIAL),
    # The same, small enough to run in seconds on a CPU.
    "tiny": Design(1, 32, 4, 2, nsa=NSAConfig(8, 4, 8, 4, window=16), defects=SEQUENTIAL),
}


def design(name: str, **changes: Any) -> Design:
    """Design of that name with some fields changed; ValueError names the nearest."""
    choice("design", name, DESIGNS)
    return DESIGNS[name].with_(**changes)


def production(layers: int = 12) -> Design:
    return design("production", layers=layers)


@dataclass(frozen=True)
class Held:
    """Bytes at the peak: the backward has the last MLP's gradients, and no attention's yet.

    window, compressed, selected: the copies of keys and values in all layers, with what their
    attentions keep beside them; rest: weights, gradients, and tensors that grow with T only.
    """

    window: int
    compressed: int
    selected: int
    rest: int

    @property
    def total(self) -> int:
        return self.window + self.compressed + self.selected + self.rest


def held(design: Design, tokens: int, *, checkpointing: bool = False) -> Held:
    """Count a forward and backward with batch 1, without an optimizer, on the path "loop".

    checkpointing: of every block. One block's copies are there at a time; the peak is the last
    block's, with the inputs of all, or the first one's, with the gradients of all others.

    ValueError for another path, or tokens below 1.
    """
    if design.path != "loop" or tokens < 1:
        raise ValueError(
            f"path={design.path!r}, tokens={tokens}: counted is 'loop', of at least 1 token"
        )
    dim, heads, groups = design.dim, design.heads, design.groups
    layers = 1 if checkpointing else design.layers
    width = groups * design.head_dim
    # A key and its value for every head, every head's probability of it, and its place in a mask.
    copied = FP32 * (2 * dim + heads) + design.has("one_key")
    shared = FP32 * (2 * width + heads) + INT64 * groups + heads * design.has("heads_as_time")

    def copies(keys: tuple[int, ...], each: int) -> int:
        # With an attention's scaled query and its output; only zeros if it sees no key.
        return layers * sum(n * each + FP32 * dim * (2 if n else 1) for n in keys)

    seen = (_seen(design, tokens, t) for t in range(tokens))
    window, compressed, selected = zip(*seen, strict=True)
    # Two norms' x, x / rms and output, and o; the MLP's twice 4; the gate's; the rotary tables.
    rows = 7 * dim + 8 * dim + (2 * width + 3 * groups) + (design.head_dim + 2)
    head = FP32 * (3 * dim + design.vocab + 1) + 2 * INT64
    gradients = dim * design.vocab + 8 * dim * dim  # gradients of the head and the last MLP
    released = 5 * tokens * dim  # by that MLP's backward: 11 rows, less the 6 that it holds itself
    numbers = parameters(design) + gradients - released + layers * tokens * rows
    if checkpointing:
        others = parameters(design) - parameters(replace(design, layers=1))
        numbers += max(others, (design.layers - 1) * tokens * dim)
    found = copies(window, copied), copies(compressed, copied), copies(selected, shared)
    return Held(*found, rest=FP32 * numbers + tokens * head)


def parameters(design: Design) -> int:
    """Number of elements in the model's weights."""
    d, width, hidden = design.dim, design.groups * design.head_dim, design.head_dim // 2
    gate = hidden * (design.head_dim + 1) + 3 * (hidden + 1)
    layer = 2 * d * d + 6 * d * width + gate + 8 * d * d + 2 * d
    return design.layers * layer + 2 * design.vocab * d + d


def peak_mib(layers: int, tokens: int, *, right_window: bool = False) -> float:
    """Peak of the production design; right_window: with a window that is not truncated."""
    chosen = production(layers)
    if right_window:
        chosen = chosen.with_(defects=[d for d in SEQUENTIAL if d != "truncated_cache"])
    return held(chosen, tokens).total / MIB


def _seen(design: Design, tokens: int, t: int) -> tuple[int, int, int]:
    """Number of keys that token t copies in the window, compressed and selected branch."""
    nsa = design.nsa
    end = t + 1
    if design.has("truncated_cache"):  # sequence positions index a cache of the last keys
        end = min(end, tokens, nsa.window)
    window = max(0, end - max(0, t + 1 - nsa.window))
    compressed = min(compressed_span(nsa).seen(t)[1], count_compressed(tokens, nsa))
    # Its own block, which is always selected, is cut at the query.
    blocks = count_selectable(t + 1, nsa)
    cut = blocks * nsa.select_block - (t + 1)
    return window, compressed, min(blocks, nsa.select_count) * nsa.select_block - cut
