"""Facts of the settlement that trials of the rebuilt loop decide."""

from collections.abc import Callable

from nsa.experiments.case_study.settlement.measured import Asked, Found, asking

ASKED: list[Asked] = []
_fact = asking(ASKED)


@_fact("print-schedule", "print-schedule",
       "a healthy single process of 21 eager steps, looked at in step 13: its last line is step "
       "3, 5 or 8, whichever the print policy says, and all 21 steps end")  # fmt: skip
def _print(found: Found) -> bool:
    rows = [row for rows in found["paths"].values() for row in rows]
    policies = {row["first"] for row in rows}
    return policies == {3, 5, 8} and all(
        row["last_line_at_step_13"] == row["first"] and row["lines"][-1] == "step 0020"
        for row in rows
    )


@_fact(
    "loop-prints-alike",
    "print-schedule",
    "the loop and dense masks print the same lines: a console does not tell them apart",
)
def _alike(found: Found) -> bool:
    loop = {row["first"]: row["lines"] for row in found["paths"]["loop"]}
    masked = {row["first"]: row["lines"] for row in found["paths"]["masked"]}
    return all(masked[first] == lines for first, lines in loop.items())


def reached(found: Found, arm: str, deadline_s: float) -> int:
    """Steps of that arm that had begun after so many seconds."""
    return sum(t <= deadline_s for t in found["begun_s"][arm][:-1])


def _plain_s(found: Found) -> float:
    """A deadline that cuts the plain arm in its fifth step."""
    begun = found["begun_s"]["plain"]
    return (begun[4] + begun[5]) / 2


def _cut(found: Found) -> str:
    at = _plain_s(found)
    return "; ".join(
        f"{arm}: {', '.join(str(reached(found, arm, at * n)) for n in (0.5, 1, 2))} steps"
        for arm in found["begun_s"]
    ) + f" by {at / 2:.2f}, {at:.2f} and {2 * at:.2f} s"  # fmt: skip


@_fact("deadline-moves", "deadlines",
       "half the deadline cuts an earlier step, twice the deadline a later one or none: the step "
       "that hangs moves with the limit", _cut)  # fmt: skip
def _moves(found: Found) -> bool:
    steps = [reached(found, "plain", _plain_s(found) * n) for n in (0.5, 1, 2)]
    return steps[0] < steps[1] < steps[2]


def _total(found: Found, arm: str) -> float:
    return found["begun_s"][arm][-1]


@_fact(
    "traced-is-slower",
    "deadlines",
    "traced, a step takes longer, so the same deadline cuts it at an earlier step",
    _cut,
)
def _traced(found: Found) -> bool:
    at = _plain_s(found)
    slower = _total(found, "traced") > _total(found, "plain")
    return slower and reached(found, "traced", at) < reached(found, "plain", at)


def _same_steps(arm: str) -> Callable[[Found], bool]:
    return lambda found: len(found["begun_s"][arm]) == len(found["begun_s"]["plain"])


_fact("traced-same-steps", "deadlines", "without a deadline the traced loop ends all its steps",
      _cut)(_same_steps("traced"))  # fmt: skip
_fact("aux-stats-same-steps", "deadlines",
      "without a deadline the loop with aux stats ends all its steps", _cut)(
    _same_steps("aux stats"))  # fmt: skip


def row_of(found: Found, path: str, tokens: int, batch: int = 1) -> Found:
    """The row of `operations` for that path, T and batch."""
    return next(r for r in found["rows"]
                if (r["path"], r["tokens"], r["batch"]) == (path, tokens, batch))  # fmt: skip


def _shown(key: str) -> Callable[[Found], str]:
    return lambda found: ", ".join(
        f"{path} T {t}: {row_of(found, path, t)[key]:,}"
        for path in ("loop", "masked") for t in (64, 128)
    )  # fmt: skip


@_fact("operations-per-token", "operations",
       "the rebuilt loop's operations grow with T, those of dense masks do not; at T 128 it has "
       "over 20 times as many", _shown("operations"))  # fmt: skip
def _operations(found: Found) -> bool:
    loop, masked = ([row_of(found, p, t)["operations"] for t in (64, 128)]
                    for p in ("loop", "masked"))  # fmt: skip
    grows = 1.8 < loop[1] / loop[0] < 2.2
    return grows and masked[0] == masked[1] and loop[1] > 20 * masked[1]


@_fact("nodes-per-token", "operations",
       "its autograd graph has over 50 nodes a token and layer, over a million with 12 layers at T "
       "2048; that of dense masks as many at T 64 as at 128", _shown("nodes"))  # fmt: skip
def _nodes(found: Found) -> bool:
    loop, masked = ([row_of(found, p, t)["nodes"] for t in (64, 128)] for p in ("loop", "masked"))
    each = (loop[1] - loop[0]) / 64
    return each > 50 and each * 12 * 2048 > 1e6 and masked[0] == masked[1]


@_fact(
    "syncs-per-token",
    "operations",
    "it waits for the host several times a token; dense masks never do",
    _shown("syncs"),
)
def _syncs(found: Found) -> bool:
    loop, masked = ([row_of(found, p, t)["syncs"] for t in (64, 128)] for p in ("loop", "masked"))
    return (loop[1] - loop[0]) / 64 > 2 and masked == [0, 0]


@_fact("batch-costs-operations", "operations",
       "a second sequence in the batch adds a fifth and more to the loop's operations, and under "
       "1 % to those of dense masks",
       lambda f: ", ".join(f"{p}: {row_of(f, p, 64)['operations']:,} to "
                           f"{row_of(f, p, 64, 2)['operations']:,}"
                           for p in ("loop", "masked")))  # fmt: skip
def _batch(found: Found) -> bool:
    one, two = ([row_of(found, p, 64, b)["operations"] for p in ("loop", "masked")] for b in (1, 2))
    return two[0] > 1.2 * one[0] and two[1] < 1.01 * one[1]


@_fact("nothing-accumulates", "state",
       "from step 4 to 5 nothing changes but weights, moments and the optimizer's step",
       lambda f: ", ".join(r["what"] for r in f["rows"] if r["changed"]))  # fmt: skip
def _state(found: Found) -> bool:
    return all(row["changed"] == row["should"] for row in found["rows"])


def _errors(name: str) -> Callable[[Found], str]:
    return lambda f: "relative errors " + ", ".join(f"{e:.2f}" for e in f[name]["errors"])


@_fact("late-binding", "checkpointing",
       "a checkpoint of the loop's variable gives the same loss, and wrong gradients in every "
       "block but the last", _errors("late"))  # fmt: skip
def _late(found: Found) -> bool:
    late = found["late"]
    return (
        late["loss"] == late["plain_loss"]
        and min(late["errors"][:-1]) > 0.5
        and late["errors"][-1] < 1e-6
    )


@_fact("bound-is-exact", "checkpointing", "with the block itself gradients are bit-equal",
       _errors("bound"))  # fmt: skip
def _bound(found: Found) -> bool:
    return max(found["bound"]["errors"]) == 0.0


@_fact("eager-compiles-nothing", "recompiles", "six eager steps of the loop compile nothing")
def _eager(found: Found) -> bool:
    return found["eager"] == 0


@_fact(
    "compile-recompiles",
    "recompiles",
    "torch.compile with fixed shapes compiles once for each of four lengths",
)
def _compiles(found: Found) -> bool:
    return found["five_calls_four_lengths"] == 4


@_fact("freeing-is-short", "freeing",
       "freeing the loop's graph of over 10,000 nodes takes less time than making it",
       lambda f: f"{f['free_s']:.2f} s beside {f['forward_s']:.2f} s")  # fmt: skip
def _freeing(found: Found) -> bool:
    return found["nodes"] > 10_000 and found["free_s"] < found["forward_s"]
