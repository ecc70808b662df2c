"""Answers of stored runs to the questions of the decision, with the lines that were read."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbook.rooms.case_study.figures import TARGET_TOKENS_PER_S
from workbook.runs import parameters
from workbook.runs.claim import UNDECIDED
from workbook.runs.loaded import Sentence, StoredRun
from workbook.runs.metrics import is_gpu
from workbook.runs.results import Stored

SAME = 1e-6  # relative to the largest output: tolerance for rounding of the same attention in fp64
TOLD = parameters.read_file(Path(__file__).with_name("decision.yaml"))
SENTENCES = TOLD["sentences"]  # (notebook, beginning), by name
LIMITS = TOLD["limits"] | dict(zip(("least", "most"), TARGET_TOKENS_PER_S, strict=True))


@dataclass(frozen=True)
class Answer:
    """Answer to a question, with its numbers; holds: None without evidence (see `because`).

    where: the lines and folders, below the runs' root, that it was read from.
    """

    holds: bool | None
    because: str
    where: tuple[str, ...] = ()


NOTHING = Answer(None, "no stored run says")


def late_is(stored: Stored, column: str, pattern: str) -> Answer:
    """Decide whether that column of the trial under the old deadline matches `pattern`."""
    found = stored.sentence("03", "the same run comes further")
    if found is None or not isinstance(found.evidence, dict) or "trials" not in found.evidence:
        return NOTHING
    run = next(run for run in stored.runs if run.folder == found.folder)
    rows = {r["config"].get("trial"): r for r in run.rows if r["metric"] == "steps_reached"}
    id = next((id for id in found.evidence["trials"] if id in rows), None)
    if id is None:
        return NOTHING
    seen, step = rows[id]["config"], rows[id]["median"]
    where = next((run.opens(path) for path in found.trials if path.name == id), found.where)
    holds = re.match(pattern, seen[column]) is not None
    return Answer(holds, f"trial {id}: {seen['verdict']}, in step {step:g}", (where,))


def times_as_much(stored: Stored, least: dict[str, float]) -> Answer:
    """Decide whether a step of the loop takes more than `least` times each of these metrics of a
    step of dense masks, at the loop's T."""
    found = stored.rows("03", lambda r: r["metric"] in least and _measured(r), operation="step")
    if found is None:
        return NOTHING
    run, rows = found
    tokens = next((r["x_value"] for r in rows if r["backend"] == "loop"), None)
    of = {(r["backend"], r["metric"]): r["median"] for r in rows if r["x_value"] == tokens}
    if any((path, metric) not in of for path in ("loop", "masked") for metric in least):
        return NOTHING
    times = {metric: of["loop", metric] / of["masked", metric] for metric in least}
    told = ", ".join(f"{n:.3g} times the {metric}" for metric, n in times.items())
    more = all(n > least[metric] for metric, n in times.items())
    return Answer(more, f"{told} of dense masks", (run.table,))


def loop_is_attention(stored: Stored) -> Answer:
    """Compare the loop's attention, as the reports ran it, with the reference in fp64."""
    as_it_was = {"operation": "attention", "metric": "error"}
    found = stored.rows(
        "03", lambda r: bool(r["config"].get("defects")) and _measured(r), **as_it_was
    )
    if found is None:
        return NOTHING
    run, rows = found
    off = max(row["median"] for row in rows)
    named = ", ".join(rows[0]["config"]["defects"])
    told = f"off by {off:.2g} of the largest output, with {named}"
    return Answer(off <= SAME, told, (run.table,))


def all_hold(stored: Stored, *names: str, ranks: int = 1) -> Answer:
    """Decide whether the newest decided sentence of each of these SENTENCES is a PASS; `ranks`:
    from runs of at least that many."""
    wanted = [one for name in names for one in SENTENCES[name]]
    found = [stored.sentence(*one, among=_ranks(ranks)) for one in wanted]
    return _joined([s for s in found if s], len(wanted))


def not_held(stored: Stored, name: str) -> Answer:
    """Negation of `all_hold` on two ranks."""
    found = all_hold(stored, name, ranks=2)
    return found if found.holds is None else replace(found, holds=not found.holds)


def _ranks(least: int) -> Callable[[StoredRun], bool]:
    def among(run: StoredRun) -> bool:
        given = run.parameters.get("ranks", least)
        return max(given if isinstance(given, list) else [given]) >= least

    return among


def _joined(found: list[Sentence], wanted: int) -> Answer:
    where = tuple(sentence.where for sentence in found)
    if bad := [s for s in found if s.verdict in ("FAIL", "AIM MISSED")]:
        return Answer(False, bad[0].claim, where)
    if len(found) < wanted or any(s.verdict != "PASS" for s in found):
        return NOTHING
    return Answer(True, "; ".join(s.claim for s in found), where)


def matters(
    stored: Stored, factor: str, notebooks: list[str], pattern: str = "", values: Collection = ()
) -> Answer:
    """Decide whether `factor` changes how things end, over at least these of its values.

    By the newest A/B run that varies it; else by the sentences of these notebooks that match
    `pattern`, in the newest run of each value, on two ranks for "communication".
    """
    for run in stored.of("08"):
        ended: dict[str, set[str]] = {}
        for config in (row["config"] for row in run.rows if factor in row["config"]):
            ended.setdefault(str(config[factor]), set()).add(config.get("outcome", "PASS"))
        if len(ended) > 1 and set(values) <= set(ended):
            apart = len({frozenset(outcomes) for outcomes in ended.values()}) > 1
            told = "; ".join(", ".join(sorted(outcomes)) for outcomes in ended.values())
            return Answer(apart, f"{len(ended)} variants of {factor}: {told}", (run.table,))
    for notebook in notebooks:
        decided: dict[str, dict[str, Sentence]] = {}
        for run in reversed(stored.of(notebook)):
            found = {s.key: s for s in run.sentences
                     if s.verdict not in UNDECIDED and re.match(pattern, s.claim)}  # fmt: skip
            decided |= dict.fromkeys(_labels(run, factor) if found else (), found)
        if len(decided) < 2 or not set(values) <= set(decided):
            continue
        if shared := sorted(set.intersection(*map(set, decided.values()))):
            apart = [k for k in shared if len({each[k].verdict for each in decided.values()}) > 1]
            told = f"{len(apart)} of {len(shared)} sentences of {notebook} come out otherwise "
            told += f"under {', '.join(sorted(decided))}" + "".join(f"; {key}" for key in apart[:1])
            key = (apart or shared)[0]
            return Answer(bool(apart), told, tuple(each[key].where for each in decided.values()))
    return NOTHING


def _labels(run: StoredRun, factor: str) -> set[str]:
    """Versions of torch of a run's rows ("python"), or its communication backends on two ranks
    ("auto": NCCL on GPUs, else gloo)."""
    if factor == "python":
        return {row["torch"] for row in run.rows} - {""}
    rows = [row["config"] for row in run.rows if "communication" in row["config"]]
    automatic = {"cuda": "nccl"}
    named = {c["communication"] or automatic.get(c.get("device"), "gloo") for c in rows}
    return named if _ranks(2)(run) else set()


def peak(stored: Stored, *kept: Sequence[str]) -> Answer:
    """Compare the largest cell of that size with the limit; a backend that needs more memory, or
    ran out of it, counts too. kept: (notebook, operation) of the rows that hold them."""
    found = [
        stored.rows(notebook, _wants_memory, operation=operation, metric="peak_memory", mode="step")
        for notebook, operation in kept
    ]
    rows = [row for one in found if one for row in one[1]]
    where = tuple(one[0].table for one in found if one)
    if not rows:
        return NOTHING
    if burst := [row for row in rows if not _measured(row)]:
        return Answer(False, f"{burst[0]['backend']} ran out of memory", where)
    row = max(rows, key=lambda r: r["median"])
    gib, alert_gib = row["median"] / 1024, LIMITS["alert_gib"]
    alert = f", above the alert of {alert_gib:g}" if gib >= alert_gib else ""
    told = f"{row['backend']} holds {gib:.1f} GiB, the most of {len(rows)} cells{alert}"
    return Answer(gib < LIMITS["limit_gib"], told, where)


def _wants_memory(row: dict[str, Any]) -> bool:
    ours = row["config"].get("attention", "nsa") == "nsa"
    return _production(row) and ours and (_measured(row) or row["config"].get("outcome") == "oom")


def _measured(row: dict[str, Any]) -> bool:
    return row["median"] == row["median"]  # NaN is not


def _production(row: dict[str, Any]) -> bool:
    """True for a cell of the production model at its T, one sequence, on a GPU."""
    config = row["config"]
    named = config.get("preset") or config.get("design") or config.get("model")
    sized = config.get("layers") == LIMITS["layers"] and row["x_value"] == LIMITS["tokens"]
    return named == "production" and sized and config.get("batch", 1) == 1 and is_gpu(row["device"])


def speed(stored: Stored) -> Answer:
    """Compare the slowest cell of that size with the target."""
    found = stored.rows(
        "04",
        lambda r: _production(r) and r["config"].get("attention") == "nsa" and _measured(r),
        metric="tokens_per_second",
        mode="step",
    )
    if found is None:
        return NOTHING
    run, rows = found
    row = min(rows, key=lambda r: r["median"])
    told = f"{row['backend']} {row['median']:,.0f}, the slowest of {len(rows)} cells"
    return Answer(row["median"] >= LIMITS["least"], told, (run.table,))


def loop_speed(stored: Stored) -> Answer:
    """Compare the loop's slowest step with the target. Fewer layers give an upper bound."""
    found = stored.rows("03", _timed_long, operation="step", backend="loop")
    if found is None:
        return NOTHING
    run, rows = found
    rate, row = min(((1e3 * r["x_value"] / r["median"], r) for r in rows), key=lambda pair: pair[0])
    layers = row["config"]["layers"]
    told = f"{rate:,.0f} with {layers} layer{'s' if layers > 1 else ''} at T {row['x_value']:g}"
    if layers < LIMITS["layers"]:
        told += f", and more layers are no faster than {layers}"
    if rate >= LIMITS["least"] and not _production(row):
        return Answer(None, f"{told}; its production size was not timed")
    return Answer(rate >= LIMITS["least"], told, (run.table,))


def _timed_long(row: dict[str, Any]) -> bool:
    """True for a latency on a GPU, at a T large enough for a design that is not a toy."""
    timed = "latency" in row["metric"] and _measured(row)
    return timed and is_gpu(row["device"]) and row["x_value"] >= 1024
