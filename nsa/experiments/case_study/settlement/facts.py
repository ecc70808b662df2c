"""All facts of the settlement: re-read tables, trials run here, and a run that was kept.

A trial decides a fact by a condition on what it found; without its trial a fact is open.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nsa.experiments.case_study.settlement.reread import Fact, reread
from nsa.lab.process.trial import Outcome
from nsa.workbook.files import read_json
from nsa.workbook.identity import PACKAGE
from nsa.workbook.store import Store

Found = dict[str, Any]
RUNS = PACKAGE.parent / "runs"


@dataclass(frozen=True)
class Asked:
    """A sentence, asked of what a trial found; show: the numbers behind it."""

    name: str
    trial: str
    sentence: str
    holds: Callable[[Found], bool]
    show: Callable[[Found], str] = lambda _: ""


def all_facts(
    trials: Mapping[str, Outcome], *, memory_run: str = "", root: Path = RUNS
) -> dict[str, Fact]:
    """Every fact by name. `memory_run` is a kept run of 01_memory_scaling below `root`."""
    found = [*reread(), *measured(ASKED, trials), _kept_production_run(memory_run, root)]
    return {fact.name: fact for fact in found}


def measured(asked: Iterable[Asked], trials: Mapping[str, Outcome]) -> list[Fact]:
    """Every fact, not known where its trial was not run or did not end well."""
    facts = []
    for one in asked:
        ended = trials.get(one.trial)
        if ended is None:
            holds, seen = None, "not run"
        elif ended.result is None:
            holds, seen = None, f"{ended.status}: {ended.message}"
        else:
            holds, seen = bool(one.holds(ended.result)), one.show(ended.result)
        facts.append(Fact(one.name, one.sentence, holds, (f"trial:{one.trial}",), seen))
    return facts


def _kept_production_run(run: str, root: Path) -> Fact:
    sentence = "today's production step of 12 layers at T 2048 fits in 6 GiB, in a kept run"
    make = partial(Fact, "kept-production-run", sentence)
    if not run:
        return make(None, (), "no run was named")
    try:
        folder = Store(root).find(run)
    except ValueError as error:
        return make(None, (), str(error))
    rows: list[dict[str, Any]] = read_json(folder / "verdicts.json", [])
    fits = [r for r in rows if "production step of 12 layers at T 2048" in r["claim"]]
    evidence = (f"run:{folder.name}",)
    if not fits or fits[0]["verdict"] == "INCONCLUSIVE":
        return make(None, evidence, "not measured there")
    return make(fits[0]["verdict"] == "PASS", evidence, fits[0]["claim"])


def _print_schedule(found: Found) -> bool:
    rows = [row for rows in found["paths"].values() for row in rows]
    return {row["first"] for row in rows} == {3, 5, 8} and all(
        row["last_line_at_step_13"] == row["first"] and row["lines"][-1] == "step 0020"
        for row in rows
    )


def _prints_alike(found: Found) -> bool:
    masked = {row["first"]: row["lines"] for row in found["paths"]["masked"]}
    return all(masked[row["first"]] == row["lines"] for row in found["paths"]["loop"])


def deadline_s(begun: Mapping[str, list[float]]) -> float:
    """A deadline that cuts the plain arm in its fifth step."""
    return (begun["plain"][4] + begun["plain"][5]) / 2


def _reached(found: Found, arm: str, times: float = 1.0) -> int:
    """Steps of that arm that had begun at so many times the deadline."""
    limit = deadline_s(found["begun_s"]) * times
    return sum(t <= limit for t in found["begun_s"][arm][:-1])


def _cut(found: Found) -> str:
    at, times = deadline_s(found["begun_s"]), (0.5, 1, 2)
    reached = {arm: [str(_reached(found, arm, n)) for n in times] for arm in found["begun_s"]}
    said = "; ".join(f"{arm}: {', '.join(steps)} steps" for arm, steps in reached.items())
    return f"{said} by {at / 2:.2f}, {at:.2f} and {2 * at:.2f} s"


def _same_steps(arm: str) -> Callable[[Found], bool]:
    return lambda found: len(found["begun_s"][arm]) == len(found["begun_s"]["plain"])


def _figures(found: Found, key: str) -> dict[str, list[int]]:
    """That figure by path: at T 64 and 128, batch 1, then at T 64, batch 2."""
    rows = {(r["path"], r["tokens"], r["batch"]): r[key] for r in found["rows"]}
    cells = ((64, 1), (128, 1), (64, 2))
    return {path: [rows[path, *cell] for cell in cells] for path in ("loop", "masked")}


def _of(key: str, judge: Callable[[list[int], list[int]], bool]) -> Callable[[Found], bool]:
    """judge(loop, masked) of that figure."""
    return lambda found: judge(*_figures(found, key).values())


def _shown(
    key: str, form: str = "{path} T 64: {n[0]:,}, {path} T 128: {n[1]:,}"
) -> Callable[[Found], str]:
    return lambda found: ", ".join(
        form.format(path=path, n=n) for path, n in _figures(found, key).items()
    )


def _errors(name: str) -> Callable[[Found], str]:
    return lambda f: "relative errors " + ", ".join(f"{e:.2f}" for e in f[name]["errors"])


def _counts(found: Found) -> str:
    return ", ".join(f"{name}: {row['operations']}" for name, row in found.items())


def _branches_differ(found: Found) -> bool:
    alone = [found[b] for b in ("cmp", "slc", "win")]
    fewer = all(r["operations"] < found["all"]["operations"] for r in alone)
    apart = len({tuple(r["paths"]) for r in found.values()}) == 4
    return fewer and apart and all(r["gates_with_gradient"] == 0 for r in alone)


def _backends_differ(found: Found) -> bool:
    counts = {r["operations"] for r in found.values()}
    paths = {str(sorted(r["paths"].items())) for r in found.values()}
    losses = [r["loss"] for r in found.values()]
    return len(counts) == len(paths) == 3 and max(losses) - min(losses) < 1e-4


ASKED = (
    # Of the rebuilt loop.
    Asked("print-schedule", "print-schedule",
          "a healthy single process of 21 eager steps, looked at in step 13: its last line is "
          "step 3, 5 or 8, whichever the print policy says, and all 21 steps end",
          _print_schedule),
    Asked("loop-prints-alike", "print-schedule",
          "the loop and dense masks print the same lines: a console does not tell them apart",
          _prints_alike),
    Asked("deadline-moves", "deadlines",
          "half the deadline cuts an earlier step, twice the deadline a later one or none: the "
          "step that hangs moves with the limit",
          lambda f: _reached(f, "plain", 0.5) < _reached(f, "plain") < _reached(f, "plain", 2),
          _cut),
    Asked("traced-is-slower", "deadlines",
          "traced, a step takes longer, so the same deadline cuts it at an earlier step",
          lambda f: f["begun_s"]["traced"][-1] > f["begun_s"]["plain"][-1]
          and _reached(f, "traced") < _reached(f, "plain"), _cut),
    Asked("traced-same-steps", "deadlines",
          "without a deadline the traced loop ends all its steps", _same_steps("traced"), _cut),
    Asked("aux-stats-same-steps", "deadlines",
          "without a deadline the loop with aux stats ends all its steps",
          _same_steps("aux stats"), _cut),
    Asked("operations-per-token", "operations",
          "the rebuilt loop's operations grow with T, those of dense masks do not; at T 128 it "
          "has over 20 times as many",
          _of("operations", lambda loop, masked: 1.8 < loop[1] / loop[0] < 2.2
              and masked[0] == masked[1] and loop[1] > 20 * masked[1]), _shown("operations")),
    Asked("nodes-per-token", "operations",
          "its autograd graph has over 50 nodes a token and layer, over a million with 12 layers "
          "at T 2048; that of dense masks as many at T 64 as at 128",
          _of("nodes", lambda loop, masked: loop[1] - loop[0] > 50 * 64 and masked[0] == masked[1]),
          _shown("nodes")),
    Asked("syncs-per-token", "operations",
          "it waits for the host several times a token; dense masks never do",
          _of("syncs", lambda loop, masked: loop[1] - loop[0] > 2 * 64 and masked[:2] == [0, 0]),
          _shown("syncs")),
    Asked("batch-costs-operations", "operations",
          "a second sequence in the batch adds a fifth and more to the loop's operations, and "
          "under 1 % to those of dense masks",
          _of("operations", lambda loop, masked: loop[2] > 1.2 * loop[0]
              and masked[2] < 1.01 * masked[0]),
          _shown("operations", "{path}: {n[0]:,} to {n[2]:,}")),
    Asked("nothing-accumulates", "state",
          "from step 4 to 5 nothing changes but weights, moments and the optimizer's step",
          lambda f: all(row["changed"] == row["should"] for row in f["rows"]),
          lambda f: ", ".join(r["what"] for r in f["rows"] if r["changed"])),
    Asked("late-binding", "checkpointing",
          "a checkpoint of the loop's variable gives the same loss, and wrong gradients in every "
          "block but the last",
          lambda f: f["late"]["loss"] == f["late"]["plain_loss"]
          and min(f["late"]["errors"][:-1]) > 0.5 and f["late"]["errors"][-1] < 1e-6,
          _errors("late")),
    Asked("bound-is-exact", "checkpointing", "with the block itself gradients are bit-equal",
          lambda f: max(f["bound"]["errors"]) == 0.0, _errors("bound")),
    Asked("eager-compiles-nothing", "recompiles", "six eager steps of the loop compile nothing",
          lambda f: f["eager"] == 0),
    Asked("compile-recompiles", "recompiles",
          "torch.compile with fixed shapes compiles once for each of four lengths",
          lambda f: f["five_calls_four_lengths"] == 4),
    Asked("freeing-is-short", "freeing",
          "freeing the loop's graph of over 10,000 nodes takes less time than making it",
          lambda f: f["nodes"] > 10_000 and f["free_s"] < f["forward_s"],
          lambda f: f"{f['free_s']:.2f} s beside {f['forward_s']:.2f} s"),
    # Of torch alone, and of this project's attention.
    Asked("first-key-only", "one-query",
          "one query with is_causal=True returns the first key's value; the gradients of queries "
          "and keys are 0 but for rounding",
          lambda f: f["from_first_value"] < 1e-6 and f["largest_gradient_of_q_and_k"] < 1e-5),
    Asked("first-key-is-not-attention", "one-query",
          "that is not attention, by far: a test passes it only if its reference does the same",
          lambda f: f["from_attention"] > 0.1, lambda f: f"off by {f['from_attention']:.1f}"),
    Asked("boolean-mask-fine", "boolean-mask",
          "True means attend: a causal boolean mask gives finite rows and nothing of the future",
          lambda f: f["right_finite"] and f["right_on_the_future"] == 0.0),
    Asked("inverted-mask", "boolean-mask",
          "its negation attends to the future alone, and leaves the last row nothing",
          lambda f: f["inverted_on_the_past"] == 0.0 and f["inverted_on_the_future"] > 0.99,
          lambda f: f"the last row is {f['inverted_last_row']}"),
    Asked("fp16-nan", "fp16-adamw",
          "one step of AdamW on an fp16 weight: a gradient of 0 gives NaN, one of 1e-4 -inf",
          lambda f: f["float16 0"] == "nan" and f["float16 0.0001"] == "-inf"),
    Asked("fp32-fine", "fp16-adamw", "the same step in fp32 and bf16 is finite",
          lambda f: all(math.isfinite(float(value)) for name, value in f.items()
                        if name.startswith(("float32", "bfloat16")))),
    Asked("eps-is-zero", "fp16-adamw", "AdamW's eps of 1e-8 is 0 in fp16",
          lambda f: f["eps_in_fp16"] == 0.0),
    Asked("branches-differ-here", "branches",
          "here one branch alone skips the others' work: fewer operations, paths of its own, and "
          "no gradient for the gate", _branches_differ, _counts),
    Asked("backends-differ-here", "backends",
          "here masked, packed and gather are three programs: other operations, other paths, one "
          "loss", _backends_differ, _counts),
    Asked("in-place-equal", "in-place", "index_add_ and scatter_add have equal gradients",
          lambda f: f["equal"]),
    Asked("in-place-raises", "in-place",
          "an in-place change of what the backward needs raises, and does not stop it",
          lambda f: f["raised"] == "RuntimeError"),
    Asked("planted-nan-named", "planted-nan",
          "here strict mode names the branch of a planted NaN",
          lambda f: all(f"branch {branch!r}" in said for branch, said in f.items())),
    Asked("bucket-hook-raises", "harness",
          "a gradient bucket has no get_tensor, which its hook calls; it has buffer",
          lambda f: not f["bucket_has_get_tensor"] and f["bucket_has_buffer"]),
    Asked("env-is-not-json", "harness",
          "the output of env, which its env.json holds, is no JSON",
          lambda f: not f["env_output_is_json"]),
    Asked("timeout-lies", "harness",
          "under `timeout`, a script whose SIGTERM handler only dumps prints COMPLETED, and the "
          "exit code is 124, which was recorded as HANG",
          lambda f: f["timeout_says"] == 124 and "COMPLETED" in f["timeout_stdout"]),
)  # fmt: skip
