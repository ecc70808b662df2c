"""The cells of a memory table: a model, a backend and a size each, checked before anything runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from nsa.attention.registry import check_name
from nsa.lab.training import TrainingSpec, check_fields
from nsa.spelling import choice, pair

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Cell:
    """One training step to measure.

    layers: None for the preset's own number. dtype: "bf16" is autocast over fp32 weights.
    checkpoint: layers that are recomputed in the backward, see ModelConfig. data: "text" reads the
    standard library's sources. changes: further fields of ModelConfig, e.g. {"phi": "mlp",
    "nsa": {"window": 64}}.

    Raises ValueError for anything that could not be run.
    """

    preset: str
    backend: str
    tokens: int
    layers: int | None = None
    batch: int = 1
    dtype: str = "fp32"
    checkpoint: str = ""
    device: str = "cpu"
    seed: int = 1337
    data: str = "text"
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, DTYPES)
        self.spec()

    def spec(self) -> TrainingSpec:
        """The training that it measures a step of. ValueError for what could not be run."""
        values = asdict(self)
        return TrainingSpec(precision=values.pop("dtype"), **values)

    def config(self) -> "ModelConfig":
        return self.spec().config()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same cell back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cell":
        """The cell of `to_dict`. ValueError for a field it does not have, naming the nearest."""
        check_fields(cls, values, "a cell", needed=("preset", "backend", "tokens"))
        return cls(**values)

    def __str__(self) -> str:
        batch = f" batch {self.batch}" * (self.batch != 1)
        return self.spec().told(self.backend, f"T={self.tokens} {self.dtype} {self.device}{batch}")


def limits(longest: Sequence[str]) -> dict[str, int]:
    """["sequential=256"] as {"sequential": 256}, a colon as well; ValueError for anything else."""
    found = {}
    for text in longest:
        name, tokens = pair(text, "sequential=256", "=:")
        if not (tokens.isascii() and tokens.isdigit()) or int(tokens) < 1:
            raise ValueError(f"longest={text!r} must end in a number of tokens, as sequential=256")
        found[check_name(name)] = int(tokens)
    return found


def memory_grid(
    presets: Sequence[str],
    layers: Sequence[int],
    backends: Sequence[str],
    tokens: Sequence[int],
    *,
    longest: Sequence[str] = (),
    **fixed: Any,
) -> list[Cell]:
    """One cell for each preset, number of layers, backend and T, in that order.

    `longest` keeps a backend out of longer T than it names, see `limits`. `layers`
    may be empty: each preset's own number. `fixed` holds the other fields of every cell. ValueError
    for anything illegal, before any cell runs, and for a grid without cells.
    """
    most = limits(longest)
    cells = [
        Cell(preset=preset, layers=depth, backend=backend, tokens=length, **fixed)
        for preset, depth, backend, length in product(presets, layers or [None], backends, tokens)
        if length <= most.get(backend, length)
    ]
    if not cells:
        raise ValueError(
            f"no cell to measure: presets={list(presets)}, backends={list(backends)}, "
            f"tokens={list(tokens)}, longest={list(longest)}"
        )
    return cells
