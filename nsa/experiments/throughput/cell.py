"""One cell of a throughput table: a model, how it is trained, and for how long."""

from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from nsa.lab.cells import DATA, DEVICES, check_choices, check_fields, check_model, check_whole

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig
    from nsa.model.train import TrainConfig

ATTENTIONS = ("nsa", "dense")
PARALLELS = ("none", "ddp", "fsdp")
LEAST_WARMUP = 3  # steps 0 to 2: kernels are compiled, optimizer state is made, buckets are rebuilt
SWITCHES = ("compile", "cuda_graph", "observe")
TOLD = ("attention", "backend", "tokens")  # by a cell's name and T, wherever it is shown


@dataclass(frozen=True)
class TrainCell:
    """A training run of `warmup` steps that nobody times and `steps` that are timed.

    attention: "dense" is the twin of the same model, see `nsa.model.presets.dense_twin`, and
    `backend` one of dense attention's. batch: sequences of one step of the whole job, all ranks
    together. layers: None for the preset's own number. checkpoint: see ModelConfig. data: "text"
    reads the standard library's sources. seed draws the weights; the data are the same for every
    seed. observe: what all observers together cost is measured too, after the timed steps. changes:
    further fields of ModelConfig. variant: how `with_` made this cell of another.

    Raises ValueError for anything that could not be run.
    """

    preset: str
    tokens: int
    attention: str = "nsa"
    backend: str = "auto"
    batch: int = 1
    layers: int | None = None
    precision: str = "fp32"
    checkpoint: str = ""
    compile: bool = False
    cuda_graph: bool = False
    observe: bool = False
    ranks: int = 1
    parallel: str = "none"
    device: str = "cpu"
    data: str = "text"
    seed: int = 1337
    warmup: int = LEAST_WARMUP
    steps: int = 20
    changes: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    def __post_init__(self) -> None:
        least = {"tokens": 1, "batch": 1, "ranks": 1, "seed": 0, "warmup": LEAST_WARMUP, "steps": 2}
        check_whole(self, least)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        choices = {"attention": ATTENTIONS, "parallel": PARALLELS, "device": DEVICES, "data": DATA}
        check_choices(self, choices)
        if self.observe and (self.compile or self.cuda_graph):
            raise ValueError("observe hooks modules, which compile and cuda_graph leave out")
        if self.ranks > 1 and self.parallel == "none":
            raise ValueError(f"ranks={self.ranks} need parallel='ddp' or 'fsdp'")
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} is not a multiple of ranks={self.ranks}")
        check_model(self, own={"attention", "layers", "backend", "checkpoint"})
        self.training()

    @property
    def name(self) -> str:
        """What its line is called: the backend; the twin is "dense", or "dense-sdpa"."""
        if self.attention == "nsa":
            return self.backend
        return "dense" if self.backend == "auto" else f"dense-{self.backend}"

    def config(self) -> "ModelConfig":
        """The model's config. ValueError where preset, layers, backend or changes are wrong."""
        from nsa.attention.registry import check_name
        from nsa.model import dense_attention
        from nsa.model.presets import dense_twin, preset

        dense = self.attention == "dense"
        layers = {} if self.layers is None else {"layers": self.layers}
        try:
            config = preset(self.preset, **layers, checkpoint=self.checkpoint, **self.changes)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if not dense:
            check_name(self.backend)
            return config.with_(backend=self.backend)
        if self.backend not in dense_attention.BACKENDS:
            known = ", ".join(dense_attention.BACKENDS)
            raise ValueError(f"backend={self.backend!r} is none of dense attention's: {known}")
        return dense_twin(config, backend=self.backend)

    def training(self, **changes: Any) -> "TrainConfig":
        """How it is trained. ValueError where the loop refuses that."""
        from nsa.model.train import TrainConfig

        values = {
            "batch": self.batch,
            "tokens": self.tokens,
            "precision": self.precision,
            "compile": self.compile,
            "cuda_graph": self.cuda_graph,
            "seed": self.seed,
        }
        return TrainConfig(**values | changes)

    def with_(self, text: str) -> "TrainCell":
        """A copy with the fields that words name: "compile", "checkpoint:all batch:1".

        "attention:dense backend:auto" makes the twin of it. Its variant is the words but for TOLD.

        ValueError for a field that a cell does not have, naming the nearest.
        """
        values, words = self.to_dict(), self.variant.split()
        for word in text.split():
            name, colon, value = word.partition(":")
            if name not in values or (not colon and name not in SWITCHES):
                near = get_close_matches(name, values, n=1, cutoff=0.0)[0]
                raise ValueError(f"{word!r} in {text!r} changes nothing; the nearest is {near}:...")
            words += [word] * (name not in TOLD)
            old = getattr(self, name)
            if not colon:
                values[name] = True
            elif isinstance(old, bool):
                values[name] = value.lower() == "true"
            else:
                values[name] = int(value) if value.isdigit() else value
        return TrainCell(**values | {"variant": " ".join(words)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same cell back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainCell":
        """The cell of `to_dict`. ValueError for a field it does not have, naming the nearest."""
        check_fields(cls, values, "a cell", needed=("preset", "tokens"))
        return cls(**values)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" x{self.layers}"
        extra = [name for name in SWITCHES if getattr(self, name)]
        extra += [f"checkpoint {self.checkpoint}"] * bool(self.checkpoint)
        extra += [f"{self.ranks} ranks {self.parallel}"] * (self.parallel != "none")
        extra += [f"{name}={value}" for name, value in self.changes.items()]
        size = f"T={self.tokens} batch {self.batch} {self.precision} {self.device}"
        return " ".join([f"{self.preset}{layers} {self.name} {size}", *extra])
