"""A training as a single value, checked before anything runs, and opened where it runs.

Notebook cells, traced trials and profiled steps share this definition of "train this model";
invalid combinations are rejected here, in one place.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from nsa.spelling import choice, nearest, pair

if TYPE_CHECKING:  # a table of cells loads no torch
    from nsa.model.config import ModelConfig
    from nsa.model.data import Data
    from nsa.model.parallel import Parallel
    from nsa.model.train import Trainer
    from nsa.model.train_config import TrainConfig

DENSE = "dense"
OWN = {"attention", "layers", "backend", "checkpoint"}  # ModelConfig fields that a spec sets itself


def setting(told: str, default: Any = MISSING, **limits: Any) -> Any:
    """Field of a spec: what it is, its default, and `least` or `choices`, which limit its values.

    Factors of trials and options of commands take all three from here; `option` is the option's
    name if it is not the field's, and all else is argparse's.
    """
    return field(default=default, metadata={"help": told} | limits)


@dataclass(frozen=True)
class TrainingSpec:
    """A model, its data, and how it is trained.

    Raises ValueError for anything that cannot run; the message names valid values.
    """

    preset: str = setting("the model, one of nsa.model.presets")
    tokens: int = setting("T, tokens of a sequence", least=1)
    # "dense": the dense baseline of the model, nsa.model.presets.dense_twin
    attention: str = setting("of every layer", "nsa", choices=("nsa", "dense"))
    backend: str = setting("of all branches, or of dense attention", "auto")
    batch: int = setting("sequences a step, of all ranks together", 1, least=1)
    layers: int | None = setting("none: the preset's", None)
    precision: str = setting("bf16 and fp16 are autocast over fp32 weights", "fp32")
    checkpoint: str = setting("layers recomputed in the backward: '', all or 2:8", "")
    compile: bool = setting("torch.compile of each block", False)
    cuda_graph: bool = setting("the whole step as one CUDA graph", False)
    ranks: int = setting("processes, started by torchrun when there are several", 1, least=1)
    parallel: str = setting("of several ranks", "none", choices=("none", "ddp", "fsdp"))
    cp: int = setting("ranks that share each sequence", 1, least=1)
    device: str = setting("where", "cpu", choices=("cpu", "cuda"))
    data: str = setting(
        "Python's own sources, or random bytes", "text", choices=("text", "synthetic")
    )
    seed: int = setting("of weights and data", 1337, least=0)
    changes: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further fields of the model's config, as {phi: mlp}"},
    )

    def __post_init__(self) -> None:
        for name, known in TrainingSpec.__dataclass_fields__.items():
            if "least" in known.metadata:
                check_whole(self, {name: known.metadata["least"]})
            elif "choices" in known.metadata:
                choice(name, getattr(self, name), known.metadata["choices"])
            elif known.default is False:
                check_switch(self, name)
        if self.ranks > 1 and self.parallel == "none":
            raise ValueError(f"ranks={self.ranks} need parallel='ddp' or 'fsdp'")
        if not isinstance(self.changes, dict):
            raise ValueError(f"changes={self.changes!r} must be a mapping of ModelConfig fields")
        if twice := sorted(OWN & set(self.changes)):
            raise ValueError(f"changes names {', '.join(twice)}, which the cell itself has")
        config = self.config()

        from nsa.model.parallel import Parallel  # after the checks that need no torch

        Parallel("ddp", ranks=self.ranks, cp=self.cp).rows(self.batch)
        if config.max_tokens is not None and self.tokens > config.max_tokens:
            raise ValueError(f"tokens={self.tokens} is more than max_tokens={config.max_tokens}")
        if self.data == "text" and config.vocab < 256:
            raise ValueError(f"data='text' has 256 byte values, vocab={config.vocab} is too few")
        train = self.training()
        if self.cp > 1:
            from nsa.model.llama import check_shareable
            from nsa.model.train import check_shared
            from nsa.parallel.mesh import ContextParallel

            check_shared(train, self.cp, config.nsa.select_block)
            check_shareable(config, ContextParallel(ranks=self.cp))

    @property
    def name(self) -> str:
        """Name of its line: the backend; the dense baseline is "dense", or "dense-sdpa"."""
        if self.attention == "nsa":
            return self.backend
        return DENSE if self.backend == "auto" else f"{DENSE}-{self.backend}"

    def config(self) -> "ModelConfig":
        """The model's config. ValueError for an invalid preset, layers, backend or changes."""
        from nsa.attention import known
        from nsa.model.presets import dense_twin, preset

        layers = {} if self.layers is None else {"layers": self.layers}
        try:
            config = preset(self.preset, **layers, checkpoint=self.checkpoint, **self.changes)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if self.attention == "nsa":
            known.check(self.backend)  # without torch

            from nsa.attention.registry import check_name

            check_name(self.backend)
            return config.with_(backend=self.backend)
        from nsa.model import dense_attention

        if self.backend not in dense_attention.BACKENDS:
            hint = nearest(self.backend, dense_attention.BACKENDS)
            raise ValueError(f"backend={self.backend!r} is none of dense attention's; {hint}")
        return dense_twin(config, backend=self.backend)

    def training(self, **changes: Any) -> "TrainConfig":
        """The training config. ValueError if the training loop rejects it."""
        from nsa.model.train_config import TrainConfig

        names = ("batch", "tokens", "precision", "compile", "cuda_graph", "seed")
        return TrainConfig(**{name: getattr(self, name) for name in names} | changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-compatible values; `from_dict` restores an equal spec.

        cp is there only if it is not 1, so that earlier specs have the same values, and ids.
        """
        return {name: x for name, x in asdict(self).items() if (name, x) != ("cp", 1)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`. ValueError for an unknown field, naming the nearest."""
        check_fields(cls, values, "a cell", needed=("preset", "tokens"))
        return cls(**values)

    def __str__(self) -> str:
        batch = f" batch {self.batch}" * (self.batch != 1)
        return self.told(self.backend, f"T={self.tokens} {self.precision} {self.device}{batch}")

    def told(self, name: str, size: str, switches: Iterable[str] = ()) -> str:
        """One line: the preset, `name`, `size`, and all non-default settings."""
        layers = "" if self.layers is None else f" x{self.layers}"
        extra = [switch for switch in switches if getattr(self, switch)]
        extra += [f"checkpoint {self.checkpoint}"] * bool(self.checkpoint)
        extra += [f"{self.ranks} ranks {self.parallel}"] * (self.parallel != "none")
        extra += [f"cp {self.cp}"] * (self.cp > 1)
        extra += [f"{key}={value}" for key, value in self.changes.items()]
        return " ".join([f"{self.preset}{layers} {name} {size}", *extra])


@contextlib.contextmanager
def open_trainer(
    spec: TrainingSpec,
    *,
    threads: int | None = None,
    data_seed: int | None = None,
    prefetch: bool = False,
    observers: Sequence[Any] = (),
    **changes: Any,
) -> Iterator["Trainer"]:
    """Yield the spec's trainer, as `trainer_at` does; under torchrun, this rank's.

    threads: torch's thread count; None keeps it. data_seed: seed of the batches; None: the spec's.
    prefetch: batches are prefetched in a thread. changes: overrides of the spec's TrainConfig.
    """
    import torch

    from nsa.model import parallel

    if threads:
        torch.set_num_threads(threads)
    model, train = spec.config(), spec.training(**changes)
    seed = spec.seed if data_seed is None else data_seed
    backend = None if spec.device == "cuda" else "gloo"
    place = parallel.start(spec.parallel, backend=backend, cp=spec.cp)
    if place.kind == "none" or spec.device == "cpu":
        place = replace(place, device=spec.device)
    with trainer_at(place, model, train, spec.data, seed, prefetch=prefetch) as trainer:
        trainer.observers = tuple(observers)
        yield trainer


@contextlib.contextmanager
def trainer_at(
    place: "Parallel",
    model: "ModelConfig",
    train: "TrainConfig",
    data: "str | Data",
    data_seed: int = 1337,
    *,
    prefetch: bool = False,
) -> Iterator["Trainer"]:
    """Yield a new model's trainer in training mode; on exit close it and `place`. `data` is
    "text" or "synthetic", which are seeded by `data_seed`, or the batches themselves."""
    from nsa.model.data import Prefetch, synthetic, text
    from nsa.model.llama import LanguageModel
    from nsa.model.train import Trainer

    with contextlib.ExitStack() as opened:
        opened.callback(place.close)
        batches = data
        if isinstance(data, str):
            batches = text(seed=data_seed) if data == "text" else synthetic(data_seed, model.vocab)
        if prefetch:
            batches = opened.enter_context(Prefetch(batches))
        made = LanguageModel(model)
        trainer = Trainer(made, batches, train, device=place.device, parallel=place)
        opened.callback(trainer.close)
        trainer.model.train()
        yield trainer


def attention_named(name: str) -> dict[str, str]:
    """Fields of a spec whose line has this name: a backend of NSA, or "dense", the baseline."""
    return {"attention": DENSE} if name == DENSE else {"backend": name}


def check_whole(spec: Any, least: Mapping[str, int]) -> None:
    """Raise ValueError unless these fields are integers of at least the given minimum."""
    for name, smallest in least.items():
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {smallest}")


def longest_tokens(texts: Iterable[str]) -> dict[str, int]:
    """Parse {backend: largest T} from "sequential=256" or, for papermill, "sequential:256".
    ValueError for another form, or an unknown backend."""
    from nsa.attention.registry import check_name

    most = {}
    for text in texts:
        name, limit = pair(text, "sequential=256", "=:")
        if not (limit.isascii() and limit.isdigit()) or int(limit) < 1:
            raise ValueError(f"longest={text!r} must end in a number of tokens, as sequential=256")
        most[check_name(name)] = int(limit)
    return most


def check_switch(spec: Any, name: str) -> None:
    """Raise ValueError unless the field is true or false."""
    if not isinstance(getattr(spec, name), bool):
        raise ValueError(f"{name}={getattr(spec, name)!r} must be true or false")


def check_fields(cls: type, values: Mapping[str, Any], what: str, needed: Iterable[str]) -> None:
    """Raise ValueError for an unknown field of `what`, naming the nearest, or a missing one."""
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise ValueError(f"{what} has no field {name!r}; {nearest(name, known)}")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}")
