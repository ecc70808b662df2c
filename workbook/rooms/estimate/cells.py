"""Grid of trainings that are estimated and then run, and the boundaries to search for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from nsa.model.config import layer_range
from nsa.spelling import choice
from workbook.lab.estimate.gpus import GPUS, gpu_named
from workbook.lab.search import covering
from workbook.lab.search.plan import STRENGTH
from workbook.lab.training import TrainingSpec, check_fields, longest_tokens

# Parameters of the notebook, and the field of a TrainingSpec that each one varies.
FACTORS = {
    "backends": "backend",
    "tokens": "tokens",
    "presets": "preset",
    "layers": "layers",
    "checkpoints": "checkpoint",
    "batches": "batch",
    "precisions": "precision",
}
FOUND = ("tokens", "batch")  # fields that a boundary may search


def grid(
    values: Mapping[str, Sequence],
    *,
    longest: Sequence[str] = (),
    cover: str = "all",
    **fixed: Any,
) -> list[TrainingSpec]:
    """Make the trainings of these FACTORS, grouped by backend.

    cover="all" takes every combination, "triples" enough that any values of any three factors
    occur together, "pairs" of any two. `longest` excludes longer T for a backend, e.g.
    "sequential:256". `fixed` holds the other fields of every cell. Raises ValueError for what
    cannot be run, and for a grid without cells.
    """
    choice("cover", cover, STRENGTH)
    factors = {field: list(values[name]) for name, field in FACTORS.items()}
    factors["layers"] = factors["layers"] or [None]  # the preset's own
    most = longest_tokens(longest)
    for text in factors["checkpoint"] if values["layers"] else ():
        layer_range(text, max(values["layers"]))  # a range that fits no depth is an error

    def legal(part: Mapping[str, Any]) -> bool:
        if "tokens" in part and part["tokens"] > most.get(part.get("backend"), part["tokens"]):
            return False
        if part.get("backend") == "flash" and part.get("precision") == "fp32":
            return False  # not supported
        if part.get("checkpoint") and part.get("layers"):
            try:
                layer_range(part["checkpoint"], part["layers"])
            except ValueError:
                return False
        return True

    if not all(factors.values()):
        chosen = []
    elif size := STRENGTH[cover]:
        chosen = list(covering.cover(factors, legal=legal, strength=size))
    else:
        every = (dict(zip(factors, cell, strict=True)) for cell in product(*factors.values()))
        chosen = [cell for cell in every if legal(cell)]
    cells = [TrainingSpec(**cell, data="synthetic", **fixed) for cell in chosen]
    if not cells:
        given = {name: list(values[name]) for name in FACTORS}
        raise ValueError(f"no cell to estimate: {given}, longest={list(longest)}")
    order = values["backends"]
    return sorted(cells, key=lambda cell: (order.index(cell.backend), cell.tokens))


@dataclass(frozen=True)
class Boundary:
    """Search for the largest value of field `find` of `spec` that fits in `gib` GiB of a GPU."""

    spec: TrainingSpec
    find: str
    gib: float

    def __str__(self) -> str:
        other = f"batch {self.spec.batch}" if self.find == "tokens" else f"T={self.spec.tokens}"
        return self.spec.told(self.spec.backend, f"{other}, {self.find} in {self.gib:g} GiB")


def boundaries(given: Sequence[Mapping[str, Any]], seed: int) -> list[Boundary]:
    """Make a boundary of each mapping: fields of a TrainingSpec, `find` and `gib`. ValueError
    describes the error in one of them."""
    found = []
    for one in given:
        if not isinstance(one, Mapping):
            raise ValueError(f"boundaries has {one!r}; each is a mapping with find and gib")
        rest = dict(one)
        find, gib = rest.pop("find", "tokens"), rest.pop("gib", None)
        choice("find", find, FOUND)
        if not isinstance(gib, int | float) or isinstance(gib, bool) or not gib > 0:
            raise ValueError(f"gib={gib!r} of a boundary must be a number above 0")
        rest = {"tokens": 128, "seed": seed, "data": "synthetic", "device": "cuda"} | rest
        check_fields(TrainingSpec, rest, "a boundary", needed=("preset",))
        found.append(Boundary(TrainingSpec(**rest), find, float(gib)))
    return found


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    grid(values, longest=values["longest"], cover=values["cover"])
    boundaries(values["boundaries"], values["seed"])
    gpu_named(values["gpu"])


def name_of(cell: Mapping[str, Any] | TrainingSpec) -> str:
    """Describe a cell, or a row with its fields, in one line."""
    if not isinstance(cell, TrainingSpec):
        known = {f.name for f in fields(TrainingSpec)}
        cell = TrainingSpec(**{name: cell[name] for name in known & cell.keys()})
    batch = f" batch {cell.batch}" * (cell.batch != 1)
    return cell.told(cell.backend, f"T={cell.tokens} {cell.precision}{batch}")


def gpu_of(machine: str, wanted: str) -> str:
    """GPU to estimate for: the machine's own if it is known, else `wanted`."""
    return machine if machine in GPUS else wanted
