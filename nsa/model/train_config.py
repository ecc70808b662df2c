"""Everything that decides how a model is trained, as one frozen value that is stored with a run."""

from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from nsa.model.config import check_names
from nsa.model.precision import check_precision
from nsa.model.schedule import SCHEDULES, learning_rate


@dataclass(frozen=True)
class TrainConfig:
    """How a Trainer trains: sizes, AdamW, its learning rate, precision, and how steps are run.

    Raises:
        TypeError: a size that is not an int, a rate that is not a number, a switch that is no bool.
        ValueError: values that are unknown or do not fit; the message says what would do.
    """

    batch: int  # sequences of one optimizer step of the whole job: all ranks and micro-batches
    tokens: int  # T
    steps: int | None = None  # where a "cosine" ends
    lr: float = 1e-3
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 10
    clip: float | None = 1.0  # norm of the gradient; None: it is left as it is
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.95)
    accumulate: int = 1  # micro-batches of a step, on each rank
    precision: str = "fp32"
    compile: bool = False  # torch.compile of each block
    cuda_graph: bool = False  # the whole step as one CUDA graph
    seed: int | None = None  # draws the weights anew; None keeps them

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "warmup_steps", "accumulate", "steps", "seed"):
            value = getattr(self, name)
            if value is None and name in ("steps", "seed"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is not an int")
            least = 0 if name == "seed" else 1
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        for name in ("compile", "cuda_graph"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a bool")
        _check_number("lr", self.lr, above=0.0)
        _check_number("min_lr", self.min_lr, least=0.0)
        _check_number("weight_decay", self.weight_decay, least=0.0)
        if self.clip is not None:
            _check_number("clip", self.clip, above=0.0)
        for beta in self.betas:
            _check_number("betas", beta, least=0.0, below=1.0)
        check_precision(self.precision)
        self._check_schedule()
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch={self.batch} is not a multiple of accumulate={self.accumulate}; nearest "
                f"that are: {self.batch // self.accumulate * self.accumulate or self.accumulate} "
                f"and {(self.batch // self.accumulate + 1) * self.accumulate}"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            known = ", ".join(map(repr, SCHEDULES))
            raise ValueError(f"schedule={self.schedule!r} is unknown; known are {known}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is more than lr={self.lr}")
        if self.schedule == "constant":
            return
        if self.steps is None:
            raise ValueError("schedule='cosine' needs steps, the step at which it ends")
        if self.steps < self.warmup_steps:
            raise ValueError(
                f"steps={self.steps} end before warmup_steps={self.warmup_steps} do; "
                "a shorter warm-up or more steps would do"
            )

    def rate(self, step: int) -> float:
        """The learning rate of step number `step`."""
        return learning_rate(
            step,
            lr=self.lr,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            steps=self.steps,
            min_lr=self.min_lr,
        )

    def with_(self, **changes: Any) -> "TrainConfig":
        """A copy with some fields changed. Raises ValueError for a field it does not have."""
        check_names(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` brings the same config back."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """The config that `to_dict` described. Raises ValueError for names unknown or missing."""
        check_names(cls, values)
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise ValueError(
                f"TrainConfig needs {', '.join(missing)} as well; it got "
                f"{', '.join(values) or 'nothing'}"
            )
        betas = values.get("betas", cls.betas)
        if len(betas) != 2:
            raise ValueError(f"betas={betas} must be two numbers, e.g. {cls.betas}")
        return cls(**{**values, "betas": tuple(betas)})  # JSON knows lists only


def _check_number(
    name: str,
    value: Any,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        hint = "; YAML reads 1e-4 as text and 1.0e-4 as a number" if isinstance(value, str) else ""
        raise TypeError(f"{name}={value!r} is not a number{hint}")
    wanted = []
    if least is not None:
        wanted.append((value >= least, f"at least {least:g}"))
    if above is not None:
        wanted.append((value > above, f"greater than {above:g}"))
    if below is not None:
        wanted.append((value < below, f"less than {below:g}"))
    if not isfinite(value) or not all(holds for holds, _ in wanted):
        raise ValueError(
            f"{name}={value} must be finite and {' and '.join(text for _, text in wanted)}"
        )
