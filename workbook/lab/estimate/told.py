"""An estimate as text and tables, for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from workbook.lab.estimate.estimate import Estimate
from workbook.lab.search.candidates import text
from workbook.lab.training import TrainingSpec

MIB = 2**20
MOST = 12  # modules listed
SMALL = 1e-3  # share of the peak


def page(spec: TrainingSpec, found: Estimate, fits: Mapping[str, Any] | None = None) -> str:
    """Format the peak, its owners, tensors saved by the forward, the method and its uncertainty.

    fits: {"tokens": Bracket, "batch": Bracket} for `fits["gib"]` GiB.
    """
    where = f"an {found.gpu}" if found.gpu else "a CPU"
    size = f"T {spec.tokens}, batch {spec.batch}, {spec.precision}"
    lines = [f"{spec.told(spec.backend, size, ('compile', 'cuda_graph'))}, on {where}"]
    lines += [f"  allocated  {mib(found.allocated)} at the peak, in the {found.phase}"]
    if found.reserved is not None:
        lines += [f"  reserved   {mib(found.reserved)} at the peak"]
    for name in ("tokens", "batch") if fits else ():
        lines += [f"  fits       {fitting(name, fits[name])} in {fits['gib']:g} GiB"]
    lines += [f"  estimated  {found.how}{trust(found)}"]
    lines += [f"  note       {note}" for note in found.notes]
    lines += [f"  unknown    {line}" for line in unknown(found)]
    held = text(by_phase(found))
    return "\n".join([*lines, "", "MiB at the peak of each phase", held, *_saved(found)])


def mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"


def trust(found: Estimate) -> str:
    """Describe the uncertainty, and note a GPU that was never calibrated."""
    told = f", ±{found.uncertainty:.1%}" if found.uncertainty >= SMALL else ""
    if found.calibrated:
        return told
    return f"{told}; no {found.gpu} was ever calibrated: nsa estimate --calibrate, on one"


def unknown(found: Estimate) -> list[str]:
    """Lines on operators in no table, with the possible error of each; small ones in one line."""
    large = {name: n for name, n in found.unknown.items() if n > SMALL * found.allocated}
    told = [f"{name} is in no table; it may hold up to {mib(n)} more" for name, n in large.items()]
    if small := [name for name in found.unknown if name not in large]:
        told.append(f"{', '.join(small)}: in no table, each less than {SMALL:.1%} of the peak")
    return told


def fitting(name: str, bracket: Any) -> str:
    """Describe the largest size that fits, and the smallest that does not."""
    word = {"tokens": "T", "batch": "batch"}[name]
    if not bracket.fits:
        return f"no {word}: {word} {bracket.does_not} does not"
    more = "" if bracket.does_not is None else f" ({bracket.does_not:,} does not)"
    return f"{word} up to {bracket.fits:,}{more}"


def by_phase(found: Estimate) -> list[dict[str, str]]:
    """Table with a row per category and one of sums, and a column per phase."""
    phases = list(found.phases)
    known = dict.fromkeys(c for held in found.by_phase_category.values() for c in held)
    rows = []
    for category in known:
        sizes = [found.by_phase_category.get(phase, {}).get(category, 0) for phase in phases]
        if any(sizes):
            rows.append({"": category.replace("_", " ")} | _line(phases, sizes))
    return [*rows, {"": "together"} | _line(phases, list(found.phases.values()))]


def _line(names: Sequence[str], sizes: Sequence[int]) -> dict[str, str]:
    """Format MiB by name, right-aligned in columns of equal width."""
    return {f"{n:>11}": f"{size / MIB:>11,.1f}" for n, size in zip(names, sizes, strict=True)}


def _saved(found: Estimate) -> list[str]:
    largest = sorted(found.saved.items(), key=lambda item: -item[1])
    if not largest:
        return []
    told = [(name or "the model", size) for name, size in largest]
    if rest := sum(size for _, size in largest[MOST:]):
        told[MOST:] = [(f"{len(largest) - MOST} others", rest)]
    return ["", text([{"saved by": name} | _line(["MiB"], [size]) for name, size in told])]
