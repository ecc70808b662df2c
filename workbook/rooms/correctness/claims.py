"""Claims of the correctness notebook, each decided by measurements."""

from collections.abc import Sequence

import numpy as np

from workbook.rooms.correctness.definition import Definition, facts
from workbook.rooms.correctness.gallery import RIGHT, Seen, known_tests
from workbook.rooms.correctness.learning import PEEK
from workbook.rooms.correctness.mutants import MUTANTS
from workbook.rooms.correctness.oracle import IMPOSTORS
from workbook.rooms.correctness.table import VISIBLE, difference
from workbook.runs.claim import ANSWERS, Claim, verdict_of


def all_claims(
    found: Definition,
    oracle: Sequence[dict],
    seen: Sequence[Seen],
    lessons: Sequence[dict],
    killed: Sequence[dict],
) -> list[Claim]:
    """All claims; those without measurements are INCONCLUSIVE."""
    size = {"tokens": found.tokens}
    return [
        *(Claim(sentence, verdict_of(holds), size) for sentence, holds in facts(found)),
        backends_are_held(oracle),
        impostors_are_turned_down(oracle),
        right_pictures_agree(seen),
        mutants_are_seen(seen),
        lessons_tell(lessons),
        losses_do_not_tell(lessons),
        killers_exist(),
        killers_kill(killed),
    ]


def backends_are_held(rows: Sequence[dict]) -> Claim:
    """Claim that o and all gradients are within twice plain torch's error; declined is not red."""
    ours = [row for row in rows if row["kind"] == "backend"]
    ran = [row for row in ours if row["outcome"] in ("held", "red")]
    names = sorted({row["who"] for row in ran})
    red = [row["message"] for row in ran if row["outcome"] == "red"]
    declined = sorted({row["who"] for row in ours} - set(names))
    sentence = f"{len(names)} backends hold the accuracy rule in {len(ran)} tensors: "
    evidence = {"red": red, "declined": declined}
    claim = Claim(sentence + ", ".join(names), _verdict(red, not ran), evidence)
    told = ("held", "red", "no gradient", *ANSWERS)
    lost = (row for row in ours if row["outcome"] not in told)
    return claim.over(f"{row['who']}: {row['message']}" for row in lost)


def impostors_are_turned_down(rows: Sequence[dict]) -> Claim:
    """Claim that impostors fail on some shape per dtype: at T = 1, w + 1 keys change nothing."""
    fakes = [row for row in rows if row["kind"] == "impostor"]
    dtypes = sorted({row["dtype"] for row in fakes})
    red = {(row["who"], row["dtype"]) for row in fakes if row["outcome"] == "red"}
    passed = [f"{n}, {dtype}" for n in IMPOSTORS for dtype in dtypes if (n, dtype) not in red]
    sentence = f"the rule turns down {', '.join(IMPOSTORS)} in {' and '.join(dtypes) or 'no dtype'}"
    return Claim(sentence, _verdict(passed, not fakes), {"passed": passed})


def right_pictures_agree(seen: Sequence[Seen]) -> Claim:
    """Claim that correct backends give every token the same weight."""
    views: dict[str, list[np.ndarray]] = {}
    for one in seen:
        if one.mutant == RIGHT and one.picture is not None:
            views.setdefault(one.view, []).append(np.array(one.picture))
    many = {view: pictures for view, pictures in views.items() if len(pictures) > 1}
    apart = [float(np.abs(p - some[0]).max()) for some in many.values() for p in some]
    worst = max(apart, default=0.0)
    claim = Claim(
        f"right code gives every token the same weight in each of {len(apart)} backends' pictures",
        _verdict(worst > VISIBLE, not many),
        {view: len(pictures) for view, pictures in many.items()} | {"worst": worst},
    )
    lost = (one for one in seen if one.mutant == RIGHT and one.picture is None)
    return claim.over(f"{one.view}: {one.message}" for one in lost)


def mutants_are_seen(seen: Sequence[Seen]) -> Claim:
    """Claim that every mutant's picture differs; if one is equal, its mutated code never runs."""
    mutants = [one for one in seen if one.mutant != RIGHT]
    wrong = {one.mutant: difference(one, seen) for one in mutants}
    blind = [name for name, d in wrong.items() if d is not None and np.abs(d).max() <= VISIBLE]
    lost = {one.mutant: one.message for one in mutants if wrong[one.mutant] is None}
    sentence = f"each of {len(mutants)} mutants attends to, recomputes or differentiates something"
    evidence = {"no difference": blind, "no picture": lost}
    return Claim(f"{sentence} else", _verdict(blind, lost or not mutants), evidence)


def lessons_tell(rows: Sequence[dict]) -> Claim:
    """Claim that correct attention learns every lesson as expected, and a mutant does not."""
    ran = [row for row in rows if row["outcome"] == "ok"]
    misled = [row for row in ran if row["as_expected"] != (row["mutant"] == RIGHT)]
    wrong = [f"{row['mutant']}, {row['lesson']}" for row in misled]
    names = sorted({row["mutant"] for row in ran} - {RIGHT})
    lost = [row["mutant"] for row in rows if row["outcome"] not in ("ok", "untold")]
    return Claim(
        f"a lesson tells {len(names)} mutants from right attention: {', '.join(names) or 'none'}",
        _verdict(wrong, lost or not names),
        {"wrong": wrong, "not learnt": lost},
    )


def losses_do_not_tell(rows: Sequence[dict]) -> Claim:
    """Claim that some mutants are wrong though their loss is no higher than correct attention's."""
    ran = [row for row in rows if row["outcome"] == "ok"]
    right = {(r["lesson"], r["backend"], r["tokens"]): r for r in ran if r["mutant"] == RIGHT}
    hidden = {}
    for row in ran:
        beside = right.get((row["lesson"], row["backend"], row["tokens"]))
        if row["mutant"] == RIGHT or beside is None or row["as_expected"]:
            continue
        if row["loss"] <= 1.05 * beside["loss"]:
            how = "peeks" if row["peek"] >= PEEK else "answers what is out of reach"
            hidden[row["mutant"]] = how
    told = ", ".join(f"{name} {how}" for name, how in hidden.items()) or "nothing to compare"
    return Claim(f"a training loss does not tell: {told}", _verdict(False, not hidden), hidden)


def killers_exist() -> Claim:
    """Claim that each mutant's killer exists among the project's tests."""
    missing = [one.killer for one in MUTANTS.values() if one.killer not in known_tests()]
    verdict = verdict_of(not missing) if known_tests() else "INCONCLUSIVE"
    sentence = f"each of {len(MUTANTS)} mutants has a test that is to kill it"
    return Claim(sentence, verdict, {"missing": missing})


def killers_kill(killed: Sequence[dict]) -> Claim:
    """Claim that killers run here kill; `pytest -m "" -k mutant` runs all."""
    by = {row["mutant"]: row["outcome"] for row in killed}
    undecided = not by or any(outcome in ("error", "no tests") for outcome in by.values())
    tried = ", ".join(by) or "mutants: none was tried in this run"
    return Claim(f"the tests kill {tried}", _verdict("survived" in by.values(), undecided), by)


def _verdict(wrong: object, undecided: object) -> str:
    """Return FAIL if anything is wrong, else INCONCLUSIVE if anything is undecided, else PASS."""
    return "FAIL" if wrong else "INCONCLUSIVE" if undecided else "PASS"
