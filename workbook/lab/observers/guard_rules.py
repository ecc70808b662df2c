"""Rules of `--guard NAME=LIMIT:ACTION`: limits of a training, and the quantities they bound.

A guard has one or more limits, each with its action: `warn` warns once, `stop` ends the run
cleanly. `NAME=ACTION` alone uses the usual limit, `NAME=off` none.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from nsa.spelling import choice, pair

BOUND = 10  # skipped steps in a row
ACTIONS = ("warn", "stop", "off")
GIB_IN_MIB = 1024.0
EXAMPLE = "--guard memory=60GiB:warn,65GiB:stop"


@dataclass(frozen=True)
class Level:
    """Limit of a guard; reaching it warns or stops the run."""

    limit: float
    action: str


@dataclass(frozen=True)
class Kind:
    """Kind of guard: the record's reason, usual limit and action, and a limit's unit and range."""

    reason: str
    usual: str | None
    unit: str
    least: float = 0.0
    most: float = math.inf


KINDS = {
    "flat": Kind("flat", "500:warn", "steps without a lower loss", least=20),
    "collapse": Kind("gate_collapse", "0.9:warn", "share of gates, 0 to 1", most=1.0),
    "zero": Kind("zero_gradient", "3:warn", "looks in a row", least=1),
    "memory": Kind("memory", None, "MiB or GiB"),
}


def levels(texts: Iterable[str]) -> dict[str, tuple[Level, ...]]:
    """Limits of each guard: from `texts`, such as `flat=stop` or `memory=60GiB:warn,65GiB:stop`,
    else the usual ones. Raises ValueError for any other form, with an example of a valid one."""
    given: dict[str, str | None] = {name: kind.usual for name, kind in KINDS.items()}
    for text in texts:
        name, value = pair(text, EXAMPLE)
        choice("guard", name, KINDS)
        given[name] = value or " "
    found = {name: [] if of is None else _levels(name, of) for name, of in given.items()}
    return {
        name: tuple(level for level in of if level.action != "off") for name, of in found.items()
    }


def _levels(name: str, text: str) -> list[Level]:
    found: list[Level] = []
    for part in text.split(","):
        limit, colon, action = part.strip().rpartition(":")
        if not colon:
            usual = KINDS[name].usual
            if usual is None and action != "off":
                raise ValueError(f"--guard {name}={text} needs a limit, as in {EXAMPLE}")
            limit = usual.rpartition(":")[0] if usual else "1MiB"
        if action not in ACTIONS:
            raise ValueError(
                f"--guard {name}={text}: {action!r} is no action; warn, stop and off are, as in "
                f"{EXAMPLE}"
            )
        found.append(Level(_limit(name, limit), action))
    return found


def _limit(name: str, text: str) -> float:
    kind = KINDS[name]
    if name == "memory":
        return mib(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not kind.least <= value <= kind.most:
        most = "" if kind.most == math.inf else f" and at most {kind.most:g}"
        raise ValueError(
            f"--guard {name}: the limit {text!r} must be a number ({kind.unit}) of at least "
            f"{kind.least:g}{most}"
        )
    return value


def mib(text: str) -> float:
    """Convert `60GiB` or `512MiB` to MiB. Raises ValueError for any other unit, or none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(MiB|GiB)\s*", text)
    if found is None or not float(found[1]) > 0:
        raise ValueError(f"{text!r} is no size of memory; write 60GiB or 512MiB")
    return float(found[1]) * (GIB_IN_MIB if found[2] == "GiB" else 1.0)


def shown_mib(value: float) -> str:
    """Format a size in MiB or GiB."""
    return f"{value / GIB_IN_MIB:.4g} GiB" if value >= GIB_IN_MIB else f"{value:.4g} MiB"


def check_memory(found: Sequence[Level], device_mib: float, where: str) -> None:
    """Raise ValueError for a limit that the device could never reach."""
    for level in found:
        if level.limit > device_mib:
            raise ValueError(
                f"--guard memory={shown_mib(level.limit)}:{level.action} can never be reached: "
                f"{where} has {shown_mib(device_mib)}"
            )


def ram_mib() -> float:
    """RAM of this machine in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def flat(losses: Sequence[float]) -> tuple[float, float] | None:
    """(median of the first half, of the second) if the second is not lower by more than the
    standard error of their difference, else None. Medians are robust to a single odd batch.

    The standard error of a median is 1.2533 sigma / sqrt(n), and sigma 1.4826 times the median
    distance from it, both for normal noise.
    """
    halves = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    middles = [median(half) for half in halves]
    sigmas = [
        1.4826 * median(abs(loss - middle) for loss in half)
        for half, middle in zip(halves, middles, strict=True)
    ]
    errors = [1.2533**2 * s**2 / len(half) for half, s in zip(halves, sigmas, strict=True)]
    before, after = middles
    return (before, after) if before - after <= math.sqrt(sum(errors)) else None


def flat_told(before: float, after: float, steps: int, vocab: int | None) -> str:
    """Describe a flat loss in words, with a note if it is flat at ln(vocab)."""
    text = f"the loss has not fallen beyond its noise in {steps} steps ({before:.4f}, {after:.4f})"
    guess = math.log(vocab) if vocab else math.nan
    if abs(after - guess) < 0.02 * guess:
        text += (
            f"; it is flat at ln {vocab} = {guess:.4f}, the loss of a guess: random tokens stay "
            "there by nature, and so does a model that sees nothing"
        )
    return text
