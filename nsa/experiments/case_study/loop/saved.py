"""What one step of the loop holds, byte for byte from shapes: the case study's memory table.

Nothing is fitted. The table grew neither with T nor with its square: it is copies of keys and
values, one set a token, of which the window's share shrinks once T exceeds the window, because
the truncated cache has ever less of it to give.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nsa.blocks import compressed_span, count_compressed, count_selectable
from nsa.experiments.case_study.loop.design import Design

FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Held:
    """Bytes at the peak: the backward has the last MLP's gradients, and no attention's yet.

    window, compressed, selected: the copies of keys and values in all layers, with what their
    attentions keep beside them; other: what grows with T alone; gradients: of the head and of that
    MLP; released: what their backward has freed, less the rows that it holds itself.
    """

    weights: int
    window: int
    compressed: int
    selected: int
    other: int
    gradients: int
    released: int

    @property
    def saved(self) -> int:
        """What the forward keeps for the backward."""
        return self.window + self.compressed + self.selected + self.other

    @property
    def total(self) -> int:
        return self.weights + self.saved + self.gradients - self.released


def held(design: Design, tokens: int) -> Held:
    """Of a forward and backward with batch 1, without an optimizer, on the path "loop".

    ValueError for another path, or tokens below 1.
    """
    if design.path != "loop" or tokens < 1:
        raise ValueError(
            f"path={design.path!r}, tokens={tokens}: counted is 'loop', of at least 1 token"
        )
    d, width = design.dim, design.groups * design.head_dim
    mask = 1 if design.has("one_key") else 0
    # A key and its value for every head, every head's probability of it, and its place in a mask.
    copied = FP32 * (2 * d + design.heads) + mask
    shared = FP32 * (2 * width + design.heads) + INT64 * design.groups
    shared += design.heads if design.has("heads_as_time") else 0
    seen = [_seen(design, tokens, t) for t in range(tokens)]
    window = sum(w * copied + _rows(w, d) for w, _, _ in seen)
    compressed = sum(c * copied + _rows(c, d) for _, c, _ in seen)
    selected = sum(s * shared + _rows(s, d) for _, _, s in seen)
    layers = design.layers
    return Held(
        weights=FP32 * parameters(design),
        window=layers * window,
        compressed=layers * compressed,
        selected=layers * selected,
        other=layers * tokens * _token(design) + _head(design, tokens),
        gradients=FP32 * (d * design.vocab + 8 * d * d),
        released=FP32 * (11 - 6) * tokens * d,
    )


def parameters(design: Design) -> int:
    """Numbers in the model's weights."""
    d, width, hidden = design.dim, design.groups * design.head_dim, design.head_dim // 2
    gate = hidden * (design.head_dim + 1) + 3 * (hidden + 1)
    layer = 2 * d * d + 6 * d * width + gate + 8 * d * d + 2 * d
    return design.layers * layer + 2 * design.vocab * d + d


def with_correct_window(design: Design) -> Design:
    """The same with a window that is not truncated: what the table would have shown then."""
    kept: Iterable[str] = (name for name in design.defects if name != "truncated_cache")
    return design.with_(defects=tuple(kept))


def _seen(design: Design, tokens: int, t: int) -> tuple[int, int, int]:
    """Keys that token t copies in the window, compressed and selected branch."""
    nsa = design.nsa
    first, end = max(0, t + 1 - nsa.window), t + 1
    if design.has("truncated_cache"):  # positions of the sequence in a cache of the last ones
        end = min(end, tokens, nsa.window)
    compressed = min(compressed_span(nsa).seen(t)[1], count_compressed(tokens, nsa))
    if design.has("first_compressed"):
        compressed = min(compressed, 1)
    blocks = count_selectable(t + 1, nsa)
    if design.has("drop_current"):
        blocks = (t + 1) // nsa.select_block
        return max(0, end - first), compressed, min(blocks, nsa.select_count) * nsa.select_block
    cut = blocks * nsa.select_block - (t + 1)  # of its own block, which is always among them
    return max(0, end - first), compressed, min(blocks, nsa.select_count) * nsa.select_block - cut


def _rows(keys: int, dim: int) -> int:
    """An attention's scaled query and its output; zeros alone for a token that sees no key."""
    return (2 if keys else 1) * dim * FP32


def _token(design: Design) -> int:
    """Bytes a token and layer: the block's rows, the gate's, and its share of rotary's tables."""
    width, groups = design.groups * design.head_dim, design.groups
    rows = 7 * design.dim + 8 * design.dim  # two norms' x, x / rms and output, o; the MLP's twice 4
    gate = 2 * width + 3 * groups
    return FP32 * (rows + gate + design.head_dim + 2)


def _head(design: Design, tokens: int) -> int:
    return tokens * (FP32 * (3 * design.dim + design.vocab + 1) + 2 * INT64)
