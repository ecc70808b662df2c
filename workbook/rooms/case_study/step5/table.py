"""Tables of the step-5 question."""

import math
from collections.abc import Sequence

import pandas

from whyhung.verdict import explain
from workbook.lab.search import candidates
from workbook.rooms.case_study.answers import SAME
from workbook.rooms.case_study.decision import SUBJECTS, TREE, Decision
from workbook.rooms.case_study.loop.subject import CASE_STUDY
from workbook.rooms.case_study.step5.trials import Results, Trial


def trials(results: Results) -> pandas.DataFrame:
    """One row a trial: both verdicts side by side."""
    names = {t.id: name for name, t in reversed(results.named.items())}
    names |= {results.planted.id: "planted lock"} if results.planted else {}
    rows = [
        {
            "trial": t.id,
            "name": names.get(t.id, ""),
            **{k: t.cell[k] for k in ("path", "layers", "deadline")},
            "allowed, s": t.evidence.deadline_s,
            "last line": t.said,
            "was in step": t.reached,
            "of": t.steps,
            "old rule": t.old_verdict,
            "verdict": t.verdict.label,
        }
        for t in [*results.trials, *filter(None, [results.planted])]
    ]
    return pandas.DataFrame(rows).set_index("trial")


def ledger(results: Results) -> pandas.DataFrame:
    """Bisection of the old rule's HANG: trial, hypothesis, verdict, what it eliminated."""
    rows = candidates.table(results.bisection.rows)
    return pandas.DataFrame(rows).set_index("number") if rows else pandas.DataFrame()


def state(results: Results) -> pandas.DataFrame:
    """State after step 4 and after step 5, side by side."""
    rows = (results.state or {}).get("rows", [])
    table = pandas.DataFrame(rows, columns=["what", "before", "after", "changed", "should"])
    table = table.rename(columns={"before": "after step 4", "after": "after step 5"})
    return table.set_index("what")


def operations(results: Results) -> pandas.DataFrame:
    """Operations of the exhibit, as counted here: of a step, and of each token in one layer."""
    columns = ["path", "layers", "tokens", "forward", "backward", "operations", "syncs", "nodes",
               "kernels", "seconds", "microseconds"]  # fmt: skip
    table = pandas.DataFrame(results.operations, columns=columns)
    each = table["operations"] / table["layers"] / table["tokens"]
    table.insert(6, "a token", each.round(1))
    return table.set_index(["path", "tokens"])


def recorded(results: Results) -> pandas.DataFrame:
    """Peaks recorded on this machine, and their prediction from shapes."""
    columns = ["layers", "tokens", "peak_mib", "predicted_mib", "seconds"]
    table = pandas.DataFrame(results.memory, columns=columns)
    table["error"] = table["peak_mib"] / table["predicted_mib"] - 1
    return table.set_index(["layers", "tokens"])


def decided(decisions: Sequence[Decision]) -> pandas.DataFrame:
    """Questions of the decision tree in the order of the paths, and each subject's answers."""
    rows: dict[str, dict[str, str]] = {}
    for one in decisions:
        for node, answer in one.path:
            word = {True: "yes", False: "no", None: "no evidence"}[answer.holds]
            rows.setdefault(TREE[node].text, {})[SUBJECTS[one.subject]] = (
                f"{word}: {answer.because}"
            )
    return pandas.DataFrame.from_dict(rows, orient="index").fillna("not asked")


def page(trial: Trial) -> str:
    """Page of the trial as `nsa explain` prints it, which names no folder of the machine."""
    return explain.page(trial.evidence, trial.verdict, name=trial.id)


def to_metrics(results: Results) -> list[dict]:
    """Rows for metrics.csv."""
    rows = []

    def add(operation: str, backend: str, config: dict, x: tuple, *numbers: tuple, **more: str):
        """Add a row for each of `numbers`, (metric, unit, median), at x, (name, value)."""
        place = {"operation": operation, "backend": backend, "mode": "step", "config": config}
        place |= {"x_name": x[0], "x_value": x[1]} | more
        for metric, unit, median in numbers:
            rows.append(place | {"metric": metric, "unit": unit, "median": median})

    for t in results.trials:
        config = {"trial": t.id, **t.cell, "old_rule": t.old_verdict, "verdict": t.verdict.label}
        numbers = [("steps_reached", "steps", t.reached)]
        numbers += [("last_line", "steps", t.said)] * (t.said is not None)
        add("trial", t.cell["path"], config, ("deadline", t.cell["deadline"]), *numbers)
    for row in results.operations:
        config = {"layers": row["layers"], "design": row["design"]}
        counted = ("operations", "1", row["operations"])
        timed = ("latency", "ms", 1e3 * row["seconds"])
        add("step", row["path"], config, ("tokens", row["tokens"]), counted, timed)
    for row in results.memory:
        config = {"layers": row["layers"], "design": row["design"]}
        config |= {"predicted": row["predicted_mib"]}
        peak = ("peak_memory", "MiB", row["peak_mib"])
        timed = ("recorded_latency", "ms", 1e3 * row["seconds"])
        if math.isfinite(row["peak_mib"]):
            add("step", "loop", config, ("tokens", row["tokens"]), peak, timed)
    for row in results.attention:
        config = {"design": row["design"], "defects": row["defects"]}
        error = ("error", "of the largest", row["error"])
        on = {"mode": "forward", "device": "cpu"}
        add("attention", row["path"], config, ("tokens", row["tokens"]), error, **on)
    return rows


def facts(results: Results, tokens: int) -> list[str]:
    """Lines that are the same on every machine: what was printed, judged and counted."""
    stand = ("HANG", "STALLED")
    unexplained = sum(trial.said not in trial.expected() for trial in results.trials)
    changed = [r["what"] for r in results.state["rows"] if r["changed"]]
    alike = [r["what"] for r in results.state["rows"] if not r["changed"]]
    loop, masked, longer = (row["operations"] for row in results.operations)
    return [
        f"the console is silent from step to step: {CASE_STUDY.silences(45)}",
        f"trials by name: {', '.join(results.named)}",
        f"judged HANG or STALLED: {sum(t.verdict.kind in stand for t in results.trials)}",
        f"with a lock planted at step 5: {results.planted.verdict.label}, "
        f"its last line is step {results.planted.said}",
        f"last lines that no print schedule explains: {unexplained}",
        f"changed from step 4 to 5: {', '.join(changed)}",
        f"alike: {', '.join(alike)}",
        f"loop: about {round(loop / tokens, -1):.0f} operations a token",
        *(
            f"attention {'as it was' if row['defects'] else 'without its defects'} is NSA's: "
            f"{row['error'] <= SAME}"
            for row in results.attention
        ),
        f"masked: as many at T {tokens} as at T {2 * tokens}: {masked == longer}",
    ]
