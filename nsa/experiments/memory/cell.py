"""One cell of a memory table: a model, a backend and a size, checked before anything runs."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nsa.lab.cells import DATA, DEVICES, check_choices, check_fields, check_model, check_whole

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
        check_whole(self, {"tokens": 1, "batch": 1, "seed": 0})
        check_choices(self, {"dtype": DTYPES, "device": DEVICES, "data": DATA})
        check_model(self, own={"layers", "backend", "checkpoint"})

    def config(self) -> "ModelConfig":
        """The model's config. ValueError where preset, layers, backend or changes are wrong."""
        from nsa.attention.registry import check_name
        from nsa.model.presets import preset

        check_name(self.backend)
        layers = {} if self.layers is None else {"layers": self.layers}
        try:
            return preset(
                self.preset,
                **layers,
                backend=self.backend,
                checkpoint=self.checkpoint,
                **self.changes,
            )
        except TypeError as error:
            raise ValueError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same cell back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cell":
        """The cell of `to_dict`. ValueError for a field it does not have, naming the nearest."""
        check_fields(cls, values, "a cell", needed=("preset", "backend", "tokens"))
        return cls(**values)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" x{self.layers}"
        extra = [f"checkpoint {self.checkpoint}"] * bool(self.checkpoint)
        extra += [f"batch {self.batch}"] * (self.batch != 1)
        extra += [f"{name}={value}" for name, value in self.changes.items()]
        size = f"T={self.tokens} {self.dtype} {self.device}"
        return " ".join([f"{self.preset}{layers} {self.backend} {size}", *extra])
