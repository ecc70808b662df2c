"""One drawn example: what each query sees, selects and weighs, fast enough to follow a slider.

Everything comes from `nsa.reference` and the lab's drawn inputs, at as many queries as a picture
can resolve; a query's own weights are exact at any T.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from nsa.blocks import compressed_span, count_compressed, count_selectable, window_span
from nsa.config import NSAConfig
from nsa.reference.attend import attend, attention_probs
from nsa.reference.compress import Phi, compress_keys, compress_values
from nsa.reference.nsa import BRANCHES, compressed_visible
from nsa.reference.select import selected_tokens
from workbook.lab.measure.attention_inputs import Drawn, draw, importance_at, mean_union, select_at
from workbook.lab.measure.shapes import Shape
from workbook.lab.measure.timing import one_thread

DOTS = 256  # queries, and tokens, that a picture shows of a long sequence
NEIGHBOURS = 8  # consecutive queries whose selections are compared
TILES = 16  # such groups, spread over the sequence
MOST_TOKENS = 8192  # limit for updates while a slider moves
MOST_HEADS = 64
OUTPUTS, HEADS = 24, 4  # queries, and heads of the group, whose outputs are computed


@dataclass(frozen=True)
class Choice:
    """Settings of an example: G query heads that share one KV head, fp32, phi a mean.

    ValueError for sizes below 1, an unknown kind of queries, more than MOST_TOKENS or MOST_HEADS.
    """

    tokens: int = 512
    group: int = 4
    dim: int = 16
    queries: str = "random"
    seed: int = 1337
    config: NSAConfig = field(default_factory=NSAConfig)

    def __post_init__(self) -> None:
        self.shape  # noqa: B018 - it raises for invalid sizes
        for name, most in (("tokens", MOST_TOKENS), ("group", MOST_HEADS)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"{name}={getattr(self, name)} is more than can be drawn while a slider moves; "
                    f"at most {most}"
                )

    @property
    def shape(self) -> Shape:
        """Shape from which the lab draws inputs."""
        sizes = {"heads": self.group, "kv_heads": 1, "dim": self.dim, "value_dim": self.dim}
        kind = {"dtype": "fp32", "queries": self.queries, "seed": self.seed}
        return Shape(self.tokens, **sizes, **kind, config=self.config)


@lru_cache(2)
@one_thread()
def _drawn(shape: Shape) -> Drawn:
    with torch.no_grad():
        return draw(shape)


@dataclass(frozen=True)
class Seen:
    """View of one query: `weights` {branch: [t + 1]}, each token's share of that branch's output,
    a mean over the group's heads (zeros if it sees none); `blocks` selected, ascending;
    `importance` [NB] of Eq. 10, from 0 to G; `forced`, the forced blocks."""

    query: int
    weights: dict[str, Tensor]
    blocks: list[int]
    forced: list[int]
    importance: Tensor


class Example:
    """Drawn example of a choice. Parts are computed on first use and cached."""

    def __init__(self, choice: Choice):
        self.choice, self.config = choice, choice.config
        dots = min(choice.tokens, DOTS)
        self.rows = ((torch.arange(dots) + 0.5) * choice.tokens / dots).long()  # [R]
        # block sizes do not affect the drawn inputs
        drawn = _drawn(replace(choice.shape, config=NSAConfig()))
        self.q, self.k, self.v = (x.detach() for x in (drawn.q, drawn.k, drawn.v))
        self._last: Seen | None = None

    @cached_property
    @one_thread()
    def k_cmp(self) -> Tensor:
        """Compressed keys [1, C, 1, D]."""
        return compress_keys(self.k, Phi(), self.config)

    @one_thread()
    def selection(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute importance [R, NB] and blocks [R, n] of the queries at these positions."""
        scores = importance_at(self.q[:, rows], self.k_cmp, rows, self.choice.tokens, self.config)
        return scores[0, :, 0], select_at(scores, rows, self.config)[0, :, 0]

    @cached_property
    def selected(self) -> tuple[Tensor, Tensor]:
        """Importance [R, NB] and blocks [R, n] of the queries that are shown."""
        return self.selection(self.rows)

    @cached_property
    @one_thread()
    def sees(self) -> dict[str, Tensor]:
        """Masks {branch: bool [R, R]} of tokens (columns) that contribute to each query (rows)."""
        rows, span = self.rows, compressed_span(self.config)
        starts = torch.arange(self.k_cmp.shape[1])[:, None] * span.stride
        covers = (rows >= starts) & (rows < starts + span.length)  # [C, R]
        visible = self._visible(rows, self.selected[1], self.choice.tokens)
        found = {branch: visible[branch][0, 0][:, rows] for branch in ("slc", "win")}
        return {"cmp": visible["cmp"][0, 0].float() @ covers.float() > 0} | found

    def _visible(self, rows: Tensor, blocks: Tensor, tokens: int) -> dict[str, Tensor]:
        """Masks {branch: [1, 1, R, S]} of the compressed keys, and of the first tokens, that the
        queries at `rows` see when they select `blocks`."""
        t = torch.arange(tokens)
        past = t <= rows[:, None]
        return {
            "cmp": compressed_visible(rows, self.k_cmp.shape[1], self.config),
            "slc": selected_tokens(blocks[None, :, None], tokens, self.config) & past,
            "win": (past & (t > rows[:, None] - self.config.window))[None, None],
        }

    def at(self, query: int) -> Seen:
        """Return what the query at this position sees. ValueError outside 0..T-1."""
        if not 0 <= query < self.choice.tokens:
            raise ValueError(f"query={query} must be in 0..{self.choice.tokens - 1}")
        if self._last is None or self._last.query != query:  # the picture and the words ask
            self._last = self._at(query)
        return self._last

    @one_thread()
    def _at(self, query: int) -> Seen:
        config, position = self.config, torch.tensor([query])
        q, k = self.q[:, position], self.k[:, : query + 1]
        scores, blocks = self.selection(position)
        visible = self._visible(position, blocks, query + 1)
        scale = self.choice.dim**-0.5

        def weights(branch: str, keys: Tensor) -> Tensor:
            return attention_probs(q, keys, visible[branch], scale)[0][0, 0, :, 0].mean(0)

        found = {branch: weights(branch, k) for branch in ("slc", "win")}
        found["cmp"] = _spread(weights("cmp", self.k_cmp), query + 1, config)
        taken = [int(j) for j in blocks[0] if j >= 0]
        return Seen(query, found, taken, forced_blocks(query, config), scores[0])

    @cached_property
    def distinct(self) -> float:
        """Mean number of distinct blocks that NEIGHBOURS consecutive queries select."""
        whole = self.choice.tokens // NEIGHBOURS
        if not whole:
            return float("nan")
        tiles = torch.linspace(0, whole - 1, min(TILES, whole)).long().unique()
        rows = (tiles[:, None] * NEIGHBOURS + torch.arange(NEIGHBOURS)).flatten()
        return mean_union(self.selection(rows)[1][None, :, None], NEIGHBOURS)

    @cached_property
    @one_thread()
    def output_norms(self) -> tuple[Tensor, Tensor]:
        """Positions [S], and the mean norm [S, 3] of a head's output in each branch there."""
        rows = self.rows[:: -(-len(self.rows) // OUTPUTS)]
        visible = self._visible(rows, self.selection(rows)[1], self.choice.tokens)
        q = self.q[:, rows, :HEADS]
        values = {"cmp": compress_values(self.v, Phi(), self.config), "slc": self.v, "win": self.v}
        keys = {"cmp": self.k_cmp, "slc": self.k, "win": self.k}
        outputs = [
            attend(q, keys[b], values[b], visible[b], self.choice.dim**-0.5)[0] for b in BRANCHES
        ]
        return rows, torch.stack([o[0].norm(dim=-1).mean(-1) for o in outputs], dim=-1)


def forced_blocks(query: int, config: NSAConfig) -> list[int]:
    """Blocks that a query selects regardless of their scores."""
    own = query // config.select_block
    first = range(min(config.select_initial, own + 1))
    return sorted({*first, *range(max(0, own - config.select_local + 1), own + 1)})


def _spread(weights: Tensor, tokens: int, config: NSAConfig) -> Tensor:
    """Weights [tokens]: each compressed key's weight, divided evenly among its tokens."""
    seen = count_compressed(tokens, config)
    starts = torch.arange(seen) * config.compress_stride
    share = weights[:seen] / config.compress_block
    steps = torch.zeros(tokens + 1)
    steps.index_add_(0, starts, share)
    steps.index_add_(0, starts + config.compress_block, -share)
    return steps.cumsum(0)[:tokens].clamp(min=0)


def keys_seen(choice: Choice, query: int) -> dict[str, int]:
    """Number of keys that a query sees in each branch, from sizes alone, and in dense attention."""
    config = choice.config
    ranges = {"cmp": compressed_span(config), "win": window_span(config)}
    found = {name: span.seen(query)[1] - span.seen(query)[0] for name, span in ranges.items()}
    blocks = min(config.select_count, query // config.select_block + 1)
    found["slc"] = (blocks - 1) * config.select_block + query % config.select_block + 1
    return {name: found[name] for name in BRANCHES} | {"dense": query + 1}


def sentences(example: Example, query: int) -> list[str]:
    """Describe the pictures in words; the same on every machine."""
    choice, config = example.choice, example.config
    seen = keys_seen(choice, query)
    sparse = seen["cmp"] + seen["slc"] + seen["win"]
    blocks, due = example.at(query).blocks, count_selectable(query + 1, config)
    reach = config.select_count * config.select_block
    return [
        f"query {query} of T = {choice.tokens} sees {seen['cmp']} compressed keys, {seen['slc']} "
        f"selected tokens and {seen['win']} in its window: {sparse} keys, where dense attention "
        f"sees {seen['dense']} ({seen['dense'] / sparse:.2g} times as many)",
        f"it selects {len(blocks)} of the {due} blocks begun, "
        f"{len(set(blocks) & set(forced_blocks(query, config)))} of them forced",
        f"selection leaves something out from T = {reach + 1} on (n l' = {reach}), the window from "
        f"T = {config.window + 1} on",
        f"{NEIGHBOURS} neighbouring queries select {example.distinct:.1f} distinct blocks between "
        f"them, {choice.queries} queries",
    ]
