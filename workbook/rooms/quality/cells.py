"""Cells of the comparison: variants of one model, each a seed and a length, on equal tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nsa.config import NSAConfig
from nsa.model import shards, tokens
from nsa.model.config import ModelConfig, keep_int
from nsa.model.presets import dense_twin, production
from nsa.model.train_config import TrainConfig
from nsa.spelling import choice
from workbook.rooms.quality.planted import LEAST


def _blocks(block: int, stride: int, select: int, count: int) -> dict[str, int]:
    names = ("compress_block", "compress_stride", "select_block", "select_count")
    return dict(zip(names, (block, stride, select, count), strict=True))


BASE, DENSE = "nsa", "dense"
BYTES = 256  # ids of text in bytes
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)  # of packages held out, the first that leaves enough text
CONTROLS = ("window", "compressed")  # which must lose
# Variants whose blocks dense attention's weights are summed by.
BLOCKS = (BASE, "half-blocks", "quarter-blocks", "select-64")
# Changes of the model by variant; dense ones are baselines of the unchanged model.
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    DENSE: {},
    "dense-wide": {},  # its MLPs make up for the parameters that NSA has more
    "window": {"force_branch": "win"},
    "compressed": {"force_branch": "cmp"},
    "selected": {"force_branch": "slc"},
    "shared-kv": {"shared_kv": True},
    "phi-mlp": {"phi": "mlp"},
    "gate-softmax": {"gate": "softmax"},
    "gate-uniform": {"gate": "uniform"},
    "half-blocks": {"nsa": _blocks(16, 8, 32, 32)},  # as many bytes read exactly
    "quarter-blocks": {"nsa": _blocks(8, 4, 16, 64)},
    "select-64": {"nsa": {"select_count": 64}},  # four times as many
    "share-2": {"share_selection": 2},  # every second layer selects
    "share-4": {"share_selection": 4},
}


def small() -> ModelConfig:
    """The model of the comparison: 21 million parameters, the paper's block sizes."""
    return ModelConfig("quality", layers=7, dim=512, heads=8, kv_heads=2, head_dim=64)


def tiny() -> ModelConfig:
    """The same shape for a CPU and a minute: 130,000 parameters, T = 512."""
    nsa = NSAConfig(16, 8, select_block=16, select_count=6, window=64)
    return ModelConfig("quality-tiny", 2, dim=64, heads=4, kv_heads=1, head_dim=16, nsa=nsa)


MODELS = {"small": small, "tiny": tiny, "production": production}


@dataclass(frozen=True)
class Cell:
    """One training: a variant of a model, a seed, a length, and how much text it sees.

    Cells that differ in the variant alone see the same text in the same order. Ids are bytes, or
    tokens of a tokenizer of `vocab` ids. Raises ValueError for what cannot be trained.
    """

    variant: str
    seed: int
    tokens: int  # T
    bytes: int  # ids that training sees, counted again where it sees them again
    model: str = "small"
    batch_tokens: int = 65536  # of a step
    lr: float = 1e-3
    precision: str = "bf16"
    vocab: int = BYTES

    def __post_init__(self) -> None:
        choice("variant", self.variant, VARIANTS)
        choice("model", self.model, MODELS)
        for name, least in (("seed", 0), ("tokens", LEAST), ("bytes", 1), ("batch_tokens", 1)):
            keep_int(self, name, least)
        keep_int(self, "vocab", BYTES)
        if self.batch_tokens % self.tokens:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} are no multiple of tokens={self.tokens}; "
                f"{max(1, self.batch_tokens // self.tokens) * self.tokens} are"
            )
        if self.steps < 2:
            raise ValueError(
                f"bytes={self.bytes} are fewer than two steps of {self.batch_tokens}; at least "
                f"{2 * self.batch_tokens} would do"
            )

    @property
    def steps(self) -> int:
        return self.bytes // self.batch_tokens

    @property
    def batch(self) -> int:
        return self.batch_tokens // self.tokens

    @property
    def name(self) -> str:
        """Name of the cell's folder; cells with the same name are equal."""
        rate = f"{self.lr:g}-{self.precision}-{self.batch_tokens}"
        rate += f"-{self.vocab}" if self.vocab != BYTES else ""
        return f"{self.model}-{self.variant}-{self.tokens}-seed{self.seed}-{self.bytes}-{rate}"

    def config(self) -> ModelConfig:
        """The variant's model."""
        base = MODELS[self.model]().with_(vocab=self.vocab, **VARIANTS[self.variant])
        if self.variant.startswith(DENSE):
            return dense_twin(base, same_parameters=self.variant == "dense-wide")
        return base

    def training(self, compile: bool = False, cuda_graph: bool = False) -> TrainConfig:
        """AdamW, a warm-up of 5 % of the steps, then a cosine to a tenth of the rate."""
        return TrainConfig(
            self.batch,
            self.tokens,
            self.steps,
            lr=self.lr,
            min_lr=self.lr / 10,
            schedule="cosine",
            warmup_steps=max(1, self.steps // 20),
            precision=self.precision,
            compile=compile,
            cuda_graph=cuda_graph,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields as a row has them: a vocabulary of bytes, the only one once, is left out."""
        return {name: x for name, x in asdict(self).items() if (name, x) != ("vocab", BYTES)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def cells_of(
    variants: Sequence[str], seeds: Sequence[int], lengths: Sequence[int], **common: Any
) -> list[Cell]:
    """Cells by length, then seed, then variant, so that the first ones to end can be compared."""
    return [
        Cell(variant, seed, tokens, **common)
        for tokens in lengths
        for seed in seeds
        for variant in variants
    ]


def text_of(
    cells: Sequence[Cell], folder: Path, longest: int, most: int | None = None
) -> shards.Shards:
    """Text of this Python's packages for cells of one vocabulary, made in `folder` unless it is
    there; as much is held out as evaluations of `longest` times the trained length read.

    Raises:
        ImportError: cells are of tokens, and tokenizers is missing.
        ValueError: The packages have too little text, or yield fewer ids.
    """
    vocab = cells[0].vocab
    least = 4 * longest * max(cell.tokens for cell in cells)
    least *= 1 if vocab == BYTES else 4  # bytes of a token, at most
    if (folder / "manifest.json").is_file():
        found = shards.opened(folder)
    else:
        found = _built(folder, least, most)
    if vocab != BYTES and "tokenizer" not in found.manifest:
        found = tokens.tokenize(found, vocab)
    return found


def _built(folder: Path, least: int, most: int | None) -> shards.Shards:
    for fraction in FRACTIONS:
        try:
            return shards.build(folder, least, max_bytes=most, fraction=fraction)
        except ValueError as error:
            short = error
    raise short
