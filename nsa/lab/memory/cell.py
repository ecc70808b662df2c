"""One cell of a memory table: a model, a backend and a size, checked before anything runs."""

from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig

DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")
DATA = ("text", "synthetic")


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
        for name, least in (("tokens", 1), ("batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        for name, known in (("dtype", DTYPES), ("device", DEVICES), ("data", DATA)):
            if getattr(self, name) not in known:
                choices = ", ".join(known)
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; known are {choices}")
        if not isinstance(self.changes, dict):
            raise ValueError(f"changes={self.changes!r} must be a mapping of ModelConfig fields")
        twice = sorted({"layers", "backend", "checkpoint"} & set(self.changes))
        if twice:
            raise ValueError(f"changes names {', '.join(twice)}, which the cell itself has")
        config = self.config()
        if config.max_tokens is not None and self.tokens > config.max_tokens:
            raise ValueError(f"tokens={self.tokens} is more than max_tokens={config.max_tokens}")
        if self.data == "text" and config.vocab < 256:
            raise ValueError(f"data='text' has 256 byte values, vocab={config.vocab} is too few")

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
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
                raise ValueError(f"a cell has no field {name!r}; {hint}")
        missing = [name for name in ("preset", "backend", "tokens") if name not in values]
        if missing:
            raise ValueError(f"a cell needs {', '.join(missing)}")
        return cls(**values)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" x{self.layers}"
        extra = [f"checkpoint {self.checkpoint}"] * bool(self.checkpoint)
        extra += [f"batch {self.batch}"] * (self.batch != 1)
        extra += [f"{name}={value}" for name, value in self.changes.items()]
        size = f"T={self.tokens} {self.dtype} {self.device}"
        return " ".join([f"{self.preset}{layers} {self.backend} {size}", *extra])
