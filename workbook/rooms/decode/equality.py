"""Compare decoding with the whole sequence at once, in fp64 on a CPU, and a model's counters."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.cache import LayerCache
from nsa.attention.decode import nsa_decode
from nsa.attention.places import CacheShape
from nsa.config import NSAConfig
from nsa.model.cache import NSACache
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.reference.nsa import BRANCHES, compressed_visible, nsa, window_visible
from nsa.reference.select import select, selected_tokens
from workbook.lab.measure.shapes import TINY_CONFIG
from workbook.lab.measure.timing import one_thread

BACKENDS = ("reference", "masked", "gather")
TOKENS, BATCH, HEADS, KV_HEADS, DIM = 96, 2, 4, 2, 8
CHUNKS = (33, 1, 2, 5, 16, 3)  # of a prompt, then again from the beginning; the rest one by one
SAME = 1e-12  # tolerance in fp64 for another order of sums


@dataclass(frozen=True)
class Equal:
    """Largest difference between outputs of decoding and of the whole sequence at once."""

    what: str
    layout: str
    steps: int
    difference: float
    largest: float  # output

    @property
    def holds(self) -> bool:
        return self.difference <= SAME * max(1.0, self.largest)


def operations(seed: int) -> Iterator[Equal]:
    """Yield the result of each backend and layout: a prompt in chunks, then token by token."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int, dim: int) -> Tensor:
        size = (BATCH, TOKENS, heads, dim)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q = drawn(HEADS, DIM)
    k, v = ({branch: drawn(KV_HEADS, DIM) for branch in BRANCHES} for _ in range(2))
    gates = drawn(HEADS, 3).sigmoid()
    whole = nsa(q, k, v, gates, TINY_CONFIG).o
    sizes = BATCH, TOKENS, KV_HEADS, DIM, DIM, torch.float64
    for backend in BACKENDS:
        for page in (None, TINY_CONFIG.select_block, 2 * TINY_CONFIG.select_block):
            cache, outputs = LayerCache(CacheShape(TINY_CONFIG, *sizes, page=page)), []
            for at in _steps(TOKENS):
                sides = ({branch: x[:, at] for branch, x in side.items()} for side in (k, v))
                given = q[:, at], *sides, gates[:, at]
                outputs.append(nsa_decode(*given, cache, backend=backend))
            layout = "contiguous" if page is None else f"pages of {page}"
            yield _equal(backend, layout, outputs, whole)


def _steps(tokens: int) -> Iterator[slice]:
    start = 0
    for length in (*CHUNKS, *[1] * tokens):
        if start >= tokens:
            return
        yield slice(start, min(start + length, tokens))
        start += length


def _equal(what: str, layout: str, outputs: list[Tensor], whole: Tensor) -> Equal:
    difference = float((torch.cat(outputs, 1) - whole).abs().max())
    return Equal(what, layout, len(outputs), difference, float(whole.abs().max()))


def checked(seed: int) -> tuple[list[Equal], "Counted"]:
    """Check the operation's backends and layouts, and a model."""
    with one_thread():
        return list(operations(seed)), model(seed)


@dataclass(frozen=True)
class Counted:
    """Keys read by the counters of a model's cache, and visible by the definition's masks."""

    equal: Equal
    last_step: dict[str, int]
    in_all: dict[str, int]
    masks_last: dict[str, int]
    masks_all: dict[str, int]
    bytes: int
    foretold_bytes: int
    held_bytes: int


def model(seed: int) -> Counted:
    """Decode after a prompt with a small fp64 model; compare its logits with the uncached ones."""
    torch.manual_seed(seed)
    sizes = {"dim": 32, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    config = ModelConfig("decoding", 2, **sizes, nsa=TINY_CONFIG, backend="masked")
    made = LanguageModel(config).double()
    tokens = torch.randint(0, config.vocab, (BATCH, TOKENS))
    kept = {"dtype": torch.float64, "page": TINY_CONFIG.select_block}
    cache = NSACache(config, BATCH, TOKENS, **kept, backend="gather")
    with torch.no_grad():
        whole, _ = made(tokens)
        outputs = [made(tokens[:, at], cache=cache)[0] for at in _steps(TOKENS)]
    told = cache.record()
    seen = _seen(TOKENS, TINY_CONFIG)
    last, every = ({b: BATCH * x for b, x in one.items()} for one in (seen[-1], _sum(seen)))
    held = sum(x.untyped_storage().nbytes() for x in _tensors(cache))
    estimated = NSACache.bytes_for(config, BATCH, TOKENS, **kept)
    equal = _equal("a model's logits", f"pages of {TINY_CONFIG.select_block}", outputs, whole)
    return Counted(
        equal, told["last_step"], told["in_all"], last, every, told["bytes"], estimated, held
    )


def _tensors(cache: NSACache) -> Iterator[Tensor]:
    """Yield every tensor of a cache, each storage once."""
    seen, waiting = set(), [vars(cache)]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            address = thing.untyped_storage().data_ptr()
            if address not in seen:
                seen.add(address)
                yield thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple):
            waiting += thing
        elif type(thing).__module__.startswith("nsa.") and hasattr(thing, "__dict__"):
            waiting.append(vars(thing))


def _seen(tokens: int, config: NSAConfig) -> list[dict[str, int]]:
    """Number of keys visible to each token by the definition's masks, by branch."""
    positions = torch.arange(tokens)
    blocks = -(-tokens // config.select_block)
    chosen = select(torch.rand(1, tokens, 1, blocks), config)
    inside = selected_tokens(chosen, tokens, config) & (positions <= positions[:, None])
    compressed = compressed_visible(positions, tokens // config.compress_stride, config)
    masks = {"cmp": compressed, "slc": inside, "win": window_visible(positions, config)}
    counts = {branch: mask.sum(-1).flatten().tolist() for branch, mask in masks.items()}
    return [dict(zip(counts, three, strict=True)) for three in zip(*counts.values(), strict=True)]


def _sum(seen: list[dict[str, int]]) -> dict[str, int]:
    return {branch: sum(one[branch] for one in seen) for branch in BRANCHES}
