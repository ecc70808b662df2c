"""What takes long to trace at its own T, from traces of a few short T.

`sequential` calls hundreds of operators a token. Its layers need no form, for a trace repeats them;
bytes are taken for a sum of a constant, T, and what it keeps for one token after the other. One T
more than the form needs is traced, and how far off the form is there is said.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from nsa.lab.measure.activation_model import one_token_at_a_time
from nsa.lab.measure.allocations import CATEGORIES, Stream, replay
from nsa.lab.training import TrainingSpec
from nsa.model.config import ModelConfig

UNIT = 32  # tokens; 1, 2, 3 and 4 times as many are traced, or compressed blocks if those are more
COUNT = 4
LONGEST = 256  # up to it the spec's own T takes no longer than these


def is_long(spec: TrainingSpec) -> bool:
    """Whether a trace of its own T would take longer than those of short ones."""
    return spec.attention == "nsa" and spec.backend == "sequential" and spec.tokens > LONGEST


def estimated(spec: TrainingSpec, traced: Callable[[TrainingSpec], Stream]) -> dict[str, Any]:
    """{"phases", "by_phase_category"} as `allocations.replay` has them, "how", "notes" and "error",
    relative, at the T held out. traced: the events of the training at another T."""
    config = spec.config()
    unit = max(UNIT, config.nsa.compress_block)  # in fewer tokens no key is compressed
    sizes = [unit * (i + 1) for i in range(COUNT)]
    found = [replay(_in_parts(traced(replace(spec, tokens=tokens)))) for tokens in sizes]
    names = list(found[0]["phases"])
    rows = np.array([_flat(one, names) for one in found])
    known = np.array([_basis(config, tokens) for tokens in sizes])
    few, *_ = np.linalg.lstsq(known[:-1], rows[:-1], rcond=None)
    peaks = slice(0, len(names))
    error = float((known[-1] @ few)[peaks].max() / rows[-1][peaks].max() - 1)
    form, *_ = np.linalg.lstsq(known, rows, rcond=None)
    longest = sizes[-1]
    notes = (f"T {spec.tokens} is {spec.tokens / longest:.0f} times the longest that was traced",)
    return _named(np.array(_basis(config, spec.tokens)) @ form, names) | {
        "how": f"from traces of T {', '.join(map(str, sizes))}; without the last one the form is "
        f"{error:+.1%} off there",
        "error": abs(error),
        "notes": notes if spec.tokens > 2 * longest else (),
    }


def _basis(config: ModelConfig, tokens: int) -> list[float]:
    """What the bytes are a sum of."""
    return [1.0, tokens, one_token_at_a_time(config, tokens)]


def _in_parts(stream: Stream) -> Stream:
    """With each backward in parts, which end where a parameter's gradient is made: that order is of
    the model and the same at every T. The peak may be in any part, and each has a form of its own:
    near the start it is of activations, near the end of gradients."""
    tagged = (addresses for _, category, addresses in stream.tags if category == "gradients")
    gradients = frozenset().union(*tagged)
    marks: list[tuple[int, str]] = []
    for (begun, name), (end, _) in pairwise([*stream.marks, (len(stream), "")]):
        if name != "backward":
            marks.append((begun, name))
            continue
        made = (at for at in range(begun, end) if stream.sizes[at] >= 0)
        cuts = [begun, *(at for at in made if stream.addresses[at] in gradients)]
        marks += [(at, f"backward {i}") for i, at in enumerate(cuts)]
    stream.marks = marks
    return stream


def _flat(found: dict[str, Any], names: list[str]) -> list[int]:
    by = found["by_phase_category"]
    return [found["phases"][p] for p in names] + [by[p][c] for p in names for c in CATEGORIES]


def _named(values: np.ndarray, names: list[str]) -> dict[str, Any]:
    numbers = [max(0, round(float(value))) for value in values]
    each = iter(numbers[len(names) :])
    phases = dict(zip(names, numbers, strict=False))
    by = {p: {c: next(each) for c in CATEGORIES} for p in names}
    highest = max((n for n in names if n.startswith("backward")), key=lambda part: phases[part])
    phases["backward"], by["backward"] = phases[highest], by[highest]
    kept = ("data", "forward", "backward", "optimizer")
    return {"phases": {p: phases[p] for p in kept}, "by_phase_category": {p: by[p] for p in kept}}
