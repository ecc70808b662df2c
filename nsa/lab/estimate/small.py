"""What cannot be traced, from small real runs on this CPU: a few T and numbers of layers.

The form is honest rather than exact: bytes are affine in layers and a quadratic in T, for
`sequential` with what it keeps a token in place of the square. One more size than the form needs
is measured, and how far off the form is there is said.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from nsa.lab.measure.activation_model import one_token_at_a_time
from nsa.lab.measure.allocations import CATEGORIES, Stream, replay
from nsa.lab.process.trial import run_child
from nsa.lab.training import TrainingSpec, open_trainer
from nsa.model.config import ModelConfig

TOKENS = (32, 64, 96)  # that are measured for a longer T
CHECK = 128  # and the T that the form is held against; up to it the spec's own T is run
DEADLINE_S = 300.0
# The peak of a backward is near its start where activations are most of it, near its end where
# gradients are: each part of it has a form of its own.
PARTS = tuple(f"backward {i}" for i in range(32))
PHASES = ("data", "forward", *PARTS, "optimizer")


def estimated(spec: TrainingSpec) -> dict[str, Any]:
    """{"phases", "by_phase_category"} as `allocations.replay` has them, "how", "notes" and "error",
    relative, at the size held out. RuntimeError where the runs do not end."""
    longest = spec.config().max_tokens or CHECK
    short = spec.tokens <= min(CHECK, longest)
    tokens = (spec.tokens,) if short else TOKENS
    held_out = (spec.tokens, 3) if short else (CHECK, 2)
    sizes = [(t, layers) for layers in (1, 2) for t in tokens]
    found = _measured([_small(spec, *size) for size in (*sizes, held_out)])
    config, rows = spec.config(), np.array([_flat(one) for one in found])
    known = np.array([_basis(config, t, layers, short) for t, layers in sizes])
    form, *_ = np.linalg.lstsq(known, rows[:-1], rcond=None)
    checked = np.array(_basis(config, *held_out, short)) @ form
    peaks = slice(0, len(PHASES))
    error = float(checked[peaks].max() / rows[-1][peaks].max() - 1)
    total = config.layers
    whole = np.array(_basis(config, spec.tokens, total, short)) @ form
    said = ", ".join(map(str, tokens))
    text = f"from small real runs: T {said}, 1 and 2 layers; {error:+.1%} at T {held_out[0]}, "
    return _named(whole) | {
        "how": f"{text}{held_out[1]} layers, which the form was not fitted to",
        "error": abs(error),
        "notes": _notes(spec, tokens),
    }


def _notes(spec: TrainingSpec, tokens: Sequence[int]) -> tuple[str, ...]:
    notes = []
    if spec.device == "cuda":
        notes.append("the runs were of the CPU: what a GPU's operators take besides is not in it")
    if spec.checkpoint not in ("", "all"):
        notes.append(f"checkpoint={spec.checkpoint!r} is taken for none, which holds more")
    if spec.tokens > 2 * max(tokens):
        notes.append(f"T {spec.tokens} is {spec.tokens / max(tokens):.0f} times the longest run")
    return tuple(notes)


def _small(spec: TrainingSpec, tokens: int, layers: int) -> TrainingSpec:
    again = "all" if spec.checkpoint == "all" else ""
    alone = {"ranks": 1, "parallel": "none", "cuda_graph": False, "compile": False}
    sizes = {"tokens": tokens, "layers": layers, "checkpoint": again, "device": "cpu"}
    return replace(spec, batch=max(1, spec.batch // spec.ranks), data="synthetic", **sizes, **alone)


def _basis(config: ModelConfig, tokens: int, layers: int, one_size: bool) -> list[float]:
    """What the bytes are a sum of, each alone and times the layers."""
    square = one_token_at_a_time(config, tokens) if config.backend == "sequential" else tokens**2
    terms = [1.0] if one_size else [1.0, tokens, square]
    return [*terms, *(layers * term for term in terms)]


def _measured(specs: Sequence[TrainingSpec]) -> list[dict[str, Any]]:
    cells = {"specs": [one.to_dict() for one in specs]}
    ended = run_child("nsa.lab.estimate.small:measure", cells, deadline_s=DEADLINE_S)
    if ended.result is None:
        raise RuntimeError(
            f"small real runs of the training ended in {ended.status}: {ended.message}"
        )
    return ended.result["found"]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """In the child: {"found": phases and categories of a recorded step of each of {"specs"}}."""
    return {"found": [_recorded(TrainingSpec.from_dict(values)) for values in spec["specs"]]}


def _recorded(spec: TrainingSpec) -> dict[str, Any]:
    """In a function of its own: a recorder holds its model, which the next one would count."""
    from nsa.lab.measure.recorders import recorded_step

    with open_trainer(spec, threads=1) as trainer:
        trainer.step(0)
        _, recorder = recorded_step(trainer)
    record = replay(_in_parts(recorder.stream))
    return {name: record[name] for name in ("phases", "by_phase_category")}


def _in_parts(stream: Stream) -> Stream:
    """With the backward as PARTS of the same number of events."""
    marks: list[tuple[int, str]] = []
    for (at, name), (end, _) in pairwise([*stream.marks, (len(stream), "")]):
        if name == "backward":
            marks += [(at + (end - at) * i // len(PARTS), part) for i, part in enumerate(PARTS)]
        else:
            marks.append((at, name))
    stream.marks = marks
    return stream


def _flat(found: dict[str, Any]) -> list[int]:
    by = found["by_phase_category"]
    return [found["phases"][p] for p in PHASES] + [by[p][c] for p in PHASES for c in CATEGORIES]


def _named(values: np.ndarray) -> dict[str, Any]:
    numbers = [max(0, round(float(value))) for value in values]
    each = iter(numbers[len(PHASES) :])
    phases = dict(zip(PHASES, numbers, strict=False))
    by = {p: {c: next(each) for c in CATEGORIES} for p in PHASES}
    highest = max(PARTS, key=lambda part: phases[part])
    phases["backward"], by["backward"] = phases[highest], by[highest]
    kept = ("data", "forward", "backward", "optimizer")
    return {"phases": {p: phases[p] for p in kept}, "by_phase_category": {p: by[p] for p in kept}}
