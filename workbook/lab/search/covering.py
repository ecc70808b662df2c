"""A few cells that cover every pair of values, and the smallest set that still shows a fault."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

from workbook.lab.search.candidates import Cell, Tried, position
from workbook.lab.search.thresholds import Answer

Legal = Callable[[Mapping[str, Any]], bool]
Numbers = dict[int, int]  # factor index to value index
Left = set[tuple[tuple[int, int], ...]]  # combinations of (factor, value) not yet covered


def same(target: Tried | None, found: Tried) -> Answer:
    """Return True if `found` is the fault of `target`, None for another fault, which may hide it.

    A slow run neither hangs nor stalls, although it was not observed to its end. Without a target
    no verdict is the fault yet.
    """
    if target is None:
        return False if found.kind == "PASS" else None
    if (found.kind, found.signature) == (target.kind, target.signature):
        return True
    if found.kind == "PASS" or (found.kind == "SLOW" and target.kind in ("HANG", "STALLED")):
        return False
    return None


def cover(
    factors: Mapping[str, Sequence[Any]],
    *,
    legal: Legal = lambda part: True,
    strength: int = 2,
    tested: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Cell]:
    """Yield cells that cover every legal combination of values of any `strength` factors.

    `legal(part)` is called with cells and parts of cells; a part is illegal if no completion is
    legal. `tested` cells count as done. The number is small: 32 cells for the pairs of 11 factors
    with 138,240 combinations.
    """
    names = list(factors)
    size = min(strength, len(names))
    sizes = [len(factors[name]) for name in names]

    # Indices instead of values: True differs from 1, and a list is unhashable.
    def cell(part: Numbers) -> Cell:
        return {names[one]: factors[names[one]][number] for one, number in part.items()}

    def fits(part: Numbers) -> bool:
        return legal(cell(part))

    left: Left = {
        tuple(zip(chosen, numbers, strict=True))
        for chosen in combinations(range(len(names)), size)
        for numbers in product(*(range(sizes[one]) for one in chosen))
    }
    before = [
        {one: position(factors[name], done[name]) for one, name in enumerate(names)}
        for done in tested
    ]
    for done in before:
        left.difference_update(combinations(done.items(), size))
    # The library covers all pairs, but omits a third of the triples; those are added here.
    found = _by_allpairspy(sizes, fits, before, size) if size > 1 else ()
    for numbers in chain(found, _completions(left, sizes, fits)):
        fresh = left.intersection(combinations(numbers.items(), size))
        if fresh:
            left -= fresh
            yield cell(numbers)


def _by_allpairspy(
    sizes: Sequence[int], fits: Callable[[Numbers], bool], before: Sequence[Numbers], size: int
) -> Iterator[Numbers]:
    try:
        from allpairspy import AllPairs
    except ModuleNotFoundError:
        raise ValueError("a screen needs allpairspy; pip install 'nsa[lab]' brings it") from None
    rows = AllPairs(
        [list(range(count)) for count in sizes],
        filter_func=lambda row: fits(dict(enumerate(row))),
        previously_tested=[list(done.values()) for done in before if fits(done)],
        n=size,
    )
    return (dict(enumerate(row)) for row in rows)


def _completions(
    left: Left, sizes: Sequence[int], fits: Callable[[Numbers], bool]
) -> Iterator[Numbers]:
    """Yield cells for combinations in `left`, which the caller removes; drop impossible ones."""
    while left:
        seed = min(left)
        found = _completed(dict(seed), left, sizes, fits)
        if found is None:
            left.discard(seed)
        else:
            yield found


def _completed(
    part: Numbers, left: Left, sizes: Sequence[int], fits: Callable[[Numbers], bool]
) -> Numbers | None:
    """Complete `part` to a legal cell that covers as much of `left` as possible, else None."""
    if not fits(part):
        return None
    missing = next((one for one in range(len(sizes)) if one not in part), None)
    if missing is None:
        return dict(sorted(part.items()))
    near = {one for one in left if all(part.get(f, n) == n for f, n in one)}
    gains = Counter(number for one in near for factor, number in one if factor == missing)
    for number in sorted(range(sizes[missing]), key=lambda number: -gains[number]):
        whole = _completed(part | {missing: number}, near, sizes, fits)
        if whole is not None:
            return whole
    return None


def ddmin(differences: Sequence[Any], test: Callable[[list[Any]], Answer]) -> list[Any]:
    """Return a minimal part of `differences` that shows the fault: each one is necessary.

    `test(part)` is called once per part. Delta debugging by halves: the needed part of one half is
    searched for with the other half present. About 2 k log2(n / k) + k tests for k of n
    differences, if adding one never hides the fault; otherwise one by one.

    Raises ValueError if all of them together do not show it.
    """
    known: dict[frozenset[int], Answer] = {}

    def shows(part: Sequence[int]) -> bool:
        key = frozenset(part)
        if key not in known:
            known[key] = test([differences[i] for i in sorted(key)])
        return known[key] is True

    def needed(there: list[int], looked_for: list[int], ask: bool) -> list[int]:
        if ask and shows(there):
            return []
        if len(looked_for) == 1:
            return looked_for
        half = len(looked_for) // 2
        first, second = looked_for[:half], looked_for[half:]
        of_second = needed([*there, *first], second, True)
        return needed([*there, *of_second], first, bool(of_second)) + of_second

    whole = list(range(len(differences)))
    if not shows(whole):
        raise ValueError(
            f"{len(whole)} difference(s) together do not show the fault: {differences}"
        )
    kept = needed([], whole, True) if whole else []
    kept = kept if shows(kept) else whole
    shrank = True
    while shrank:
        shrank = False
        for one in list(kept):
            rest = [i for i in kept if i != one]
            if shows(rest):
                kept, shrank = rest, True
    return [differences[i] for i in sorted(kept)]
